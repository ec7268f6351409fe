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

// nf4.inl and int8.inl use simd.inl and numbers.inl.
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

#include "codec/int8.inl"
#include "codec/nf4.inl"

// Calls `work` with the C++ type that represents the dtype.
template <class Work>
inline auto with(DType dtype, const Work& work) {
  if (dtype == DType::fp32) return work(Fp32{});
  return dtype == DType::bf16 ? work(Bf16{}) : work(Fp16{});
}

void any_decode_nf4(const std::uint8_t* codes, const float* scales, const DecodeOutput& out, std::size_t numel) {
  with(out.dtype, [&](auto to) { decode_nf4<decltype(to)>(codes, scales, out, numel); });
}

void any_decode_int8(const std::int8_t* codes, const std::uint16_t* scales, const DecodeOutput& out,
                     std::size_t numel) {
  with(out.dtype, [&](auto to) { decode_int8<decltype(to)>(codes, scales, out, numel); });
}

void any_decode_row(const std::int8_t* codes, float scale, const DecodeOutput& out, std::size_t numel) {
  with(out.dtype, [&](auto to) { decode_row<decltype(to)>(codes, scale, out, numel); });
}

void unnest(const std::uint8_t* codes, float nested, float offset, float* scales, std::size_t blocks) {
  for (std::size_t i = 0; i < blocks; ++i) scales[i] = kDynamicMap.values[codes[i]] * nested + offset;
}

std::size_t any_encode_nf4(const void* values, DType dtype, std::size_t numel, std::uint8_t* codes, float* scales) {
  return with(dtype, [&](auto from) { return encode_nf4<decltype(from)>(values, numel, codes, scales); });
}

std::size_t any_encode_int8(const void* values, DType dtype, std::size_t numel, std::int8_t* codes,
                            std::uint16_t* scales) {
  return with(dtype, [&](auto from) { return encode_int8<decltype(from)>(values, numel, codes, scales); });
}

}  // namespace

extern const CodecKernels kCodecKernels = {any_decode_nf4, any_decode_int8, any_decode_row,
                                           unnest,         any_encode_nf4,  any_encode_int8};

}  // namespace infinity::INFINITY_ISA_NAMESPACE
