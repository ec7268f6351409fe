// Page-aligned mappings of exactly the requested size: the pinned allocation of a process, and memory that processes
// share.
#pragma once

#include <sys/types.h>

#include <cstddef>

#include "base/thread_pool.hpp"

namespace infinity {

// Life cycle: mmap (huge pages advised) → [Python: cudaHostRegister] → division into leases by Python → munmap. A page
// becomes resident at its first use. Excluded from fork (MADV_DONTFORK) and from core dumps (MADV_DONTDUMP).
//
// Invariant: address() never moves. It is 2 MiB-aligned, or 4 KiB-aligned in shared memory.
class Arena {
 public:
  // Throws std::system_error when the mapping fails; std::invalid_argument when nbytes is 0.
  // `numa_node`: node that the pages should come from, or -1.
  Arena(std::size_t nbytes, bool huge_pages, int numa_node = -1);
  // Maps memory that several processes share. `fd`: file of at least `nbytes`, such as a memfd, which may be closed
  // afterwards. Throws the same errors.
  Arena(int fd, std::size_t nbytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  [[nodiscard]] std::byte* address() const { return address_; }
  [[nodiscard]] std::size_t nbytes() const { return nbytes_; }
  // Makes all pages resident, with all threads of the pool: a single thread reaches 4 GB/s.
  void touch(ThreadPool& pool);
  // Takes memory for the pages of [offset, offset + nbytes), without a change of their content. Throws
  // std::out_of_range, or std::system_error when there is no memory: a later write would end the process with SIGBUS.
  // A kernel before 5.14 takes the memory at the first write.
  void populate(std::size_t offset, std::size_t nbytes);
  // Returns the pages to the system. The content of the pages is lost, for all processes that have mapped them: they
  // read as zeros afterwards.
  void give_back();
  // Whether the kernel accepted the advice to use huge pages.
  [[nodiscard]] bool huge_pages() const { return huge_pages_; }

 private:
  void* mapping_ = nullptr;
  std::size_t mapping_bytes_ = 0;
  std::byte* address_ = nullptr;
  std::size_t nbytes_ = 0;
  bool huge_pages_ = false;
  bool shared_ = false;
  pid_t pid_;
};

}  // namespace infinity
