// The optimizer work of a unit: read states → Adam → write states, in tiles; all three stages run at the same time.
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

// Location of one state of a job.
//
//   memory only   the state is updated in place
//   file only     the state is read into the staging and written back
//   both          the memory is current: it is updated in place, and the new values are also written to the file
//
// Element 0 of the job is at memory[0]. In the file, the state is read from `offset` and written to `write_offset`,
// which may be the same place. If there is a file, memory and offsets are 4 KiB-aligned, and the memory has room for
// the last tile rounded up to 4 KiB.
//
// New values may be written to a different place than the current values. In this case `source` points to the
// current values in memory, which are not changed. If a tile is moved, every element of the tile is copied from
// `source`; see UpdateJob::whole. The memory of the new values has room for the last tile rounded up to 4 KiB, and the
// bytes after the last element become zero.
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
  StateStream exp_avg;   // a moment is moved only if the rule of a segment uses it
  StateStream exp_avg_sq;
  StateStream grad;        // read only
  bool whole = false;      // also move tiles that no segment touches, because the states are written to another place
  bool arithmetic = true;  // false: the states are read and written back unchanged (to measure the traffic alone)
  std::shared_ptr<std::atomic<bool>> not_finite = nullptr;  // set when a new weight or moment is not finite
  std::uint64_t tag = 0;  // the caller's number for the trace of the job's tiles and transfers
  std::optional<std::uint64_t> unit = std::nullopt;  // speculative jobs are never placed between jobs of a unit
};

// The completion of a job, and two milestones that the job reaches before.
//
//   computed   All new values are computed: states in memory are new, and the gradients are not read any more. Writes
//              to the file may be in flight.
//   weights    The new weights are in memory and in the file, as the job asks.
//
// If the job fails before a milestone is reached, the milestone fails with the same failure.
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

// A tile in the trace of a pipeline, from the check of the pages that were read to the checksums of the pages to write.
// Python parses the bytes of this struct (infinity/io/events.py).
struct TileEvent {
  std::uint64_t begin_ns;
  std::uint64_t end_ns;
  std::uint64_t first;  // index of the tile's first element in the job
  std::uint64_t numel;
  std::uint64_t tag;
};
static_assert(sizeof(TileEvent) == 40);
using TileLog = EventLog<TileEvent>;

struct UpdateCounters {
  std::uint64_t tiles = 0;
  std::uint64_t ahead = 0;          // number of tiles that were read ahead
  std::uint64_t adam_ns = 0;        // time in which the driver checked pages, updated them and computed checksums
  std::uint64_t read_wait_ns = 0;   // time in which the driver was idle because the next tile was not read yet
  std::uint64_t write_wait_ns = 0;  // time in which the driver was idle while writes were in flight, but no reads
};

// Jobs run in the order in which they are submitted. A speculative job is an exception: it runs next, that is, directly
// after the remaining jobs of a unit that was begun. Jobs that neither read nor write a file have a separate order:
// they run while the other jobs have nothing to compute. The first tiles of a job are read while the last tiles of the
// job before it are written, so the pipeline does not drain between units. One thread, the driver, keeps reads in
// flight as long as the staging has free buffers, runs Adam on the oldest tile that has been read, and starts the
// tile's writes (see driver.hpp). A tile is neither read nor written if every element of the tile is skipped or outside
// all segments, unless the job has `whole` set.
//
// A job that fails starts no more tiles; its future fails once nothing of the job is in flight. The states of a failed
// job are partly new, partly old. If a tile has a damaged page, no new value of the tile reaches the file, but some
// values in memory may be new.
//
// [Note: reading ahead] It can be known which states a job will read before it is known what the job will compute. A
// job that reads ahead computes and writes nothing. Such a job reads only when no other job has tiles to read, and at
// most as many tiles as may be read ahead. Once the computation is known, a job is submitted for it. This job takes
// over the tiles of the job that read ahead, including tiles that are still being read, and reads the states that are
// missing. If the job that read ahead has failed, the job that takes over its tiles fails, too.
//
// Invariant: the staging of a tile is reused only when the tile's writes are complete. After a timeout (FailureKind)
// nothing is known to be complete: no staging is reused, and every present and later job fails with the timeout.
//
// The driver completes the futures: their callbacks must not call the pipeline.
class UpdatePipeline {
 public:
  // `staging` is 4 KiB-aligned. `staging` has room for at least two tiles of `tile_bytes` (a multiple of 4 KiB) in
  // addition to the tiles that may be read ahead. `tile_numel` is a positive multiple of kCutNumel, so that every
  // stream's tile is a multiple of 4 KiB. Throws std::invalid_argument otherwise. The pipeline keeps `engine` and
  // `pool` alive.
  UpdatePipeline(std::shared_ptr<IoEngine> engine, std::shared_ptr<ThreadPool> pool, std::byte* staging,
                 std::size_t staging_bytes, std::size_t tile_numel, std::size_t tile_bytes, std::size_t ahead_tiles_max,
                 Isa isa);
  // Waits for transfers in flight. Jobs that are held, or whose tiles are not all started, fail with ECANCELED.
  ~UpdatePipeline();
  UpdatePipeline(const UpdatePipeline&) = delete;
  UpdatePipeline& operator=(const UpdatePipeline&) = delete;

