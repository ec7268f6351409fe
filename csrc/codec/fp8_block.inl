// Decoding of e4m3 with a scale for each rectangle (see [Note: fp8_block]).

// Loads kLanes e4m3 numbers times 2^-8; NaN codes give any number. The exponent and mantissa are moved to their places
// in fp16, whose exponent has a bias of 15 instead of 7; numbers that are denormal in e4m3 are denormal in fp16, too.
inline Floats load_e4m3(const std::uint8_t* from) {
#if defined(__AVX512F__)
  const __m256i wide = _mm256_cvtepi8_epi16(load<__m128i>(from));
  const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<short>(0xbf80)));
  return std::bit_cast<Floats>(_mm512_cvtph_ps(halves));
#elif defined(__AVX2__)
  const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  const __m128i halves = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<short>(0xbf80)));
  return std::bit_cast<Floats>(_mm256_cvtph_ps(halves));
#elif defined(__ARM_NEON) && defined(__aarch64__)
  std::uint32_t codes = 0;
  std::memcpy(&codes, from, sizeof codes);
  const int16x8_t wide = vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(codes)));
  const uint16x4_t halves = vand_u16(vreinterpret_u16_s16(vshl_n_s16(vget_low_s16(wide), 7)), vdup_n_u16(0xbf80));
  return std::bit_cast<Floats>(vcvt_f32_f16(vreinterpret_f16_u16(halves)));
#else
  Floats result;
  for (std::size_t lane = 0; lane < kLanes; ++lane) result[lane] = kE4m3Map.values[from[lane]] * 0x1p-8f;
  return result;
#endif
}

// Whether a code of a block is NaN.
inline bool has_nan(const std::uint8_t* codes) {
  std::uint64_t found = 0;  // the sum of a byte with 1 reaches the highest bit if the code is NaN
  for (std::size_t i = 0; i < kCodecBlockNumel; i += 8) {
    found |= (load<std::uint64_t>(codes + i) & 0x7f7f7f7f7f7f7f7fu) + 0x0101010101010101u;
  }
  return (found & 0x8080808080808080u) != 0;
}

// Decodes kCodecBlockNumel codes that have the same scale. The product of the scale and 2^8 is exact unless it
// overflows.
template <class To>
void decode_e4m3(const std::uint8_t* codes, float scale, typename To::type* out) {
  const float shifted = scale * 0x1p8f;
  if (!is_finite(shifted) || has_nan(codes)) {
    for (std::size_t i = 0; i < kCodecBlockNumel; ++i) out[i] = To::rounded(kE4m3Map.values[codes[i]] * scale);
    return;
  }
  const Floats factor = splat(shifted);
  const auto decoded = [=](std::size_t i) { return load_e4m3(codes + i) * factor; };
  for (std::size_t i = 0; i < kCodecBlockNumel; i += 2 * kLanes) {
    store_rounded(out + i, decoded(i), decoded(i + kLanes));
  }
}

// Decodes fewer than kCodecBlockNumel codes.
template <class To>
void decode_few_e4m3(const std::uint8_t* codes, float scale, typename To::type* out, std::size_t numel) {
  std::uint8_t padded[kCodecBlockNumel] = {};
  typename To::type values[kCodecBlockNumel];
  std::memcpy(padded, codes, numel);
  decode_e4m3<To>(padded, scale, values);
  std::memcpy(out, values, numel * sizeof values[0]);
}

// Scales of the blocks in one row of blocks.
struct ScaleRow {
  const std::byte* scales;
  ScaleType type;

  ScaleRow(const DecodeSpan& span, std::size_t row) : type(span.weight.form.scale_type) {
    const WeightForm& form = span.weight.form;
    const std::size_t blocks = (span.weight.row_numel + form.block_columns - 1) / form.block_columns;
    scales = part_at<std::byte>(span, span.layout.scales) + row / form.block_rows * blocks * itemsize(type);
  }

  float operator[](std::size_t block) const { return load_scale(scales, block, type); }
};

struct Fp8Block {
  template <class To>
  static void decode(const DecodeSpan& span) {
    const auto block_columns = static_cast<std::size_t>(span.weight.form.block_columns);
    const bool aligned = block_columns % kCodecBlockNumel == 0 && span.weight.row_numel % kCodecBlockNumel == 0;
    const auto* const codes = part_at<std::uint8_t>(span, span.layout.codes);
    for_each_row(span, [&](std::size_t row, std::size_t column, std::size_t at, std::size_t numel) {
      auto* const out = static_cast<typename To::type*>(span.out.data) + at;
      const ScaleRow scales(span, row);
      if (aligned) {
        write_blocks(out, numel / kCodecBlockNumel, span.out.past_caches, [&](std::size_t block, auto* values) {
          const std::size_t done = block * kCodecBlockNumel;
          fetch_ahead(codes + at + done);
          decode_e4m3<To>(codes + at + done, scales[(column + done) / block_columns], values);
        });
        return;
      }
      for (std::size_t done = 0; done < numel;) {
        const std::size_t block = (column + done) / block_columns;
        const std::size_t left = smaller((block + 1) * block_columns - column, numel) - done;
        if (left < kCodecBlockNumel) {
          decode_few_e4m3<To>(codes + at + done, scales[block], out + done, left);
          done += left;
        } else {
          decode_e4m3<To>(codes + at + done, scales[block], out + done);
          done += kCodecBlockNumel;
        }
      }
    });
  }
};
