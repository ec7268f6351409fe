// Passes over gradients: taking them in, adding them up, the sum of squares. And the traffic of a step without its
// arithmetic.

// Sixteen partial sums and a fixed tree, whatever the vector width: the same bits everywhere.
class SumSquares {
 public:
  static constexpr std::size_t kWidth = 16;

  // Adds elements [begin, end); only the last call may be for a number that is no multiple of kWidth.
  template <class Format>
  void add(const typename Format::type* __restrict values, std::size_t begin, std::size_t end) {
    std::size_t i = begin;
    for (; i + kWidth <= end; i += kWidth) {
      for (std::size_t lane = 0; lane < kWidth; ++lane) add(lane, Format::load(values[i + lane]));
    }
    for (std::size_t lane = 0; i < end; ++i, ++lane) add(lane, Format::load(values[i]));
  }

  [[nodiscard]] double total() {
    for (std::size_t width = kWidth / 2; width > 0; width /= 2) {
      for (std::size_t lane = 0; lane < width; ++lane) sums_[lane] += sums_[lane + width];
    }
    return sums_[0];
  }

 private:
  inline void add(std::size_t lane, double x) { sums_[lane] += x * x; }

  double sums_[kWidth] = {};
};

template <class Format>
double sum_squares(const void* data, std::size_t begin, std::size_t end) {
  SumSquares sum;
  sum.add<Format>(static_cast<const typename Format::type*>(data), begin, end);
  return sum.total();
}

double sum_squares(const void* data, DType dtype, std::size_t begin, std::size_t end) {
  switch (dtype) {
    case DType::fp32:
      return sum_squares<Fp32>(data, begin, end);
    case DType::bf16:
      return sum_squares<Bf16>(data, begin, end);
    case DType::fp16:
      return sum_squares<Fp16>(data, begin, end);
  }
  return 0.0;
}

// In runs that are read again while they are in the L1 cache.
template <class Format, class Take>
double take_in_runs(typename Format::type* dst, std::size_t begin, std::size_t end, const Take& take) {
  constexpr std::size_t kRun = 1024;
  SumSquares sum;
  for (std::size_t at = begin; at < end; at += kRun) {
    const std::size_t stop = end - at < kRun ? end : at + kRun;
    take(at, stop);
    sum.add<Format>(dst, at, stop);
  }
  return sum.total();
}

template <class Format>
double land_as_it_is(void* dst, const void* src, std::size_t begin, std::size_t end) {
  auto* to = static_cast<typename Format::type*>(dst);
  const auto* from = static_cast<const typename Format::type*>(src);
  return take_in_runs<Format>(to, begin, end, [&](std::size_t at, std::size_t stop) {
    std::memcpy(to + at, from + at, (stop - at) * sizeof *to);
  });
}

template <class Format>
double land_in_fp32(float* to, const void* src, bool add, std::size_t begin, std::size_t end) {
  const auto* from = static_cast<const typename Format::type*>(src);
  return take_in_runs<Fp32>(to, begin, end, [&](std::size_t at, std::size_t stop) {
    float* __restrict out = to;
    const auto* __restrict in = from;
    if (add) {
      for (std::size_t i = at; i < stop; ++i) out[i] += Format::load(in[i]);
    } else {
      for (std::size_t i = at; i < stop; ++i) out[i] = Format::load(in[i]);
    }
  });
}

// dst is fp32, or of the dtype of src and nothing is added.
double land(void* dst, DType dst_dtype, const void* src, DType src_dtype, bool add, std::size_t begin,
            std::size_t end) {
  auto* wide = static_cast<float*>(dst);
  const bool widens = dst_dtype == DType::fp32;
  switch (src_dtype) {
    case DType::fp32:
      return land_in_fp32<Fp32>(wide, src, add, begin, end);
    case DType::bf16:
      return widens ? land_in_fp32<Bf16>(wide, src, add, begin, end) : land_as_it_is<Bf16>(dst, src, begin, end);
    case DType::fp16:
      return widens ? land_in_fp32<Fp16>(wide, src, add, begin, end) : land_as_it_is<Fp16>(dst, src, begin, end);
  }
  return 0.0;
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
