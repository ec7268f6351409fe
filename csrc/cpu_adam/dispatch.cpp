// Choosing the instruction set, and cutting flat ranges into tasks.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <stdexcept>

#include "base/cpuid.hpp"
#include "cpu_adam/adam.hpp"
#include "cpu_adam/kernels.hpp"

namespace infinity {
namespace {

const Kernels& kernels_for(Isa isa) {
#ifdef INFINITY_X86
  if (isa == Isa::avx512) return avx512::kKernels;
  if (isa == Isa::avx2) return avx2::kKernels;
#endif
  static_cast<void>(isa);
  return baseline::kKernels;
}

Constants constants_of(const Segment& segment, float grad_scale) {
  const auto step = static_cast<double>(segment.step);
  const double bc1 = 1.0 - std::pow(segment.beta1, step);
  const double bc2 = 1.0 - std::pow(segment.beta2, step);
  Constants c;
  c.grad_scale = grad_scale;
  c.beta1 = static_cast<float>(segment.beta1);
  c.one_minus_beta1 = static_cast<float>(1.0 - segment.beta1);
  c.beta2 = static_cast<float>(segment.beta2);
  c.one_minus_beta2 = static_cast<float>(1.0 - segment.beta2);
  c.decay = static_cast<float>(1.0 - segment.lr * segment.weight_decay);
  c.step_size = static_cast<float>(segment.lr / bc1);
  c.inverse_bc2_sqrt = static_cast<float>(1.0 / std::sqrt(bc2));
  c.eps = static_cast<float>(segment.eps);
  return c;
}

struct Piece {
  std::size_t begin;  // relative to `first`
  std::size_t end;
  Constants constants;
};

}  // namespace

Isa select_isa() {
  const auto available = supported_isas();
  const char* asked = std::getenv("INFINITY_ISA");
  if (asked == nullptr || *asked == '\0') return available.back();
  const Isa isa = isa_from_name(asked);
  if (std::find(available.begin(), available.end(), isa) == available.end()) {
    throw std::invalid_argument(std::string("INFINITY_ISA=") + asked + " is not supported by this processor; unset it");
  }
  return isa;
}

std::vector<Isa> supported_isas() {
  std::vector<Isa> isas{Isa::baseline};
#ifdef INFINITY_X86
  if (cpu_has_avx2()) isas.push_back(Isa::avx2);
  if (cpu_has_avx512()) isas.push_back(Isa::avx512);
#endif
  return isas;
}

std::string isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx512:
      return "avx512";
    case Isa::avx2:
      return "avx2";
    case Isa::baseline:
      break;
  }
  return "baseline";
}

Isa isa_from_name(const std::string& name) {
  for (const Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (isa_name(isa) == name) return isa;
  }
  throw std::invalid_argument("unknown instruction set '" + name + "'; use baseline, avx2 or avx512");
}

void adam_update(const AdamFormat& format, const AdamBuffers& buffers, std::uint64_t first, std::size_t numel,
                 const std::vector<Segment>& segments, float grad_scale, Isa isa, ThreadPool& pool) {
  std::vector<Piece> pieces;
  for (const Segment& segment : segments) {
    const std::uint64_t begin = std::max(segment.begin, first);
    const std::uint64_t end = std::min<std::uint64_t>(segment.end, first + numel);
    if (segment.skip || begin >= end) continue;
    const Constants constants = constants_of(segment, grad_scale);
    for (std::uint64_t at = begin; at < end; at += kTaskNumel) {
      pieces.push_back({at - first, std::min<std::uint64_t>(at + kTaskNumel, end) - first, constants});
    }
  }
  const Kernels& kernels = kernels_for(isa);
  pool.parallel_for(pieces.size(), [&](std::size_t index) {
    const Piece& piece = pieces[index];
    kernels.adam(format, buffers, piece.begin, piece.end, piece.constants);
  });
}

double sum_squares(const void* data, DType dtype, std::size_t numel, Isa isa, ThreadPool& pool) {
  const Kernels& kernels = kernels_for(isa);
  std::vector<double> partials((numel + kTaskNumel - 1) / kTaskNumel);
  pool.parallel_for(partials.size(), [&](std::size_t index) {
    const std::size_t begin = index * kTaskNumel;
    partials[index] = kernels.sum_squares(data, dtype, begin, std::min(begin + kTaskNumel, numel));
  });
  double total = 0.0;
  for (const double partial : partials) total += partial;
  return total;
}

void accumulate(float* dst, const void* src, DType src_dtype, std::size_t numel, Isa isa, ThreadPool& pool) {
  const Kernels& kernels = kernels_for(isa);
  pool.parallel_for((numel + kTaskNumel - 1) / kTaskNumel, [&](std::size_t index) {
    const std::size_t begin = index * kTaskNumel;
    kernels.accumulate(dst, src, src_dtype, begin, std::min(begin + kTaskNumel, numel));
  });
}

}  // namespace infinity
