// The driver of the uploads: the state of jobs and pieces, and the choice of the next action.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "aio/engine.hpp"
#include "base/inbox.hpp"
#include "device/gate.hpp"
#include "device/upload_job.hpp"

namespace infinity {

// Like the driver of updates (update/driver.hpp), this driver has no locks: only the driver's thread calls these
// functions, except those marked "any thread". Other threads post to the inbox.
class UploadDriver {
 public:
  UploadDriver(std::shared_ptr<Inbox> inbox, std::shared_ptr<IoEngine> engine, std::shared_ptr<const DeviceGate> gate,
               std::vector<UploadPiece> pieces, std::size_t piece_bytes);

  // See Uploads.
  void submit(const std::shared_ptr<UploadWork>& job);
  void cancel(const Future& future);
  // Fails the jobs that wait for the `after` future of a part. After this call, `run` returns when all other jobs are
  // done.
  void stop() { stopping_ = true; }

  // Called by the driver's thread.
  void run();

  // Called by any thread.
  [[nodiscard]] UploadCounters counters() const;
  [[nodiscard]] std::shared_ptr<const std::atomic<bool>> gave_up() const { return gave_up_; }

 private:
  using Job = std::shared_ptr<UploadWork>;
  using Transfer = std::shared_ptr<UploadTransfer>;

  void arrived(const Job& job, std::size_t part, const std::optional<Failure>& failure);
  bool copy_next();
  bool read_next();
  bool reuse_oldest();
  [[nodiscard]] Job next_to_read() const;
  [[nodiscard]] Transfer take_piece(const Job& job);
  void was_read(const Transfer& transfer, const std::optional<Failure>& failure);
  void copy(const Transfer& transfer);
  [[nodiscard]] std::optional<Failure> queue_waits(UploadWork& job) const;

  void fail(const Job& job, const Failure& failure);
  void fail_all();
  void cancel_waiting();
  void end_if_idle(const Job& job);
  void wait_for_copies(const Job& job);
  void wait_for_all_copies();
  void lose(const Failure& failure);
  void free(const UploadPiece& piece);
  void finish(const Job& job);

  const std::shared_ptr<Inbox> inbox_;  // outlives this object: a device that was given up may answer late
  const std::shared_ptr<IoEngine> engine_;
  const std::shared_ptr<const DeviceGate> gate_;
  const std::size_t piece_bytes_;
  const std::shared_ptr<std::atomic<bool>> gave_up_ = std::make_shared<std::atomic<bool>>(false);

  std::deque<Job> jobs_;            // jobs that are not done, in order
  std::deque<Transfer> under_way_;  // transfers whose copy is not queued yet; in order
  std::deque<Transfer> copied_;     // transfers queued on a stream: the device may still read the pieces; in order
  std::vector<UploadPiece> free_;
  bool found_none_ = false;  // without_a_piece already counts the next piece to read
  bool stopping_ = false;
  std::optional<Failure> broken_;  // the failure that ended the uploads

  std::atomic<std::uint64_t> read_bytes_{0};
  std::atomic<std::uint64_t> pieces_{0};
  std::atomic<std::uint64_t> without_a_piece_{0};
};

}  // namespace infinity
