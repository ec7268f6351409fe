// The forms in which states are kept, and their sizes in bytes. The functions are static, so that each translation unit
// has its own copy, compiled for its own instruction set (see base/bits.hpp).
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.hpp"

namespace infinity {

// Form of the fp32 master.
//   weight:  the weight is fp32 and is itself the master; no second stream.
//   split16: weight bf16 = high half, rounded half up; second stream int16 = the residual. Lossless.
//   fp32:    weight bf16 or fp16; second stream is the fp32 master.
//   none:    weight bf16, rounded stochastically; there is no master and no second stream.
enum class Master : std::uint8_t { weight, split16, fp32, none };

[[nodiscard]] static constexpr std::size_t residual_itemsize(Master master) {
  return master == Master::split16 ? 2 : master == Master::fp32 ? 4 : 0;
}

// Form of exp_avg and exp_avg_sq.
//   fp32
//   bf16: rounded stochastically.
//   int8: block-wise dynamic quantisation (Dettmers et al. 2022, arXiv 2110.02861), 256 elements per fp32 scale.
enum class Moments : std::uint8_t { fp32, bf16, int8 };

// [Note: layout of int8 moments]
// A chunk is a page of 1,024 fp32 scales, then 262,144 codes of one byte each; the last chunk of a buffer has only the
// remaining codes. With this layout, a moment is one stream of bytes, a tile of complete chunks begins at the start of
// a page, and the scales cost 1/64 byte per element. A block never contains elements of two parameters: parameters
// begin at multiples of 256.
inline constexpr std::size_t kBlockNumel = 256;
inline constexpr std::size_t kScalesBytes = 4096;
inline constexpr std::size_t kChunkNumel = kScalesBytes / sizeof(float) * kBlockNumel;
inline constexpr std::size_t kChunkBytes = kScalesBytes + kChunkNumel;

// Tiles and tasks are divided at multiples of this many elements, so that every stream is divided between 4 KiB pages.
inline constexpr std::size_t kCutNumel = 4096;

// Bytes of the first `numel` elements of a moment. If `numel` is a multiple of kChunkNumel, the result is also the
// offset of element `numel`.
[[nodiscard]] static constexpr std::uint64_t moment_bytes(Moments moments, std::uint64_t numel) {
  if (moments == Moments::fp32) return numel * 4;
  if (moments == Moments::bf16) return numel * 2;
  const std::uint64_t rest = numel % kChunkNumel;
  return numel / kChunkNumel * kChunkBytes + (rest > 0 ? kScalesBytes + rest : 0);
}

struct StateFormat {
  DType weight;
  Master master;
  DType grad;
  Moments moments;
};

// Throws std::invalid_argument if the format of the master does not fit the dtype of the weight.
void check_format(const StateFormat& format);

}  // namespace infinity
