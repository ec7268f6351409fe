// Choice of kernels, conversion of hyperparameters to constants, and division of flat ranges into tasks.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>

#include "base/require.hpp"
#include "base/rounding.hpp"
#include "cpu_adam/kernels.hpp"
#include "cpu_adam/optimizer.hpp"

namespace infinity {
namespace {

const Kernels& kernels_for(Isa isa) {
#ifdef INFINITY_X86
  if (isa == Isa::avx512) return avx512::kKernels;
  if (isa == Isa::avx2) return avx2::kKernels;
#endif
  static_cast<void>(isa);
  return baseline::kKernels;  // on 64-bit ARM the baseline has NEON
}

// The largest gradient g with factor·g·g < 2^-150: this product rounds to zero. Such small products are slow on most
// processors and are therefore not computed.
float vanishing_gradient(double factor) {
  constexpr double kLess = 1.0 - 0x1p-20;
  return factor > 0.0 ? static_cast<float>(std::sqrt(0x1p-150 / factor) * kLess) : 0.0f;
}

Constants adam_constants(const Hyperparameters& hyper, double step) {
  Constants c;
  const bool decoupled = hyper.rule == Rule::adamw;
  c.beta1 = static_cast<float>(hyper.beta1);
  c.one_minus_beta1 = static_cast<float>(1.0 - hyper.beta1);
  c.beta2 = static_cast<float>(hyper.beta2);
  c.one_minus_beta2 = static_cast<float>(1.0 - hyper.beta2);
  c.decay = decoupled ? static_cast<float>(1.0 - hyper.lr * hyper.weight_decay) : 1.0f;
  c.l2 = decoupled ? 0.0f : static_cast<float>(hyper.weight_decay);
  c.step_size = static_cast<float>(hyper.lr / (1.0 - std::pow(hyper.beta1, step)));
  c.vanishing = vanishing_gradient(1.0 - hyper.beta2);
  c.inverse_bc2_sqrt = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(hyper.beta2, step)));
  c.eps = static_cast<float>(hyper.eps);
  return c;
}

Constants lion_constants(const Hyperparameters& hyper) {
  Constants c;
  c.beta1 = static_cast<float>(hyper.beta1);
  c.one_minus_beta1 = static_cast<float>(1.0 - hyper.beta1);
  c.beta2 = static_cast<float>(hyper.beta2);
  c.one_minus_beta2 = static_cast<float>(1.0 - hyper.beta2);
  c.decay = static_cast<float>(1.0 - hyper.lr * hyper.weight_decay);
  c.step_size = static_cast<float>(hyper.lr);
  return c;
}

Constants adagrad_constants(const Hyperparameters& hyper, double step, bool fresh) {
  Constants c;
  c.l2 = static_cast<float>(hyper.weight_decay);
  c.step_size = static_cast<float>(hyper.lr / (1.0 + (step - 1.0) * hyper.lr_decay));
  c.eps = static_cast<float>(hyper.eps);
  c.vanishing = vanishing_gradient(1.0);
  c.initial = fresh ? static_cast<float>(hyper.initial_accumulator) : 0.0f;
  return c;
}

Constants sgd_constants(const Hyperparameters& hyper, bool fresh) {
  Constants c;
  c.l2 = static_cast<float>(hyper.weight_decay);
  c.beta1 = static_cast<float>(hyper.beta1);
  c.one_minus_beta1 = fresh ? 1.0f : static_cast<float>(1.0 - hyper.dampening);
  c.nesterov = hyper.nesterov;
  c.step_size = static_cast<float>(hyper.lr);
  return c;
}

// Runs `work(begin, end)` over `numel` elements, divided where a partial of the larger array begins. `first` is the
// index of the range's first element in the larger array. Returns the results, one per partial.
template <class Work>
std::vector<double> partials_of(std::uint64_t first, std::size_t numel, ThreadPool& pool, const Work& work) {
  if (numel == 0) return {};
  const std::size_t gone = first % kPartialNumel;  // number of elements of the first partial that precede this range
  std::vector<double> partials((gone + numel + kPartialNumel - 1) / kPartialNumel);
  pool.parallel_for(
      partials.size(),
      [&](std::size_t index) {
        const IeeeArithmetic ieee;
        const std::size_t begin = std::max(index * kPartialNumel, gone) - gone;
        partials[index] = work(begin, std::min((index + 1) * kPartialNumel - gone, numel));
      },
      nullptr, Urgency::urgent);
  return partials;
}

}  // namespace

Constants constants_of(const Segment& segment) {
  const Hyperparameters& hyper = segment.hyper;
  const auto step = static_cast<double>(segment.step);
  Constants c;
  switch (hyper.rule) {
    case Rule::adamw:
    case Rule::adam:
      c = adam_constants(hyper, step);
      break;
    case Rule::lion:
      c = lion_constants(hyper);
      break;
    case Rule::adagrad:
      c = adagrad_constants(hyper, step, segment.fresh);
      break;
    case Rule::sgd:
      c = sgd_constants(hyper, segment.fresh);
      break;
  }
  c.rule = hyper.rule;
  c.uses_exp_avg = hyper.uses_exp_avg();
  c.uses_exp_avg_sq = hyper.uses_exp_avg_sq();
  c.grad_scale = hyper.maximize ? -segment.grad_scale : segment.grad_scale;
  c.fresh = segment.fresh;
  c.seed = segment.seed;
  c.step = segment.step;
  return c;
}

