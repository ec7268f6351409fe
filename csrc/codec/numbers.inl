// Conversion of fp32 vectors from and to the three dtypes, rounded to the nearest value, ties to even. Infinite and NaN
// values are rounded one at a time, so that a NaN stays a NaN.
struct Fp32 {
  using type = float;
  static inline float wide(float value) { return value; }
  static inline float rounded(float value) { return value; }
};
struct Bf16 {
  using type = std::uint16_t;
  static inline float wide(std::uint16_t value) { return float_of_bf16(value); }
  static inline std::uint16_t rounded(float value) {
    const std::uint32_t bits = infinity::bits_of(value);
    if (value != value) return 0x7fc0;
    return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
};
struct Fp16 {
  using type = Half;
  static inline float wide(Half value) { return static_cast<float>(value); }
  static inline Half rounded(float value) { return static_cast<Half>(value); }
};

using Shorts = std::uint16_t __attribute__((vector_size(kLanes * 2)));

inline bool is_finite(float value) { return (infinity::bits_of(value) & 0x7fffffffu) < 0x7f800000u; }

// The number of an e8m0 code, a power of two or NaN.
inline float e8m0_scale(std::uint8_t exponent) {
  if (exponent == 0) return 0x1p-127f;
  return infinity::float_of(exponent == 255 ? 0x7fc00000u : static_cast<std::uint32_t>(exponent) << 23);
}

inline float load_scale(const std::byte* scales, std::size_t index, ScaleType type) {
  if (type == ScaleType::fp32) return load<float>(scales + 4 * index);
  if (type == ScaleType::bf16) return float_of_bf16(load<std::uint16_t>(scales + 2 * index));
  return e8m0_scale(load<std::uint8_t>(scales + index));
}

inline Floats load_wide(const float* from) { return load<Floats>(from); }

inline Floats load_wide(const std::uint16_t* from) {
  return floats_of(__builtin_convertvector(load<Shorts>(from), Ints) << 16);
}

inline Floats load_wide(const Half* from) {
#if defined(__AVX512F__)
  return std::bit_cast<Floats>(_mm512_cvtph_ps(load<__m256i>(from)));
#elif defined(__AVX2__)
  return std::bit_cast<Floats>(_mm256_cvtph_ps(load<__m128i>(from)));
#else
  Floats result;
  for (std::size_t lane = 0; lane < kLanes; ++lane) result[lane] = static_cast<float>(from[lane]);
  return result;
#endif
}

// Loads kLanes signed bytes.
inline Floats load_wide(const std::int8_t* from) {
#if defined(__AVX512F__)
  return std::bit_cast<Floats>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from))));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return std::bit_cast<Floats>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)));
#else
  Floats result;
  for (std::size_t lane = 0; lane < kLanes; ++lane) result[lane] = static_cast<float>(from[lane]);
  return result;
#endif
}

// The values must not be NaN; ±infinity is allowed.
inline void store_rounded(float* to, Floats values) { store(to, values); }

// The upper half of each lane is the rounded value.
inline Ints rounded_to_bf16(Floats values) {
  const Ints bits = bits_of(values);
  return bits + 0x7fff + ((bits >> 16) & 1);
}

inline void store_rounded(std::uint16_t* to, Floats values) {
  const Ints rounded = rounded_to_bf16(values);
#if defined(__AVX512F__)
  store(to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(std::bit_cast<__m512i>(rounded), 16)));
#elif defined(__AVX2__)
  const __m256i high = _mm256_srli_epi32(std::bit_cast<__m256i>(rounded), 16);
  store(to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08)));
#else
  store(to, __builtin_convertvector(rounded >> 16, Shorts));
#endif
}

inline void store_rounded(Half* to, Floats values) {
#if defined(__AVX512F__)
  store(to, _mm512_cvtps_ph(std::bit_cast<__m512>(values), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__AVX2__)
  store(to, _mm256_cvtps_ph(std::bit_cast<__m256>(values), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  for (std::size_t lane = 0; lane < kLanes; ++lane) to[lane] = static_cast<Half>(values[lane]);
#endif
}

// Stores two vectors, one after the other, with the widest store: a load of a complete vector after stores of its
// halves would stall.
template <class T>
inline void store_rounded(T* to, Floats first, Floats second) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, std::uint16_t>) {
    alignas(64) static constexpr std::uint16_t kUpperHalves[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                                   23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                                   45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    const auto bits = [](Floats values) { return std::bit_cast<__m512i>(rounded_to_bf16(values)); };
    store(to, _mm512_permutex2var_epi16(bits(first), load<__m512i>(kUpperHalves), bits(second)));
    return;
  }
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<T, std::uint16_t>) {
    const auto bits = [](Floats values) {
      return _mm256_srli_epi32(std::bit_cast<__m256i>(rounded_to_bf16(values)), 16);
    };
    store(to, _mm256_permute4x64_epi64(_mm256_packus_epi32(bits(first), bits(second)), 0xd8));
    return;
  } else if constexpr (std::is_same_v<T, Half>) {
    const auto halves = [](Floats values) {
      return _mm256_cvtps_ph(std::bit_cast<__m256>(values), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    };
    store(to, _mm256_set_m128i(halves(second), halves(first)));
    return;
  }
#endif
  store_rounded(to, first);
  store_rounded(to + kLanes, second);
}
