#include "base/shared_counters.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>
#include <stdexcept>
#include <string>

namespace infinity {
namespace {
using Clock = std::chrono::steady_clock;
using Counter = std::atomic<std::uint32_t>;
static_assert(sizeof(Counter) == sizeof(std::uint32_t) && Counter::is_always_lock_free);

// The futex is not FUTEX_PRIVATE_FLAG: the waiting processes have other page tables.
void futex_wait(Counter& counter, std::uint32_t seen, std::chrono::nanoseconds timeout) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(timeout);
  timespec limit{};
  limit.tv_sec = static_cast<std::time_t>(seconds.count());
  limit.tv_nsec = static_cast<long>((timeout - seconds).count());
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&counter), FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void futex_wake(Counter& counter) {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&counter), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}
}  // namespace

SharedCounters::SharedCounters(std::byte* memory, std::size_t nbytes) : memory_(memory), count_(nbytes / kStride) {
  if (reinterpret_cast<std::uintptr_t>(memory) % kStride != 0) {
    throw std::invalid_argument("shared counters must be aligned to " + std::to_string(kStride) + " bytes");
  }
}

Counter& SharedCounters::at(std::size_t index) const {
  if (index >= count_) {
    throw std::out_of_range("counter " + std::to_string(index) + " of " + std::to_string(count_));
  }
  return *reinterpret_cast<Counter*>(memory_ + index * kStride);
}

std::uint32_t SharedCounters::load(std::size_t index) const { return at(index).load(std::memory_order_acquire); }

void SharedCounters::advance(std::size_t index, std::uint32_t value) {
  Counter& counter = at(index);
  counter.store(value, std::memory_order_release);
  futex_wake(counter);
}

std::uint32_t SharedCounters::add(std::size_t index) {
  Counter& counter = at(index);
  const std::uint32_t before = counter.fetch_add(1, std::memory_order_acq_rel);
  futex_wake(counter);
  return before;
}

bool SharedCounters::wait(std::size_t index, std::uint32_t value, std::chrono::nanoseconds timeout) const {
  Counter& counter = at(index);
  const auto deadline = Clock::now() + timeout;
  for (;;) {
    const std::uint32_t seen = counter.load(std::memory_order_acquire);
    if (static_cast<std::int32_t>(seen - value) >= 0) return true;  // a counter that counts exchanges wraps
    const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now());
    if (left <= std::chrono::nanoseconds(0)) return false;
    futex_wait(counter, seen, left);
  }
}

}  // namespace infinity
