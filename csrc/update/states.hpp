// The states of a parameter, by name.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace infinity {

enum class State : std::uint8_t { weight, residual, exp_avg, exp_avg_sq, grad };

inline constexpr std::array kStates = {State::weight, State::residual, State::exp_avg, State::exp_avg_sq, State::grad};

[[nodiscard]] constexpr bool is_moment(State state) { return state == State::exp_avg || state == State::exp_avg_sq; }

// A value for each state.
template <class Value>
class PerState {
 public:
  [[nodiscard]] Value& operator[](State state) { return values_[static_cast<std::size_t>(state)]; }
  [[nodiscard]] const Value& operator[](State state) const { return values_[static_cast<std::size_t>(state)]; }

 private:
  std::array<Value, kStates.size()> values_{};
};

}  // namespace infinity
