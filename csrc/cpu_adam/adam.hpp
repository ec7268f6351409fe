// AdamW over flat ranges. Decoupled weight decay (Loshchilov & Hutter 2019, arXiv 1711.05101, algorithm 2), as
// torch.optim.AdamW.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/thread_pool.hpp"

namespace infinity {

enum class DType : std::uint8_t { fp32, bf16, fp16 };
[[nodiscard]] constexpr std::size_t itemsize(DType dtype) { return dtype == DType::fp32 ? 4 : 2; }

// How the fp32 master is kept.
//   weight:  the weight is fp32 and is the master itself; no second stream.
//   split16: weight bf16 = high half, rounded half up; second stream int16 = what is left. Lossless.
//   fp32:    weight bf16 or fp16; second stream is the fp32 master.
enum class Master : std::uint8_t { weight, split16, fp32 };

// Elements [begin, end) of a flat buffer that share hyperparameters: one parameter.
struct Segment {
  std::uint64_t begin;
  std::uint64_t end;
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  std::int64_t step;  // from 1: the step being taken
  bool skip;          // grad is None: no decay, no step, nothing touched
};

// Memory of elements [first, first + numel). `residual` is the second stream of `Master` (null for Master::weight).
struct AdamBuffers {
  void* weight;
  void* residual;
  float* exp_avg;
  float* exp_avg_sq;
  const void* grad;
};

struct AdamFormat {
  DType weight;
  Master master;
  DType grad;
};

enum class Isa : std::uint8_t { baseline, avx2, avx512 };

// The best this machine has, or what INFINITY_ISA (baseline | avx2 | avx512) asks for. Throws std::invalid_argument
// when that is unknown or not supported here.
[[nodiscard]] Isa select_isa();
[[nodiscard]] std::vector<Isa> supported_isas();
[[nodiscard]] std::string isa_name(Isa isa);
[[nodiscard]] Isa isa_from_name(const std::string& name);  // throws std::invalid_argument

// Elements per task; fixed, so that the cut never depends on the number of threads.
inline constexpr std::size_t kTaskNumel = 64 * 1024;

// One AdamW step on elements [first, first + numel) of a flat buffer whose segments are sorted and disjoint. Elements
// in no segment are left alone. The gradient is multiplied by `grad_scale` in fp32 first. Everything per element is
// fp32 without contraction, so the result depends on nothing but the inputs: not on ISA, threads or cuts. Bias
// corrections are taken in double from the integer step.
//
//   m ← β1·m + (1−β1)·g        v ← β2·v + (1−β2)·g·g
//   p ← p·(1 − lr·wd) − (lr / (1−β1^t)) · m / (√v / √(1−β2^t) + eps)
void adam_update(const AdamFormat& format, const AdamBuffers& buffers, std::uint64_t first, std::size_t numel,
                 const std::vector<Segment>& segments, float grad_scale, Isa isa, ThreadPool& pool);

// Σ x² in double over fixed partials of kTaskNumel elements added in index order: the same for any number of threads
// and ISA.
[[nodiscard]] double sum_squares(const void* data, DType dtype, std::size_t numel, Isa isa, ThreadPool& pool);

// dst += src, in fp32.
void accumulate(float* dst, const void* src, DType src_dtype, std::size_t numel, Isa isa, ThreadPool& pool);

// A buffer that holds `numel` 16-bit values at its start becomes the same values in fp32 (it must have room).
void widen_in_place(void* data, DType dtype, std::size_t numel);

// fp32 ↔ the two halves of split16. Round half up: hi = (bits + 0x8000) >> 16, lo = int16(bits − (hi << 16)); a NaN
// whose hi would not be a NaN keeps the sign and becomes a quiet NaN.
void encode_split16(const float* master, std::uint16_t* weight, std::int16_t* residual, std::size_t numel);
void decode_split16(const std::uint16_t* weight, const std::int16_t* residual, float* master, std::size_t numel);
// fp32 → bf16 (half up) or fp16 (nearest even).
void round_weights(const float* master, void* weight, DType dtype, std::size_t numel);

}  // namespace infinity