bool Hyperparameters::uses_exp_avg() const {
  return rule == Rule::adamw || rule == Rule::adam || rule == Rule::lion || (rule == Rule::sgd && beta1 != 0.0);
}

bool Hyperparameters::uses_exp_avg_sq() const {
  return rule == Rule::adamw || rule == Rule::adam || rule == Rule::adagrad;
}

void check_format(const StateFormat& format) {
  require((format.master == Master::weight) == (format.weight == DType::fp32),
          "an fp32 weight is its own master ('weight'); a 16-bit weight needs 'split16', 'fp32' or 'none'");
  require(format.weight == DType::bf16 || (format.master != Master::split16 && format.master != Master::none),
          "masters 'split16' and 'none' need bf16 weights");
}

void check_segments(const std::vector<Segment>& segments, std::uint64_t numel, const StateFormat& format) {
  std::uint64_t end = 0;
  for (const Segment& segment : segments) {
    require(segment.begin >= end && segment.end >= segment.begin, "segments must be sorted and disjoint");
    require(segment.end <= numel, "a segment ends after the buffers: segments must be within them");
    require(segment.skip || segment.step >= 1, "a segment's step counts from 1");
    require(segment.index % kBlockNumel == 0, "a segment's index must be a multiple of 256");
    require(format.moments != Moments::int8 || segment.begin % kBlockNumel == 0,
            "with int8 moments a segment must begin at a multiple of 256");
    end = segment.end;
  }
}

std::size_t task_numel() {
  static const std::size_t numel = [] {
    constexpr std::size_t kStreamBytes = 16;  // bytes per element, in most formats
    const long l2_bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
    const std::size_t fits = l2_bytes > 0 ? static_cast<std::size_t>(l2_bytes) / 2 / kStreamBytes : 16 * 1024;
    return std::clamp<std::size_t>(std::bit_floor(fits), kCutNumel, 64 * 1024);  // divides a chunk
  }();
  return numel;
}

bool optimizer_update(const StateFormat& format, const StateBuffers& buffers, std::uint64_t first, std::size_t begin,
                      std::size_t end, const std::vector<Segment>& segments, Isa isa) {
  const Kernels& kernels = kernels_for(isa);
  const IeeeArithmetic ieee;
  auto segment = std::partition_point(segments.begin(), segments.end(),
                                      [&](const Segment& earlier) { return earlier.end <= first + begin; });
  bool finite = true;
  for (; segment != segments.end() && segment->begin < first + end; ++segment) {
    const std::uint64_t from = std::max<std::uint64_t>(segment->begin, first + begin);
    const std::uint64_t to = std::min<std::uint64_t>(segment->end, first + end);
    if (segment->skip || from >= to) continue;
    const Constants constants = constants_of(*segment);
    finite &=
        kernels.update(format, buffers, from - first, to - first, segment->index + (from - segment->begin), constants);
  }
  return finite;
}

bool optimizer_update(const StateFormat& format, const StateBuffers& buffers, std::uint64_t first, std::size_t numel,
                      const std::vector<Segment>& segments, Isa isa, ThreadPool& pool) {
  const std::size_t task = task_numel();
  std::atomic<bool> finite{true};
  pool.parallel_for((numel + task - 1) / task, [&](std::size_t index) {
    const std::size_t begin = index * task;
    const std::size_t end = std::min(begin + task, numel);
    if (!optimizer_update(format, buffers, first, begin, end, segments, isa)) finite = false;
  });
  return finite;
}

std::vector<double> sums_of_squares(const void* data, DType dtype, std::uint64_t first, std::size_t numel, Isa isa,
                                    ThreadPool& pool) {
  const Kernels& kernels = kernels_for(isa);
  return partials_of(first, numel, pool,
                     [&](std::size_t begin, std::size_t end) { return kernels.sum_squares(data, dtype, begin, end); });
}

std::vector<double> land_gradient(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::uint64_t first,
                                  std::size_t numel, bool add, Isa isa, ThreadPool& pool) {
  require(dst_dtype == DType::fp32 || dst_dtype == src_dtype, "a gradient lands in its own dtype or in fp32");
  require(!add || dst_dtype == DType::fp32, "gradients are added up in fp32 only");
  const Kernels& kernels = kernels_for(isa);
  return partials_of(first, numel, pool, [&](std::size_t begin, std::size_t end) {
    return kernels.land(dst, dst_dtype, src, src_dtype, add, begin, end);
  });
}

void read_modify_write(float* a, float* b, float* c, const float* d, std::size_t numel, Isa isa, ThreadPool& pool) {
  const Kernels& kernels = kernels_for(isa);
  const std::size_t task = task_numel();
  pool.parallel_for((numel + task - 1) / task, [&](std::size_t index) {
    const std::size_t begin = index * task;
    kernels.read_modify_write(a, b, c, d, begin, std::min(begin + task, numel));
  });
}

void decode_moments(Moments moments, bool is_signed, const void* data, float* values, std::size_t numel, Isa isa) {
  kernels_for(isa).decode_moments(moments, is_signed, data, values, numel);
}

void encode_moments(Moments moments, bool is_signed, const float* values, void* data, std::size_t numel, Isa isa) {
  kernels_for(isa).encode_moments(moments, is_signed, values, data, numel);
}

}  // namespace infinity
