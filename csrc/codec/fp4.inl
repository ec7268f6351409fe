// Decoding of e2m1 codes with a scale in 8 bits for each group (see [Note: fp4]).

// The values of the codes. The low three bits of a code are the magnitude, and the fourth bit is the sign; other bits
// are ignored.
inline Floats e2m1_values(Ints codes) {
  static constexpr Table kMagnitudes = [] {
    constexpr float kValues[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    Table table{};
    for (std::size_t i = 0; i < 8; ++i) table.set(i, kValues[i]);
    return table;
  }();
  return floats_of(bits_of(Lookup(kMagnitudes)[codes]) | ((codes & 8) << 28));
}

// The scales of the 256 bytes that may be stored for a group. All NaN have the same bits, which stay NaN when
// store_rounded rounds them.
class ScaleTable {
 public:
  template <class ScaleOf>
  explicit ScaleTable(const ScaleOf& scale_of) {
    for (std::size_t code = 0; code < 256; ++code) {
      const float scale = scale_of(static_cast<std::uint8_t>(code));
      values_[code] = scale == scale ? scale : __builtin_nanf("");
    }
  }

  float operator[](std::uint8_t code) const { return values_[code]; }

 private:
  float values_[256];
};

// Decodes groups whose elements are stored one after the other.
template <class To, std::size_t group>
void decode_groups(const DecodeSpan& span, const ScaleTable& scales) {
  const auto* const groups = part_at<std::uint8_t>(span, span.layout.scales);
  decode_nibbles<To>(
      span, [](Ints codes) { return e2m1_values(codes); },
      [&](std::size_t element) { return scales[groups[element / group]]; });
}

// Transposes 16 rows of 16 bytes. Each of the four steps rotates the address of a byte, which is four bits of its row
// and four bits of its place in the row, by one bit.
inline void transpose_bytes(const std::uint8_t* from, std::uint8_t* to, std::size_t to_stride) {
#if defined(__SSE2__) || (defined(__ARM_NEON) && defined(__aarch64__))
#if defined(__SSE2__)
  using Bytes = __m128i;
  const auto low = [](Bytes a, Bytes b) { return _mm_unpacklo_epi8(a, b); };
  const auto high = [](Bytes a, Bytes b) { return _mm_unpackhi_epi8(a, b); };
#else
  using Bytes = uint8x16_t;
  const auto low = [](Bytes a, Bytes b) { return vzip1q_u8(a, b); };
  const auto high = [](Bytes a, Bytes b) { return vzip2q_u8(a, b); };
#endif
  Bytes rows[16];
  Bytes next[16];
  for (std::size_t i = 0; i < 16; ++i) rows[i] = load<Bytes>(from + 16 * i);
  for (int step = 0; step < 4; ++step) {
    for (std::size_t i = 0; i < 8; ++i) {
      next[2 * i] = low(rows[i], rows[i + 8]);
      next[2 * i + 1] = high(rows[i], rows[i + 8]);
    }
    std::memcpy(rows, next, sizeof rows);
  }
  for (std::size_t i = 0; i < 16; ++i) store(to + to_stride * i, rows[i]);
#else
  for (std::size_t i = 0; i < 16; ++i) {
    for (std::size_t j = 0; j < 16; ++j) to[to_stride * i + j] = from[16 * j + i];
  }
#endif
}

// A group of mxfp4 of each of up to 32 neighbouring columns that are stored one after the other: 32 rows, each of which
// is a line of a cache in 16 bits.
struct TransposedGroups {
  static constexpr std::size_t kColumns = 32;

  std::size_t columns;
  alignas(64) float scales[kColumns] = {};
  alignas(64) std::uint8_t codes[kMxfp4Group / 2 * kColumns];  // row by row, two rows in one: the nibbles of a byte

  // `from` and `groups` are those of the first column, `column_groups` is the number of groups of a column.
  TransposedGroups(std::size_t given_columns, const std::uint8_t* from, const std::uint8_t* groups,
                   std::size_t column_groups, const ScaleTable& table)
      : columns(given_columns) {
    alignas(64) std::uint8_t stored[sizeof codes];
    if (columns < kColumns) std::memset(stored, 0, sizeof stored);
    for (std::size_t column = 0; column < columns; ++column) {
      const std::uint8_t* const of_column = from + column * column_groups * kMxfp4Group / 2;
      __builtin_prefetch(of_column + 64);  // may be beyond the end of the codes
      std::memcpy(stored + 16 * column, of_column, 16);
      scales[column] = table[groups[column * column_groups]];
    }
    for (std::size_t at = 0; at < kColumns; at += 16) transpose_bytes(stored + 16 * at, codes + at, kColumns);
  }

  // Writes one of the 32 rows.
  template <class To>
  void decode(std::size_t row, typename To::type* out, bool past_caches) const {
    const auto decoded = [&](std::size_t i) {
      const Ints bytes = widen_bytes(codes + row / 2 * kColumns + i);
      return e2m1_values(row % 2 == 0 ? bytes : bytes >> 4) * load<Floats>(scales + i);
    };
    alignas(64) typename To::type values[kColumns];
    auto* const target = past_caches || columns < kColumns ? values : out;
    for (std::size_t i = 0; i < kColumns; i += 2 * kLanes) store_rounded(target + i, decoded(i), decoded(i + kLanes));
    if (columns < kColumns) {
      std::memcpy(out, values, columns * sizeof values[0]);
    } else if (past_caches) {
      store_past_caches(out, values, sizeof values);
    }
  }
};

// Decodes columns of matrices that are stored transposed.
template <class To>
void decode_transposed(const DecodeSpan& span, const ScaleTable& scales) {
  constexpr std::size_t kStep = TransposedGroups::kColumns;
  const auto rows = static_cast<std::size_t>(span.weight.form.matrix_rows);
  const auto row_numel = static_cast<std::size_t>(span.weight.row_numel);
  const std::size_t column_groups = rows / kMxfp4Group;
  const std::size_t end = span.end / rows;
  for (std::size_t first = span.begin / rows; first < end;) {
    const std::size_t in_matrix = first % row_numel;
    const std::size_t count = smaller(row_numel - in_matrix, end - first);
    const auto* const codes = part_at<std::uint8_t>(span, span.layout.codes) + first * rows / 2;
    const auto* const groups = part_at<std::uint8_t>(span, span.layout.scales) + first * column_groups;
    auto* const out = static_cast<typename To::type*>(span.out.data) + (first - in_matrix) * rows + in_matrix;
    for (std::size_t group = 0; group < column_groups; ++group) {
      for (std::size_t column = 0; column < count; column += kStep) {
        const TransposedGroups neighbours(smaller(kStep, count - column),
                                          codes + (column * column_groups + group) * kMxfp4Group / 2,
                                          groups + column * column_groups + group, column_groups, scales);
        for (std::size_t row = 0; row < kMxfp4Group; ++row) {
          neighbours.decode<To>(row, out + (group * kMxfp4Group + row) * row_numel + column, span.out.past_caches);
        }
      }
    }
    first += count;
  }
  if (span.out.past_caches) finish_stores();
}

struct Mxfp4 {
  template <class To>
  static void decode(const DecodeSpan& span) {
    const ScaleTable scales(e8m0_scale);
    if (span.weight.form.matrix_rows > 0) return decode_transposed<To>(span, scales);
    decode_groups<To, kMxfp4Group>(span, scales);
  }
};

struct Nvfp4 {
  template <class To>
  static void decode(const DecodeSpan& span) {
    const float global = *part_at<float>(span, span.layout.nested_scales);
    const bool divisor = span.weight.form.divisor;
    const ScaleTable scales([=](std::uint8_t code) {
      const float scale = kE4m3Map.values[code];
      return divisor ? scale / global : scale * global;
    });
    decode_groups<To, kNvfp4Group>(span, scales);
  }
};
