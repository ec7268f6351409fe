// One optimizer step over flat ranges: reads gradients, and updates states and weights in place, all in one pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/isa.hpp"
#include "base/thread_pool.hpp"
#include "cpu_adam/state_format.hpp"

namespace infinity {

// Update rule of a step, defined as in torch.optim's class of that name; Lion as in Chen et al. 2023, arXiv 2302.06675,
// algorithm 2.
//   adamw:   decoupled weight decay (Loshchilov & Hutter 2019, arXiv 1711.05101, algorithm 2)
//   adam:    weight decay added to the gradient (L2)
//   adagrad: keeps its sum of squares in exp_avg_sq
//   sgd:     keeps its momentum in exp_avg; without momentum it keeps nothing
enum class Rule : std::uint8_t { adamw, adam, lion, adagrad, sgd };

// A rule with its hyperparameters, which are doubles as the user specified them.
struct Hyperparameters {
  Rule rule = Rule::adamw;
  double lr = 0.0;
  double beta1 = 0.0;  // sgd: momentum
  double beta2 = 0.0;
  double eps = 0.0;
  double weight_decay = 0.0;
  double dampening = 0.0;            // sgd
  double lr_decay = 0.0;             // adagrad
  double initial_accumulator = 0.0;  // adagrad
  bool nesterov = false;             // sgd
  bool maximize = false;

  [[nodiscard]] bool uses_exp_avg() const;
  [[nodiscard]] bool uses_exp_avg_sq() const;
};

// One parameter: elements [begin, end) of a flat buffer, all with the same hyperparameters.
struct Segment {
  std::uint64_t begin;
  std::uint64_t end;
  // Index of element `begin` among all elements of the model, a multiple of kBlockNumel. The index, `seed` and `step`
  // are the key of stochastic rounding, so that the result does not depend on where the parameter is stored.
  std::uint64_t index;
  std::uint64_t seed;
  std::int64_t step;        // number of the step being taken, from 1
  bool skip;                // grad is None: no decay, no step, no change
  bool fresh;               // the moments start with this step: they count as zero, whatever the buffers contain
  float grad_scale = 1.0f;  // factor that multiplies the gradient first
  Hyperparameters hyper;
};

// Memory of one state. New values are written to `to`. Current values are read from `from`, which is the same memory as
// `to`, or other memory that is only read.
struct StateMemory {
  void* to = nullptr;
  const void* from = nullptr;
  // True if the new values will not be read soon (for a checksum or a write). If so, they are stored past the caches
  // where this saves traffic.
  bool past_caches = false;

  StateMemory() = default;
  StateMemory(void* in_place) : to(in_place), from(in_place) {}  // NOLINT: a pointer means memory updated in place

  [[nodiscard]] bool apart() const { return from != to; }
};

// Memory of elements [first, first + numel). `residual` is the second stream of `Master`. A stream that the format or
// the rules do not have is null. For int8 moments `first` is a multiple of kChunkNumel. If the new values of int8
// moments are written to other memory, this memory must already contain the current scales.
struct StateBuffers {
  StateMemory weight;
  StateMemory residual;
  StateMemory exp_avg;
  StateMemory exp_avg_sq;
  const void* grad = nullptr;
};

// Throws std::invalid_argument unless the segments are sorted, disjoint, and within [0, numel). Each segment must have
// a step of at least 1, and must begin at an element where the format allows a block to begin.
void check_segments(const std::vector<Segment>& segments, std::uint64_t numel, const StateFormat& format);

// Does one step on elements [begin, end) of the buffers, which contain elements [first, …) of a flat buffer whose
// segments were checked. Elements outside all segments, and moments that no rule uses, are not written, even if the new
// values are written to other memory. Runs in the calling thread; several threads may work on different elements,
// divided at multiples of kCutNumel.
//
// All arithmetic on elements is fp32 without contraction, and rounding to bf16 moments takes its random bits from
// (seed, step, index). Therefore the result depends only on the inputs, not on the ISA, the threads or the division
// into tasks (except for the payload of NaNs). Bias corrections are computed in double from the integer step.
//
// Returns false if a new weight or moment is not finite; the value is stored nevertheless.
[[nodiscard]] bool optimizer_update(const StateFormat& format, const StateBuffers& buffers, std::uint64_t first,
                                    std::size_t begin, std::size_t end, const std::vector<Segment>& segments, Isa isa);

// Does the same step on elements [0, numel), divided into tasks for the pool.
[[nodiscard]] bool optimizer_update(const StateFormat& format, const StateBuffers& buffers, std::uint64_t first,
                                    std::size_t numel, const std::vector<Segment>& segments, Isa isa, ThreadPool& pool);

// Elements per task of an update; the task's streams fit half of a core's L2. The number is a multiple of kCutNumel and
// divides kChunkNumel.
[[nodiscard]] std::size_t task_numel();

// Elements per partial of a sum of squares. The number is fixed, so that no partial depends on the number of threads.
inline constexpr std::size_t kPartialNumel = 64 * 1024;

// Returns Σ x² of each partial in double; the results are the same for every number of threads and every ISA. `first`
// is the index of the first element in a larger array. A partial begins at each multiple of kPartialNumel in the larger
// array. If the larger array is divided at such multiples, its parts therefore have the same partials as the complete
// array.
[[nodiscard]] std::vector<double> sums_of_squares(const void* data, DType dtype, std::uint64_t first, std::size_t numel,
                                                  Isa isa, ThreadPool& pool);

// Lands a gradient: dst = src, or dst += src in fp32 if `add`. Returns the sums_of_squares of the new `dst`, computed
// in the same pass. `dst` has the dtype of `src`, or is fp32; with `add`, `dst` must be fp32. Throws
// std::invalid_argument for other dtypes.
[[nodiscard]] std::vector<double> land_gradient(void* dst, DType dst_dtype, const void* src, DType src_dtype,
                                                std::uint64_t first, std::size_t numel, bool add, Isa isa,
                                                ThreadPool& pool);

// Converts `numel` 16-bit values at the start of a buffer to fp32 values in the same buffer, which must have room for
// the fp32 values.
void widen_in_place(void* data, DType dtype, std::size_t numel);

// a += d, b += d, c += d: the memory traffic of AdamW in fp32 with almost no arithmetic, 28 bytes per element.
// `infinity-bench adam` compares the update with this function.
void read_modify_write(float* a, float* b, float* c, const float* d, std::size_t numel, Isa isa, ThreadPool& pool);

// Converts fp32 to the two halves of split16, and back. Round half up: hi = (bits + 0x8000) >> 16, lo = int16(bits −
// (hi << 16)). A NaN whose hi would not be a NaN keeps the sign and becomes a quiet NaN.
void encode_split16(const float* master, std::uint16_t* weight, std::int16_t* residual, std::size_t numel);
void decode_split16(const std::uint16_t* weight, const std::int16_t* residual, float* master, std::size_t numel);
// Converts fp32 to bf16 (half up) or fp16 (nearest even).
void round_weights(const float* master, void* weight, DType dtype, std::size_t numel);

// Converts a moment buffer to fp32, and back. `is_signed` is true for exp_avg, and false for exp_avg_sq. Encoding to
// bf16 rounds half up: only a step rounds stochastically.
void decode_moments(Moments moments, bool is_signed, const void* data, float* values, std::size_t numel, Isa isa);
void encode_moments(Moments moments, bool is_signed, const float* values, void* data, std::size_t numel, Isa isa);

}  // namespace infinity
