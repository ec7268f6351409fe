// A backend that calls preadv and pwritev on a few threads, for kernels and containers that refuse io_uring. The
// results are the same as with io_uring, but there are more context switches.
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

#include "aio/backend.hpp"
#include "base/thread_name.hpp"

namespace infinity {
namespace {

class ThreadBackend final : public Backend {
 public:
  ThreadBackend(unsigned queue_depth, unsigned threads) {
    if (queue_depth == 0 || threads == 0) throw std::invalid_argument("queue depth and threads must be positive");
    try {
      for (unsigned index = 0; index < threads; ++index) {
        workers_.emplace_back([this] {
          name_thread("infinity-io");
          serve();
        });
      }
    } catch (const std::system_error& error) {
      stop_and_join();
      throw std::system_error(error.code(), "cannot start " + std::to_string(threads) + " I/O threads");
    }
  }

  ~ThreadBackend() override { stop_and_join(); }

  std::string name() const override { return "threads"; }
  std::string details() const override { return std::to_string(workers_.size()) + " threads"; }

  void submit(const BlockOp& op) override {
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(op);
    }
    work_.notify_one();
  }

  void wait(std::vector<BlockResult>& results, unsigned at_least) override {
    std::unique_lock lock(mutex_);
    wanted_ = at_least;
    arrived_.wait(lock, [this] { return woken_ || done_.size() >= wanted_; });
    woken_ = false;
    results.insert(results.end(), done_.begin(), done_.end());
    done_.clear();
  }

  void wake() override {
    {
      const std::lock_guard lock(mutex_);
      woken_ = true;
    }
    arrived_.notify_one();
  }

 private:
  void stop_and_join() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    work_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  static std::int32_t transfer(const BlockOp& op) {
    if (op.kind == OpKind::sync) return fdatasync(op.file->fd()) == 0 ? 0 : -errno;
    const iovec piece{op.data, op.nbytes};
    const auto offset = static_cast<off_t>(op.offset);
    const int fd = op.file->fd();
    const ssize_t moved = op.kind == OpKind::read ? preadv(fd, &piece, 1, offset) : pwritev(fd, &piece, 1, offset);
    return moved < 0 ? -errno : static_cast<std::int32_t>(moved);
  }

  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      work_.wait(lock, [this] { return stop_ || !queue_.empty(); });
      if (queue_.empty()) return;  // the backend is stopping, and the queue is empty
      const BlockOp op = queue_.front();
      queue_.pop_front();
      lock.unlock();
      const BlockResult result{op.token, transfer(op)};
      lock.lock();
      done_.push_back(result);
      if (done_.size() >= wanted_) arrived_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable arrived_;
  std::deque<BlockOp> queue_;
  std::vector<BlockResult> done_;
  std::size_t wanted_ = 1;  // number of results that the waiting thread needs
  bool woken_ = false;
  bool stop_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace

std::unique_ptr<Backend> make_thread_backend(unsigned queue_depth, unsigned threads) {
  return std::make_unique<ThreadBackend>(queue_depth, threads);
}

}  // namespace infinity
