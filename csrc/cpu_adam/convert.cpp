// Conversions outside the hot path: loading, saving, widening.
#include <cstring>

#include "base/bits.hpp"
#include "cpu_adam/optimizer.hpp"

namespace infinity {
namespace {
#include "cpu_adam/weights.inl"
}  // namespace

void encode_split16(const float* master, std::uint16_t* weight, std::int16_t* residual, std::size_t numel) {
  store_split16(master, weight, residual, numel, false);
}

void decode_split16(const std::uint16_t* weight, const std::int16_t* residual, float* master, std::size_t numel) {
  load_split16(weight, residual, numel, master);
}

void round_weights(const float* master, void* weight, DType dtype, std::size_t numel) {
  if (dtype == DType::fp32) {
    std::memcpy(weight, master, numel * sizeof(float));
  } else if (dtype == DType::bf16) {
    store_bf16(master, static_cast<std::uint16_t*>(weight), numel, false);
  } else {
    store_fp16(master, static_cast<Half*>(weight), numel);
  }
}

void widen_in_place(void* data, DType dtype, std::size_t numel) {
  auto* bytes = static_cast<char*>(data);
  // Convert from the end, so that no value is overwritten before it is read.
  for (std::size_t i = numel; i-- > 0;) {
    std::uint16_t narrow = 0;
    std::memcpy(&narrow, bytes + i * 2, 2);
    const float wide =
        dtype == DType::bf16 ? float_of_bf16(narrow) : static_cast<float>(__builtin_bit_cast(Half, narrow));
    std::memcpy(bytes + i * 4, &wide, 4);
  }
}

}  // namespace infinity
