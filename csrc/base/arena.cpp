#include "base/arena.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <system_error>

#include "base/numa.hpp"
#include "base/page.hpp"

namespace infinity {
namespace {
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kTouchedAtOnce = std::size_t{64} << 20;
#ifndef MADV_POPULATE_WRITE
constexpr int MADV_POPULATE_WRITE = 23;  // since Linux 5.14
#endif

// Makes pages resident without a change of their content.
void touch_pages(std::byte* first, std::size_t nbytes) {
  if (madvise(first, nbytes, MADV_POPULATE_WRITE) == 0) return;
  for (std::size_t at = 0; at < nbytes; at += kPageBytes) {
    auto* const page = reinterpret_cast<volatile std::byte*>(first + at);
    *page = *page;
  }
}
}  // namespace

Arena::Arena(std::size_t nbytes, bool huge_pages, int numa_node) : nbytes_(nbytes), pid_(getpid()) {
  if (nbytes == 0) throw std::invalid_argument("an arena needs at least one byte");
  if (nbytes > std::numeric_limits<std::size_t>::max() - kHugePage) {
    throw std::system_error(ENOMEM, std::generic_category(), "cannot map " + std::to_string(nbytes) + " bytes");
  }
  mapping_bytes_ = nbytes + kHugePage;
  mapping_ = mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(), "cannot map " + std::to_string(nbytes) + " bytes");
  }
  const auto start = reinterpret_cast<std::uintptr_t>(mapping_);
  address_ = reinterpret_cast<std::byte*>((start + kHugePage - 1) / kHugePage * kHugePage);
  // The kernel may refuse each piece of advice. A refusal costs speed, or the privacy of a core dump, but never
  // correctness.
  madvise(mapping_, mapping_bytes_, MADV_DONTFORK);
  madvise(mapping_, mapping_bytes_, MADV_DONTDUMP);
  prefer_node(mapping_, mapping_bytes_, numa_node);
  // With huge pages the first touch makes 2 MiB resident. Huge pages therefore suit only callers that use all the
  // memory they planned.
  huge_pages_ = huge_pages && madvise(mapping_, mapping_bytes_, MADV_HUGEPAGE) == 0;
}

Arena::Arena(int fd, std::size_t nbytes) : nbytes_(nbytes), shared_(true), pid_(getpid()) {
  if (nbytes == 0) throw std::invalid_argument("an arena needs at least one byte");
  mapping_bytes_ = nbytes;
  mapping_ = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (mapping_ == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(), "cannot map " + std::to_string(nbytes) + " shared bytes");
  }
  address_ = static_cast<std::byte*>(mapping_);
  madvise(mapping_, mapping_bytes_, MADV_DONTFORK);
  madvise(mapping_, mapping_bytes_, MADV_DONTDUMP);
  // The kernel follows this advice only where /sys/kernel/mm/transparent_hugepage/shmem_enabled says "advise".
  huge_pages_ = madvise(mapping_, mapping_bytes_, MADV_HUGEPAGE) == 0;
}

Arena::~Arena() {
  // A forked child does not have the mapping (MADV_DONTFORK); by now the child may use these addresses for other
  // memory.
  if (getpid() == pid_) munmap(mapping_, mapping_bytes_);
}

void Arena::give_back() {
  if (getpid() != pid_) return;
  // MADV_DONTNEED would only unmap shared pages from this process.
  const int advice = shared_ ? MADV_REMOVE : MADV_DONTNEED;
  madvise(address_, (nbytes_ + kPageBytes - 1) / kPageBytes * kPageBytes, advice);
}

void Arena::populate(std::size_t offset, std::size_t nbytes) {
  if (offset > nbytes_ || nbytes > nbytes_ - offset) throw std::out_of_range("pages outside the arena");
  const std::size_t begin = offset / kPageBytes * kPageBytes;
  while (nbytes != 0 && madvise(address_ + begin, offset + nbytes - begin, MADV_POPULATE_WRITE) != 0) {
    if (errno == EINVAL) return;
    if (errno == EINTR || errno == EAGAIN) continue;
    // A file system that is full answers EFAULT.
    throw std::system_error(errno == EFAULT ? ENOMEM : errno, std::generic_category(),
                            "no memory for " + std::to_string(nbytes) + " shared bytes");
  }
}

void Arena::touch(ThreadPool& pool) {
  pool.parallel_for((nbytes_ + kTouchedAtOnce - 1) / kTouchedAtOnce, [this](std::size_t index) {
    const std::size_t begin = index * kTouchedAtOnce;
    touch_pages(address_ + begin, std::min(kTouchedAtOnce, nbytes_ - begin));
  });
}

}  // namespace infinity
