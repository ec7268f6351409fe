// The page: the unit of direct I/O and of checksums, and the alignment of offsets and buffers.
#pragma once

#include <cstddef>

namespace infinity {

inline constexpr std::size_t kPageBytes = 4096;

// Static, so that a translation unit compiled for one instruction set has its own copy (see base/bits.hpp).
[[nodiscard]] static constexpr std::size_t round_up_to_page(std::size_t nbytes) {
  return (nbytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

}  // namespace infinity
