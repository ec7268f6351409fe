// The kernels of one instruction set, as a table of plain functions. kernels.inl is compiled once per instruction set
// and fills the table of that set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.hpp"
#include "codec/codec.hpp"

namespace infinity {

// Destination of decoded values.
struct DecodeOutput {
  void* data;
  DType dtype;
  bool past_caches;  // the values are not read soon: they may be stored without fetching the overwritten cache lines
};

// Elements [begin, end) of a weight, in the order of their codes; `begin` is a multiple of kCodecTaskNumel, or a whole
// number of columns of a weight that is stored transposed.
struct DecodeSpan {
  const EncodedWeight& weight;
  const CodecLayout& layout;
  std::size_t begin;
  std::size_t end;
  DecodeOutput out;  // of the complete weight
};

// The encoders process `numel` elements of the given dtype; the first element is the first of a block.
struct CodecKernels {
  void (*decode[kWeightCodecs])(const DecodeSpan& span);  // by WeightCodec
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
