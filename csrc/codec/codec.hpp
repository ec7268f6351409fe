// Frozen weights that are stored in 4 or 8 bits per value: the stored form, and the conversion in both directions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/dtype.hpp"
#include "base/isa.hpp"
#include "base/thread_pool.hpp"

namespace infinity {

// Stored form of one parameter. Its elements are those of the flattened tensor, in blocks of 64 unless the codec has
// blocks of its own.
//   nf4:       4 bits a value and 8 bits a block, whose scale is itself coded in groups of 256 (bitsandbytes' NF4 with
//              compress_statistics, QLoRA's double quantisation; arXiv 2305.14314)
//   nf4_fp32:  4 bits a value and an fp32 scale a block (bitsandbytes' NF4 without compress_statistics)
//   int8:      8 bits a value and a bf16 scale a block; see [Note: int8]
//   int8_rows: 8 bits a value and an fp32 scale a row (bitsandbytes' LLM.int8(), arXiv 2208.07339); only decoded
//   fp8_block: 8 bits a value and a scale for each rectangle of rows and columns (DeepSeek-V3, arXiv 2412.19437); only
//              decoded; see [Note: fp8_block]
//   mxfp4:     4 bits a value and an 8-bit power of two for each 32 values (OCP Microscaling, arXiv 2310.10537); only
//              decoded; see [Note: fp4]
//   nvfp4:     4 bits a value, an 8-bit scale for each 16 values and an fp32 scale for the weight (arXiv 2509.25149);
//              only decoded; see [Note: fp4]
//   int4_group: 4 bits a value and a scale for a number of neighbouring values of a row; only decoded; see
//              [Note: int4_group]
//
// [Note: a codec's places]
// A codec is an enumerator here, a row of the table in layout.cpp (name and parts), and a file codec/<name>.inl with
// its decoder, which kernels.inl lists in the order of the enumerators.
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
//
// [Note: fp8_block]
// The tensor is a matrix. Row r and column c have the scale [r / block rows][c / block columns]; the last blocks of
// both directions may be incomplete. value = code · scale in fp32, where the code is an e4m3 number without infinities
// (OCP FP8, arXiv 2209.05433) and the scale is converted to fp32 exactly; the product is rounded once, and then to the
// nearest value of the dtype, ties to even. The codes 0x7f and 0xff are NaN, as is a product of 0 and infinity.
//
// [Note: fp4]
// A code is an e2m1 number: a sign, and one of the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6. The first of two elements
// is in the lower nibble. value = code · scale in fp32, rounded once, and then to the nearest value of the dtype, ties
// to even.
//   mxfp4: scale = 2^(e − 127) for the byte e, and NaN for 255. The products are exact unless they overflow. With
//          matrix_rows the weight is a stack of matrices that are stored transposed, column after column: 32 elements
//          of a column have a scale. gpt-oss stores its experts in this way.
//   nvfp4: scale = s · g in fp32, or s / g if the global scale is a divisor, where s is an e4m3 number and g the global
//          scale, an fp32 number. The scale is rounded once. Model Optimizer of NVIDIA stores factors, and
//          compressed-tensors divisors.
//
// [Note: int4_group]
// value = (code − 8) · scale in fp32, which is exact for scales in bf16, rounded to the nearest value of the dtype,
// ties to even. The first of two elements is in the lower nibble: on a little-endian processor, this is the order of
// the eight codes in an int32 of compressed-tensors (pack-quantized, symmetric).
enum class WeightCodec : std::uint8_t { nf4, nf4_fp32, int8, int8_rows, fp8_block, mxfp4, nvfp4, int4_group };
inline constexpr std::size_t kWeightCodecs = 8;

// Type of the scales of fp8_block and int4_group. e8m0 is one byte e for 2^(e − 127), and NaN for 255.
enum class ScaleType : std::uint8_t { fp32, bf16, e8m0 };
[[nodiscard]] static constexpr std::size_t itemsize(ScaleType type) {
  return type == ScaleType::fp32 ? 4 : type == ScaleType::bf16 ? 2 : 1;
}

// A codec and its parameters.
struct WeightForm {
  WeightCodec codec = WeightCodec::nf4;
  std::uint64_t block_rows = 1;     // of fp8_block
  std::uint64_t block_columns = 1;  // of fp8_block; of int4_group: the values that share a scale
  ScaleType scale_type = ScaleType::fp32;
  std::uint64_t matrix_rows = 0;  // of mxfp4: rows of each matrix of a weight that is stored transposed; otherwise 0
  bool divisor = false;           // of nvfp4: whether the global scale is a divisor

  WeightForm() = default;
  WeightForm(WeightCodec without_parameters) : codec(without_parameters) {}
};

// Parses a codec's name and parameters: "nf4", "fp8_block:128x128:bf16", "mxfp4", "mxfp4:2880" with the rows of a
// matrix that is stored transposed, "nvfp4:factor", "nvfp4:divisor", and "int4_group:128:bf16". Throws
// std::invalid_argument.
[[nodiscard]] WeightForm weight_form(const std::string& text);

inline constexpr std::size_t kCodecBlockNumel = 64;
inline constexpr std::size_t kNestedBlocks = 256;  // number of blocks that share a nested scale
inline constexpr std::size_t kMxfp4Group = 32;     // number of elements that share a scale
inline constexpr std::size_t kNvfp4Group = 16;

// Byte range of a part of a stored form; empty if the codec has no such part.
struct CodecPart {
  std::uint64_t begin = 0;  // a multiple of 64
  std::uint64_t nbytes = 0;
};

// The stored form of a parameter; the parts are stored in this order.
struct CodecLayout {
  CodecPart codes;          // nf4: the first of two elements is in the upper nibble
  CodecPart scales;         // nf4: uint8; nf4_fp32, int8_rows: fp32; int8: bf16; fp8_block: row by row, in its type;
                            // mxfp4: e8m0; nvfp4: e4m3; int4_group: in its type
  CodecPart nested_scales;  // nf4: fp32; nvfp4: the global scale, fp32
  CodecPart offset;         // nf4: one fp32
  std::uint64_t nbytes;     // size of the stored form, a multiple of 64
};

// Throws std::invalid_argument for too many elements, and for shapes that the codec cannot have: `numel` is no multiple
// of `row_numel` and the codec has rows, or the groups of mxfp4, nvfp4 or int4_group are not complete.
[[nodiscard]] CodecLayout codec_layout(const WeightForm& form, std::uint64_t numel, std::uint64_t row_numel);

// A stored form. `data` begins at a multiple of 4.
struct EncodedWeight {
  const std::byte* data = nullptr;
  WeightForm form;
  std::uint64_t numel = 0;      // number of elements
  std::uint64_t row_numel = 0;  // elements of a row, for int8_rows, fp8_block, mxfp4, nvfp4 and int4_group
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

// Columns that a thread decodes at a time in matrices that are stored transposed. A column's line of codes in a cache
// is used four times before the codes of all these columns have left L1.
inline constexpr std::size_t kTransposedColumns = 256;

// Number of tasks into which the decoding of a weight is divided. `decode_task` runs one of these tasks in the calling
// thread.
[[nodiscard]] std::size_t decode_tasks(const EncodedWeight& weight);
void decode_task(const EncodedWeight& weight, std::size_t task, void* out, DType dtype, Isa isa);

}  // namespace infinity
