// Conversions at the edges: loading, saving, widening. Off the hot path.
#include <cstring>

#include "cpu_adam/bits.hpp"
#include "cpu_adam/optimizer.hpp"

namespace infinity {

void encode_split16(const float* master, std::uint16_t* weight, std::int16_t* residual, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) {
    const std::uint32_t bits = bits_of(master[i]);
    const std::uint16_t high = round_half_up(bits);
    weight[i] = high;
    residual[i] = residual_of(bits, high);
  }
}

void decode_split16(const std::uint16_t* weight, const std::int16_t* residual, float* master, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) master[i] = join(weight[i], residual[i]);
}

void round_weights(const float* master, void* weight, DType dtype, std::size_t numel) {
  if (dtype == DType::fp32) {
    std::memcpy(weight, master, numel * sizeof(float));
  } else if (dtype == DType::bf16) {
    auto* out = static_cast<std::uint16_t*>(weight);
    for (std::size_t i = 0; i < numel; ++i) out[i] = round_half_up(bits_of(master[i]));
  } else {
    auto* out = static_cast<Half*>(weight);
    for (std::size_t i = 0; i < numel; ++i) out[i] = static_cast<Half>(master[i]);
  }
}

void widen_in_place(void* data, DType dtype, std::size_t numel) {
  auto* bytes = static_cast<char*>(data);
  // From the end, so that no value is overwritten before it was read.
  for (std::size_t i = numel; i-- > 0;) {
    std::uint16_t narrow = 0;
    std::memcpy(&narrow, bytes + i * 2, 2);
    const float wide =
        dtype == DType::bf16 ? float_of_bf16(narrow) : static_cast<float>(__builtin_bit_cast(Half, narrow));
    std::memcpy(bytes + i * 4, &wide, 4);
  }
}

}  // namespace infinity
