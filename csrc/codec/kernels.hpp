// Kernels of an instruction set: one table of plain functions. kernels.inl is compiled once per set and fills the
// table.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.hpp"

namespace infinity {

// Destination of decoded values.
struct DecodeOutput {
  void* data;
  DType dtype;
  bool past_caches;  // not read soon: values may be stored without fetching the cache lines that they overwrite
};

// All functions process `numel` elements that begin with a block. `values` have the given dtype.
struct CodecKernels {
  void (*decode_nf4)(const std::uint8_t* codes, const float* scales, const DecodeOutput& out, std::size_t numel);
  // `scales` are bf16.
  void (*decode_int8)(const std::int8_t* codes, const std::uint16_t* scales, const DecodeOutput& out,
                      std::size_t numel);
  // The elements are those of one row.
  void (*decode_row)(const std::int8_t* codes, float scale, const DecodeOutput& out, std::size_t numel);
  // scales = map[codes] · nested + offset
  void (*unnest)(const std::uint8_t* codes, float nested, float offset, float* scales, std::size_t blocks);
  // Both return the number of elements before the first that is not finite: `numel` if all are finite.
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
