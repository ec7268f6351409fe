#include "base/checksum.hpp"

#include <algorithm>
#include <array>

#include "base/cpuid.hpp"

namespace infinity {

std::uint64_t checksum_bytes(const void*, std::size_t);  // XXH3-64

using Kernel = void (*)(const std::byte*, std::size_t, PageChecksum*);

namespace baseline {
void checksum_pages(const std::byte*, std::size_t, PageChecksum*);
}
#ifdef INFINITY_X86
namespace avx2 {
void checksum_pages(const std::byte*, std::size_t, PageChecksum*);
}
namespace avx512 {
void checksum_pages(const std::byte*, std::size_t, PageChecksum*);
}
#endif

namespace {

Kernel best_kernel() {
#ifdef INFINITY_X86
  if (cpu_has_avx512()) return avx512::checksum_pages;
  if (cpu_has_avx2()) return avx2::checksum_pages;
#endif
  return baseline::checksum_pages;
}

PageChecksum of_zeros() {
  alignas(64) static constexpr std::array<std::byte, kPageBytes> kZeros{};
  PageChecksum sum = 0;
  checksum_pages(kZeros.data(), 1, &sum);
  return sum;
}

// Pages per call during a comparison: few enough that the sums fit on the stack and the data stay in the cache.
constexpr std::size_t kBatch = 64;

}  // namespace

void checksum_pages(const std::byte* data, std::size_t pages, PageChecksum* sums) {
  static const Kernel kernel = best_kernel();
  kernel(data, pages, sums);
}

ChecksumTable::ChecksumTable(std::size_t pages) : sums_(pages, of_zeros()) {}

void ChecksumTable::take(std::size_t first, const std::byte* data, std::size_t count) {
  checksum_pages(data, count, sums_.data() + first);
}

void ChecksumTable::put(std::size_t first, const std::vector<PageChecksum>& sums) {
  std::copy(sums.begin(), sums.end(), sums_.begin() + static_cast<std::ptrdiff_t>(first));
}

std::vector<BlockSum> ChecksumTable::block_sums(std::size_t first, std::size_t count) const {
  constexpr std::size_t kPages = kSumBlockBytes / kPageBytes;
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the sums are of little-endian bytes");
  std::vector<BlockSum> result;
  for (std::size_t done = 0; done < count; done += kPages) {
    result.push_back(
        checksum_bytes(sums_.data() + first + done, std::min(kPages, count - done) * sizeof(PageChecksum)));
  }
  return result;
}

std::size_t ChecksumTable::first_difference(std::size_t first, const std::byte* data, std::size_t count) const {
  std::array<PageChecksum, kBatch> found{};
  for (std::size_t done = 0; done < count; done += kBatch) {
    const std::size_t batch = std::min(kBatch, count - done);
    checksum_pages(data + done * kPageBytes, batch, found.data());
    const auto* expected = sums_.data() + first + done;
    const auto [mine, _] = std::mismatch(expected, expected + batch, found.data());
    if (mine != expected + batch) return done + static_cast<std::size_t>(mine - expected);
  }
  return kNone;
}

}  // namespace infinity
