// The instruction sets that kernels are compiled for, and which of them to use.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace infinity {

enum class Isa : std::uint8_t { baseline, avx2, avx512, neon };

// The best this machine has, or what INFINITY_ISA (baseline | avx2 | avx512 | neon) asks for. Throws
// std::invalid_argument when that is unknown or not supported here.
[[nodiscard]] Isa select_isa();
[[nodiscard]] std::vector<Isa> supported_isas();
[[nodiscard]] std::string isa_name(Isa isa);
[[nodiscard]] Isa isa_from_name(const std::string& name);  // throws std::invalid_argument

}  // namespace infinity
