// The kernels of one instruction set, as a table of plain functions. kernels.inl is compiled once per instruction set
// and fills the table of that set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.hpp"

namespace infinity {

// Destination of decoded values.
struct DecodeOutput {
  void* data;
  DType dtype;
  bool past_caches;  // the values are not read soon: they may be stored without fetching the overwritten cache lines
};

// All functions process `numel` elements; the first element is the first of a block. `values` have the given dtype.
struct CodecKernels {
  void (*decode_nf4)(const std::uint8_t* codes, const float* scales, const DecodeOutput& out, std::size_t numel);
  // `scales` are bf16.
  void (*decode_int8)(const std::int8_t* codes, const std::uint16_t* scales, const DecodeOutput& out,
                      std::size_t numel);
  // All elements belong to one row.
  void (*decode_row)(const std::int8_t* codes, float scale, const DecodeOutput& out, std::size_t numel);
  // scales = map[codes] · nested + offset
  void (*unnest)(const std::uint8_t* codes, float nested, float offset, float* scales, std::size_t blocks);
  // Both functions return the number of elements before the first element that is not finite; `numel` if all are
  // finite.
  std::size_t (*encode_nf4)(const void* values, DType dtype, std::size_t numel, std::uint8_t* codes, float* scales);
  std::size_t (*encode_int8)(const void* values, DType dtype, std::size_t numel, std::int8_t* codes,
                             std::uint16_t* scales);
};

namespace baseline {
extern const CodecKernels kCodecKernels;
}
namespace avx2 {
extern const CodecKernels kCodecKernels;
}
namespace avx512 {
extern const CodecKernels kCodecKernels;
}

}  // namespace infinity
