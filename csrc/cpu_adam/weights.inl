// Gradients and masters of a block: loops that the compiler can vectorise. All functions are inline, because
// convert.cpp uses only some of them.
struct Fp32 {
  using type = float;
  static inline float load(float value) { return value; }
};
struct Bf16 {
  using type = std::uint16_t;
  static inline float load(std::uint16_t value) { return float_of_bf16(value); }
};
struct Fp16 {
  using type = Half;
  static inline float load(Half value) { return static_cast<float>(value); }
};

template <class Format>
void widen(const void* from, std::size_t at, std::size_t numel, float* __restrict to) {
  const auto* __restrict values = static_cast<const typename Format::type*>(from) + at;
  for (std::size_t i = 0; i < numel; ++i) to[i] = Format::load(values[i]);
}

inline void widen(DType dtype, const void* from, std::size_t at, std::size_t numel, float* to) {
  switch (dtype) {
    case DType::fp32:
      return widen<Fp32>(from, at, numel, to);
    case DType::bf16:
      return widen<Bf16>(from, at, numel, to);
    case DType::fp16:
      return widen<Fp16>(from, at, numel, to);
  }
}

inline void load_split16(const std::uint16_t* __restrict high, const std::int16_t* __restrict rest, std::size_t numel,
                         float* __restrict master) {
  for (std::size_t i = 0; i < numel; ++i) master[i] = join(high[i], rest[i]);
}

inline void load_master(const StateFormat& format, const StateBuffers& buffers, std::size_t at, std::size_t numel,
                        float* __restrict master) {
  switch (format.master) {
    case Master::weight:
      return widen<Fp32>(buffers.weight.from, at, numel, master);
    case Master::fp32:
      return widen<Fp32>(buffers.residual.from, at, numel, master);
    case Master::none:
      return widen<Bf16>(buffers.weight.from, at, numel, master);
    case Master::split16:
      return load_split16(static_cast<const std::uint16_t*>(buffers.weight.from) + at,
                          static_cast<const std::int16_t*>(buffers.residual.from) + at, numel, master);
  }
}

inline void store_fp16(const float* __restrict master, Half* __restrict weight, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) weight[i] = static_cast<Half>(master[i]);
}

// In this function and the next ones, `numbers` means that no value is a NaN.
inline void store_bf16(const float* __restrict master, std::uint16_t* __restrict weight, std::size_t numel,
                       bool numbers) {
  if (numbers) {
    for (std::size_t i = 0; i < numel; ++i) weight[i] = round_half_up_number(infinity::bits_of(master[i]));
  } else {
    for (std::size_t i = 0; i < numel; ++i) weight[i] = round_half_up(infinity::bits_of(master[i]));
  }
}

inline void store_split16(const float* __restrict master, std::uint16_t* __restrict high, std::int16_t* __restrict rest,
                          std::size_t numel, bool numbers) {
  if (numbers) {
    for (std::size_t i = 0; i < numel; ++i) {
      const std::uint32_t bits = infinity::bits_of(master[i]);
      high[i] = round_half_up_number(bits);
      rest[i] = static_cast<std::int16_t>(bits);
    }
  } else {
    for (std::size_t i = 0; i < numel; ++i) {
      const std::uint32_t bits = infinity::bits_of(master[i]);
      high[i] = round_half_up(bits);
      rest[i] = residual_of(bits, high[i]);
    }
  }
}

inline void store_stochastically(const float* __restrict values, std::uint16_t* __restrict to,
                                 const std::uint16_t* __restrict random, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) to[i] = round_stochastically(infinity::bits_of(values[i]), random[i]);
}
