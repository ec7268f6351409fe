// Dtypes of weights and gradients. The function is static, so that each translation unit has its own copy, compiled for
// its own instruction set (see bits.hpp).
#pragma once

#include <cstddef>
#include <cstdint>

namespace infinity {

enum class DType : std::uint8_t { fp32, bf16, fp16 };
[[nodiscard]] static constexpr std::size_t itemsize(DType dtype) { return dtype == DType::fp32 ? 4 : 2; }

}  // namespace infinity
