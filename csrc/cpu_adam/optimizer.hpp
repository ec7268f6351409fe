// One optimizer step over flat ranges: gradients in, states and weights updated in place, all in one pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/isa.hpp"
#include "base/thread_pool.hpp"
#include "cpu_adam/state_format.hpp"

namespace infinity {

// What the step computes; each as torch.optim of that name defines it, but Lion (Chen et al. 2023, arXiv 2302.06675,
// algorithm 2).
//   adamw:   decoupled weight decay (Loshchilov & Hutter 2019, arXiv 1711.05101, algorithm 2)
//   adam:    weight decay added to the gradient (L2)
//   adagrad: keeps its sum of squares in exp_avg_sq
//   sgd:     keeps its momentum in exp_avg; without momentum it keeps nothing
enum class Rule : std::uint8_t { adamw, adam, lion, adagrad, sgd };

// A rule with its hyperparameters, in double as the user gave them.
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

// Elements [begin, end) of a flat buffer that share hyperparameters: one parameter.
struct Segment {
  std::uint64_t begin;
  std::uint64_t end;
  // Index of element `begin` among all elements of the model, a multiple of kBlockNumel. With `seed` and `step` it keys
  // stochastic rounding, so that where a parameter lies does not matter.
  std::uint64_t index;
  std::uint64_t seed;
  std::int64_t step;        // from 1: the step being taken
  bool skip;                // grad is None: no decay, no step, nothing touched
  bool fresh;               // the moments begin with this step: they are zero, whatever the buffers hold
  float grad_scale = 1.0f;  // the gradient is multiplied by this first
  Hyperparameters hyper;
};

// Memory of one state. Its new values go `to` one place; its current ones come `from` there, or from another place that
// is only read.
struct StateMemory {
  void* to = nullptr;
  const void* from = nullptr;
  // Nobody reads the new values soon, for a checksum or a write: where that saves traffic, they are stored past the
  // caches.
  bool past_caches = false;

  StateMemory() = default;
  StateMemory(void* in_place) : to(in_place), from(in_place) {}  // NOLINT: a pointer is memory updated in place

  [[nodiscard]] bool apart() const { return from != to; }
};

// Memory of elements [first, first + numel). `residual` is the second stream of `Master`; null where the format or the
// rules have no such stream. For int8 moments `first` is a multiple of kChunkNumel, and where the new values go to
// another place, the current scales are there already.
struct StateBuffers {
  StateMemory weight;
  StateMemory residual;
  StateMemory exp_avg;
  StateMemory exp_avg_sq;
  const void* grad = nullptr;
};

// Throws std::invalid_argument unless the segments are sorted, disjoint, within [0, numel), count steps from 1, and
// begin where the format allows a block to begin.
void check_segments(const std::vector<Segment>& segments, std::uint64_t numel, const StateFormat& format);

// One step on elements [begin, end) of the buffers, which hold elements [first, …) of a flat buffer whose segments were
// checked. Elements in no segment, and moments that
// no rule uses, are left alone, also where the new values go to another place. Runs in the calling thread; several
// threads may work on different elements, cut at multiples of kCutNumel.
//
// Everything per element is fp32 without contraction, and rounding to bf16 moments takes its random bits from (seed,
// step, index): the result depends on nothing but the inputs, not on ISA, threads or cuts (but for which NaN a NaN is).
// Bias corrections are taken in double from the integer step.
//
// False when a new weight or moment is not finite; it is stored as it is.
[[nodiscard]] bool optimizer_update(const StateFormat& format, const StateBuffers& buffers, std::uint64_t first,
                                    std::size_t begin, std::size_t end, const std::vector<Segment>& segments, Isa isa);

// Elements [0, numel), cut into tasks for the pool.
[[nodiscard]] bool optimizer_update(const StateFormat& format, const StateBuffers& buffers, std::uint64_t first,
                                    std::size_t numel, const std::vector<Segment>& segments, Isa isa, ThreadPool& pool);

// Elements per task of an update: its streams fit half of a core's L2. A multiple of kCutNumel that divides
// kChunkNumel.
[[nodiscard]] std::size_t task_numel();

// Elements per partial of a sum of squares; fixed, so that no partial depends on the number of threads.
inline constexpr std::size_t kPartialNumel = 64 * 1024;

// Σ x² in double of each partial: the same for any number of threads and ISA. The elements are those from `first` on of
// a larger whole, and a partial begins wherever the whole has a multiple of kPartialNumel. So a whole that is cut there
// has the same partials in its parts.
[[nodiscard]] std::vector<double> sums_of_squares(const void* data, DType dtype, std::uint64_t first, std::size_t numel,
                                                  Isa isa, ThreadPool& pool);

// Lands a gradient: dst = src, or dst += src in fp32 where `add`. Returns the sums_of_squares of the new `dst`, taken
// in the same pass. dst has the dtype of src, or is fp32; to add it must be fp32. Throws std::invalid_argument for
// other dtypes.
[[nodiscard]] std::vector<double> land_gradient(void* dst, DType dst_dtype, const void* src, DType src_dtype,
                                                std::uint64_t first, std::size_t numel, bool add, Isa isa,
                                                ThreadPool& pool);

// A buffer that holds `numel` 16-bit values at its start becomes the same values in fp32 (it must have room).
void widen_in_place(void* data, DType dtype, std::size_t numel);

// a += d, b += d, c += d: the memory traffic of AdamW in fp32 with next to no arithmetic, 28 bytes per element. What
// `infinity-bench adam` holds the update against.
void read_modify_write(float* a, float* b, float* c, const float* d, std::size_t numel, Isa isa, ThreadPool& pool);

// fp32 ↔ the two halves of split16. Round half up: hi = (bits + 0x8000) >> 16, lo = int16(bits − (hi << 16)); a NaN
// whose hi would not be a NaN keeps the sign and becomes a quiet NaN.
void encode_split16(const float* master, std::uint16_t* weight, std::int16_t* residual, std::size_t numel);
void decode_split16(const std::uint16_t* weight, const std::int16_t* residual, float* master, std::size_t numel);
// fp32 → bf16 (half up) or fp16 (nearest even).
void round_weights(const float* master, void* weight, DType dtype, std::size_t numel);

// A moment buffer ↔ fp32. `is_signed`: exp_avg; not: exp_avg_sq. Encoding to bf16 rounds half up: only a step rounds
// stochastically.
void decode_moments(Moments moments, bool is_signed, const void* data, float* values, std::size_t numel, Isa isa);
void encode_moments(Moments moments, bool is_signed, const float* values, void* data, std::size_t numel, Isa isa);

}  // namespace infinity
