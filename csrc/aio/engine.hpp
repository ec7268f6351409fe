// Requests of any size in, block transfers out, one future per request.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "aio/backend.hpp"
#include "aio/file.hpp"
#include "base/future.hpp"

namespace infinity {

// Bulk traffic never delays a fetch: a class is served before those after it.
enum class IoClass : std::uint8_t { weights, activations, states };
inline constexpr std::size_t kIoClasses = 3;

struct IoRequest {
  OpKind kind;
  IoClass io_class;
  std::shared_ptr<File> file;
  std::uint64_t offset;  // bytes, 4 KiB-aligned when file->direct()
  std::byte* data;       // 4 KiB-aligned when file->direct(); must stay valid until the future is done
  std::size_t nbytes;    // bytes, a multiple of 4 KiB when file->direct()
};

struct EngineOptions {
  std::string engine = "auto";         // auto | io_uring | threads
  std::size_t block_bytes = 1u << 20;  // larger requests are cut to this
  unsigned queue_depth = 32;           // blocks in flight, over all requests
  unsigned threads = 8;                // of the thread engine
  std::vector<Fault> faults;           // for tests
};

struct EngineCounters {
  std::uint64_t read_bytes[kIoClasses] = {};  // bytes completed
  std::uint64_t write_bytes[kIoClasses] = {};
  std::uint64_t operations = 0;  // block ops submitted, continuations and retries included
  std::uint64_t retries = 0;     // EINTR, EAGAIN
  std::uint64_t short_transfers = 0;
  std::uint64_t busy_ns = 0;  // time with at least one block in flight
};

// One I/O thread owns the backend. Requests are queued per class and cut to blocks; the queue depth is held across
// requests, so the pipe does not drain between tensors.
//
// Every result is checked: short → continued from where it stopped, EINTR/EAGAIN → retried at most kRetriesMax times
// per block, anything else, and a read at the end of the file, → the request fails with a Failure that names path,
// offset, length and errno. The other blocks of a failed request are dropped if not yet submitted; its future completes
// only when none of its blocks is in flight, so the buffer may then be reused.
//
// Invariant: the destructor returns only when nothing is in flight; what was still queued fails with ECANCELED.
class IoEngine {
 public:
  static constexpr unsigned kRetriesMax = 16;

  // Throws std::system_error (engine: io_uring where the kernel refuses) or std::invalid_argument (unknown engine, zero
  // depth, block not a positive multiple of 4 KiB).
  explicit IoEngine(EngineOptions options);
  ~IoEngine();
  IoEngine(const IoEngine&) = delete;
  IoEngine& operator=(const IoEngine&) = delete;

  // Throws std::invalid_argument for misaligned or empty requests. Never blocks.
  Future submit(const IoRequest& request);

  // "io_uring" or "threads": what is really used.
  [[nodiscard]] const std::string& name() const;
  // Why: for the log.
  [[nodiscard]] const std::string& reason() const;
  [[nodiscard]] EngineCounters counters() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace infinity
