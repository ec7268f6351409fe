// Bits of the 16-bit formats. All functions are static inline, so that each translation unit has its own copy, compiled
// for its own instruction set: a common copy could contain AVX-512 code and run on a machine without AVX-512.
#pragma once

#include <cstdint>

namespace infinity {

#if defined(__aarch64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
using Half = __fp16;  // this compiler has __fp16, but not _Float16
#else
using Half = _Float16;
#endif

static inline std::uint32_t bits_of(float value) { return __builtin_bit_cast(std::uint32_t, value); }
static inline float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

// fp32 → bf16, half up. A NaN whose rounded half would not be a NaN (it would overflow into ±0 or ±Inf) becomes a quiet
// NaN of the same sign.
static inline std::uint16_t round_half_up(std::uint32_t bits) {
  const std::uint32_t rounded = (bits + 0x8000u) >> 16;
  const bool was_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const bool is_nan = (rounded & 0x7fffu) > 0x7f80u;
  return static_cast<std::uint16_t>(was_nan && !is_nan ? (bits >> 16) | 0x7fc0u : rounded);
}

// The same rounding for values other than NaN.
static inline std::uint16_t round_half_up_number(std::uint32_t bits) {
  return static_cast<std::uint16_t>((bits + 0x8000u) >> 16);
}

// The residual of round_half_up, which is the low half of the bits: bits − (hi << 16) as 16 bits; 0 for NaNs that
// round_half_up changed.
static inline std::int16_t residual_of(std::uint32_t bits, std::uint16_t high) {
  const std::uint32_t rounded = ((bits + 0x8000u) >> 16) & 0xffffu;
  return static_cast<std::int16_t>(rounded == high ? bits : 0);
}

static inline float join(std::uint16_t high, std::int16_t rest) {
  const auto wide = static_cast<std::uint32_t>(static_cast<std::int32_t>(rest));
  return float_of((static_cast<std::uint32_t>(high) << 16) + wide);
}

static inline float float_of_bf16(std::uint16_t value) { return float_of(static_cast<std::uint32_t>(value) << 16); }

// fp32 → bf16. Rounds a value up in magnitude with a probability equal to the fraction that is cut off; `random` has 16
// bits. NaN and Inf do not change; finite values stay finite.
static inline std::uint16_t round_stochastically(std::uint32_t bits, std::uint16_t random) {
  const std::uint32_t rounded = (bits + random) >> 16;
  const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
  const bool overflow = (rounded & 0x7fffu) == 0x7f80u;
  const std::uint32_t quiet = (bits & 0x007fffffu) != 0 ? 0x40u : 0u;
  return static_cast<std::uint16_t>(finite ? rounded - (overflow ? 1u : 0u) : (bits >> 16) | quiet);
}

}  // namespace infinity
