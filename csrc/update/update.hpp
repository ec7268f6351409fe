// One unit's optimizer work: read states → Adam → write states, in tiles, all three in flight.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "aio/engine.hpp"
#include "base/event_log.hpp"
#include "base/future.hpp"
#include "base/thread_pool.hpp"
#include "cpu_adam/optimizer.hpp"

namespace infinity {

// Where one state of a job lives. Memory only: updated in place. File only: read into staging, written back. Both:
// memory is current, is updated in place, and what was updated is written to the file too. Element 0 of the job is at
// memory[0], is read from file offset `offset` and written to `write_offset`, which may be the same place; each is 4
// KiB-aligned and has room for the last tile rounded up to 4 KiB.
//
// Two ways to have the new values in another place of memory than the old ones: `source` (weights only) holds the
// current values and stays as it is; without `current` they are read from the file into `memory`.
struct StateStream {
  std::byte* memory = nullptr;
  std::shared_ptr<SwapFile> file;
  std::uint64_t offset = 0;
  std::uint64_t write_offset = offset;
  const std::byte* source = nullptr;
  bool current = true;

  [[nodiscard]] bool given() const { return memory != nullptr || file != nullptr; }
  [[nodiscard]] bool read_from_file() const { return source == nullptr && (memory == nullptr || !current); }
};

struct UpdateJob {
  StateFormat format;
  std::uint64_t numel = 0;
  std::vector<Segment> segments;  // sorted, disjoint, within [0, numel)
  float grad_scale = 1.0f;
  StateStream weight;
  StateStream residual;  // unused for Master::weight and Master::none
  StateStream exp_avg;   // both moments are moved only where a segment's rule uses them
  StateStream exp_avg_sq;
  StateStream grad;        // read only, in memory or in a file
  bool whole = false;      // tiles that no segment touches are moved too: the states go to another place
  bool arithmetic = true;  // false: the states are read and written back as they are (replaying the traffic)
  std::shared_ptr<std::atomic<bool>> not_finite = nullptr;  // set when a new weight or moment is not finite
  std::uint64_t tag = 0;  // the caller's own, for the trace: of its tiles and their transfers
};

// The result of a job. `computed` is done once all new values are: what lives in memory is new, and the gradients are
// not read any more, while writes may be under way. `weights` is done once the new weights are where they go, in memory
// and in the file. Where the job fails before, they are done with it.
struct UpdateCompletion : Completion {
  Completion computed;
  Completion weights;

