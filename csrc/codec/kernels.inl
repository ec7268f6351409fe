// The kernels. kernels_<isa>.cpp defines INFINITY_ISA_NAMESPACE and includes this file, compiled for exactly that
// instruction set.
//
// Invariant: there is no contraction, no reassociation and no approximate reciprocal, so the bits do not depend on the
// instruction set.

#include <bit>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "base/bits.hpp"
#include "codec/codec.hpp"
#include "codec/kernels.hpp"
#include "codec/maps.hpp"

namespace infinity::INFINITY_ISA_NAMESPACE {
namespace {

#include "base/simd.inl"

// The files of the codecs use simd.inl and numbers.inl.
#include "codec/numbers.inl"

// The next block of at most `left` values in fp32, padded with zeros if fewer values are left than a block has.
template <class From>
struct ValueBlock {
  alignas(64) float values[kCodecBlockNumel];
  std::size_t numel;
  float absmax;  // infinite or NaN if a value of the block is infinite or NaN

  ValueBlock(const typename From::type* from, std::size_t left)
      : numel(left < kCodecBlockNumel ? left : kCodecBlockNumel) {
    if (whole()) {
      for (std::size_t i = 0; i < kCodecBlockNumel; i += kLanes) store(values + i, load_wide(from + i));
    } else {
      for (std::size_t i = 0; i < kCodecBlockNumel; ++i) values[i] = i < numel ? From::wide(from[i]) : 0.0f;
    }
    Ints most{};
    for (std::size_t i = 0; i < kCodecBlockNumel; i += kLanes) {
      most = maximum(most, magnitude_bits(load<Floats>(values + i)));
    }
    absmax = largest_float(most);
  }

  [[nodiscard]] bool whole() const { return numel == kCodecBlockNumel; }
  // Number of values before the first value that is not finite.
  [[nodiscard]] std::size_t finite() const {
    std::size_t count = 0;
    while (count < numel && is_finite(values[count])) ++count;
    return count;
  }
};

// Prefetches into the L2 cache the codes that are decoded later. The hardware prefetcher comes too late, because stores
// past the caches use the same buffers as the prefetches. The prefetched address may be beyond the end of the codes.
inline void fetch_ahead(const void* codes) {
  constexpr std::size_t kDistance = 1024;
  __builtin_prefetch(static_cast<const std::byte*>(codes) + kDistance, 0, 2);
}

// Calls `decode(block, values)` for each complete block, and writes the values to the output.
template <class T, class Decode>
void write_blocks(T* out, std::size_t blocks, bool past_caches, const Decode& decode) {
#if defined(__SSE2__)
  if (past_caches && reinterpret_cast<std::uintptr_t>(out) % 16 == 0) {
    alignas(64) T values[kCodecBlockNumel];
    for (std::size_t block = 0; block < blocks; ++block) {
      decode(block, values);
      store_past_caches(out + block * kCodecBlockNumel, values, sizeof values);
    }
    return finish_stores();
  }
#endif
  static_cast<void>(past_caches);
  for (std::size_t block = 0; block < blocks; ++block) decode(block, out + block * kCodecBlockNumel);
}

template <class T>
const T* part_at(const DecodeSpan& span, const CodecPart& part) {
  return reinterpret_cast<const T*>(span.weight.data + part.begin);
}

// The output from element `at` of the weight on.
template <class To>
DecodeOutput out_at(const DecodeSpan& span, std::size_t at) {
  return {static_cast<typename To::type*>(span.out.data) + at, span.out.dtype, span.out.past_caches};
}

inline std::size_t smaller(std::size_t a, std::size_t b) { return a < b ? a : b; }

// Calls `decode(row, column, at, numel)` for the part of each row that is in the span; element `at` of the weight is
// the first element of the part, in column `column`.
template <class Decode>
void for_each_row(const DecodeSpan& span, const Decode& decode) {
  const auto row_numel = static_cast<std::size_t>(span.weight.row_numel);
  for (std::size_t at = span.begin; at < span.end;) {
    const std::size_t row = at / row_numel;
    const std::size_t end = smaller((row + 1) * row_numel, span.end);
    decode(row, at - row * row_numel, at, end - at);
    at = end;
  }
}

#include "codec/nibbles.inl"

// The codecs.
#include "codec/fp4.inl"
#include "codec/fp8_block.inl"
#include "codec/int4_group.inl"
#include "codec/int8.inl"
#include "codec/nf4.inl"

// Calls `work` with the C++ type that represents the dtype.
template <class Work>
inline auto with(DType dtype, const Work& work) {
  if (dtype == DType::fp32) return work(Fp32{});
  return dtype == DType::bf16 ? work(Bf16{}) : work(Fp16{});
}

template <class Codec>
void decode(const DecodeSpan& span) {
  with(span.out.dtype, [&](auto to) { Codec::template decode<decltype(to)>(span); });
}

std::size_t any_encode_nf4(const void* values, DType dtype, std::size_t numel, std::uint8_t* codes, float* scales) {
  return with(dtype, [&](auto from) { return encode_nf4<decltype(from)>(values, numel, codes, scales); });
}

std::size_t any_encode_int8(const void* values, DType dtype, std::size_t numel, std::int8_t* codes,
                            std::uint16_t* scales) {
  return with(dtype, [&](auto from) { return encode_int8<decltype(from)>(values, numel, codes, scales); });
}

}  // namespace

// The decoders are in the order of WeightCodec.
extern const CodecKernels kCodecKernels = {{decode<Nf4>, decode<Nf4Fp32>, decode<Int8>, decode<Int8Rows>,
                                            decode<Fp8Block>, decode<Mxfp4>, decode<Nvfp4>, decode<Int4Group>},
                                           any_encode_nf4,
                                           any_encode_int8};

}  // namespace infinity::INFINITY_ISA_NAMESPACE
