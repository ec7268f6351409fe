#include "base/numa.hpp"

#include <sched.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace infinity {
namespace {

constexpr int kPreferred = 1;  // MPOL_PREFERRED in linux/mempolicy.h
constexpr int kNodesMax = 1024;

bool several_nodes() {
  struct stat info{};
  return stat("/sys/devices/system/node/node1", &info) == 0;
}

}  // namespace

std::vector<int> parse_cpu_list(const std::string& list) {
  std::vector<int> cpus;
  std::istringstream parts(list);
  for (std::string part; std::getline(parts, part, ',');) {
    std::size_t used = 0;
    const int first = std::stoi(part, &used);
    int last = first;
    if (used < part.size() && part[used] == '-') last = std::stoi(part.substr(used + 1));
    if (first < 0 || last < first) throw std::invalid_argument("not a list of processors: " + list);
    for (int cpu = first; cpu <= last; ++cpu) cpus.push_back(cpu);
  }
  return cpus;
}

bool run_on_node(int node) {
  if (node < 0 || !several_nodes()) return false;
  std::ifstream file("/sys/devices/system/node/node" + std::to_string(node) + "/cpulist");
  std::string list;
  cpu_set_t allowed;
  if (!std::getline(file, list) || sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return false;
  cpu_set_t wanted;
  CPU_ZERO(&wanted);
  for (const int cpu : parse_cpu_list(list)) {
    if (cpu < CPU_SETSIZE && CPU_ISSET(cpu, &allowed)) CPU_SET(cpu, &wanted);
  }
  return CPU_COUNT(&wanted) > 0 && sched_setaffinity(0, sizeof(wanted), &wanted) == 0;
}

bool prefer_node(void* address, std::size_t nbytes, int node) {
  if (node < 0 || node >= kNodesMax || !several_nodes()) return false;
  constexpr std::size_t kBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, kNodesMax / kBits> mask{};
  mask[static_cast<std::size_t>(node) / kBits] |= 1UL << (static_cast<std::size_t>(node) % kBits);
  return syscall(SYS_mbind, address, nbytes, kPreferred, mask.data(), static_cast<unsigned long>(kNodesMax), 0) == 0;
}

}  // namespace infinity
