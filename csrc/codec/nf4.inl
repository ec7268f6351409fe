// NF4. A block has only 16 different values. These 16 values are scaled and rounded once per block, and each code is
// only looked up.

// The 16 values of a block in the dtype of the output, and the lookup of codes in these values.
template <class T>
class BlockTable {
 public:
  explicit BlockTable(float scale) {
    const auto values = [factor = splat(scale)](std::size_t i) { return load<Floats>(kNf4Map.values + i) * factor; };
    if constexpr (kLanes == 16) {
      store_rounded(values_, values(0));
    } else {
      for (std::size_t i = 0; i < 16; i += 2 * kLanes) store_rounded(values_ + i, values(i), values(i + kLanes));
    }
  }

  // Decodes a complete block from 32 bytes of codes.
  void look_up(const std::uint8_t* codes, T* out) const {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 2) {
      const __m512i table = _mm512_broadcast_i64x4(load<__m256i>(values_));  // the instruction uses the low four bits
      for (std::size_t i = 0; i < 32; i += 16) {
        const __m512i bytes = _mm512_cvtepu8_epi32(load<__m128i>(codes + i));
        const __m512i index = _mm512_or_si512(_mm512_srli_epi32(bytes, 4), _mm512_slli_epi32(bytes, 16));
        store(out + 2 * i, _mm512_permutexvar_epi16(index, table));
      }
    } else {
      const auto table = load<__m512>(values_);
      for (std::size_t i = 0; i < 32; i += 16) {
        const Nibbles nibbles(codes + i);
        store(out + 2 * i, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(nibbles.first), table));
        store(out + 2 * i + 16, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(nibbles.second), table));
      }
    }
#elif defined(__AVX2__)
    for (std::size_t i = 0; i < 32; i += 16) {
      const Nibbles nibbles(codes + i);
      look_up_16(nibbles.first, out + 2 * i);
      look_up_16(nibbles.second, out + 2 * i + 16);
    }
#elif defined(__ARM_NEON) && defined(__aarch64__)
    for (std::size_t i = 0; i < 32; i += 16) {
      const uint8x16_t bytes = vld1q_u8(codes + i);
      const uint8x16_t high = vshrq_n_u8(bytes, 4);
      const uint8x16_t low = vandq_u8(bytes, vdupq_n_u8(15));
      look_up_16(vzip1q_u8(high, low), out + 2 * i);
      look_up_16(vzip2q_u8(high, low), out + 2 * i + 16);
    }
#else
    for (std::size_t i = 0; i < 32; ++i) {
      out[2 * i] = values_[codes[i] >> 4];
      out[2 * i + 1] = values_[codes[i] & 15];
    }
#endif
  }

 private:
#if defined(__AVX2__)
  // The nibbles of 16 bytes, one byte for each, in the order of the elements.
  struct Nibbles {
    __m128i first;
    __m128i second;

    explicit Nibbles(const std::uint8_t* codes) {
      const auto bytes = load<__m128i>(codes);
      const __m128i mask = _mm_set1_epi8(15);
      const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
      const __m128i low = _mm_and_si128(bytes, mask);
      first = _mm_unpacklo_epi8(high, low);
      second = _mm_unpackhi_epi8(high, low);
    }
  };
