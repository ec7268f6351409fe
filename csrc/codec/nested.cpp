// Encoding of blocks' scales in 8 bits, computed as in bitsandbytes' C code (see [Note: bitsandbytes, to the bit]).
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>

#include "base/rounding.hpp"
#include "codec/codec.hpp"
#include "codec/maps.hpp"

namespace infinity {
namespace {

constexpr std::size_t kSteps = 65536;  // between −1 and 1

using StepCodes = std::array<std::uint8_t, kSteps>;

// The code of each step: the nearest value of the map.
StepCodes nearest_of_steps() {
  constexpr auto kBounds = bounds_of(kDynamicMap);
  StepCodes codes{};
  std::size_t code = 0;
  for (std::size_t step = 0; step < kSteps; ++step) {
    const float value = 2.0f * static_cast<float>(step) / static_cast<float>(kSteps - 1) - 1.0f;
    while (code < std::size(kBounds.values) && kBounds.values[code] < value) ++code;
    codes[step] = static_cast<std::uint8_t>(code);
  }
  return codes;
}

// `value` is between −1 and 1. There is an exception: if the group's scales are so small that the reciprocal of the
// largest scale is infinite, `value` is infinite, or NaN for a zero.
std::size_t step_of(float value) {
  if (std::isnan(value)) return 0;
  const float share = (std::clamp(value, -1.0f, 1.0f) + 1.0f) * 0.5f;
  // The product and the sum are exact in double, so there is only one rounding, as with a fused multiply and add.
  return static_cast<std::size_t>(static_cast<float>(static_cast<double>(share) * (kSteps - 1) + 0.5));
}

}  // namespace

void nest_scales(const float* scales, std::size_t blocks, float offset, std::uint8_t* codes, float* nested_scales) {
  const IeeeArithmetic ieee;
  static const StepCodes kCodes = nearest_of_steps();
  if (!std::isfinite(offset)) throw std::invalid_argument("the offset is not finite");
  for (std::size_t begin = 0; begin < blocks; begin += kNestedBlocks) {
    const std::size_t count = std::min(kNestedBlocks, blocks - begin);
    std::array<float, kNestedBlocks> rest{};
    float largest = 0.0f;
    for (std::size_t i = 0; i < count; ++i) {
      rest[i] = scales[begin + i] - offset;
      if (!std::isfinite(rest[i])) {
        throw std::invalid_argument("scale " + std::to_string(begin + i) +
                                    " is not finite, or too far from the offset");
      }
      largest = std::max(largest, std::fabs(rest[i]));
    }
    nested_scales[begin / kNestedBlocks] = largest;
    if (largest == 0.0f) {
      std::memset(codes + begin, 0, count);
      continue;
    }
    const float factor = 1.0f / largest;
    for (std::size_t i = 0; i < count; ++i) codes[begin + i] = kCodes[step_of(rest[i] * factor)];
  }
}

}  // namespace infinity
