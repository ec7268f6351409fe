// The queue of one device: a thread, its ring, and the order in which blocks are given to them.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "aio/backend.hpp"
#include "aio/request.hpp"

namespace infinity {

struct LaneOptions {
  std::string engine = "auto";              // auto | io_uring | threads
  std::size_t block_bytes = 1u << 20;       // larger requests are divided into blocks of this size
  unsigned queue_depth = 128;               // blocks in flight
  std::size_t in_flight_bytes = 32u << 20;  // limit on the sum of all blocks in flight; one block is always allowed
  unsigned threads = 8;                     // threads of the thread engine
  std::shared_ptr<FaultPlan> plan;          // faults to inject in tests; may be null
};

struct LaneCounters {
  std::uint64_t read_bytes[kIoClasses] = {};  // bytes completed
  std::uint64_t write_bytes[kIoClasses] = {};
  std::uint64_t operations = 0;  // block ops submitted, continuations and retries included
  std::uint64_t retries = 0;     // blocks tried again after EINTR or EAGAIN
  std::uint64_t short_transfers = 0;
  std::uint64_t busy_ns = 0;    // time with at least one block in flight
  std::uint64_t in_flight = 0;  // blocks in flight now
};

// One thread owns the backend. Parts of requests are queued by class and divided into blocks (see part.hpp). Blocks of
// several requests are in flight at once, so the pipeline does not drain between tensors.
//
// Every result is checked:
//
//   a short transfer                         continues from where it stopped
//   EINTR, EAGAIN                            is retried, at most kRetriesMax times for a block
//   a page that differs from its checksum    fails the request as corruption
//   any other error, the end of the file     fails the request with a Failure that names path, offset, length and errno
//   a failed sync                            is never retried: the kernel may have dropped the unwritten pages
//
// When a request fails, its blocks that were not submitted yet are dropped. A part of a request is finished only when
// none of the part's blocks is in flight.
//
// Life cycle: open() → submit()… → close(). A lane whose device does not answer is abandoned: its requests fail, its
// thread and its ring are never freed, and every later submit() fails at once.
class Lane : public FileWatcher, public std::enable_shared_from_this<Lane> {
 public:
  static constexpr unsigned kRetriesMax = 16;

  // Throws std::system_error if the engine must be io_uring and the kernel refuses it.
  static std::shared_ptr<Lane> open(LaneOptions options);
  ~Lane() override;

  // Queues the part of `request` whose bytes are in `members`, a mask with one bit for each member of the file. Never
  // blocks.
  void submit(std::shared_ptr<Request> request, std::uint64_t members);
  // See Backend::register_memory. Waits for the lane's thread.
  std::string register_memory(std::byte* data, std::size_t nbytes);
  // Restricts the thread to the processors of a NUMA node.
  void run_on(int numa_node);
  void file_closed(std::uint64_t id) override;

  // Abandons the lane if a block has been in flight for longer than `deadline`.
  void check(std::chrono::nanoseconds deadline);
  // Fails queued requests with ECANCELED. Waits for blocks in flight, unless the lane is abandoned before or during the
  // wait.
  void close();

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const std::string& reason() const { return reason_; }
  [[nodiscard]] LaneCounters counters() const;

 private:
  class Server;
  using Task = std::function<void(Backend&)>;

  explicit Lane(LaneOptions options);
  std::unique_ptr<Backend> make_backend();
  void serve(std::promise<void>& opened);
  void abandon(const std::string& cause);
  bool post(Task task);  // returns false if the lane is closed or abandoned
  void finished(const std::shared_ptr<Request>& request);

  const LaneOptions options_;
  std::string name_;
  std::string reason_;
  std::thread thread_;

  mutable std::mutex mutex_;  // guards the members up to the blank line
  std::condition_variable changed_;
  Backend* backend_ = nullptr;  // owned by the thread; null before the thread starts and after it ends
  std::vector<std::pair<std::shared_ptr<Request>, std::uint64_t>> incoming_;
  std::vector<Task> tasks_;
  std::unordered_set<std::shared_ptr<Request>> live_;
  bool listening_ = false;  // the thread could start more blocks but is about to wait: a new request must wake it
  bool stop_ = false;
  bool abandoned_ = false;
  std::string abandoned_because_;
  bool ended_ = false;  // the thread has used this object for the last time

  // Written only by the lane's thread.
  std::vector<std::atomic<std::uint64_t>> started_ns_;  // by token; 0: the token is free
  std::atomic<std::uint64_t> read_bytes_[kIoClasses] = {};
  std::atomic<std::uint64_t> write_bytes_[kIoClasses] = {};
  std::atomic<std::uint64_t> operations_{0};
  std::atomic<std::uint64_t> retries_{0};
  std::atomic<std::uint64_t> short_transfers_{0};
  std::atomic<std::uint64_t> busy_ns_{0};
  std::atomic<std::uint64_t> busy_since_ns_{0};  // 0: the lane is idle
  std::atomic<std::uint64_t> in_flight_{0};
};

}  // namespace infinity
