// A fixed set of compute threads. Our own, because a second OpenMP runtime beside torch's oversubscribes the cores.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace infinity {

// What somebody waits for is urgent. Threads leave other loops for it, after the task that they are at, and the callers
// of other loops wait until all its tasks are taken.
enum class Urgency : std::uint8_t { ordinary, urgent };

class ThreadPool {
 public:
  // `threads` counts the calling thread: 1 runs everything inline and starts none. Throws std::invalid_argument for 0,
  // std::system_error when the system has no more threads. `numa_node`: where the started threads run, or -1. `nice`:
  // by how much they yield to the process's other threads (setpriority); 0: not at all.
  explicit ThreadPool(unsigned threads, int numa_node = -1, int nice = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] unsigned threads() const;
  [[nodiscard]] int nice() const;

  // Runs task(0) … task(count - 1), each once, in no fixed order; the caller takes part and returns when all are done.
  // May be called from several threads at once: of loops that are equally urgent, the threads help the one that came
  // first, and each caller works on its own meanwhile. The caller also runs `between`, if there is one, after each of
  // its tasks. Neither may throw.
  void parallel_for(std::size_t count, const std::function<void(std::size_t)>& task,
                    const std::function<void()>& between = nullptr, Urgency urgency = Urgency::ordinary);

 private:
  struct Shared;
  std::unique_ptr<Shared> shared_;
};

// The calling thread yields to the process's other threads, by `nice`. Refused without harm.
void yield_by(int nice);

}  // namespace infinity
