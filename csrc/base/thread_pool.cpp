#include "base/thread_pool.hpp"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "base/numa.hpp"

namespace infinity {

struct ThreadPool::Shared {
  std::mutex caller;  // one parallel_for at a time
  std::mutex mutex;
  std::condition_variable work;
  std::condition_variable finished;
  const std::function<void(std::size_t)>* task = nullptr;
  std::size_t count = 0;
  std::atomic<std::size_t> next{0};
  unsigned busy = 0;  // workers inside the current round
  unsigned long round = 0;
  bool stop = false;
  pid_t pid = getpid();
  std::vector<std::thread> threads;

  void stop_and_join() {
    {
      const std::lock_guard lock(mutex);
      stop = true;
    }
    work.notify_all();
    for (auto& thread : threads) thread.join();
  }

  void drain(const std::function<void(std::size_t)>& current, std::size_t total, const std::function<void()>& between) {
    for (std::size_t index = next.fetch_add(1); index < total; index = next.fetch_add(1)) {
      current(index);
      if (between) between();
    }
  }

  void serve() {
    unsigned long seen = 0;
    std::unique_lock lock(mutex);
    for (;;) {
      work.wait(lock, [&] { return stop || (round != seen && task != nullptr); });
      if (stop) return;
      seen = round;
      ++busy;
      const auto* current = task;
      const std::size_t total = count;
      lock.unlock();
      drain(*current, total, nullptr);
      lock.lock();
      if (--busy == 0) finished.notify_all();
    }
  }
};

ThreadPool::ThreadPool(unsigned threads, int numa_node) : shared_(std::make_unique<Shared>()) {
  if (threads == 0) throw std::invalid_argument("a thread pool needs at least one thread");
  try {
    for (unsigned index = 1; index < threads; ++index) {
      shared_->threads.emplace_back([shared = shared_.get(), numa_node] {
        run_on_node(numa_node);
        shared->serve();
      });
    }
  } catch (const std::system_error& error) {
    shared_->stop_and_join();
    throw std::system_error(error.code(), "cannot start " + std::to_string(threads) + " threads");
  }
}

ThreadPool::~ThreadPool() {
  if (getpid() != shared_->pid) {
    // In a forked child the threads do not exist: neither join them nor destroy what they hold.
    static_cast<void>(shared_.release());
    return;
  }
  shared_->stop_and_join();
}

unsigned ThreadPool::threads() const { return static_cast<unsigned>(shared_->threads.size()) + 1; }

void ThreadPool::parallel_for(std::size_t count, const std::function<void(std::size_t)>& task,
                              const std::function<void()>& between) {
  Shared& shared = *shared_;
  if (shared.threads.empty() || count < 2) {
    for (std::size_t index = 0; index < count; ++index) {
      task(index);
      if (between) between();
    }
    return;
  }
  const std::lock_guard one_at_a_time(shared.caller);
  {
    const std::lock_guard lock(shared.mutex);
    shared.task = &task;
    shared.count = count;
    shared.next = 0;
    ++shared.round;
  }
  shared.work.notify_all();
  shared.drain(task, count, between);
  std::unique_lock lock(shared.mutex);
  // A worker that wakes up only now must not see the task, which the caller is about to destroy.
  shared.task = nullptr;
  shared.finished.wait(lock, [&] { return shared.busy == 0; });
}

}  // namespace infinity
