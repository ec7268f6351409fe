// Histogram of transfer times: 16 buckets for each doubling, so that a percentile is accurate to 6 %.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace infinity {

// Filled by one thread, read by any.
class Histogram {
 public:
  using Counts = std::vector<std::pair<std::uint64_t, std::uint64_t>>;  // (largest value of a bucket, count)

  void add(std::uint64_t value) { counts_[index_of(value)].fetch_add(1, std::memory_order_relaxed); }

  [[nodiscard]] Counts counts() const {
    Counts result;
    for (std::size_t index = 0; index < kBuckets; ++index) {
      const std::uint64_t count = counts_[index].load(std::memory_order_relaxed);
      if (count > 0) result.emplace_back(largest_of(index), count);
    }
    return result;
  }

 private:
  static constexpr unsigned kBits = 4;
  static constexpr std::size_t kEach = std::size_t{1} << kBits;
  static constexpr std::size_t kBuckets = (64 - kBits + 1) * kEach;

  // Each value below 16 has its own bucket; for larger values the top five bits choose the bucket.
  static std::size_t index_of(std::uint64_t value) {
    if (value < kEach) return value;
    const auto shift = static_cast<unsigned>(std::bit_width(value)) - kBits - 1;
    return (shift + 1) * kEach + ((value >> shift) - kEach);
  }

  static std::uint64_t largest_of(std::size_t index) {
    if (index < kEach) return index;
    const std::size_t shift = index / kEach - 1;
    const std::uint64_t first = static_cast<std::uint64_t>(kEach + index % kEach) << shift;
    return first + ((std::uint64_t{1} << shift) - 1);
  }

  std::array<std::atomic<std::uint64_t>, kBuckets> counts_{};
};

}  // namespace infinity
