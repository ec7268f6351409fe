// A job of the uploads, and a piece of a job in flight.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/future.hpp"
#include "device/uploads.hpp"

namespace infinity {

//   queued  ──▶ reading  the read of the job's first piece was started
//   reading ──▶ copying  the read of the job's last piece was started
//   copying ──▶ done     the job's last copy is queued on the stream
//   queued, reading, copying ──▶ ending   the job failed or was canceled
//   ending  ──▶ done     nothing of the job is in flight
enum class UploadPhase : std::uint8_t {
  queued,   // no read was started
  reading,  // some reads were not started yet
  copying,  // all reads were started
  ending,   // no more reads or copies are started
  done,     // the job's future is done
};

// Only the driver's thread accesses a job.
struct UploadWork {
  UploadJob given;
  Future future = std::make_shared<Completion>();
  UploadPhase phase = UploadPhase::queued;
  std::vector<bool> arrived;  // for each part: the part's `after` is done
  std::size_t part = 0;       // part of the next piece to read
  std::uint64_t begin = 0;    // offset of that piece in its part, in bytes
  unsigned reads = 0;         // reads in flight
  bool copied = false;        // the job's first copy was queued
  std::optional<Failure> failure;

  // Throws std::logic_error for a transition that is not listed above.
  void go(UploadPhase to);

  [[nodiscard]] bool to_read() const { return phase == UploadPhase::queued || phase == UploadPhase::reading; }
  // Whether the next piece may be read. There must be one.
  [[nodiscard]] bool may_read() const { return arrived[part]; }
};

// A piece of the bounce buffer, and the event that happens when the device has read it.
struct UploadPiece {
  std::byte* memory;
  void* event;
};

// A transfer of a job's piece through a piece of the bounce buffer.
struct UploadTransfer {
  std::shared_ptr<UploadWork> job;
  UploadPiece piece;
  std::byte* address;  // destination in the device's memory
  std::size_t nbytes;
  bool read = false;  // the bytes are in the bounce buffer
  bool last = false;  // last piece of the job
};

}  // namespace infinity
