// Passes over gradients (landing, adding, the sum of squares), and a pass with the memory traffic of a step and almost
// no arithmetic.

// 32 partial sums are added in a fixed tree for every vector width, so that the bits are the same on every processor.
// The square of a float is exact in double, so a fused multiply-add gives the same bits as a product and a sum.
class SumSquares {
 public:
  // Adds the squares of values in fp32 (float) or bf16 (std::uint16_t). Only the last call may pass a number that is no
  // multiple of kWidth.
  template <class Value>
  void add(const Value* values, std::size_t numel) {
    std::size_t i = 0;
    for (; i + kWidth <= numel; i += kWidth) add_width(values + i);
    if (i == numel) return;
    Value rest[kWidth] = {};
    std::memcpy(rest, values + i, (numel - i) * sizeof(Value));
    add_width(rest);
  }

  [[nodiscard]] double total() const {
    double lanes[kWidth];
    std::memcpy(lanes, sums_, sizeof lanes);
    for (std::size_t width = kWidth / 2; width > 0; width /= 2) {
      for (std::size_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    }
    return lanes[0];
  }

 private:
  static constexpr std::size_t kWidth = 32;
  static constexpr std::size_t kParts = kWidth / kDoubles;

  template <class Value>
  void add_width(const Value* values) {
    for (std::size_t part = 0; part < kParts; ++part) {
      sums_[part] = add_squares(sums_[part], to_doubles(values + part * kDoubles));
    }
  }

  Doubles sums_[kParts] = {};
};

// Elements per run; in fp32 the elements of a run stay in the L1 cache.
constexpr std::size_t kRun = 1024;

// Calls `take(at, count, scratch)` for each run of [begin, end). `take` returns the run in fp32: the run's own memory,
// or `scratch` after filling it.
template <class Take>
double sum_squares_in_runs(std::size_t begin, std::size_t end, const Take& take) {
  alignas(64) float scratch[kRun];
  SumSquares sum;
  for (std::size_t at = begin; at < end; at += kRun) {
    const std::size_t count = end - at < kRun ? end - at : kRun;
    sum.add(take(at, count, scratch), count);
  }
  return sum.total();
}

double sum_squares(const void* data, DType dtype, std::size_t begin, std::size_t end) {
  if (dtype == DType::bf16) {
    SumSquares sum;
    sum.add(static_cast<const std::uint16_t*>(data) + begin, end - begin);
    return sum.total();
  }
  return sum_squares_in_runs(begin, end, [&](std::size_t at, std::size_t count, float* scratch) -> const float* {
    if (dtype == DType::fp32) return static_cast<const float*>(data) + at;
    widen(dtype, data, at, count, scratch);
    return scratch;
  });
}

// dst += src if `add`, else dst = src; dst is fp32.
template <class Format>
void take_in(float* dst, const void* src, bool add, std::size_t at, std::size_t count) {
  float* __restrict out = dst + at;
  const auto* __restrict in = static_cast<const typename Format::type*>(src) + at;
  if (add) {
    for (std::size_t i = 0; i < count; ++i) out[i] += Format::load(in[i]);
  } else {
    for (std::size_t i = 0; i < count; ++i) out[i] = Format::load(in[i]);
  }
}

// `dst` is fp32, or `dst` has the dtype of `src` and `add` is false.
double land(void* dst, DType dst_dtype, const void* src, DType src_dtype, bool add, std::size_t begin,
            std::size_t end) {
  return sum_squares_in_runs(begin, end, [&](std::size_t at, std::size_t count, float* scratch) -> const float* {
    if (dst_dtype != DType::fp32) {
      const std::size_t item = itemsize(dst_dtype);
      std::memcpy(static_cast<std::byte*>(dst) + at * item, static_cast<const std::byte*>(src) + at * item,
                  count * item);
      widen(src_dtype, src, at, count, scratch);
      return scratch;
    }
    auto* const wide = static_cast<float*>(dst);
    if (src_dtype == DType::fp32) take_in<Fp32>(wide, src, add, at, count);
    if (src_dtype == DType::bf16) take_in<Bf16>(wide, src, add, at, count);
    if (src_dtype == DType::fp16) take_in<Fp16>(wide, src, add, at, count);
    return wide + at;
  });
}

void read_modify_write(float* a, float* b, float* c, const float* d, std::size_t begin, std::size_t end) {
  float* __restrict first = a;
  float* __restrict second = b;
  float* __restrict third = c;
  const float* __restrict added = d;
  for (std::size_t i = begin; i < end; ++i) {
    const float x = added[i];
    first[i] += x;
    second[i] += x;
    third[i] += x;
  }
}
