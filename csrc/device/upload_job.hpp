// A job of the uploads while it is worked on, and the piece of it that is under way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/future.hpp"
#include "device/uploads.hpp"

namespace infinity {

//   queued  ──▶ reading  its first piece is being read
//   reading ──▶ copying  its last piece is being read
//   copying ──▶ done     its last copy is queued on the stream
//   queued, reading, copying ──▶ ending   it failed or was canceled
//   ending  ──▶ done     nothing of it is in flight
enum class UploadPhase : std::uint8_t {
  queued,   // nothing of it was read
  reading,  // there are pieces that are not being read yet
  copying,  // all its pieces are being read, or are read
  ending,   // nothing more of it is read or copied
  done,     // its future is done
};

// Only the driver's thread touches it.
struct UploadWork {
  UploadJob given;
  Future future = std::make_shared<Completion>();
  UploadPhase phase = UploadPhase::queued;
  std::vector<bool> arrived;  // for each part: what it waits for is done
  std::size_t part = 0;       // of the next piece to read
  std::uint64_t begin = 0;    // where in that part it begins, in bytes
  unsigned reads = 0;         // under way
  bool copied = false;        // its first copy was queued
  std::optional<Failure> failure;

  // Throws std::logic_error for a step that is not listed above.
  void go(UploadPhase to);

  [[nodiscard]] bool to_read() const { return phase == UploadPhase::queued || phase == UploadPhase::reading; }
  // The next piece may be read. Only where there is one.
  [[nodiscard]] bool may_read() const { return arrived[part]; }
};

// A piece of the landing memory, and the event that is reached when the device has read it.
struct UploadPiece {
  std::byte* memory;
  void* event;
};

// A piece of a job on its way through a piece of the landing memory.
struct UploadTransfer {
  std::shared_ptr<UploadWork> job;
  UploadPiece piece;
  std::byte* address;  // of the device
  std::size_t nbytes;
  bool read = false;  // it is in the landing memory
  bool last = false;  // of its job
};

}  // namespace infinity
