// Uploads of weights from swap files to a device: read → copy, in pieces; several pieces are in flight at once.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "aio/engine.hpp"
#include "base/future.hpp"
#include "device/gate.hpp"

namespace infinity {

// A range of a file, and the range's destination in the device's memory.
struct UploadPart {
  std::shared_ptr<SwapFile> file;
  std::uint64_t offset = 0;      // bytes, 4 KiB-aligned
  std::uint64_t nbytes = 0;      // bytes; the file is read to the end of the last page
  std::byte* address = nullptr;  // destination in the device's memory
  bool verify = true;            // the pages are compared with their checksums
  Future after;                  // the part is read when `after` is done, or fails with `after`; null: read at once
};

struct UploadJob {
  std::vector<UploadPart> parts;  // read and copied in this order
  void* stream = nullptr;
  std::vector<void*> waits;  // events that the stream waits for before the first copy
  void* ready = nullptr;     // event that is recorded after the last copy
};

struct UploadCounters {
  std::uint64_t read_bytes = 0;       // bytes that were read
  std::uint64_t pieces = 0;           // pieces that were given to the engine
  std::uint64_t without_a_piece = 0;  // pieces that could have been read when no piece of the bounce buffer was free
};

// Jobs run in the order in which they are submitted. Pieces of a job are read as long as the bounce buffer has free
// pieces. The pieces of a job are read while the last pieces of the job before it are copied. Copies are queued on the
// job's stream, in order, as soon as their pieces are read. A job is done when its last copy and the event `ready` are
// queued: from then on streams can wait for `ready`.
//
// A job that fails queues no more copies. The future of a failed job fails once nothing of the job is in flight: the
// reads have ended, and the device has done the queued copies, so that the device's memory is free again.
//
// [Note: back-pressure] A piece of the bounce buffer is reused once the device has read the piece. If no piece is
// free, the driver's thread waits for the event of the oldest copy; no other thread waits for that event.
//
// Invariant: two kinds of failure end the uploads. The first is a timeout (FailureKind) of a read. The second is an
// error of the runtime in `record` after a copy or in `synchronize`, which leaves open whether the device still reads a
// piece. After either failure no bounce buffer is reused, and every present and later job fails with that failure.
//
// The driver completes the futures: their callbacks must not block.
class Uploads {
 public:
  // `bounce` is 4 KiB-aligned and pinned. `bounce` has one piece of `piece_bytes` (a multiple of 4 KiB) for each
  // event in `events`; no event occurs twice. Throws std::invalid_argument otherwise. Keeps `engine` alive.
  Uploads(std::shared_ptr<IoEngine> engine, std::shared_ptr<const DeviceGate> gate, std::byte* bounce,
          std::size_t bounce_bytes, std::size_t piece_bytes, const std::vector<void*>& events);
  // Waits for all jobs that were submitted, and until the device has read all of the bounce buffer. Jobs that still
  // wait for the `after` future of a part fail with ECANCELED.
  ~Uploads();
  Uploads(const Uploads&) = delete;
  Uploads& operator=(const Uploads&) = delete;

  // Throws std::invalid_argument for a job without parts, or a part that the engine cannot read.
  Future upload(UploadJob job);
  // Stops reading and copying a job. The job fails with ECANCELED once nothing of the job is in flight, unless its last
  // copy was already queued. Does not wait.
  void cancel(const Future& job);
  [[nodiscard]] UploadCounters counters() const;
  // True once a device may use the bounce buffer forever; in that case the bounce buffer must never be freed. The
  // flag outlives the uploads.
  [[nodiscard]] std::shared_ptr<const std::atomic<bool>> abandoned() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace infinity
