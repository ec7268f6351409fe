// What this processor, and the operating system under it, can run.
#pragma once

namespace infinity {

[[nodiscard]] bool cpu_has_avx2();    // AVX2, FMA and F16C
[[nodiscard]] bool cpu_has_avx512();  // AVX-512 F, BW, DQ and VL, and all of the above

}  // namespace infinity
