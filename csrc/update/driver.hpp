// The driver of a pipeline: the state of jobs and tiles, and the choice of the next action.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "aio/engine.hpp"
#include "base/inbox.hpp"
#include "base/thread_pool.hpp"
#include "update/job.hpp"
#include "update/staging.hpp"
#include "update/tile.hpp"
#include "update/update.hpp"

namespace infinity {

// [Note: one thread changes the state] The driver has no locks: only the driver's thread calls these functions, except
// those marked "any thread". The thread runs the messages of an inbox. The pipeline's callers post their requests, and
// the engine's threads post that a transfer has ended. The driver runs messages before each action. While the driver
// computes a tile together with the pool, it also runs messages after each piece, so that a message waits for one piece
// at most.
//
// Tiles are started in order, as long as the staging has free buffers: to start a tile means to read its states. Tiles
// whose states have been read are computed, one after the other, and their new states are written. Jobs in memory have
// a separate queue and need no staging. The tiles of jobs in memory are computed, in order, while no tile of another
// job is ready. As a result, jobs in memory never keep the disk idle, and they wait for other jobs only where the disk
// is faster than the processor. While there is no other job, one tile of a job in memory is as long as many ordinary
// tiles, because each end of a tile costs time: the threads wait for the tile's last piece, and the next tile must wake
// the threads.
class Driver {
 public:
  Driver(std::shared_ptr<Inbox> inbox, std::shared_ptr<IoEngine> engine, std::shared_ptr<ThreadPool> pool,
         Staging staging, std::size_t tile_numel, std::size_t tile_bytes, Isa isa);

  // See UpdatePipeline.
  void submit(std::shared_ptr<Job> job, bool speculative, const Future& ahead);
  void hold(const std::shared_ptr<Job>& job, bool speculative, const Future& ahead, const std::vector<Future>& after);
  void read_ahead(std::shared_ptr<Job> job) { jobs_ahead_.push_back(std::move(job)); }
  bool withdraw_all(const std::vector<Future>& jobs);
  void cancel(const Future& future);
  [[nodiscard]] Staging& staging() { return staging_; }
  [[nodiscard]] UpdateCounters counters() const { return counters_; }
  // Fails the jobs whose tiles are not all started. After this call, `run` returns when nothing is in flight.
  void stop() { stopping_ = true; }

  // Called by the driver's thread.
  void run();

  // Called by any thread.
  [[nodiscard]] TileLog& log() { return log_; }
  [[nodiscard]] std::shared_ptr<const std::atomic<bool>> gave_up() const { return gave_up_; }

 private:
  using Queue = std::deque<std::shared_ptr<Job>>;

  // A held job, and the other arguments with which it will be submitted.
  struct Held {
    std::shared_ptr<Job> job;
    bool speculative;
    Future ahead;
  };

  static Queue::iterator find(Queue& queue, const Future& future);
  static bool is_untouched(const Job& job) { return job.phase == JobPhase::ahead || job.phase == JobPhase::queued; }
  [[nodiscard]] Queue::iterator place_of_next(Queue& queue);
  [[nodiscard]] bool may_withdraw(const Future& future);
  bool withdraw(const Future& future);
  [[nodiscard]] std::optional<std::uint64_t>& begun_unit(const Queue& queue) {
    return begun_units_[&queue == &in_memory_ ? 1 : 0];
  }
  [[nodiscard]] std::array<Queue*, 3> queues() { return {&jobs_ahead_, &jobs_, &in_memory_}; }
  std::shared_ptr<Job> require_ahead(const Future& ahead, const Job& by);
  void take_over_ahead(const Future& ahead, const std::shared_ptr<Job>& by);
  void arrived(const std::shared_ptr<Job>& job, const std::optional<Failure>& failure);
  void enter(const Held& held);
  void drop_held(const Held& held, const Failure& why);
  Held take_held(const Future& future);

  bool start_next_tile();
  bool read_next_ahead();
  bool compute_next();
  bool compute_in_memory();
  void wait();
  void advance(Queue& queue, std::uint64_t end);
  std::shared_ptr<Tile> take_tile(const std::shared_ptr<Job>& job, std::uint64_t first, TilePhase phase,
                                  std::size_t tiles = 1);
  void read(const std::shared_ptr<Tile>& tile);
  void transfer(const std::shared_ptr<Tile>& tile, OpKind kind, const std::vector<State>& states);
  void transferred(const std::shared_ptr<Tile>& tile, State state, const std::optional<Failure>& failure);
  void compute(const std::shared_ptr<Tile>& tile);
  void go(Tile& tile, TilePhase to);
  void leave(const std::shared_ptr<Tile>& tile);
  void drop_next(Job& job);
  void drop_ahead(Job& job);

  void fail(Job& job, const Failure& failure);
  void give_up(const std::shared_ptr<Job>& job);
  void give_up_all(const Failure& why);
  void tell(Job& job);
  void finish(Job& job);
  void finish_if_ended(Job& job);

  [[nodiscard]] unsigned count(TilePhase phase) const { return counts_[static_cast<std::size_t>(phase)]; }
  // Number of tiles that were read ahead and are not needed yet, plus tiles that are dropped but are still being read.
  [[nodiscard]] unsigned tiles_ahead() const { return count(TilePhase::ahead) + count(TilePhase::dropped); }
  [[nodiscard]] bool idle() const;

  const std::shared_ptr<Inbox> inbox_;  // outlives this object: a device that was given up may answer late
  const std::shared_ptr<IoEngine> engine_;
  const std::shared_ptr<ThreadPool> pool_;
  Staging staging_;
  const std::size_t tile_numel_;
  const std::size_t tile_bytes_;
  const Isa isa_;
  TileLog log_;
  const std::shared_ptr<std::atomic<bool>> gave_up_ = std::make_shared<std::atomic<bool>>(false);

  std::vector<Held> held_;                                     // in the order in which they were submitted
  Queue jobs_;                                                 // queued or begun, in the order in which they run
  Queue in_memory_;                                            // queued or begun jobs in memory
  std::array<std::optional<std::uint64_t>, 2> begun_units_{};  // for each of the two queues, the unit begun last
  Queue jobs_ahead_;                                           // jobs that read ahead: neither taken over nor withdrawn
  std::deque<std::shared_ptr<Tile>> reading_;                  // in order; the first tile is computed next
  std::array<unsigned, kTilePhases> counts_{};                 // number of tiles in each phase
  bool stopping_ = false;
  std::optional<Failure> abandoned_;  // the timeout that ended the pipeline
  UpdateCounters counters_;
};

}  // namespace infinity