#endif
#if defined(__AVX2__) && !defined(__AVX512F__)
  void look_up_16(__m128i index, T* out) const {
    if constexpr (sizeof(T) == 2) {
      const auto values = load<__m256i>(values_);
      const __m256i mask = _mm256_set1_epi16(255);
      const __m256i bytes = _mm256_permute4x64_epi64(
          _mm256_packus_epi16(_mm256_and_si256(values, mask), _mm256_srli_epi16(values, 8)), 0xd8);
      const __m128i low = _mm_shuffle_epi8(_mm256_castsi256_si128(bytes), index);
      const __m128i high = _mm_shuffle_epi8(_mm256_extracti128_si256(bytes, 1), index);
      store(out, _mm256_set_m128i(_mm_unpackhi_epi8(low, high), _mm_unpacklo_epi8(low, high)));
    } else {
      for (std::size_t i = 0; i < 16; i += 8) {
        const __m256i lanes = _mm256_cvtepu8_epi32(i == 0 ? index : _mm_srli_si128(index, 8));
        const __m256 lower = _mm256_permutevar8x32_ps(load<__m256>(values_), lanes);
        const __m256 upper = _mm256_permutevar8x32_ps(load<__m256>(values_ + 8), lanes);
        store(out + i, _mm256_blendv_ps(lower, upper, _mm256_castsi256_ps(_mm256_slli_epi32(lanes, 28))));
      }
    }
  }
#elif defined(__ARM_NEON) && defined(__aarch64__)
  void look_up_16(uint8x16_t index, T* out) const {
    const auto* const bytes = reinterpret_cast<const std::uint8_t*>(values_);
    auto* const to = reinterpret_cast<std::uint8_t*>(out);
    if constexpr (sizeof(T) == 2) {
      const uint8x16x2_t table = vld2q_u8(bytes);
      vst2q_u8(to, uint8x16x2_t{{vqtbl1q_u8(table.val[0], index), vqtbl1q_u8(table.val[1], index)}});
    } else {
      const uint8x16x4_t table = vld4q_u8(bytes);
      vst4q_u8(to, uint8x16x4_t{{vqtbl1q_u8(table.val[0], index), vqtbl1q_u8(table.val[1], index),
                                 vqtbl1q_u8(table.val[2], index), vqtbl1q_u8(table.val[3], index)}});
    }
  }
#endif

  alignas(64) T values_[16];
};

template <class To>
void decode_nf4_block(const std::uint8_t* codes, float scale, typename To::type* out) {
  if (is_finite(scale)) return BlockTable<typename To::type>(scale).look_up(codes, out);
  for (std::size_t i = 0; i < kCodecBlockNumel; ++i) {
    const unsigned code = i % 2 == 0 ? codes[i / 2] >> 4 : codes[i / 2] & 15;
    out[i] = To::rounded(kNf4Map.values[code] * scale);
  }
}

template <class To>
void decode_nf4_blocks(const std::uint8_t* codes, const float* scales, const DecodeOutput& output, std::size_t numel) {
  using T = typename To::type;
  auto* const out = static_cast<T*>(output.data);
  const std::size_t whole = numel / kCodecBlockNumel;
  write_blocks(out, whole, output.past_caches, [&](std::size_t block, T* values) {
    const std::uint8_t* const from = codes + block * kCodecBlockNumel / 2;
    fetch_ahead(from);
    decode_nf4_block<To>(from, scales[block], values);
  });
  const std::size_t rest = numel % kCodecBlockNumel;
  if (rest == 0) return;
  std::uint8_t last[kCodecBlockNumel / 2] = {};
  T values[kCodecBlockNumel];
  std::memcpy(last, codes + whole * kCodecBlockNumel / 2, (rest + 1) / 2);
  decode_nf4_block<To>(last, scales[whole], values);
  std::memcpy(out + whole * kCodecBlockNumel, values, rest * sizeof values[0]);
}

struct Nf4Fp32 {
  template <class To>
  static void decode(const DecodeSpan& span) {
    decode_nf4_blocks<To>(part_at<std::uint8_t>(span, span.layout.codes) + span.begin / 2,
                          part_at<float>(span, span.layout.scales) + span.begin / kCodecBlockNumel,
                          out_at<To>(span, span.begin), span.end - span.begin);
  }
};

