// Log of events for a trace. While the log is switched on, it records events up to a limit, until they are taken.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <utility>

namespace infinity {

// Any thread may call any function. While the log is off, an event costs one relaxed load.
//
// Invariant: every event that was added while the log was on either is in the log or was counted as dropped.
template <class Event>
class EventLog {
 public:
  struct Taken {
    std::deque<Event> events;   // not a vector, which would be copied, under the lock, whenever it grows
    std::uint64_t dropped = 0;  // number of events that were added while the log was full
  };

  // Switches recording on or off. Recorded events stay in the log until they are taken.
  void record(bool on, std::size_t events_max) {
    const std::lock_guard lock(mutex_);
    events_max_ = events_max;
    on_.store(on, std::memory_order_relaxed);
  }

  void add(const Event& event) {
    if (!on_.load(std::memory_order_relaxed)) return;
    const std::lock_guard lock(mutex_);
    if (taken_.events.size() < events_max_) {
      taken_.events.push_back(event);
    } else {
      ++taken_.dropped;
    }
  }

  [[nodiscard]] Taken take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(taken_, {});
  }

 private:
  std::atomic<bool> on_{false};
  std::mutex mutex_;  // guards the members below
  std::size_t events_max_ = 0;
  Taken taken_;
};

}  // namespace infinity
