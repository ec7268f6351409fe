// Vectors of this instruction set's width, with the few operations that the compiler's own vector types do not have.
//
// Invariant: every operation is exact IEEE arithmetic, or integer arithmetic with the same result on every instruction
// set: minimum(a, b) is a < b ? a : b. A result that is NaN is NaN on every instruction set, but the payload of the NaN
// is not specified.
#if defined(__AVX512F__)
constexpr std::size_t kLanes = 16;
#elif defined(__AVX2__)
constexpr std::size_t kLanes = 8;
#else
constexpr std::size_t kLanes = 4;
#endif

using Floats = float __attribute__((vector_size(kLanes * 4)));
using Ints = std::int32_t __attribute__((vector_size(kLanes * 4)));
using Words = std::uint64_t __attribute__((vector_size(kLanes * 4)));

template <class Vector>
inline Vector load(const void* from) {
  Vector value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class Vector>
inline void store(void* to, Vector value) {
  std::memcpy(to, &value, sizeof value);
}

inline Floats splat(float value) { return value - Floats{}; }  // −0 stays −0
inline Floats to_floats(Ints value) { return __builtin_convertvector(value, Floats); }
inline Ints bits_of(Floats value) { return std::bit_cast<Ints>(value); }
inline Floats floats_of(Ints bits) { return std::bit_cast<Floats>(bits); }
inline Ints magnitude_bits(Floats value) { return bits_of(value) & 0x7fffffff; }

// −1 in lanes whose value is not finite, else 0.
inline Ints not_finite(Floats value) { return magnitude_bits(value) > 0x7f7fffff; }

inline bool any_negative(Ints value) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(std::bit_cast<__m512i>(value)) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(std::bit_cast<__m256>(value)) != 0;
#else
  std::int32_t all = 0;
  for (std::size_t lane = 0; lane < kLanes; ++lane) all |= value[lane];
  return all < 0;
#endif
}

// The largest lane; no lane may be negative.
inline std::int32_t largest(Ints value) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32(std::bit_cast<__m512i>(value));
#elif defined(__AVX2__)
  const auto wide = std::bit_cast<__m256i>(value);
  __m128i half = _mm_max_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
  return _mm_cvtsi128_si32(half);
#else
  std::int32_t result = 0;
  for (std::size_t lane = 0; lane < kLanes; ++lane) result = value[lane] > result ? value[lane] : result;
  return result;
#endif
}

constexpr float kLargestFloat = 0x1.fffffep127f;

// The largest float, compared by bits: a NaN is larger than all numbers. No float may be negative.
inline float largest_float(Ints bits) { return infinity::float_of(static_cast<std::uint32_t>(largest(bits))); }

inline Ints maximum(Ints a, Ints b) { return a > b ? a : b; }

inline Floats minimum(Floats a, Floats b) {
#if defined(__AVX512F__)
  return std::bit_cast<Floats>(_mm512_min_ps(std::bit_cast<__m512>(a), std::bit_cast<__m512>(b)));
#elif defined(__AVX2__)
  return std::bit_cast<Floats>(_mm256_min_ps(std::bit_cast<__m256>(a), std::bit_cast<__m256>(b)));
#else
  return a < b ? a : b;
#endif
}

inline Floats maximum(Floats a, Floats b) {
#if defined(__AVX512F__)
  return std::bit_cast<Floats>(_mm512_max_ps(std::bit_cast<__m512>(a), std::bit_cast<__m512>(b)));
#elif defined(__AVX2__)
  return std::bit_cast<Floats>(_mm256_max_ps(std::bit_cast<__m256>(a), std::bit_cast<__m256>(b)));
#else
  return a > b ? a : b;
#endif
}

// Replaces values whose magnitude is below `limit`, which is not negative, by 0.
inline Floats zero_below(Floats value, float limit) {
  return floats_of(bits_of(value) & (magnitude_bits(value) >= static_cast<std::int32_t>(infinity::bits_of(limit))));
}

inline Floats square_root(Floats value) {
#if defined(__AVX512F__)
  return std::bit_cast<Floats>(_mm512_sqrt_ps(std::bit_cast<__m512>(value)));
#elif defined(__AVX2__)
  return std::bit_cast<Floats>(_mm256_sqrt_ps(std::bit_cast<__m256>(value)));
#elif defined(__SSE2__)
  return std::bit_cast<Floats>(_mm_sqrt_ps(std::bit_cast<__m128>(value)));
#elif defined(__ARM_NEON) && defined(__aarch64__)
  return std::bit_cast<Floats>(vsqrtq_f32(std::bit_cast<float32x4_t>(value)));
#else
  Floats result;
  for (std::size_t lane = 0; lane < kLanes; ++lane) result[lane] = __builtin_sqrtf(value[lane]);
  return result;
#endif
}

inline Ints magnitude(Ints value) {
#if defined(__AVX512F__)
  return std::bit_cast<Ints>(_mm512_abs_epi32(std::bit_cast<__m512i>(value)));
#elif defined(__AVX2__)
  return std::bit_cast<Ints>(_mm256_abs_epi32(std::bit_cast<__m256i>(value)));
#else
  return value < 0 ? -value : value;
#endif
}

