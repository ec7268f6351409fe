// Compiled for avx512 only; see CMakeLists.txt for the flags.
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
// GCC 12 takes the "any value" operand in its own intrinsics for a mistake (its bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#define INFINITY_ISA_NAMESPACE avx512
#include "cpu_adam/kernels.inl"
