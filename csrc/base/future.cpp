#include "base/future.hpp"

#include <utility>

namespace infinity {

Failure composed(Failure failure) {
  failure.message = failure.operation + " of " + std::to_string(failure.nbytes) + " bytes at offset " +
                    std::to_string(failure.offset) + " of " + failure.path + ": " + failure.cause;
  return failure;
}

bool Completion::complete(std::optional<Failure> failure) {
  std::vector<std::function<void()>> callbacks;
  {
    const std::lock_guard lock(mutex_);
    if (done_) return false;
    failure_ = std::move(failure);
    done_ = true;
    callbacks.swap(callbacks_);
    // Notify under the lock: a waiter may destroy this object as soon as the waiter sees done_.
    changed_.notify_all();
  }
  for (auto& callback : callbacks) callback();
  return true;
}

bool Completion::done() const {
  const std::lock_guard lock(mutex_);
  return done_;
}

void Completion::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return done_; });
}

bool Completion::wait_for(std::chrono::nanoseconds timeout) const {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, timeout, [this] { return done_; });
}

void Completion::then(std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    if (!done_) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

}  // namespace infinity
