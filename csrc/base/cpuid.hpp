// Instruction sets that this processor and its operating system support.
#pragma once

namespace infinity {

// The builtins also ask the operating system (XGETBV) whether it saves the wide registers.
[[nodiscard]] inline bool cpu_has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

// Includes the instructions of cpu_has_avx2().
[[nodiscard]] inline bool cpu_has_avx512() {
#if defined(__x86_64__)
  return cpu_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

}  // namespace infinity
