// Interface between a lane, which knows requests, and the ways to move one block: io_uring, threads, faults.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "aio/file.hpp"

namespace infinity {

enum class OpKind : std::uint8_t { read, write, sync };

// One block transfer, or the fdatasync of a file, which has no data, no length and no offset. The completion returns
// `token`.
struct BlockOp {
  OpKind kind;
  const File* file;  // stays open until the completion
  std::byte* data;
  std::uint32_t nbytes;
  std::uint64_t offset;
  std::uint64_t token;
};

struct BlockResult {
  std::uint64_t token;
  std::int32_t res;  // bytes moved, 0 for a sync, or -errno, as io_uring reports it
};

// Used by one thread, the lane's, except wake().
//
// Invariant: every submitted op comes back exactly once, whether it succeeded or failed (except with a fault that loses
// it).
class Backend {
 public:
  virtual ~Backend() = default;
  [[nodiscard]] virtual std::string name() const = 0;
  // The configuration that was chosen, for the log.
  [[nodiscard]] virtual std::string details() const = 0;
  // The number of outstanding ops must not exceed the depth that the backend was made for.
  virtual void submit(const BlockOp& op) = 0;
  // Gives all submitted ops to the kernel or the workers, then appends completed ones to `results`. Blocks until there
  // are `at_least` results (1 or more), or fewer after wake(). Never throws for a failed transfer: `res` has its error.
  virtual void wait(std::vector<BlockResult>& results, unsigned at_least) = 0;
  // Makes the present or the next wait() return as soon as it has any result, even if it waits for several. Any thread.
  virtual void wake() = 0;
  // Registers the pages of this range with the kernel, which saves work for each transfer within the range. The range
  // must stay mapped until the backend is gone. Returns "" or why the kernel refused, which costs only speed.
  virtual std::string register_memory(std::byte* /*data*/, std::size_t /*nbytes*/) { return ""; }
  // Forgets a file that was closed, above all a registration that keeps it open.
  virtual void forget_file(std::uint64_t /*id*/) {}
};

// Registers files as it sees them. Throws std::system_error with the cause and the fix (seccomp,
// kernel.io_uring_disabled, memlock) if the kernel refuses. Must be called on the thread that will use the backend.
std::unique_ptr<Backend> make_uring_backend(unsigned queue_depth);
// Throws std::system_error if the system has no more threads.
std::unique_ptr<Backend> make_thread_backend(unsigned queue_depth, unsigned threads);

enum class FaultKind : std::uint8_t {
  error,      // fails with `error_number`; nothing is moved
  cut,        // moves only the first half of its bytes, rounded down to 4 KiB
  flip,       // one bit of the data is wrong
  stale,      // reported as done, but a write leaves the old bytes and a read leaves the memory unchanged
  misdirect,  // moves the block next to the right one
  delay,      // completes after the ops submitted after it
  shuffle,    // half of the ops complete after a random number of others, and now and then the device pauses
  lose,       // never completes
  kill,       // the process is killed before it is submitted
  kill_after  // the process is killed when it has completed
};

// A fault to inject into the `index`-th op that matches (from 0, counted over all lanes, continuations and retries
// included) and the `repeat` - 1 after it. An op matches if it has the requested kind, if any, and begins within
// [begin, end) of its file.
struct Fault {
  std::uint64_t index;
  FaultKind kind;
  int error_number = 0;
  std::uint64_t repeat = 1;
  std::optional<OpKind> operation = std::nullopt;
  std::uint64_t begin = 0;
  std::uint64_t end = ~std::uint64_t{0};
  std::uint64_t seed = 0;  // seed of the random choices in `shuffle`
};

// The faults of one engine, which all its lanes use, and its journal. If there is a journal, every write and sync is
// appended to it when it is submitted, and again when it has completed. From the journal a test can tell which data a
// power cut could have left.
//
// A record: one letter ('W' a write begins, 'w' it ended, 'S' and 's' a sync), 7 bytes of zeros, then little-endian 64
// bits each: a number that is the same for both ends, the result, the offset, the length of the data and that of the
// path; then the path and the data.
class FaultPlan {
 public:
  // `journal`: file to append to; empty for none. Throws std::system_error.
  FaultPlan(std::vector<Fault> faults, const std::string& journal);
  ~FaultPlan();
  FaultPlan(const FaultPlan&) = delete;
  FaultPlan& operator=(const FaultPlan&) = delete;

  // The fault of the op that is being submitted, or nullptr.
  const Fault* next(const BlockOp& op);
  // Random bits for `shuffle`, different at each call.
  std::uint64_t draw(const Fault& fault);
  // Neither does anything without a journal, or for a read. `began` returns the op's number.
  std::uint64_t began(const BlockOp& op);
  void ended(const BlockOp& op, std::uint64_t number, std::int32_t res);

 private:
  void append(char letter, std::uint64_t number, std::int64_t res, const BlockOp& op, bool with_data);

  const std::vector<Fault> faults_;
  int journal_ = -1;
  std::mutex mutex_;                 // guards the members below, and keeps each record contiguous
  std::vector<std::uint64_t> seen_;  // by fault: number of ops that matched
  std::uint64_t numbers_ = 0;
  std::uint64_t draws_ = 0;
};

std::unique_ptr<Backend> make_faulty_backend(std::unique_ptr<Backend> inner, std::shared_ptr<FaultPlan> plan);

}  // namespace infinity
