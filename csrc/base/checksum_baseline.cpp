// Compiled for baseline only; see CMakeLists.txt for the flags.
#define INFINITY_ISA_NAMESPACE baseline
#include "base/checksum_kernel.inl"
