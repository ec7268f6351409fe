// Placement of threads and memory on the NUMA node of their disk. On machines with only one node these functions do
// nothing.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace infinity {

// "0-3,8,10-11" → 0 1 2 3 8 10 11. Throws std::invalid_argument for anything else.
std::vector<int> parse_cpu_list(const std::string& list);
// Binds the calling thread to the processors of `node` (-1: no binding). Returns false if the thread was not bound: no
// such node, only one node, or a refusal by the system. In that case only speed is lost.
bool run_on_node(int node);
// Asks the system to take untouched pages of the range from `node`, as long as the node has free pages. Returns like
// run_on_node.
bool prefer_node(void* address, std::size_t nbytes, int node);

}  // namespace infinity
