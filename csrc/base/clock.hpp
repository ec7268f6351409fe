// The clock of all measurements; Python's time.perf_counter_ns uses the same clock.
#pragma once

#include <chrono>
#include <cstdint>

namespace infinity {

inline std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
}

}  // namespace infinity
