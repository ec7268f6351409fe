// Frozen weights that are stored in 4 or 8 bits per value: the stored form, and the conversion in both directions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.hpp"
#include "base/isa.hpp"
#include "base/thread_pool.hpp"

namespace infinity {

// Stored form of one parameter. Its elements are those of the flattened tensor, in blocks of 64.
//   nf4:       4 bits a value and 8 bits a block, whose scale is itself coded in groups of 256 (bitsandbytes' NF4 with
//              compress_statistics, QLoRA's double quantisation; arXiv 2305.14314)
//   nf4_fp32:  4 bits a value and an fp32 scale a block (bitsandbytes' NF4 without compress_statistics)
//   int8:      8 bits a value and a bf16 scale a block; see [Note: int8]
//   int8_rows: 8 bits a value and an fp32 scale a row (bitsandbytes' LLM.int8(), arXiv 2208.07339); only decoded
//
// [Note: bitsandbytes, to the bit]
// NF4 has the bits of bitsandbytes 0.50.2 on a processor, in both directions:
//   values → codes: the torch code of backends/default (there is no other for a processor). The scale is the largest
//     magnitude of the block. A complete block is multiplied by the reciprocal of the scale in fp32; an incomplete
//     block at the end is divided by the scale. A scale below 1e-38 counts as 1e-38; only an incomplete block also
//     stores 1e-38 as the scale. A value between two values of the map gets the nearest map value in fp32, and in a tie
//     the smaller map value. If the number of elements is odd, the unused nibble is 7 (zero).
//   scales → codes: the C code of the x86-64 wheel, which rounds to the nearest of 65,536 steps between −1 and 1, with
//     a fused multiply and add, before it looks for the nearest value of the map. (backends/default, which does not run
//     on a processor, looks for the nearest value directly; the wheel for 64-bit ARM may differ where that addition
//     rounds.) The codes of a group whose scales are all equal to the offset are 0.
//   codes → values: scale = map·nested + offset in fp32, rounded twice; value = map·scale in fp32, rounded to the
//     nearest value of the dtype, ties to even. Denormal numbers are kept, as in torch and in bitsandbytes' C code
//     without AVX512_BF16; the instructions of AVX512_BF16 replace products below 2^-126 by zero.
//
// [Note: int8]
// scale = the smallest bf16 that is not below absmax / 127 in fp32, so that no code is beyond ±127. code = value /
// scale in fp32, rounded to the nearest integer, ties to even; 0 if the scale is 0. value = code · scale in fp32,
// rounded to the nearest value of the dtype, ties to even.
enum class WeightCodec : std::uint8_t { nf4, nf4_fp32, int8, int8_rows };

inline constexpr std::size_t kCodecBlockNumel = 64;
inline constexpr std::size_t kNestedBlocks = 256;  // number of blocks that share a nested scale

// Byte range of a part of a stored form; empty if the codec has no such part.
struct CodecPart {
  std::uint64_t begin = 0;  // a multiple of 64
  std::uint64_t nbytes = 0;
};

// The stored form of a parameter; the parts are stored in this order.
struct CodecLayout {
  CodecPart codes;          // nf4: the first of two elements is in the upper nibble
  CodecPart scales;         // nf4: uint8; nf4_fp32, int8_rows: fp32; int8: bf16
  CodecPart nested_scales;  // nf4: fp32
  CodecPart offset;         // nf4: one fp32
  std::uint64_t nbytes;     // size of the stored form, a multiple of 64
};

// Throws std::invalid_argument for too many elements, or if `numel` is no multiple of `row_numel`.
[[nodiscard]] CodecLayout codec_layout(WeightCodec codec, std::uint64_t numel, std::uint64_t row_numel);

// A stored form. `data` begins at a multiple of 4.
struct EncodedWeight {
  const std::byte* data = nullptr;
  WeightCodec codec = WeightCodec::nf4;
  std::uint64_t numel = 0;      // number of elements
  std::uint64_t row_numel = 0;  // elements of a row, for int8_rows
};

// Encodes to nf4_fp32 or int8. `scales` has the size in the layout. Throws std::invalid_argument for another codec, and
// if a value is NaN or infinite. In the second case the message names the first such element, and codes and scales are
// undefined.
void encode_weights(const void* values, DType dtype, std::uint64_t numel, WeightCodec codec, void* codes, void* scales,
                    Isa isa, ThreadPool& pool);

// Converts the fp32 scales of nf4_fp32 to the scales and nested scales of nf4. `offset` is the mean of these fp32
// scales, as torch computes the mean. Throws std::invalid_argument if a scale or the offset is not finite.
void nest_scales(const float* scales, std::size_t blocks, float offset, std::uint8_t* codes, float* nested_scales);

void decode_weights(const EncodedWeight& weight, void* out, DType dtype, Isa isa, ThreadPool& pool);

// Elements that a thread decodes at a time: their bf16 values and their codes fit half of a core's L2. The number is a
// multiple of a group of nested scales.
inline constexpr std::size_t kCodecTaskNumel = 4 * kNestedBlocks * kCodecBlockNumel;

// Number of tasks into which the decoding of a weight is divided. `decode_task` runs one of these tasks in the calling
// thread.
[[nodiscard]] std::size_t decode_tasks(const EncodedWeight& weight);
void decode_task(const EncodedWeight& weight, std::size_t task, void* out, DType dtype, Isa isa);

}  // namespace infinity
