// A result that one thread sets once, and for which other threads wait.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace infinity {

enum class FailureKind : std::uint8_t {
  io,          // the device or the system reported an error
  corruption,  // the data read differ from the data written
  timeout,     // no answer before the deadline: the device may use the request's memory forever
  canceled,    // the request was withdrawn, or its queue was closed before
  device,      // the runtime of a compute device reported an error
};

// Cause of a failed operation. `error_number` is an errno value, or 0 if no system call failed.
struct Failure {
  FailureKind kind = FailureKind::io;
  std::string operation;  // "read", "write", ...
  std::string path;
  std::uint64_t offset = 0;  // position in bytes of the block that failed
  std::uint64_t nbytes = 0;  // length in bytes of the block that failed
  int error_number = 0;
  std::string cause;
  std::string message;  // all fields above as one sentence
};

// Returns the failure with a `message` that is composed of the other fields.
[[nodiscard]] Failure composed(Failure failure);

// pending ──complete()──▶ done, with or without a failure; never back.
//
// Invariant: callbacks run exactly once, on the thread that completes the result, or in `then` if the result is already
// complete.
class Completion {
 public:
  Completion() = default;
  Completion(const Completion&) = delete;
  Completion& operator=(const Completion&) = delete;

  // Completes the result at the first call; later calls change nothing and return false.
  bool complete(std::optional<Failure> failure = std::nullopt);

  [[nodiscard]] bool done() const;
  void wait() const;
  // Waits until the result is complete. Returns false if `timeout` passed before.
  [[nodiscard]] bool wait_for(std::chrono::nanoseconds timeout) const;
  // The failure, or nothing after success; valid only once done() is true.
  [[nodiscard]] const std::optional<Failure>& failure() const { return failure_; }

  // Calls `callback` once the result is complete. `callback` must not block and must not throw.
  void then(std::function<void()> callback);

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool done_ = false;
  std::optional<Failure> failure_;
  std::vector<std::function<void()>> callbacks_;
};

using Future = std::shared_ptr<Completion>;

}  // namespace infinity
