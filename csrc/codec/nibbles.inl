// Codes of 4 bits, two in a byte, the first in the lower half.

// Writes the codes of a block into one byte each, a code in the lower half of a byte.
inline void spread_codes(const std::uint8_t* codes, std::uint8_t* spread) {
  for (std::size_t i = 0; i < kCodecBlockNumel / 2; i += 16) {
#if defined(__SSE2__)
    const auto bytes = load<__m128i>(codes + i);
    const __m128i mask = _mm_set1_epi8(15);
    const __m128i low = _mm_and_si128(bytes, mask);
    const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
    store(spread + 2 * i, _mm_unpacklo_epi8(low, high));
    store(spread + 2 * i + 16, _mm_unpackhi_epi8(low, high));
#elif defined(__ARM_NEON) && defined(__aarch64__)
    const uint8x16_t bytes = vld1q_u8(codes + i);
    const uint8x16_t low = vandq_u8(bytes, vdupq_n_u8(15));
    const uint8x16_t high = vshrq_n_u8(bytes, 4);
    vst1q_u8(spread + 2 * i, vzip1q_u8(low, high));
    vst1q_u8(spread + 2 * i + 16, vzip2q_u8(low, high));
#else
    for (std::size_t at = i; at < i + 16; ++at) {
      spread[2 * at] = codes[at] & 15;
      spread[2 * at + 1] = codes[at] >> 4;
    }
#endif
  }
}

// Decodes the elements of the span. A code is the number that `values_of` returns for it, times the scale of the
// element, rounded once. At least 16 elements have the same scale, and the first of them is a multiple of 16. A scale
// that is NaN has no bits in its lower half, so that store_rounded leaves it NaN.
template <class To, class ValuesOf, class ScaleOf>
void decode_nibbles(const DecodeSpan& span, const ValuesOf& values_of, const ScaleOf& scale_of) {
  using T = typename To::type;
  constexpr std::size_t kBytes = kCodecBlockNumel / 2;
  const auto* const codes = part_at<std::uint8_t>(span, span.layout.codes) + span.begin / 2;
  T* const out = static_cast<T*>(span.out.data) + span.begin;
  const auto decode_block = [&](const std::uint8_t* from, std::size_t first, T* values) {
    alignas(64) std::uint8_t spread[kCodecBlockNumel];
    spread_codes(from, spread);
    const auto decoded = [&](std::size_t i) {
      return values_of(widen_bytes(spread + i)) * splat(scale_of(smaller(first + i, span.end - 1)));
    };
    for (std::size_t i = 0; i < kCodecBlockNumel; i += 2 * kLanes) {
      store_rounded(values + i, decoded(i), decoded(i + kLanes));
    }
  };
  const std::size_t whole = (span.end - span.begin) / kCodecBlockNumel;
  write_blocks(out, whole, span.out.past_caches, [&](std::size_t block, T* values) {
    fetch_ahead(codes + block * kBytes);
    decode_block(codes + block * kBytes, span.begin + block * kCodecBlockNumel, values);
  });
  const std::size_t rest = (span.end - span.begin) % kCodecBlockNumel;
  if (rest == 0) return;
  std::uint8_t last[kBytes] = {};
  T values[kCodecBlockNumel];
  std::memcpy(last, codes + whole * kBytes, (rest + 1) / 2);
  decode_block(last, span.begin + whole * kCodecBlockNumel, values);
  std::memcpy(out + whole * kCodecBlockNumel, values, rest * sizeof values[0]);
}
