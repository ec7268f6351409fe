// What each instruction set provides: one table of plain functions, filled by kernels.inl compiled once per set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.hpp"

namespace infinity {

// Where values go.
struct DecodeOutput {
  void* data;
  DType dtype;
  bool past_caches;  // nobody reads them soon: they may be stored without fetching the lines that they overwrite
};

// All take `numel` elements from the begin of a block on; those of `values` have the dtype.
struct CodecKernels {
  void (*decode_nf4)(const std::uint8_t* codes, const float* scales, const DecodeOutput& out, std::size_t numel);
  // `scales` as bf16.
  void (*decode_int8)(const std::int8_t* codes, const std::uint16_t* scales, const DecodeOutput& out,
                      std::size_t numel);
  // Elements of one row.
  void (*decode_row)(const std::int8_t* codes, float scale, const DecodeOutput& out, std::size_t numel);
  // scales = map[codes] · nested + offset
  void (*unnest)(const std::uint8_t* codes, float nested, float offset, float* scales, std::size_t blocks);
  // These return how many elements come before the first that is not finite: `numel` where all are.
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
