// Messages from any thread to the thread that runs them.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

namespace infinity {

class Inbox {
 public:
  // Must not throw.
  using Message = std::function<void()>;

  void post(Message message) {
    {
      const std::lock_guard lock(mutex_);
      messages_.push_back(std::move(message));
    }
    changed_.notify_one();
  }

  // Waits until there is a message.
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !messages_.empty(); });
  }

  // Runs the present messages in the order in which they were posted. Must not be called by a message.
  void run() {
    std::vector<Message> messages;
    {
      const std::lock_guard lock(mutex_);
      messages.swap(messages_);
    }
    for (Message& message : messages) {
      message();
      message = nullptr;  // frees the objects that the message owns before the next message runs
    }
  }

 private:
  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::vector<Message> messages_;
};

}  // namespace infinity