  void complete_all(const std::optional<Failure>& failure) {
    computed.complete(failure);
    weights.complete(failure);
    complete(failure);
  }
};
using UpdateFuture = std::shared_ptr<UpdateCompletion>;

// A tile in the trace of a pipeline: while its elements were checked, updated and summed. Python reads it as it lies in
// memory (infinity/io/events.py).
struct TileEvent {
  std::uint64_t begin_ns;
  std::uint64_t end_ns;
  std::uint64_t first;  // element of the job
  std::uint64_t numel;
  std::uint64_t tag;
};
static_assert(sizeof(TileEvent) == 40);
using TileLog = EventLog<TileEvent>;

struct UpdateCounters {
  std::uint64_t tiles = 0;
  std::uint64_t ahead = 0;          // tiles that were read while their job was held, and used
  std::uint64_t adam_ns = 0;        // driver thread checking, updating and taking checksums
  std::uint64_t read_wait_ns = 0;   // driver thread idle because the next tile was not read yet
  std::uint64_t write_wait_ns = 0;  // driver thread idle because no staging was free and no read was outstanding
};

// Jobs are done in the order they were submitted, but for those that go first; tiles flow across job borders, so the
// pipe does not drain between units. One driver thread: keeps reads going as far as staging reaches, runs Adam on the
// oldest tile that is read, starts its writes. A tile in which every element is skipped (or in no segment) is neither
// read nor written, unless the job is moved as a whole.
//
// A failure fails its job's future once nothing of the job is in flight; later tiles of that job are not started.
// States of a failed job are partly new, partly old; of a tile with a damaged page nothing new reaches the file, but
// what is kept in memory may be new in part.
//
// [Note: held jobs] What a job reads can be known before what it computes. A held job reads its tiles as far as the
// staging reaches, when no other job has tiles to read, and leaves the others what is not for held jobs; it computes
// and writes nothing. The job that is decided takes over what it has, also what is still on its
// way, and reads what is missing. A failure of a held job fails the job that takes it over, too.
//
// Invariant: the staging of a tile is reused only when its writes are complete. After a timeout (FailureKind) nothing
// is known to be complete: every job, present and future, fails with it.
class UpdatePipeline {
 public:
  // `staging` is 4 KiB-aligned and holds at least two tiles of `tile_bytes`, a multiple of 4 KiB, beside those that
  // held jobs may have there. `tile_numel` is a positive multiple of kCutNumel, so that every stream's tile is a
  // multiple of 4 KiB. Throws std::invalid_argument otherwise. The pipeline keeps `engine` and `pool` alive.
  UpdatePipeline(std::shared_ptr<IoEngine> engine, std::shared_ptr<ThreadPool> pool, std::byte* staging,
                 std::size_t staging_bytes, std::size_t tile_numel, std::size_t tile_bytes, std::size_t held_tiles_max,
                 Isa isa);
  // Waits for what is in flight; jobs not begun fail with ECANCELED.
  ~UpdatePipeline();
  UpdatePipeline(const UpdatePipeline&) = delete;
  UpdatePipeline& operator=(const UpdatePipeline&) = delete;

  // With `first` the job comes before those not begun. With `held` it takes that job over, which is then done, and must
  // be of the same format and size. Throws std::invalid_argument for an inconsistent job, or one whose tiles do not fit
  // the staging.
  UpdateFuture submit(UpdateJob job, bool first = false, const Future& held = nullptr);
  // Begins to read a job's tiles ahead; see [Note: held jobs]. Of `job` its format, numel and tag count, and those of
  // its states that are given, each in a file, where nothing may change it until the job is taken over or taken back.
  // Throws as submit.
  UpdateFuture hold(UpdateJob job);
  // The most tiles that held jobs have in the staging.
  [[nodiscard]] std::size_t held_tiles_max() const;
  // More staging, all of it for tiles that held jobs may have: as many as fit. `memory` is 4 KiB-aligned, and the
  // pipeline's until `reclaim` has returned true.
  void lend(std::byte* memory, std::size_t nbytes);
  // Starts no more tiles in memory that was lent and waits until none is there. Held jobs that have some must be taken
  // over or taken back, and every job be computed, or this may wait for ever. False where a device was given up that
  // may still use the memory: it must never be freed. Throws std::invalid_argument when it was not lent.
  [[nodiscard]] bool reclaim(std::byte* memory);
  // Takes a job back of which no tile was started, or that is held: it fails with ECANCELED, having touched nothing.
  // False, and the job goes on, when it was begun.
  bool withdraw(const Future& job);
  // Starts no more tiles of a job. It fails with ECANCELED once nothing of it is in flight, unless it was done.
  void cancel(const Future& job);
  [[nodiscard]] UpdateCounters counters() const;
  // As IoEngine's, of tiles.
  void trace(bool on, std::size_t events_max);
  [[nodiscard]] TileLog::Taken take_trace();
  // True once a device was given up that may still use the staging: it must never be freed. Outlives the pipeline.
  [[nodiscard]] std::shared_ptr<const std::atomic<bool>> abandoned() const;

  // Bytes of a tile of `numel` elements whose states are all in a file, and with `gradients` those, too.
  [[nodiscard]] static std::size_t staging_tile_bytes(const StateFormat& format, std::size_t numel, bool gradients);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace infinity
