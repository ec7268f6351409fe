// The seam between the engine, which knows requests, and the ways to move one block: io_uring, threads, faults.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace infinity {

enum class OpKind : std::uint8_t { read, write };

// One block transfer. `token` comes back with its completion.
struct BlockOp {
  OpKind kind;
  int fd;
  std::byte* data;
  std::uint32_t nbytes;
  std::uint64_t offset;
  std::uint64_t token;
};

struct BlockResult {
  std::uint64_t token;
  std::int32_t res;  // bytes moved, or -errno, as io_uring reports it
};

// Used by one thread, the engine's, except wake().
//
// Invariant: every submitted op comes back exactly once, whatever happened to it.
class Backend {
 public:
  virtual ~Backend() = default;
  [[nodiscard]] virtual std::string name() const = 0;
  // How it was set up, for the log.
  [[nodiscard]] virtual std::string details() const = 0;
  // At most `capacity()` ops may be outstanding.
  [[nodiscard]] virtual unsigned capacity() const = 0;
  virtual void submit(const BlockOp& op) = 0;
  // Hands everything submitted to the kernel or the workers, then appends what has completed to `results`. Blocks until
  // at least one result is there or wake() was called. Never throws for a failed transfer: that is in `res`.
  virtual void wait(std::vector<BlockResult>& results) = 0;
  // Makes a present or the next wait() return. Any thread.
  virtual void wake() = 0;
};

// Throws std::system_error with the cause and the fix (seccomp, kernel.io_uring_disabled, memlock) where the kernel
// refuses. Must be called on the thread that will use it.
std::unique_ptr<Backend> make_uring_backend(unsigned queue_depth);
// Throws std::system_error when the system has no more threads.
std::unique_ptr<Backend> make_thread_backend(unsigned queue_depth, unsigned threads);

// A fault to inject: the `index`-th block op submitted (from 0, counted over reads and writes, continuations and
// retries included) fails with `error_number`, or, where that is 0, moves only the first half of its bytes (rounded
// down to 4 KiB).
struct Fault {
  std::uint64_t index;
  int error_number;
  std::uint64_t repeat = 1;  // this many ops from `index` on
};
std::unique_ptr<Backend> make_faulty_backend(std::unique_ptr<Backend> inner, std::vector<Fault> faults);

}  // namespace infinity
