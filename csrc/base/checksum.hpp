// One checksum per 4 KiB page of a swap file, kept outside it: torn, stale, misdirected and flipped data show on read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/page.hpp"

namespace infinity {

// The low half of XXH3-64 of a page: 1 in 2^32 damages goes unseen. The same value on every instruction set.
using PageChecksum = std::uint32_t;

void checksum_pages(const std::byte* data, std::size_t pages, PageChecksum* sums);

// A generation's manifest keeps one sum for so many bytes: XXH3-64 of the checksums of their pages, little-endian.
inline constexpr std::size_t kSumBlockBytes = 256 * 1024;
using BlockSum = std::uint64_t;

// What every page of a swap file should hold, by its index. A page never taken reads as zeros.
//
// Pages are independent: several threads may take and check different pages at once.
class ChecksumTable {
 public:
  static constexpr std::size_t kNone = ~std::size_t{0};

  explicit ChecksumTable(std::size_t pages);
  [[nodiscard]] std::size_t pages() const { return sums_.size(); }
  // Remembers what is about to be written to pages [first, first + count).
  void take(std::size_t first, const std::byte* data, std::size_t count);
  // The same with sums that were computed before, one for each page.
  void put(std::size_t first, const std::vector<PageChecksum>& sums);
  // The sums of `count` pages from `first` on, the last of them of fewer pages when `count` does not fill it.
  [[nodiscard]] std::vector<BlockSum> block_sums(std::size_t first, std::size_t count) const;
  // The first page, counted from `first`, that differs from what was taken, or kNone.
  [[nodiscard]] std::size_t first_difference(std::size_t first, const std::byte* data, std::size_t count) const;

 private:
  std::vector<PageChecksum> sums_;
};

}  // namespace infinity
