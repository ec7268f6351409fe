// The one plain loop. Included by adam_<isa>.cpp with INFINITY_ISA_NAMESPACE defined and compiled for exactly that
// instruction set.
//
// Invariant: no contraction, no reassociation, no approximate reciprocal; so the bits do not depend on the instruction
// set.

#include "cpu_adam/formats.hpp"
#include "cpu_adam/kernels.hpp"

namespace infinity::INFINITY_ISA_NAMESPACE {
namespace {

struct Fp32 {
  using type = float;
  static inline float load(float value) { return value; }
};
struct Bf16 {
  using type = std::uint16_t;
  static inline float load(std::uint16_t value) { return float_of_bf16(value); }
};
struct Fp16 {
  using type = _Float16;
  static inline float load(_Float16 value) { return static_cast<float>(value); }
};

// Each master reads p, and writes it back with the weight that falls out of it.
struct WeightMaster {
  using weight_type = float;
  using residual_type = float;  // unused
  static inline float load(const float* weight, const float*, std::size_t i) { return weight[i]; }
  static inline void store(float* weight, float*, std::size_t i, float p) { weight[i] = p; }
};
struct Split16 {
  using weight_type = std::uint16_t;
  using residual_type = std::int16_t;
  static inline float load(const std::uint16_t* weight, const std::int16_t* rest, std::size_t i) {
    return join(weight[i], rest[i]);
  }
  static inline void store(std::uint16_t* weight, std::int16_t* rest, std::size_t i, float p) {
    const std::uint32_t bits = bits_of(p);
    const std::uint16_t high = round_half_up(bits);
    weight[i] = high;
    rest[i] = residual_of(bits, high);
  }
};
struct Bf16WithMaster {
  using weight_type = std::uint16_t;
  using residual_type = float;
  static inline float load(const std::uint16_t*, const float* master, std::size_t i) { return master[i]; }
  static inline void store(std::uint16_t* weight, float* master, std::size_t i, float p) {
    master[i] = p;
    weight[i] = round_half_up(bits_of(p));
  }
};
struct Fp16WithMaster {
  using weight_type = _Float16;
  using residual_type = float;
  static inline float load(const _Float16*, const float* master, std::size_t i) { return master[i]; }
  static inline void store(_Float16* weight, float* master, std::size_t i, float p) {
    master[i] = p;
    weight[i] = static_cast<_Float16>(p);
  }
};

template <class MasterFormat, class GradFormat>
void adam_loop(const AdamBuffers& buffers, std::size_t begin, std::size_t end, const Constants& given) {
  using Residual = typename MasterFormat::residual_type;
  auto* __restrict weight = static_cast<typename MasterFormat::weight_type*>(buffers.weight);
  auto* __restrict residual = static_cast<Residual*>(buffers.residual);
  float* __restrict exp_avg = buffers.exp_avg;
  float* __restrict exp_avg_sq = buffers.exp_avg_sq;
  const auto* __restrict grad = static_cast<const typename GradFormat::type*>(buffers.grad);
  const Constants c = given;
  for (std::size_t i = begin; i < end; ++i) {
    const float g = GradFormat::load(grad[i]) * c.grad_scale;
    const float m = exp_avg[i] * c.beta1 + g * c.one_minus_beta1;
    const float v = exp_avg_sq[i] * c.beta2 + (g * c.one_minus_beta2) * g;
    const float decayed = MasterFormat::load(weight, residual, i) * c.decay;
    const float denominator = __builtin_sqrtf(v) * c.inverse_bc2_sqrt + c.eps;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    MasterFormat::store(weight, residual, i, decayed - (c.step_size * m) / denominator);
  }
}

template <class MasterFormat>
void adam_for_grad(DType grad, const AdamBuffers& buffers, std::size_t begin, std::size_t end, const Constants& c) {
  switch (grad) {
    case DType::fp32:
      return adam_loop<MasterFormat, Fp32>(buffers, begin, end, c);
    case DType::bf16:
      return adam_loop<MasterFormat, Bf16>(buffers, begin, end, c);
    case DType::fp16:
      return adam_loop<MasterFormat, Fp16>(buffers, begin, end, c);
  }
}

void adam(const AdamFormat& format, const AdamBuffers& buffers, std::size_t begin, std::size_t end,
          const Constants& c) {
  switch (format.master) {
    case Master::weight:
      return adam_for_grad<WeightMaster>(format.grad, buffers, begin, end, c);
    case Master::split16:
      return adam_for_grad<Split16>(format.grad, buffers, begin, end, c);
    case Master::fp32:
      if (format.weight == DType::fp16) return adam_for_grad<Fp16WithMaster>(format.grad, buffers, begin, end, c);
      return adam_for_grad<Bf16WithMaster>(format.grad, buffers, begin, end, c);
  }
}

// Sixteen lanes and a fixed tree, whatever the vector width: the same bits everywhere.
template <class Format>
double sum_squares_loop(const void* data, std::size_t begin, std::size_t end) {
  constexpr std::size_t kLanes = 16;
  const auto* __restrict values = static_cast<const typename Format::type*>(data);
  double lanes[kLanes] = {};
  std::size_t i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const double x = Format::load(values[i + lane]);
      lanes[lane] += x * x;
    }
  }
  for (std::size_t lane = 0; i < end; ++i, ++lane) {
    const double x = Format::load(values[i]);
    lanes[lane] += x * x;
  }
  for (std::size_t width = kLanes / 2; width > 0; width /= 2) {
    for (std::size_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

double sum_squares(const void* data, DType dtype, std::size_t begin, std::size_t end) {
  switch (dtype) {
    case DType::fp32:
      return sum_squares_loop<Fp32>(data, begin, end);
    case DType::bf16:
      return sum_squares_loop<Bf16>(data, begin, end);
    case DType::fp16:
      return sum_squares_loop<Fp16>(data, begin, end);
  }
  return 0.0;
}

template <class Format>
void accumulate_loop(float* __restrict dst, const void* src, std::size_t begin, std::size_t end) {
  const auto* __restrict values = static_cast<const typename Format::type*>(src);
  for (std::size_t i = begin; i < end; ++i) dst[i] += Format::load(values[i]);
}

void accumulate(float* dst, const void* src, DType dtype, std::size_t begin, std::size_t end) {
  switch (dtype) {
    case DType::fp32:
      return accumulate_loop<Fp32>(dst, src, begin, end);
    case DType::bf16:
      return accumulate_loop<Bf16>(dst, src, begin, end);
    case DType::fp16:
      return accumulate_loop<Fp16>(dst, src, begin, end);
  }
}

}  // namespace

extern const Kernels kKernels = {adam, sum_squares, accumulate};

}  // namespace infinity::INFINITY_ISA_NAMESPACE
