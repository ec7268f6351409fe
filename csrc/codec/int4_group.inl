// Decoding of 4-bit integers with a scale for each group of a row (see [Note: int4_group]).

struct Int4Group {
  template <class To>
  static void decode(const DecodeSpan& span) {
    const auto* const scales = part_at<std::byte>(span, span.layout.scales);
    const ScaleType type = span.weight.form.scale_type;
    if (type == ScaleType::bf16) {  // the usual type, without a branch for each scale
      return decode_with<To>(span, [=](std::size_t i) { return load_scale(scales, i, ScaleType::bf16); });
    }
    decode_with<To>(span, [=](std::size_t i) { return load_scale(scales, i, type); });
  }

 private:
  template <class To, class ScaleAt>
  static void decode_with(const DecodeSpan& span, const ScaleAt& scale_at) {
    const auto values_of = [](Ints codes) { return to_floats((codes & 15) - 8); };
    const auto with = [&](const auto& group_of) {
      decode_nibbles<To>(span, values_of, [&](std::size_t element) {
        const float scale = scale_at(group_of(element));
        return scale == scale ? scale : __builtin_nanf("");
      });
    };
    const auto group = static_cast<std::size_t>(span.weight.form.block_columns);
    if (!std::has_single_bit(group)) return with([=](std::size_t element) { return element / group; });
    with([shift = std::countr_zero(group)](std::size_t element) { return element >> shift; });
  }
};
