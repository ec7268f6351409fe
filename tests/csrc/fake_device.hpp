// A device whose queues are lists, for the C++ tests. An operation that is queued on a stream runs when somebody waits
// for it, or at a random moment.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "device/gate.hpp"

namespace infinity::tests {

// Invariant: only one FakeDevice exists at a time, because the functions of a gate are plain functions without an
// object.
class FakeDevice {
 public:
  explicit FakeDevice(unsigned seed = 0) : random_(seed) { current() = this; }
  ~FakeDevice() { current() = nullptr; }
  FakeDevice(const FakeDevice&) = delete;
  FakeDevice& operator=(const FakeDevice&) = delete;

  // Lets the call with this number, counted from 0, return this error and do nothing.
  void fail(unsigned call, int error) {
    fail_at_ = call;
    error_ = error;
  }
  // This function runs in each call of `synchronize`, before the wait.
  std::function<void(void* event)> synchronizing;

  [[nodiscard]] std::shared_ptr<const DeviceGate> gate() const {
    return std::make_shared<const DeviceGate>(
        0, DeviceCalls{[](int) { return current()->enter(); },
                       [](void* to, const void* from, std::size_t nbytes, int, void* stream) {
                         return current()->copy(to, from, nbytes, stream);
                       },
                       [](void* event, void* stream) { return current()->record(event, stream); },
                       [](void* stream, void* event, unsigned) { return current()->wait(stream, event); },
                       [](void* event) { return current()->synchronize(event); }});
  }

  // The three functions below queue the host's operations on the host's own streams.
  void launch(void* stream, std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    streams_[stream].push_back({std::move(work), nullptr, 0});
  }
  void record_on_host(void* event, void* stream) {
    const std::lock_guard lock(mutex_);
    queue_record(event, stream);
  }
  void wait_on_host(void* stream, void* event) {
    const std::lock_guard lock(mutex_);
    queue_wait(stream, event);
  }
  // Runs all operations that can run.
  void run_all() {
    const std::lock_guard lock(mutex_);
    while (run_some()) {
    }
  }
  [[nodiscard]] unsigned calls() const { return calls_; }
  [[nodiscard]] std::size_t queued() {
    const std::lock_guard lock(mutex_);
    std::size_t sum = 0;
    for (const auto& [stream, queue] : streams_) sum += queue.size();
    return sum;
  }

 private:
  struct Step {
    std::function<void()> work;
    void* event;  // the step waits until this event is reached for the `turn`th time
    unsigned turn;
  };
  struct Event {
    unsigned recorded = 0;
    unsigned reached = 0;
  };

  static FakeDevice*& current() {
    static FakeDevice* device = nullptr;
    return device;
  }

  [[nodiscard]] bool refused() { return calls_++ == fail_at_ && error_ != 0; }

  int enter() { return refused() ? error_ : 0; }
  int copy(void* to, const void* from, std::size_t nbytes, void* stream) {
    if (refused()) return error_;
    const std::lock_guard lock(mutex_);
    streams_[stream].push_back({[to, from, nbytes] { std::memcpy(to, from, nbytes); }, nullptr, 0});
    run_by_chance();
    return 0;
  }
  int record(void* event, void* stream) {
    if (refused()) return error_;
    const std::lock_guard lock(mutex_);
    queue_record(event, stream);
    run_by_chance();
    return 0;
  }
  int wait(void* stream, void* event) {
    if (refused()) return error_;
    const std::lock_guard lock(mutex_);
    queue_wait(stream, event);
    return 0;
  }
  int synchronize(void* event) {
    if (refused()) return error_;
    if (synchronizing) synchronizing(event);
    const std::lock_guard lock(mutex_);
    const unsigned turn = events_[event].recorded;
    while (events_[event].reached < turn) {
      if (!run_some()) return -1;  // no operation is left that would reach the event
    }
    return 0;
  }

  void queue_record(void* event, void* stream) {
    const unsigned turn = ++events_[event].recorded;
    streams_[stream].push_back({[this, event, turn] { events_[event].reached = turn; }, nullptr, 0});
  }
  void queue_wait(void* stream, void* event) {
    streams_[stream].push_back({[] {}, event, events_[event].recorded});
  }
  void run_by_chance() {
    for (unsigned steps = static_cast<unsigned>(random_() % 3); steps > 0; --steps) run_some();
  }
  // Runs the next step of a random stream whose next step does not wait. Returns false if there is no such stream.
  bool run_some() {
    std::vector<std::deque<Step>*> able;
    for (auto& [stream, queue] : streams_) {
      if (queue.empty()) continue;
      const Step& step = queue.front();
      if (step.event == nullptr || events_[step.event].reached >= step.turn) able.push_back(&queue);
    }
    if (able.empty()) return false;
    std::deque<Step>& queue = *able[random_() % able.size()];
    queue.front().work();
    queue.pop_front();
    return true;
  }

  std::mutex mutex_;  // guards the queues and events below
  std::mt19937 random_;
  std::map<void*, std::deque<Step>> streams_;
  std::map<void*, Event> events_;
  std::atomic<unsigned> calls_{0};
  unsigned fail_at_ = 0;
  int error_ = 0;
};

// Handles of streams and events.
inline void* handle(std::uintptr_t number) { return reinterpret_cast<void*>(number); }

}  // namespace infinity::tests
