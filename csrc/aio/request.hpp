// A request, and what the lanes that serve its parts share of it.
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
#include "base/future.hpp"

namespace infinity {

// Bulk traffic never delays a fetch: a class is served before those after it.
enum class IoClass : std::uint8_t { weights, activations, states };
inline constexpr std::size_t kIoClasses = 3;

// A sync has no offset, no data, and as many "bytes" as its file has members.
struct IoRequest {
  OpKind kind;
  IoClass io_class;
  std::shared_ptr<SwapFile> file;
  std::uint64_t offset;  // bytes, 4 KiB-aligned when file->direct() or with checksums
  std::byte* data;       // 4 KiB-aligned when file->direct(); must stay valid until the future is done
  std::size_t nbytes;    // bytes, a multiple of 4 KiB when file->direct() or with checksums
  // The caller has the bytes in its cache and keeps the checksums itself: file->take() before a write, file->check()
  // after a read.
  bool caller_checks = false;
};

// One request under way. Its parts, one per lane, fail and finish independently; the future completes after the last,
// with the first failure.
//
// Invariant: no memory of the request is in use by a device once its future is done, unless it failed by a timeout.
class Request {
 public:
  Request(IoRequest given, unsigned parts) : io(std::move(given)), path(io.file->members()[0]->path()), parts_(parts) {}

  IoRequest io;
  const std::string path;  // of the file's first member
  const Future future = std::make_shared<Completion>();

  [[nodiscard]] bool failed() const { return failed_; }

  // The first failure counts.
  void fail(Failure failure) {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = std::move(failure);
    failed_ = true;
  }

  void finish_part() {
    if (--parts_ > 0) return;
    io.file.reset();  // first: who sees the future done and closes the file finds it closed
    std::optional<Failure> failure;
    {
      const std::lock_guard lock(mutex_);
      failure = failure_;
    }
    future->complete(std::move(failure));
  }

  // Completes the future although transfers may never end.
  void abandon(const Failure& failure) {
    fail(failure);
    future->complete(failure);
  }

 private:
  std::atomic<unsigned> parts_;
  std::atomic<bool> failed_{false};
  std::mutex mutex_;  // guards failure_
  std::optional<Failure> failure_;
};

}  // namespace infinity
