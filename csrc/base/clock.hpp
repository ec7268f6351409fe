// The clock of all measurements, which is also that of Python's time.perf_counter_ns.
#pragma once

#include <chrono>
#include <cstdint>

namespace infinity {

inline std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
}

}  // namespace infinity
