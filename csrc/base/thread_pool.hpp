// A fixed set of compute threads. Our own, because a second OpenMP runtime beside torch's oversubscribes the cores.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace infinity {

class ThreadPool {
 public:
  // `threads` counts the calling thread: 1 runs everything inline and starts none. Throws std::invalid_argument for 0,
  // std::system_error when the system has no more threads. `numa_node`: where the started threads run, or -1.
  explicit ThreadPool(unsigned threads, int numa_node = -1);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] unsigned threads() const;

  // Runs task(0) … task(count - 1), each once, in no fixed order; the caller takes part and returns when all are done.
  // May be called from several threads; the calls run one after the other. The caller also runs `between`, if there is
  // one, after each of its tasks. Neither may throw.
  void parallel_for(std::size_t count, const std::function<void(std::size_t)>& task,
                    const std::function<void()>& between = nullptr);

 private:
  struct Shared;
  std::unique_ptr<Shared> shared_;
};

}  // namespace infinity
