// Encoding and decoding in 8 bits, linear (see [Note: int8]).

// Decodes a block: value = code · scale; for a row, the product is also multiplied by 1/127, as in bitsandbytes.
template <class To, bool row>
void decode_linear(const std::int8_t* codes, float scale, typename To::type* out) {
  constexpr float kRowFactor = 7.874015718698502e-3f;
  if (!is_finite(scale)) {
    for (std::size_t i = 0; i < kCodecBlockNumel; ++i) {
      const float value = static_cast<float>(codes[i]) * scale;
      out[i] = To::rounded(row ? value * kRowFactor : value);
    }
    return;
  }
  const Floats factor = splat(scale);
  const auto decoded = [=](std::size_t i) {
    const Floats value = load_wide(codes + i) * factor;
    return row ? value * kRowFactor : value;
  };
  for (std::size_t i = 0; i < kCodecBlockNumel; i += 2 * kLanes) {
    store_rounded(out + i, decoded(i), decoded(i + kLanes));
  }
}

// Decodes a weight in blocks; `scale_of` returns the scale of a block.
template <class To, bool row, class ScaleOf>
void decode_blocks(const std::int8_t* codes, const DecodeOutput& output, std::size_t numel, const ScaleOf& scale_of) {
  using T = typename To::type;
  auto* const out = static_cast<T*>(output.data);
  const std::size_t whole = numel / kCodecBlockNumel;
  write_blocks(out, whole, output.past_caches, [&](std::size_t block, T* values) {
    const std::int8_t* const from = codes + block * kCodecBlockNumel;
    fetch_ahead(from);
    decode_linear<To, row>(from, scale_of(block), values);
  });
  const std::size_t rest = numel % kCodecBlockNumel;
  if (rest == 0) return;
  std::int8_t last[kCodecBlockNumel] = {};
  T values[kCodecBlockNumel];
  std::memcpy(last, codes + whole * kCodecBlockNumel, rest);
  decode_linear<To, row>(last, scale_of(whole), values);
  std::memcpy(out + whole * kCodecBlockNumel, values, rest * sizeof values[0]);
}

struct Int8 {
  template <class To>
  static void decode(const DecodeSpan& span) {
    const auto* const codes = part_at<std::int8_t>(span, span.layout.codes) + span.begin;
    const auto* const scales = part_at<std::uint16_t>(span, span.layout.scales) + span.begin / kCodecBlockNumel;
    decode_blocks<To, false>(codes, out_at<To>(span, span.begin), span.end - span.begin,
                             [=](std::size_t block) { return float_of_bf16(scales[block]); });
  }
};

struct Int8Rows {
  template <class To>
  static void decode(const DecodeSpan& span) {
    const auto* const codes = part_at<std::int8_t>(span, span.layout.codes);
    const auto* const scales = part_at<float>(span, span.layout.scales);
    for_each_row(span, [&](std::size_t row, std::size_t, std::size_t at, std::size_t numel) {
      decode_blocks<To, true>(codes + at, out_at<To>(span, at), numel, [=](std::size_t) { return scales[row]; });
    });
  }
};

// The smallest bf16 that is not below absmax / 127.
inline std::uint16_t int8_scale(float absmax) {
  return static_cast<std::uint16_t>((infinity::bits_of(absmax / 127.0f) + 0xffffu) >> 16);
}

// Rounds to the nearest integer, ties to even. Magnitudes are at most 2^22.
inline Ints nearest_integers(Floats values) {
  constexpr float kMagic = 0x1.8p23f;  // at this magnitude, adjacent floats differ by 1
  return truncate(values + kMagic - kMagic);
}

template <class From>
std::size_t encode_int8(const void* from, std::size_t numel, std::int8_t* codes, std::uint16_t* scales) {
  const auto* const values = static_cast<const typename From::type*>(from);
  for (std::size_t at = 0; at < numel; at += kCodecBlockNumel) {
    const ValueBlock<From> block(values + at, numel - at);
    if (!is_finite(block.absmax)) return at + block.finite();
    const std::uint16_t stored = int8_scale(block.absmax);
    scales[at / kCodecBlockNumel] = stored;
    if (stored == 0) {
      std::memset(codes + at, 0, block.numel);
      continue;
    }
    const Floats scale = splat(float_of_bf16(stored));
    std::uint8_t shifted[kCodecBlockNumel];  // codes + 128
    for (std::size_t i = 0; i < kCodecBlockNumel; i += 4 * kLanes) {
      Ints parts[4];
      for (std::size_t part = 0; part < 4; ++part) {
        parts[part] = nearest_integers(load<Floats>(block.values + i + part * kLanes) / scale);
      }
      store_bytes<128>(shifted + i, parts);
    }
    for (std::uint8_t& code : shifted) code ^= 0x80;
    std::memcpy(codes + at, shifted, block.numel);
  }
  return numel;
}
