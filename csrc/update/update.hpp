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

// Where one state of a job lives.
//
//   memory only   it is updated in place
//   file only     it is read into the staging and written back
//   both          the memory is current: it is updated in place, and the new values are written to the file, too
//
// Element 0 of the job is at memory[0]. In the file it is read from `offset` and written to `write_offset`, which may
// be the same place. Memory and offsets are 4 KiB-aligned where there is a file, with room for the last tile rounded up
// to 4 KiB.
//
// New values may go to another place than the current ones, which `source` holds in memory and which are not changed.
// Each element of a tile that is moved is brought from there; see UpdateJob::whole.
struct StateStream {
  std::byte* memory = nullptr;
  std::shared_ptr<SwapFile> file;
  std::uint64_t offset = 0;
  std::uint64_t write_offset = offset;
  const std::byte* source = nullptr;

  [[nodiscard]] bool given() const { return memory != nullptr || file != nullptr; }
  [[nodiscard]] bool read_from_file() const { return source == nullptr && memory == nullptr; }
};

struct UpdateJob {
  StateFormat format;
  std::uint64_t numel = 0;
  std::vector<Segment> segments;  // sorted, disjoint, within [0, numel)
  StateStream weight;
  StateStream residual;  // unused for Master::weight and Master::none
  StateStream exp_avg;   // a moment is moved only where the rule of a segment uses it
  StateStream exp_avg_sq;
  StateStream grad;        // only read
  bool whole = false;      // tiles that no segment touches are moved, too: the states go to another place
  bool arithmetic = true;  // false: the states are read and written back as they are (to measure the traffic alone)
  std::shared_ptr<std::atomic<bool>> not_finite = nullptr;  // set when a new weight or moment is not finite
  std::uint64_t tag = 0;  // the caller's own number, for the trace of the job's tiles and transfers
  std::optional<std::uint64_t> unit = std::nullopt;  // speculative jobs come before a unit's jobs, or after all of them
};

// The result of a job, and two milestones on the way to it.
//
//   computed   All new values are computed: states in memory are new, and the gradients are not read any more. Writes
//              to the file may be under way.
//   weights    The new weights are where they go, in memory and in the file.
//
// A milestone that the job has not reached when it fails fails with it.
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

// A tile in the trace of a pipeline: from the check of the pages that were read to the checksums of those to write.
// Python reads it as it lies in memory (infinity/io/events.py).
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
  std::uint64_t ahead = 0;          // of them, tiles that were read ahead
  std::uint64_t adam_ns = 0;        // the driver was checking, updating and taking checksums
  std::uint64_t read_wait_ns = 0;   // the driver was idle: the next tile was not read yet
  std::uint64_t write_wait_ns = 0;  // the driver was idle: nothing was being read, but something was being written
};