  // A speculative job precedes the jobs of units that were not begun. With `ahead`, the future of a job that reads
  // ahead, the submitted job takes over the tiles of that job. The job of `ahead` is done afterwards; it must have the
  // same format and size. Throws std::invalid_argument if the job is inconsistent, or if its tiles do not fit the
  // staging.
  //
  // With `after`, the job is held until the futures in `after` are done, and is submitted at that moment. A speculative
  // job that was submitted while this job was held runs after this job. If one of the futures in `after` fails, the job
  // fails with the first such failure. The job of `ahead` continues to read while this job is held, and is withdrawn if
  // this job fails before it is submitted.
  UpdateFuture submit(UpdateJob job, bool speculative = false, const Future& ahead = nullptr,
                      const std::vector<Future>& after = {});
  // Starts to read a job's tiles ahead; see [Note: reading ahead]. Only the format, numel, tag and the given states of
  // `job` matter. Each of these states is in a file. Nothing may change the state in the file until the job is taken
  // over or withdrawn. Throws the exceptions of submit.
  UpdateFuture read_ahead(UpdateJob job);
  // Largest number of tiles that may be read ahead.
  [[nodiscard]] std::size_t ahead_tiles_max() const;
  // Adds memory to the staging, so that more tiles can be read ahead: as many as fit in the added memory. `memory` is 4
  // KiB-aligned and belongs to the pipeline until `reclaim` has returned true.
  void lend(std::byte* memory, std::size_t nbytes);
  // Starts no more tiles in memory that was lent, and waits until the memory contains no tiles. The wait may last
  // forever unless all jobs that have read tiles ahead into the memory are taken over or withdrawn. Returns false if a
  // device that may still use the memory was given up; in that case the memory must never be freed. Throws
  // std::invalid_argument if the memory was not lent.
  [[nodiscard]] bool reclaim(std::byte* memory);
  // Withdraws all jobs of each list in which every job is held, reads ahead, or has no started tile. Withdrawn jobs
  // fail with ECANCELED and have written nothing. Returns false for a list with a job that was begun or is done; all
  // jobs of such a list continue.
  std::vector<bool> withdraw(const std::vector<std::vector<Future>>& lists);
  // Starts no more tiles of a job. The job fails with ECANCELED once nothing of the job is in flight, unless all its
  // tiles were already started.
  void cancel(const Future& job);
  [[nodiscard]] UpdateCounters counters() const;
  // Like IoEngine::trace and IoEngine::take_trace, but for tiles.
  void trace(bool on, std::size_t events_max);
  [[nodiscard]] TileLog::Taken take_trace();
  // True once a device that may still use the staging was given up; in that case the staging must never be freed. The
  // flag outlives the pipeline.
  [[nodiscard]] std::shared_ptr<const std::atomic<bool>> abandoned() const;

  // Bytes of a tile of `numel` elements whose states are all in a file; with `gradients`, its gradients are in a file,
  // too.
  [[nodiscard]] static std::size_t staging_tile_bytes(const StateFormat& format, std::size_t numel, bool gradients);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace infinity
