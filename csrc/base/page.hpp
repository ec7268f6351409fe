// The page: what direct I/O moves, what a checksum is taken of, and what offsets and buffers are aligned to.
#pragma once

#include <cstddef>

namespace infinity {

inline constexpr std::size_t kPageBytes = 4096;

// Static, so that a translation unit compiled for one instruction set keeps its own copy (see base/bits.hpp).
[[nodiscard]] static constexpr std::size_t round_up_to_page(std::size_t nbytes) {
  return (nbytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

}  // namespace infinity
