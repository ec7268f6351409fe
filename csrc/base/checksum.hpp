// One checksum per 4 KiB page of a swap file, kept outside the file, so that reads detect torn, stale, misdirected and
// flipped data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/page.hpp"

namespace infinity {

// The low half of XXH3-64 of a page: damage goes undetected with probability 2^-32. The value is the same on every
// instruction set.
using PageChecksum = std::uint32_t;

void checksum_pages(const std::byte* data, std::size_t pages, PageChecksum* sums);

// Bytes of data per sum in a generation's manifest. The sum is XXH3-64 of the little-endian checksums of the data's
// pages.
inline constexpr std::size_t kSumBlockBytes = 256 * 1024;
using BlockSum = std::uint64_t;

// Expected checksum of every page of a swap file, by its index. A page whose checksum was never taken must read as
// zeros.
//
// Pages are independent: several threads may take and check different pages at once.
class ChecksumTable {
 public:
  static constexpr std::size_t kNone = ~std::size_t{0};

  explicit ChecksumTable(std::size_t pages);
  [[nodiscard]] std::size_t pages() const { return sums_.size(); }
  // Remembers the checksums of data that is about to be written to pages [first, first + count).
  void take(std::size_t first, const std::byte* data, std::size_t count);
  // The same as `take`, with checksums that the caller has computed, one for each page.
  void put(std::size_t first, const std::vector<PageChecksum>& sums);
  // The sums of `count` pages from `first` on. The last sum covers fewer pages if `count` is no multiple of the pages
  // of one sum's block.
  [[nodiscard]] std::vector<BlockSum> block_sums(std::size_t first, std::size_t count) const;
  // The first page, counted from `first`, that differs from its remembered checksum, or kNone.
  [[nodiscard]] std::size_t first_difference(std::size_t first, const std::byte* data, std::size_t count) const;

 private:
  std::vector<PageChecksum> sums_;
};

}  // namespace infinity
