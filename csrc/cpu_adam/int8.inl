// Block-wise dynamic 8-bit quantisation (Dettmers et al. 2022, arXiv 2110.02861): the 256 values of bitsandbytes and
// torchao, computed by arithmetic instead of a search.
//
// [Note: the dynamic map]
// In units of the block's largest magnitude times 10^-6, decade i = 0 … 6 contains the magnitudes from 10^(i−1) to 10^i
// in P equal bins. P = 2^i if a sign is needed, and 2^(i+1) if not. A code represents the centre of its bin. The map
// also contains 0 and exactly 1. Let r = P + bin: over all decades r runs without a gap, from 1 (or 2 without a sign),
// and in each decade the maximum of r is P·2 − 1. The centre is 5^i · (18 r − 16 P + 9) / 20; both i and P can be read
// from the exponent of float(r). r = 128 (256) is exactly 1. Codes with a sign are 127 ± r, and 127 for zero; codes
// without a sign are r − 1, and 0 for zero. There is no code for −1: the value −1 gets the code next to it.
//
// A magnitude is encoded as the nearest value of the map. There is one exception: a second moment that is not zero
// never becomes zero, because the update divides by the root of the second moment.
struct DynamicMap {
  // By the low three bits of the exponent of float(r).
  Table rest;    // 9 − 16 P
  Table weight;  // 5^i / 20, in units of the largest magnitude
  // By decade; 7 means "exactly 1".
  Table border;     // the largest magnitude that belongs to the decade
  Table slope;      // r = ⌊slope · magnitude + intercept⌋
  Table intercept;  // without a sign, one less: then ⌊…⌋ is the code
  Table limit;      // upper bound of r, or of the code
};

constexpr DynamicMap make_map(bool is_signed) {
  DynamicMap map{};
  double ten = 1.0;  // 10^i
  double five = 1.0;
  double two = 1.0;
  const double shift = is_signed ? 0.0 : 1.0;
  for (std::size_t i = 0; i < 7; ++i) {
    const double bins = is_signed ? two : 2 * two;
    const std::size_t exponent = (127 + i + (is_signed ? 0 : 1)) % 8;
    map.rest.set(exponent, 9 - 16 * bins);
    map.weight.set(exponent, five * (is_signed ? 1.0 : 0.5) * 5e-8);
    map.border.set(i, i < 6 ? ten * (1 + 0.9 / bins) : 1e6 * (1 - 0.225 / bins));
    map.slope.set(i, bins / (0.9 * ten));
    map.intercept.set(i, bins * 8 / 9 - shift);
    map.limit.set(i, 2 * bins - 1 - shift);
    ten *= 10;
    five *= 5;
    two *= 2;
  }
  const double last = is_signed ? 128 : 256;
  const std::size_t exponent = (127 + 7 + (is_signed ? 0 : 1)) % 8;
  map.rest.set(exponent, 256 - 18 * last);
  map.weight.set(exponent, 1.0 / 256);
  map.border.set(7, 3e38);
  map.slope.set(7, 0);
  map.intercept.set(7, last + 0.5 - shift);
  map.limit.set(7, last - shift);
  if (is_signed) {  // decade 0 has one bin: a magnitude below half of the bin's centre becomes zero
    map.slope.set(0, 1.0);
    map.intercept.set(0, 1.0 - 0.275);
  }
  return map;
}

template <bool is_signed>
constexpr DynamicMap kMap = make_map(is_signed);

constexpr std::int32_t kZeroCode = 127;  // of signed codes
constexpr float kMapUnits = 1e6f;

// For a scale below this limit, the reciprocal of the scale overflows, and the product of the scale and the weight of a
// low decade has few bits. A block with such a scale is multiplied by a power of two during encoding and decoding.
constexpr float kSmallScale = 1e-30f;
constexpr float kLift = 0x1p100f;

void multiply_block(float* values, float factor) {
  for (std::size_t i = 0; i < kBlockNumel; ++i) values[i] *= factor;
}

// Decodes the codes of a complete block. If the scale is not finite, the values are not finite, either.
template <bool is_signed>
void decode_block(const std::uint8_t* codes, float scale, float* values) {
  if (!(scale <= kLargestFloat)) {
    for (std::size_t i = 0; i < kBlockNumel; ++i) values[i] = scale;
    return;
  }
  const bool small = scale < kSmallScale;
  const Lookup rest(kMap<is_signed>.rest);
  const Lookup weight(kMap<is_signed>.weight, small ? scale * kLift : scale);
  for (std::size_t i = 0; i < kBlockNumel; i += kLanes) {
    const Ints code = widen_bytes(codes + i) - (is_signed ? kZeroCode : 0);
    const Floats r = to_floats(is_signed ? magnitude(code) : code + 1);
    const Ints exponent = bits_of(r) >> 23;
    const Floats value = (r * 18.0f + rest[exponent]) * weight[exponent];
    Ints bits = bits_of(value) & (code != 0);
    if constexpr (is_signed) bits |= code & static_cast<std::int32_t>(0x80000000);
    store(values + i, bits);
  }
  if (small) multiply_block(values, 1.0f / kLift);
}

// ⌊log10(magnitude) + 0.045⌋ or a little less, never below 0: the decade of the magnitude, or the decade before. The
// exponent and seven bits of a float approximate the float's logarithm, at most 0.026 too low; 154 / 2^16 is log10(2) /
// 2^7.
inline Ints decade_or_one_less(Floats units) { return scaled_upper_half<0x3f80 - 19, 154>(bits_of(units)); }

// The largest magnitude in a block; a NaN counts as larger than all numbers.
inline float largest_magnitude(const float* values) {
  Ints most{};
  for (std::size_t i = 0; i < kBlockNumel; i += kLanes) {
    most = maximum(most, magnitude_bits(load<Floats>(values + i)));
  }
  return largest_float(most);
}

// Encodes the values of a complete block; the values are overwritten. `scale` is the largest magnitude of the values.
// If a value is not finite, the scale must not be finite, either, and all other information of the block is lost.
template <bool is_signed>
void encode_block(float* values, float scale, std::uint8_t* codes) {
  const bool small = scale < kSmallScale;
  if (small) multiply_block(values, kLift);
  const float divisor = small ? scale * kLift : scale;
  const float reciprocal = divisor > 0.0f ? kMapUnits / divisor : 0.0f;
  const DynamicMap& map = kMap<is_signed>;
  const Lookup border(map.border);
  const Lookup slope(map.slope);
  const Lookup intercept(map.intercept);
  const Lookup limit(map.limit);
  const auto encode = [&](const float* from) {
    const Floats value = load<Floats>(from);
    const Floats units = floats_of(is_signed ? magnitude_bits(value) : bits_of(value)) * reciprocal;
    const Ints near = decade_or_one_less(units);
    const Ints decade = plus_one_if_greater(near, units, border[near]);
    const Floats r = minimum(units * slope[decade] + intercept[decade], limit[decade]);
    if constexpr (is_signed) return truncate(with_sign_of(value, r));
    return truncate(maximum(r, splat(1.0f))) & (bits_of(value) != 0);
  };
  for (std::size_t i = 0; i < kBlockNumel; i += 4 * kLanes) {
    const float* from = values + i;
    const Ints part[4] = {encode(from), encode(from + kLanes), encode(from + 2 * kLanes), encode(from + 3 * kLanes)};
    store_bytes<is_signed ? kZeroCode : 0>(codes + i, part);
  }
}
