// The instruction sets that kernels are compiled for, and the choice among them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace infinity {

enum class Isa : std::uint8_t { baseline, avx2, avx512, neon };

// The best instruction set of this machine, or the one in INFINITY_ISA (baseline | avx2 | avx512 | neon). Throws
// std::invalid_argument if INFINITY_ISA names a set that is unknown or that this machine does not support.
[[nodiscard]] Isa select_isa();
[[nodiscard]] std::vector<Isa> supported_isas();
[[nodiscard]] std::string isa_name(Isa isa);
[[nodiscard]] Isa isa_from_name(const std::string& name);  // throws std::invalid_argument

}  // namespace infinity