// scale = map[code] · nested + offset
struct Nf4 {
  template <class To>
  static void decode(const DecodeSpan& span) {
    constexpr std::size_t kGroupNumel = kNestedBlocks * kCodecBlockNumel;
    const auto* const codes = part_at<std::uint8_t>(span, span.layout.codes);
    const auto* const scale_codes = part_at<std::uint8_t>(span, span.layout.scales);
    const auto* const nested = part_at<float>(span, span.layout.nested_scales);
    const float offset = *part_at<float>(span, span.layout.offset);
    alignas(64) float scales[kNestedBlocks];
    for (std::size_t at = span.begin; at < span.end; at += kGroupNumel) {
      const std::size_t numel = smaller(kGroupNumel, span.end - at);
      const std::size_t blocks = (numel + kCodecBlockNumel - 1) / kCodecBlockNumel;
      const float factor = nested[at / kGroupNumel];
      for (std::size_t i = 0; i < blocks; ++i) {
        scales[i] = kDynamicMap.values[scale_codes[at / kCodecBlockNumel + i]] * factor + offset;
      }
      decode_nf4_blocks<To>(codes + at / 2, scales, out_at<To>(span, at), numel);
    }
  }
};

// The code of each value, which is the number of bounds below the value.
inline Ints nf4_codes(Floats values) {
  static constexpr auto kBounds = bounds_of(kNf4Map);
#if defined(__AVX2__)
  // Binary search in four steps; each step compares with the middle of the remaining bounds.
  static constexpr auto kTable = [](std::size_t first, std::size_t step) {
    Table table{};
    for (std::size_t i = 0; i < 8 && first + i * step < 15; ++i) table.set(i, kBounds.values[first + i * step]);
    return table;
  };
  static constexpr Table kQuarters = kTable(3, 8);
  static constexpr Table kEighths = kTable(1, 4);
  static constexpr Table kSixteenths = kTable(0, 2);
  Ints code = -(values > kBounds.values[7]);
  code = code + code - (values > Lookup(kQuarters)[code]);
  code = code + code - (values > Lookup(kEighths)[code]);
  return code + code - (values > Lookup(kSixteenths)[code]);
#else
  Ints code{};
  for (const float bound : kBounds.values) code -= values > bound;
  return code;
#endif
}

// Stores the codes of a block of scaled values, two in a byte.
inline void store_nf4_codes(const float* scaled, std::uint8_t* codes) {
  alignas(64) std::uint8_t wide[kCodecBlockNumel];
  for (std::size_t i = 0; i < kCodecBlockNumel; i += 4 * kLanes) {
    Ints parts[4];
    for (std::size_t part = 0; part < 4; ++part) parts[part] = nf4_codes(load<Floats>(scaled + i + part * kLanes));
    store_bytes<0>(wide + i, parts);
  }
  for (std::size_t i = 0; i < kCodecBlockNumel / 2; ++i) {
    codes[i] = static_cast<std::uint8_t>(wide[2 * i] << 4 | wide[2 * i + 1]);
  }
}

template <class From>
std::size_t encode_nf4(const void* from, std::size_t numel, std::uint8_t* codes, float* scales) {
  constexpr float kLeast = 1e-38f;
  const auto* const values = static_cast<const typename From::type*>(from);
  for (std::size_t at = 0; at < numel; at += kCodecBlockNumel) {
    const ValueBlock<From> block(values + at, numel - at);
    if (!is_finite(block.absmax)) return at + block.finite();
    const float scale = block.absmax < kLeast ? kLeast : block.absmax;
    scales[at / kCodecBlockNumel] = block.whole() ? block.absmax : scale;
    alignas(64) float scaled[kCodecBlockNumel];
    const Floats factor = splat(1.0f / scale);
    for (std::size_t i = 0; i < kCodecBlockNumel; i += kLanes) {
      const auto part = load<Floats>(block.values + i);
      store(scaled + i, block.whole() ? part * factor : part / splat(scale));
    }
    if (block.whole()) {
      store_nf4_codes(scaled, codes + at / 2);
    } else {
      std::uint8_t last[kCodecBlockNumel / 2];
      store_nf4_codes(scaled, last);
      std::memcpy(codes + at / 2, last, (block.numel + 1) / 2);
    }
  }
  return numel;
}
