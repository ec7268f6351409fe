// The seam between a lane, which knows requests, and the ways to move one block: io_uring, threads, faults.
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
inline constexpr std::size_t kOpKinds = 3;

// One block transfer, or the fdatasync of a file, which has no data, no length and no offset. `token` comes back with
// its completion.
struct BlockOp {
  OpKind kind;
  const File* file;  // open until the completion
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
// Invariant: every submitted op comes back exactly once, whatever happened to it (but for a fault that loses it).
class Backend {
 public:
  virtual ~Backend() = default;
  [[nodiscard]] virtual std::string name() const = 0;
  // How it was set up, for the log.
  [[nodiscard]] virtual std::string details() const = 0;
  // At most as many ops as it was made for may be outstanding.
  virtual void submit(const BlockOp& op) = 0;
  // Hands everything submitted to the kernel or the workers, then appends what has completed to `results`. Blocks until
  // `at_least` results (1 or more) are there, fewer after wake(). Never throws for a failed transfer: that is in `res`.
  virtual void wait(std::vector<BlockResult>& results, unsigned at_least) = 0;
  // Makes a present or the next wait() return, where it waits for several results as soon as some are there. Any
  // thread.
  virtual void wake() = 0;
  // Has the kernel keep the pages of this range at hand, which saves it work for each transfer within. The range must
  // stay mapped until the backend is gone. Returns "" or why it was refused, which costs speed only.
  virtual std::string register_memory(std::byte* /*data*/, std::size_t /*nbytes*/) { return ""; }
  // A file was closed: forget what is known of it, above all a registration that holds it open.
  virtual void forget_file(std::uint64_t /*id*/) {}
};

// Told by the backend which files it registered. Throws std::system_error with the cause and the fix (seccomp,
// kernel.io_uring_disabled, memlock) where the kernel refuses. Must be called on the thread that will use it.
std::unique_ptr<Backend> make_uring_backend(unsigned queue_depth);
// Throws std::system_error when the system has no more threads.
std::unique_ptr<Backend> make_thread_backend(unsigned queue_depth, unsigned threads);

enum class FaultKind : std::uint8_t {
  error,      // fails with `error_number`; nothing is moved
  cut,        // moves only the first half of its bytes, rounded down to 4 KiB
  flip,       // one bit of what is moved is wrong
  stale,      // reported as done, but a write leaves the old bytes and a read leaves the memory alone
  misdirect,  // moves the block beside the right one
  delay,      // completes after those submitted after it
  shuffle,    // half of them complete after as many others as chance has it, now and then the device dawdles
  lose,       // never completes
  kill,       // the process is killed before it is submitted
  kill_after  // the process is killed when it has completed
};

// A fault to inject: the `index`-th op that matches (from 0, counted over all lanes, continuations and retries
// included) and the `repeat` - 1 after it. An op matches when it is of the kind asked for, if one is, and begins within
// [begin, end) of its file.
struct Fault {
  std::uint64_t index;
  FaultKind kind;
  int error_number = 0;
  std::uint64_t repeat = 1;
  std::optional<OpKind> operation = std::nullopt;
  std::uint64_t begin = 0;
  std::uint64_t end = ~std::uint64_t{0};
  std::uint64_t seed = 0;  // of the chance in `shuffle`
};

// The faults of one engine, shared by its lanes, and its journal: with one, every write and sync is appended to a file
// when it is submitted and when it has completed, so that a test can tell what a power cut could have left.
//
// A record: one letter ('W' a write begins, 'w' it ended, 'S' and 's' a sync), 7 bytes of zeros, then little-endian 64
// bits each: a number that is the same for both ends, the result, the offset, the length of the data and that of the
// path; then the path and the data.
class FaultPlan {
 public:
  // `journal`: appended to; empty for none. Throws std::system_error.
  FaultPlan(std::vector<Fault> faults, const std::string& journal);
  ~FaultPlan();
  FaultPlan(const FaultPlan&) = delete;
  FaultPlan& operator=(const FaultPlan&) = delete;

  // The fault of the op submitted now, or nullptr.
  const Fault* next(const BlockOp& op);
  // For `shuffle`: random bits, other ones at each call.
  std::uint64_t draw(const Fault& fault);
  // Both do nothing without a journal, or for a read. `began` returns the op's number.
  std::uint64_t began(const BlockOp& op);
  void ended(const BlockOp& op, std::uint64_t number, std::int32_t res);

 private:
  void append(char letter, std::uint64_t number, std::int64_t res, const BlockOp& op, bool with_data);

  const std::vector<Fault> faults_;
  int journal_ = -1;
  std::mutex mutex_;                 // guards what follows, and keeps a record in one piece
  std::vector<std::uint64_t> seen_;  // by fault: ops that matched
  std::uint64_t numbers_ = 0;
  std::uint64_t draws_ = 0;
};

std::unique_ptr<Backend> make_faulty_backend(std::unique_ptr<Backend> inner, std::shared_ptr<FaultPlan> plan);

}  // namespace infinity