// `value`, which is not negative, with the sign of `sign`.
inline Floats with_sign_of(Floats sign, Floats value) {
  return floats_of(bits_of(value) | (bits_of(sign) & static_cast<std::int32_t>(0x80000000)));
}

// `value` plus 1 in lanes where a > b.
inline Ints plus_one_if_greater(Ints value, Floats a, Floats b) {
#if defined(__AVX512F__)
  const auto wide = std::bit_cast<__m512i>(value);
  const __mmask16 greater = _mm512_cmp_ps_mask(std::bit_cast<__m512>(a), std::bit_cast<__m512>(b), _CMP_GT_OQ);
  return std::bit_cast<Ints>(_mm512_mask_add_epi32(wide, greater, wide, _mm512_set1_epi32(1)));
#else
  return value - (a > b);
#endif
}

// Truncates values that are within the range of int32.
inline Ints truncate(Floats value) { return __builtin_convertvector(value, Ints); }

// A table of eight values; the low three bits of a lane select the value.
struct alignas(64) Table {
  float values[16];  // each value occurs twice, for sixteen lanes

  constexpr void set(std::size_t index, double value) { values[index] = values[index + 8] = static_cast<float>(value); }
};

struct Lookup {
#if defined(__AVX2__)
  Floats values;
  explicit Lookup(const Table& table) : values(load<Floats>(table.values)) {}
  Lookup(const Table& table, float factor) : values(load<Floats>(table.values) * factor) {}
#else
  Table values;
  explicit Lookup(const Table& table) : values(table) {}
  Lookup(const Table& table, float factor) : values(table) {
    for (float& value : values.values) value *= factor;
  }
#endif

  inline Floats operator[](Ints index) const {
#if defined(__AVX512F__)
    return std::bit_cast<Floats>(_mm512_permutexvar_ps(std::bit_cast<__m512i>(index), std::bit_cast<__m512>(values)));
#elif defined(__AVX2__)
    return std::bit_cast<Floats>(
        _mm256_permutevar8x32_ps(std::bit_cast<__m256>(values), std::bit_cast<__m256i>(index)));
#elif defined(__ARM_NEON) && defined(__aarch64__)
    const uint8x16x2_t table = {
        {vreinterpretq_u8_f32(vld1q_f32(values.values)), vreinterpretq_u8_f32(vld1q_f32(values.values + 4))}};
    const uint32x4_t bytes = std::bit_cast<uint32x4_t>((index & 7) * 0x04040404 + 0x03020100);
    return std::bit_cast<Floats>(vqtbl2q_u8(table, vreinterpretq_u8_u32(bytes)));
#else
    Floats result;
    for (std::size_t lane = 0; lane < kLanes; ++lane) result[lane] = values.values[index[lane] & 7];
    return result;
#endif
  }
};

// Converts bytes [0, kLanes) to integers.
inline Ints widen_bytes(const std::uint8_t* from) {
#if defined(__AVX512F__)
  return std::bit_cast<Ints>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return std::bit_cast<Ints>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  Ints result;
  for (std::size_t lane = 0; lane < kLanes; ++lane) result[lane] = from[lane];
  return result;
#endif
}

// Stores four vectors of integers plus `offset`, at most 255, as 4·kLanes bytes; negative sums become 0.
template <std::int16_t offset>
inline void store_bytes(std::uint8_t* to, const Ints (&values)[4]) {
#if defined(__AVX512F__)
  const auto pack = [](Ints a, Ints b) {
    const __m512i packed = _mm512_packs_epi32(std::bit_cast<__m512i>(a), std::bit_cast<__m512i>(b));
    return offset != 0 ? _mm512_add_epi16(packed, _mm512_set1_epi16(offset)) : packed;
  };
  const __m512i bytes = _mm512_packus_epi16(pack(values[0], values[1]), pack(values[2], values[3]));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, bytes));
#elif defined(__AVX2__)
  const auto pack = [](Ints a, Ints b) {
    const __m256i packed = _mm256_packs_epi32(std::bit_cast<__m256i>(a), std::bit_cast<__m256i>(b));
    return offset != 0 ? _mm256_add_epi16(packed, _mm256_set1_epi16(offset)) : packed;
  };
  const __m256i bytes = _mm256_packus_epi16(pack(values[0], values[1]), pack(values[2], values[3]));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permutevar8x32_epi32(bytes, order));
#else
  for (std::size_t part = 0; part < 4; ++part) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const std::int32_t value = values[part][lane] + offset;
      to[part * kLanes + lane] = static_cast<std::uint8_t>(value > 0 ? value : 0);
    }
  }
#endif
}

