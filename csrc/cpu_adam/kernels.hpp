// The kernels of one instruction set, as a table of plain functions. kernels.inl is compiled once per instruction set
// and fills the table of that set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu_adam/optimizer.hpp"

namespace infinity {

// A segment's hyperparameters in the form that the inner loop uses; computed once, in double, then rounded to float.
struct Constants {
  Rule rule = Rule::adamw;
  bool uses_exp_avg = false;
  bool uses_exp_avg_sq = false;
  bool fresh = false;
  bool nesterov = false;
  float grad_scale = 1.0f;  // negative to maximize
  float beta1 = 0.0f;
  float one_minus_beta1 = 0.0f;
  float beta2 = 0.0f;
  float one_minus_beta2 = 0.0f;
  float decay = 1.0f;             // 1 − lr·wd
  float l2 = 0.0f;                // weight decay added to the gradient
  float step_size = 0.0f;         // lr; Adam: lr / (1 − β1^t)
  float inverse_bc2_sqrt = 1.0f;  // Adam: 1 / √(1 − β2^t)
  float eps = 0.0f;
  float vanishing = 0.0f;  // a smaller gradient adds exactly zero to exp_avg_sq
  float initial = 0.0f;    // Adagrad: initial value of the sum, used at the first step
  std::uint64_t seed = 0;
  std::int64_t step = 1;
};

// A thread that flushes denormal numbers gets zero for a constant that is one.
[[nodiscard]] Constants constants_of(const Segment& segment);

struct Kernels {
  // Updates elements [begin, end) of the buffers; all elements belong to one segment. `index` is the index of element
  // `begin`; `index` modulo kBlockNumel is the element's position in its block. Returns false if a result is not
  // finite.
  bool (*update)(const StateFormat&, const StateBuffers&, std::size_t begin, std::size_t end, std::uint64_t index,
                 const Constants&);
  double (*sum_squares)(const void* data, DType dtype, std::size_t begin, std::size_t end);
  double (*land)(void* dst, DType dst_dtype, const void* src, DType src_dtype, bool add, std::size_t begin,
                 std::size_t end);
  void (*read_modify_write)(float* a, float* b, float* c, const float* d, std::size_t begin, std::size_t end);
  void (*decode_moments)(Moments, bool is_signed, const void* data, float* values, std::size_t numel);
  void (*encode_moments)(Moments, bool is_signed, const float* values, void* data, std::size_t numel);
};

namespace baseline {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}

}  // namespace infinity
