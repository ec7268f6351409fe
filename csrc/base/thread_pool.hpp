// A fixed set of compute threads. The pool does not use OpenMP: a second OpenMP runtime beside that of torch would
// oversubscribe the cores.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace infinity {

// A loop is urgent if a thread waits for the loop's result. Threads that work on other loops move to an urgent loop as
// soon as their current task ends. The callers of the other loops wait until all tasks of the urgent loop are taken.
enum class Urgency : std::uint8_t { ordinary, urgent };

class ThreadPool {
 public:
  // `threads` includes the calling thread: 1 runs everything inline and starts no thread. `numa_node`: node of the
  // started threads, or -1. `nice`: niceness relative to the process's other threads (setpriority); 0 for none. Throws
  // std::invalid_argument for 0 threads, std::system_error if the system has no more threads.
  explicit ThreadPool(unsigned threads, int numa_node = -1, int nice = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] unsigned threads() const;
  [[nodiscard]] int nice() const;

  // Runs task(0) … task(count - 1), each once, in no fixed order. The caller takes part, and returns when all tasks are
  // done. May be called from several threads at once: the threads help the loop that was called first among equally
  // urgent loops, and each caller works on its own loop. The caller also runs `between`, if given, after each of its
  // tasks. Neither `task` nor `between` may throw.
  void parallel_for(std::size_t count, const std::function<void(std::size_t)>& task,
                    const std::function<void()>& between = nullptr, Urgency urgency = Urgency::ordinary);

 private:
  struct Shared;
  std::unique_ptr<Shared> shared_;
};

// Lowers the priority of the calling thread by `nice`. If the system refuses, the priority stays as it is.
void yield_by(int nice);

}  // namespace infinity
