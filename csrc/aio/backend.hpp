// Interface between a lane, which handles requests, and the backends that move one block: io_uring, threads, injected
// faults.
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
  const File* file;  // stays open until the op's completion
  std::byte* data;
  std::uint32_t nbytes;
  std::uint64_t offset;
  std::uint64_t token;
};

struct BlockResult {
  std::uint64_t token;
  std::int32_t res;  // bytes moved, 0 for a sync, or -errno, as io_uring reports it
};

// Only the lane's thread may call these functions; any thread may call wake().
//
// Invariant: every submitted op has exactly one result, whether the op succeeded or failed. Only an injected fault of
// kind `lose` may lose a result.
class Backend {
 public:
  virtual ~Backend() = default;
  [[nodiscard]] virtual std::string name() const = 0;
  // Description of the backend's configuration, for the log.
  [[nodiscard]] virtual std::string details() const = 0;
  // The number of outstanding ops must not exceed the depth that the backend was made for.
  virtual void submit(const BlockOp& op) = 0;
  // Gives all submitted ops to the kernel or the workers, then appends the results of completed ops. Blocks until there
  // are `at_least` results (1 or more); after wake(), fewer results are enough. Never throws for a failed transfer:
  // `res` has its error.
  virtual void wait(std::vector<BlockResult>& results, unsigned at_least) = 0;
  // Makes the present or the next wait() return as soon as there is any result, even if that wait() asked for several.
  // May be called by any thread.
  virtual void wake() = 0;
  // Registers the pages of this range with the kernel, which saves work for each transfer within the range. The range
  // must stay mapped until the backend is destroyed. Returns "" or why the kernel refused, which costs only speed.
  virtual std::string register_memory(std::byte* /*data*/, std::size_t /*nbytes*/) { return ""; }
  // Forgets a closed file; in particular, removes a registration that still keeps the file open.
  virtual void forget_file(std::uint64_t /*id*/) {}
};

// The backend registers a file with the ring when the first op on this file is submitted. Throws std::system_error with
// the cause and the fix (seccomp, kernel.io_uring_disabled, memlock) if the kernel refuses. Must be called on the
// thread that will use the backend.
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

// A fault to inject into `repeat` successive matching ops, starting with the `index`-th (from 0, counted over all
// lanes, continuations and retries included). An op matches if it begins within [begin, end) of its file and has the
// kind `operation` (any kind if `operation` is not set).
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

// The faults of one engine, which all lanes of the engine use, and the engine's journal. If there is a journal, every
// write and sync gets a record when the op is submitted, and another record when the op has completed. From the journal
// a test can derive which data may be on the disk after a power cut.
//
// A record begins with one letter ('W': a write begins, 'w': a write ended; 'S' and 's': the same for a sync) and 7
// bytes of zeros. Five little-endian 64-bit numbers follow: the op's number (the same in both records of an op), the
// result, the offset, the length of the data, the length of the path. The path and the data come last.
class FaultPlan {
 public:
  // `journal`: path of the journal, to which records are appended; empty for no journal. Throws std::system_error.
  FaultPlan(std::vector<Fault> faults, const std::string& journal);
  ~FaultPlan();
  FaultPlan(const FaultPlan&) = delete;
  FaultPlan& operator=(const FaultPlan&) = delete;

  // The fault of the op that is being submitted, or nullptr.
  const Fault* next(const BlockOp& op);
  // Random bits for `shuffle`, different at each call.
  std::uint64_t draw(const Fault& fault);
  // Appends the record of an op that begins or has ended. Without a journal, or for a read, nothing is appended.
  // `began` returns the op's number.
  std::uint64_t began(const BlockOp& op);
  void ended(const BlockOp& op, std::uint64_t number, std::int32_t res);

 private:
  void append(char letter, std::uint64_t number, std::int64_t res, const BlockOp& op, bool with_data);

  const std::vector<Fault> faults_;
  int journal_ = -1;
  std::mutex mutex_;                 // guards the members below, and keeps each record contiguous
  std::vector<std::uint64_t> seen_;  // by fault: number of matching ops so far
  std::uint64_t numbers_ = 0;
  std::uint64_t draws_ = 0;
};

std::unique_ptr<Backend> make_faulty_backend(std::unique_ptr<Backend> inner, std::shared_ptr<FaultPlan> plan);

}  // namespace infinity
