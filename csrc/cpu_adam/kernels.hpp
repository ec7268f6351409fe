// What each instruction set provides: one table of plain functions, filled by adam_kernel.inl compiled once per set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu_adam/adam.hpp"

namespace infinity {

// A segment's hyperparameters as the inner loop wants them; computed once, in double, then rounded to float.
struct Constants {
  float grad_scale;
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float decay;             // 1 − lr·wd
  float step_size;         // lr / (1 − β1^t)
  float inverse_bc2_sqrt;  // 1 / √(1 − β2^t)
  float eps;
};

struct Kernels {
  // Elements [begin, end) of the buffers.
  void (*adam)(const AdamFormat&, const AdamBuffers&, std::size_t begin, std::size_t end, const Constants&);
  double (*sum_squares)(const void* data, DType dtype, std::size_t begin, std::size_t end);
  void (*accumulate)(float* dst, const void* src, DType dtype, std::size_t begin, std::size_t end);
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
