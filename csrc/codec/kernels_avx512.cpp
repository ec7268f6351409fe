// Compiled for avx512 only; see CMakeLists.txt for the flags.
#define INFINITY_ISA_NAMESPACE avx512
#include "codec/kernels.inl"
