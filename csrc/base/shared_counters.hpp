// Counters in memory that several processes have mapped.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace infinity {

// Each counter has a cache line of its own, so that a store to one counter does not slow down readers of the others.
// What a process wrote before it advanced a counter is visible to every process that has seen the new value.
//
// Invariant: only `add` is called by several processes for the same counter; `advance` is called by its owner alone.
class SharedCounters {
 public:
  static constexpr std::size_t kStride = 64;

  // `memory`: zeroed before the first use, aligned to kStride, mapped by all processes; it must outlive this object.
  // Throws std::invalid_argument when the memory is not aligned.
  SharedCounters(std::byte* memory, std::size_t nbytes);

  [[nodiscard]] std::size_t count() const { return count_; }
  // Each of these throws std::out_of_range when there is no counter `index`.
  [[nodiscard]] std::uint32_t load(std::size_t index) const;
  // Sets a counter, and wakes the processes that wait for it.
  void advance(std::size_t index, std::uint32_t value);
  // Adds 1, and returns the value before.
  std::uint32_t add(std::size_t index);
  // Waits until a counter is at least `value`, modulo 2^32: less than 2^31 behind or ahead of it. Returns whether it
  // is, when this happens or the time is over.
  [[nodiscard]] bool wait(std::size_t index, std::uint32_t value, std::chrono::nanoseconds timeout) const;

 private:
  [[nodiscard]] std::atomic<std::uint32_t>& at(std::size_t index) const;

  std::byte* memory_;
  std::size_t count_;
};

}  // namespace infinity
