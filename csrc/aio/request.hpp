// A request, and the request's state that all lanes with a part of the request share.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "aio/backend.hpp"
#include "aio/swap_file.hpp"
#include "base/clock.hpp"
#include "base/event_log.hpp"
#include "base/future.hpp"

namespace infinity {

// A class is served before the classes after it, so that bulk traffic never delays a fetch. `writeback` is for new
// states that are written to their home: these writes are the least urgent.
enum class IoClass : std::uint8_t { weights, activations, states, writeback };
inline constexpr std::size_t kIoClasses = 4;

// A sync has no offset and no data; its `nbytes` is the number of the file's members.
struct IoRequest {
  OpKind kind;
  IoClass io_class;
  std::shared_ptr<SwapFile> file;
  std::uint64_t offset;  // bytes, 4 KiB-aligned when file->direct() or with checksums
  std::byte* data;       // 4 KiB-aligned when file->direct(); must stay valid until the future is done
  std::size_t nbytes;    // bytes, a multiple of 4 KiB when file->direct() or with checksums
  // The caller handles the checksums while the bytes are in the cache: it calls file->take() or put() before a write,
  // and file->check() after a read.
  bool caller_checks = false;
  std::uint64_t tag = 0;  // the caller's number for the trace
};

// Record of one request in an engine's trace. Python parses the bytes of this struct (infinity/io/events.py).
struct IoEvent {
  std::uint64_t begin_ns;  // when it was submitted
  std::uint64_t start_ns;  // when the device got the first block; 0: the request failed before
  std::uint64_t end_ns;
  std::uint64_t offset;  // as in the request
  std::uint64_t nbytes;  // bytes moved; 0 for a sync and for a failed request
  std::uint64_t tag;
  OpKind kind;
  IoClass io_class;
  bool failed;
  std::uint8_t unused[5] = {};
};
static_assert(sizeof(IoEvent) == 56);
using IoLog = EventLog<IoEvent>;

// One request in flight. The parts of a request, one per lane, fail and finish independently. The future completes
// after the last part, with the first failure.
//
// Invariant: no device uses memory of the request once its future is done, unless the request failed with a timeout.
class Request {
 public:
  // Engine and requests share the log, because a request of a device that was given up outlives its engine.
  Request(IoRequest given, unsigned parts, std::shared_ptr<IoLog> log)
      : io(std::move(given)), path(io.file->members()[0]->path()), parts_(parts), log_(std::move(log)) {}

  IoRequest io;
  const std::string path;  // path of the file's first member
  const Future future = std::make_shared<Completion>();

  [[nodiscard]] bool failed() const { return failed_; }

  // Records that a block of the request was given to a device.
  void started(std::uint64_t at_ns) {
    std::uint64_t none = 0;
    start_ns_.compare_exchange_strong(none, at_ns, std::memory_order_relaxed);
  }

  // Records a failure of the request; only the first one is kept.
  void fail(Failure failure) {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = std::move(failure);
    failed_ = true;
  }

  void finish_part() {
    if (--parts_ > 0) return;
    const std::uint64_t nbytes = failed_ || io.kind == OpKind::sync ? 0 : io.nbytes;
    log_->add({begin_ns_, start_ns_, now_ns(), io.offset, nbytes, io.tag, io.kind, io.io_class, failed_});
    io.file.reset();  // released first: a caller who sees the future done and closes the file must find the file closed
    std::optional<Failure> failure;
    {
      const std::lock_guard lock(mutex_);
      failure = failure_;
    }
    future->complete(std::move(failure));
  }

  // Completes the future of a request whose transfers may never end.
  void abandon(const Failure& failure) {
    fail(failure);
    future->complete(failure);
  }

 private:
  std::atomic<unsigned> parts_;
  std::atomic<bool> failed_{false};
  const std::shared_ptr<IoLog> log_;
  const std::uint64_t begin_ns_ = now_ns();
  std::atomic<std::uint64_t> start_ns_{0};
  std::mutex mutex_;  // guards failure_
  std::optional<Failure> failure_;
};

}  // namespace infinity
