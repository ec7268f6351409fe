// Compiled for baseline only; see CMakeLists.txt for the flags.
#define INFINITY_ISA_NAMESPACE baseline
#include "codec/kernels.inl"
