// What the uploads know of their jobs and pieces, and what they do next.
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

// As with updates (update/driver.hpp), nothing here is locked: only the driver's thread calls these functions, but for
// those marked "any thread". Others post to the inbox.
class UploadDriver {
 public:
  UploadDriver(std::shared_ptr<Inbox> inbox, std::shared_ptr<IoEngine> engine, std::shared_ptr<const DeviceGate> gate,
               std::vector<UploadPiece> pieces, std::size_t piece_bytes);

  // As in Uploads.
  void submit(const std::shared_ptr<UploadWork>& job);
  void cancel(const Future& future);
  // Jobs that wait for the `after` of a part fail, and `run` returns when all is done.
  void stop() { stopping_ = true; }

  // The driver's thread.
  void run();

  // Any thread.
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

  const std::shared_ptr<Inbox> inbox_;  // outlives this: a device that was given up may answer late
  const std::shared_ptr<IoEngine> engine_;
  const std::shared_ptr<const DeviceGate> gate_;
  const std::size_t piece_bytes_;
  const std::shared_ptr<std::atomic<bool>> gave_up_ = std::make_shared<std::atomic<bool>>(false);

  std::deque<Job> jobs_;            // that are not done, in order
  std::deque<Transfer> under_way_;  // being read, or read and not copied; in order
  std::deque<Transfer> copied_;     // queued on a stream; the device may still read the pieces; in order
  std::vector<UploadPiece> free_;
  bool found_none_ = false;  // the next piece to read was counted as one without a piece
  bool stopping_ = false;
  std::optional<Failure> broken_;  // what ended the uploads

  std::atomic<std::uint64_t> read_bytes_{0};
  std::atomic<std::uint64_t> pieces_{0};
  std::atomic<std::uint64_t> without_a_piece_{0};
};

}  // namespace infinity
