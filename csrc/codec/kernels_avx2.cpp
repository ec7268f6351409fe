// Compiled for avx2 only; see CMakeLists.txt for the flags.
#define INFINITY_ISA_NAMESPACE avx2
#include "codec/kernels.inl"
