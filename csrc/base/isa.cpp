#include "base/isa.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <stdexcept>

#include "base/cpuid.hpp"

namespace infinity {

Isa select_isa() {
  const auto available = supported_isas();
  const char* asked = std::getenv("INFINITY_ISA");
  if (asked == nullptr || *asked == '\0') return available.back();
  const Isa isa = isa_from_name(asked);
  if (std::find(available.begin(), available.end(), isa) == available.end()) {
    throw std::invalid_argument(std::string("INFINITY_ISA=") + asked + " is not supported by this processor; unset it");
  }
  return isa;
}

std::vector<Isa> supported_isas() {
#if defined(__aarch64__)
  return {Isa::neon};
#else
  std::vector<Isa> isas{Isa::baseline};
#ifdef INFINITY_X86
  if (cpu_has_avx2()) isas.push_back(Isa::avx2);
  if (cpu_has_avx512()) isas.push_back(Isa::avx512);
#endif
  return isas;
#endif
}

std::string isa_name(Isa isa) {
  constexpr std::array kNames = {"baseline", "avx2", "avx512", "neon"};
  return kNames[static_cast<std::size_t>(isa)];
}

Isa isa_from_name(const std::string& name) {
  for (const Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512, Isa::neon}) {
    if (isa_name(isa) == name) return isa;
  }
  throw std::invalid_argument("unknown instruction set '" + name + "'; use baseline, avx2, avx512 or neon");
}

}  // namespace infinity
