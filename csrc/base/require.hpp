// Check of a call's arguments.
#pragma once

#include <stdexcept>

namespace infinity {

// Throws std::invalid_argument(message) unless `good`.
inline void require(bool good, const char* message) {
  if (!good) throw std::invalid_argument(message);
}

}  // namespace infinity