// Jobs are done in the order in which they are submitted, except that a speculative job is the next, after the other
// jobs of a unit that was begun. A job that reads and writes no file is not in that order: such jobs are done, in the
// same order among themselves, while the others have nothing to compute. The first tiles of a job are read while the
// last tiles of the job before it are written, so the pipe does not drain between units. One thread, the driver, keeps
// reads going as far as the staging reaches, runs Adam on the oldest tile that is read, and starts its writes (see
// driver.hpp). A tile is neither read nor written when each of its elements is skipped or in no segment, unless the job
// is moved as a whole.
//
// A job that fails starts no more tiles; its future fails once nothing of the job is in flight. Its states are then
// partly new, partly old. Of a tile with a damaged page nothing new reaches the file, but what is kept in memory may be
// new in part.
//
// [Note: reading ahead] What a job reads can be known before it is known what the job computes. A job that reads ahead
// computes and writes nothing. It reads only when no other job has tiles to read, and only as many tiles as may be read
// ahead. When the job is decided, the job that is submitted takes over the tiles of the one that read ahead, also those
// that are still being read, and reads the states that are missing. When that one has failed, the job that takes it
// over fails, too.
//
// Invariant: the staging of a tile is reused only when its writes are complete. After a timeout (FailureKind) nothing
// is known to be complete: no staging is reused, and every job, present and future, fails with the timeout.
//
// The futures are completed by the driver: their callbacks must not call the pipeline.
class UpdatePipeline {
 public:
  // `staging` is 4 KiB-aligned and holds at least two tiles of `tile_bytes`, a multiple of 4 KiB, beside those that
  // may be read ahead. `tile_numel` is a positive multiple of kCutNumel, so that every stream's tile is a
  // multiple of 4 KiB. Throws std::invalid_argument otherwise. The pipeline keeps `engine` and `pool` alive.
  UpdatePipeline(std::shared_ptr<IoEngine> engine, std::shared_ptr<ThreadPool> pool, std::byte* staging,
                 std::size_t staging_bytes, std::size_t tile_numel, std::size_t tile_bytes, std::size_t ahead_tiles_max,
                 Isa isa);
  // Waits for what is in flight. Jobs that are held, or whose tiles are not all started, fail with ECANCELED.
  ~UpdatePipeline();
  UpdatePipeline(const UpdatePipeline&) = delete;
  UpdatePipeline& operator=(const UpdatePipeline&) = delete;

  // A speculative job comes before those whose units were not begun. With `ahead` it takes that job over, which is then
  // done and must have the same format and size. Throws std::invalid_argument for an inconsistent job, or one whose
  // tiles do not fit the staging.
  //
  // With `after` the job is held until these futures are done, and then submitted: a speculative job that was submitted
  // meanwhile comes after it. It fails as the first of them that fails. `ahead` goes on reading while the job is held,
  // and is withdrawn when the job fails before it is submitted.
  UpdateFuture submit(UpdateJob job, bool speculative = false, const Future& ahead = nullptr,
                      const std::vector<Future>& after = {});
  // Begins to read a job's tiles ahead; see [Note: reading ahead]. Of `job` only the format, numel, tag and the states
  // that are given matter. Each of these states is in a file, where nothing may change it until the job is taken over
  // or withdrawn. Throws as submit.
  UpdateFuture read_ahead(UpdateJob job);
  // The most tiles that may be read ahead.
  [[nodiscard]] std::size_t ahead_tiles_max() const;
  // Adds memory to the staging: as many more tiles may be read ahead as fit in it. `memory` is 4 KiB-aligned and
  // belongs to the pipeline until `reclaim` has returned true.
  void lend(std::byte* memory, std::size_t nbytes);
  // Starts no more tiles in memory that was lent, and waits until none is there. This may wait for ever unless jobs
  // that read ahead and have tiles there are taken over or withdrawn. False when a device was given up that may
  // still use the memory: it must never be freed. Throws std::invalid_argument when the memory was not lent.
  [[nodiscard]] bool reclaim(std::byte* memory);
  // Takes back all jobs of each list, if each of them is held, reads ahead, or has no tile that was started: they fail
  // with ECANCELED and have written nothing. Returns false for a list with a job that was begun or is done; then all of
  // the list goes on.
  std::vector<bool> withdraw(const std::vector<std::vector<Future>>& lists);
  // Starts no more tiles of a job. It fails with ECANCELED once nothing of it is in flight, unless all its tiles were
  // started before.
  void cancel(const Future& job);
  [[nodiscard]] UpdateCounters counters() const;
  // As IoEngine::trace and IoEngine::take_trace, of tiles.
  void trace(bool on, std::size_t events_max);
  [[nodiscard]] TileLog::Taken take_trace();
  // True once a device was given up that may still use the staging, which must then never be freed. Outlives the
  // pipeline.
  [[nodiscard]] std::shared_ptr<const std::atomic<bool>> abandoned() const;

  // Bytes of a tile of `numel` elements whose states are all in a file; with `gradients` its gradients are, too.
  [[nodiscard]] static std::size_t staging_tile_bytes(const StateFormat& format, std::size_t numel, bool gradients);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace infinity
