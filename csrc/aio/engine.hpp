// Engine that splits requests of any size into block transfers, with one future per request.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "aio/lane.hpp"
#include "aio/request.hpp"
#include "base/future.hpp"

namespace infinity {

// Options of the engine; the inherited options apply to the lane of each device.
struct EngineOptions : LaneOptions {
  std::chrono::nanoseconds deadline = std::chrono::seconds(300);  // a block that takes longer counts as lost
  std::vector<Fault> faults;                                      // for tests
  std::string journal;                                            // for tests: see FaultPlan; empty for none
};

// There is one lane per device (file system). Each lane has its own thread, ring, depth and order, so that a slow disk
// does not delay a fast disk. A watchdog gives up a device that does not answer (Lane::check).
//
// Invariant: the destructor returns only when no transfer is in flight, except transfers of devices that were given up.
// Requests that are still queued fail with ECANCELED.
class IoEngine {
 public:
  // Throws std::system_error if the engine must be io_uring and the kernel refuses it. Throws std::invalid_argument for
  // an unknown engine, a depth of zero, or a block size that is not a positive multiple of 4 KiB.
  explicit IoEngine(EngineOptions options);
  ~IoEngine();
  IoEngine(const IoEngine&) = delete;
  IoEngine& operator=(const IoEngine&) = delete;

  // Throws std::invalid_argument if a request is misaligned or empty.
  static void check(const IoRequest& request);

  // Throws the exceptions of `check`. Never waits for a device.
  Future submit(const IoRequest& request);

  // Submits the request once `first` is done; no thread waits for `first`. If `first` fails, the request fails with the
  // failure of `first`.
  static Future submit_after(const std::shared_ptr<IoEngine>& engine, const Future& first, const IoRequest& request);

  // Calls fdatasync on every member. When the future is done, writes that had completed before this call survive a
  // power cut. After a failure it is unknown which of these writes are durable; a second sync may succeed without
  // having written anything.
  Future sync(const std::shared_ptr<SwapFile>& file);

  // Registers the pages of this range with the kernel for all lanes (Backend::register_memory). The range must stay
  // mapped as long as the engine lives. Returns "" or why the kernel refused, which costs only processor time.
  std::string register_memory(std::byte* data, std::size_t nbytes);

  // "io_uring" or "threads": the engine in use.
  [[nodiscard]] const std::string& name() const;
  // Why the engine in use was chosen, for the log.
  [[nodiscard]] const std::string& reason() const;
  // Sums of the counters of all lanes; busy_ns is the maximum over the lanes.
  [[nodiscard]] LaneCounters counters() const;

  // Starts or stops recording every request that ends; at most `events_max` requests are recorded.
  void trace(bool on, std::size_t events_max);
  // Returns the events since the last call. Every request whose future is done is included; a request of a device that
  // was given up may be missing forever.
  [[nodiscard]] IoLog::Taken take_trace();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace infinity
