#include "base/thread_pool.hpp"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "base/numa.hpp"
#include "base/thread_name.hpp"

namespace infinity {
namespace {

// State of one parallel_for; it is on the stack of the caller.
struct Loop {
  const std::function<void(std::size_t)>& task;
  const std::size_t count;
  const Urgency urgency;
  std::atomic<std::size_t> next{0};
  unsigned helping = 0;  // number of threads that help, without the caller
};

}  // namespace

void yield_by(int nice) {
  // On Linux each thread has a priority, which is set by the thread's id.
  if (nice > 0) setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), nice);
}

// Invariant: a loop is in `open` while it may have tasks that no thread took. The caller of a loop destroys it once the
// loop is not in `open` and no thread helps. The mutex guards all members except the loops' `next`.
struct ThreadPool::Shared {
  std::mutex mutex;
  std::condition_variable work;
  std::condition_variable left;     // signals that a loop has no helpers any more
  std::condition_variable calm;     // signals that no urgent loop is open any more
  std::deque<Loop*> open;           // urgent loops first; otherwise in the order of arrival
  std::atomic<unsigned> urgent{0};  // number of urgent loops in `open`
  bool stop = false;
  const int nice;
  const pid_t pid = getpid();
  std::vector<std::thread> threads;

  explicit Shared(int given_nice) : nice(given_nice) {}

  void stop_and_join() {
    {
      const std::lock_guard lock(mutex);
      stop = true;
    }
    work.notify_all();
    for (auto& thread : threads) thread.join();
  }

  void begin(Loop& loop) {
    {
      const std::lock_guard lock(mutex);
      const auto behind = [&](const Loop* other) { return other->urgency < loop.urgency; };
      open.insert(std::find_if(open.begin(), open.end(), behind), &loop);
      if (loop.urgency == Urgency::urgent) ++urgent;
    }
    work.notify_all();
  }

  // Removes a loop whose tasks are all taken. The caller holds the mutex.
  void close(Loop& loop) {
    const auto found = std::find(open.begin(), open.end(), &loop);
    if (found == open.end()) return;
    open.erase(found);
    if (loop.urgency == Urgency::urgent && --urgent == 0) calm.notify_all();
  }

  void end(Loop& loop) {
    std::unique_lock lock(mutex);
    close(loop);
    left.wait(lock, [&] { return loop.helping == 0; });
  }

  // Blocks the caller of an ordinary loop during urgent loops: one more thread than cores would delay the other
  // threads.
  void stand_back() {
    if (urgent.load(std::memory_order_relaxed) == 0) return;
    std::unique_lock lock(mutex);
    calm.wait(lock, [&] { return urgent == 0; });
  }

  // Runs tasks of a loop. Returns whether this thread took the loop's last task.
  bool help(Loop& loop) const {
    for (;;) {
      const std::size_t index = loop.next.fetch_add(1);
      if (index >= loop.count) return true;
      loop.task(index);
      if (loop.urgency == Urgency::ordinary && urgent.load(std::memory_order_relaxed) > 0) return false;
    }
  }

  void serve() {
    std::unique_lock lock(mutex);
    for (;;) {
      work.wait(lock, [&] { return stop || !open.empty(); });
      if (stop) return;
      Loop& loop = *open.front();
      ++loop.helping;
      lock.unlock();
      const bool is_taken = help(loop);
      lock.lock();
      if (is_taken) close(loop);
      if (--loop.helping == 0) left.notify_all();
    }
  }
};

ThreadPool::ThreadPool(unsigned threads, int numa_node, int nice) : shared_(std::make_unique<Shared>(nice)) {
  if (threads == 0) throw std::invalid_argument("a thread pool needs at least one thread");
  try {
    for (unsigned index = 1; index < threads; ++index) {
      shared_->threads.emplace_back([shared = shared_.get(), numa_node] {
        name_thread("infinity-pool");
        run_on_node(numa_node);
        yield_by(shared->nice);
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
    // In a forked child the threads do not exist: do not join the threads, and do not destroy the objects that they
    // own.
    static_cast<void>(shared_.release());
    return;
  }
  shared_->stop_and_join();
}

unsigned ThreadPool::threads() const { return static_cast<unsigned>(shared_->threads.size()) + 1; }

int ThreadPool::nice() const { return shared_->nice; }

void ThreadPool::parallel_for(std::size_t count, const std::function<void(std::size_t)>& task,
                              const std::function<void()>& between, Urgency urgency) {
  Shared& shared = *shared_;
  Loop loop{task, count, urgency};
  const bool alone = shared.threads.empty() || count < 2;
  if (!alone) shared.begin(loop);
  for (std::size_t index = loop.next.fetch_add(1); index < count; index = loop.next.fetch_add(1)) {
    task(index);
    if (between) between();
    if (!alone && urgency == Urgency::ordinary) shared.stand_back();
  }
  if (!alone) shared.end(loop);
}

}  // namespace infinity
