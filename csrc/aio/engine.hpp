// Requests of any size in, block transfers out, one future per request.
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

// The lane's options are those of each device.
struct EngineOptions : LaneOptions {
  std::chrono::nanoseconds deadline = std::chrono::seconds(300);  // a block that takes longer never comes
  std::vector<Fault> faults;                                      // for tests
  std::string journal;                                            // for tests: see FaultPlan; empty for none
};

// One lane per device (file system): each has its own thread, ring, depth and order, so that a slow disk does not hold
// up a fast one. A watchdog gives a device up that does not answer (Lane::check).
//
// Invariant: the destructor returns only when nothing is in flight, or the device was given up; what was still queued
// fails with ECANCELED.
class IoEngine {
 public:
  // Throws std::system_error (engine: io_uring where the kernel refuses) or std::invalid_argument (unknown engine, zero
  // depth, block not a positive multiple of 4 KiB).
  explicit IoEngine(EngineOptions options);
  ~IoEngine();
  IoEngine(const IoEngine&) = delete;
  IoEngine& operator=(const IoEngine&) = delete;

  // Throws std::invalid_argument for misaligned or empty requests.
  static void check(const IoRequest& request);

  // Throws as `check`. Never waits for a device.
  Future submit(const IoRequest& request);

  // The same once `first` is done, without a thread that waits for it; a failure of `first` is the result.
  static Future submit_after(const std::shared_ptr<IoEngine>& engine, const Future& first, const IoRequest& request);

  // fdatasync of every member: when the future is done, what was written and completed before this call survives a
  // power cut. After a failure nothing is known of any of it; a second sync may succeed without having written a thing.
  Future sync(const std::shared_ptr<SwapFile>& file);

  // Has the kernel keep these pages at hand for all lanes (Backend::register_memory). They must stay mapped as long as
  // the engine lives. Returns "" or why it was refused, which costs processor time only.
  std::string register_memory(std::byte* data, std::size_t nbytes);

  // "io_uring" or "threads": what is really used.
  [[nodiscard]] const std::string& name() const;
  // Why: for the log.
  [[nodiscard]] const std::string& reason() const;
  // Sums over the lanes; busy_ns is the longest.
  [[nodiscard]] LaneCounters counters() const;
  // From submission to completion of each block, in nanoseconds.
  [[nodiscard]] Histogram::Counts latencies(OpKind kind) const;

  // From now on every request that ends is recorded, at most `events_max` of them, or no more is.
  void trace(bool on, std::size_t events_max);
  // What was recorded since it was last taken. A request whose future is done is in it; one of a device that was given
  // up may never be.
  [[nodiscard]] IoLog::Taken take_trace();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace infinity