// ⌊max(upper half of `bits` − offset, 0) · factor / 2^16⌋ of each lane, unsigned.
template <std::uint16_t offset, std::uint16_t factor>
inline Ints scaled_upper_half(Ints bits) {
#if defined(__AVX512F__)
  const __m512i rest = _mm512_subs_epu16(std::bit_cast<__m512i>(bits), _mm512_set1_epi32(offset << 16));
  return std::bit_cast<Ints>(_mm512_srli_epi32(_mm512_mulhi_epu16(rest, _mm512_set1_epi32(factor << 16)), 16));
#elif defined(__AVX2__)
  const __m256i rest = _mm256_subs_epu16(std::bit_cast<__m256i>(bits), _mm256_set1_epi32(offset << 16));
  return std::bit_cast<Ints>(_mm256_srli_epi32(_mm256_mulhi_epu16(rest, _mm256_set1_epi32(factor << 16)), 16));
#else
  const Ints rest = ((bits >> 16) & 0xffff) - offset;
  return (maximum(rest, Ints{}) * factor >> 16) & 0xffff;
#endif
}

// Copies data that will not be read soon, without fetching the cache lines that are overwritten; `nbytes` is a multiple
// of 64. Other threads see the data after finish_stores().
inline void store_past_caches(void* to, const void* from, std::size_t nbytes) {
#if defined(__SSE2__)
  const auto* const source = static_cast<const std::byte*>(from);
  auto* const target = static_cast<std::byte*>(to);
#if defined(__AVX512F__)
  if (reinterpret_cast<std::uintptr_t>(to) % 64 == 0) {
    for (std::size_t at = 0; at < nbytes; at += 64) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(target + at), load<__m512i>(source + at));
    }
    return;
  }
#elif defined(__AVX2__)
  if (reinterpret_cast<std::uintptr_t>(to) % 32 == 0) {
    for (std::size_t at = 0; at < nbytes; at += 32) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(target + at), load<__m256i>(source + at));
    }
    return;
  }
#endif
  if (reinterpret_cast<std::uintptr_t>(to) % 16 == 0) {
    for (std::size_t at = 0; at < nbytes; at += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + at), load<__m128i>(source + at));
    }
    return;
  }
#endif
  std::memcpy(to, from, nbytes);
}

// Stores one vector in the same way; `to` is aligned to the vector's size.
template <class Vector>
inline void store_vector_past_caches(void* to, Vector value) {
#if defined(__AVX512F__)
  _mm512_stream_si512(static_cast<__m512i*>(to), std::bit_cast<__m512i>(value));
#elif defined(__AVX2__)
  _mm256_stream_si256(static_cast<__m256i*>(to), std::bit_cast<__m256i>(value));
#elif defined(__SSE2__)
  _mm_stream_si128(static_cast<__m128i*>(to), std::bit_cast<__m128i>(value));
#else
  store(to, value);
#endif
}

inline void finish_stores() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

constexpr std::size_t kDoubles = kLanes / 2;
using Doubles = double __attribute__((vector_size(kLanes * 4)));

// Converts kDoubles values.
inline Doubles to_doubles(const float* values) {
#if defined(__AVX512F__)
  return std::bit_cast<Doubles>(_mm512_cvtps_pd(_mm256_loadu_ps(values)));
#elif defined(__AVX2__)
  return std::bit_cast<Doubles>(_mm256_cvtps_pd(_mm_loadu_ps(values)));
#else
  Doubles x;
  for (std::size_t lane = 0; lane < kDoubles; ++lane) x[lane] = static_cast<double>(values[lane]);
  return x;
#endif
}

// Converts kDoubles values in bf16.
inline Doubles to_doubles(const std::uint16_t* values) {
#if defined(__AVX512F__)
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
  return std::bit_cast<Doubles>(_mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))));
#elif defined(__AVX2__)
  const __m128i wide = _mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(values)));
  return std::bit_cast<Doubles>(_mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(wide, 16))));
#else
  Doubles x;
  for (std::size_t lane = 0; lane < kDoubles; ++lane) {
    x[lane] = static_cast<double>(infinity::float_of(static_cast<std::uint32_t>(values[lane]) << 16));
  }
  return x;
#endif
}

// `sums` plus the squares of `x`. The square of an fp32 number is exact in double, so a fused multiply-add gives the
// same result.
inline Doubles add_squares(Doubles sums, Doubles x) {
#if defined(__AVX512F__)
  const auto wide = std::bit_cast<__m512d>(x);
  return std::bit_cast<Doubles>(_mm512_fmadd_pd(wide, wide, std::bit_cast<__m512d>(sums)));
#elif defined(__AVX2__)
  const auto wide = std::bit_cast<__m256d>(x);
  return std::bit_cast<Doubles>(_mm256_fmadd_pd(wide, wide, std::bit_cast<__m256d>(sums)));
#else
  return sums + x * x;
#endif
}

// Product of the lower halves of each 64-bit lane.
inline Words multiply_low(Words a, Words b) {
#if defined(__AVX512F__)
  return std::bit_cast<Words>(_mm512_mul_epu32(std::bit_cast<__m512i>(a), std::bit_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return std::bit_cast<Words>(_mm256_mul_epu32(std::bit_cast<__m256i>(a), std::bit_cast<__m256i>(b)));
#elif defined(__SSE2__)
  return std::bit_cast<Words>(_mm_mul_epu32(std::bit_cast<__m128i>(a), std::bit_cast<__m128i>(b)));
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}
