#include "update/driver.hpp"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/clock.hpp"
#include "base/require.hpp"

namespace infinity {
namespace {

constexpr std::size_t kTilesInMemory = 16;

Failure canceled(const char* why) { return {FailureKind::canceled, "update", "", 0, 0, ECANCELED, why, why}; }

bool same_form(const UpdateJob& one, const UpdateJob& other) {
  return one.numel == other.numel && one.format.weight == other.format.weight &&
         one.format.master == other.format.master && one.format.moments == other.format.moments;
}

}  // namespace

Driver::Driver(std::shared_ptr<Inbox> inbox, std::shared_ptr<IoEngine> engine, std::shared_ptr<ThreadPool> pool,
               Staging staging, std::size_t tile_numel, std::size_t tile_bytes, Isa isa)
    : inbox_(std::move(inbox)),
      engine_(std::move(engine)),
      pool_(std::move(pool)),
      staging_(std::move(staging)),
      tile_numel_(tile_numel),
      tile_bytes_(tile_bytes),
      isa_(isa) {}

// Requests of callers.

Driver::Queue::iterator Driver::find(Queue& queue, const Future& future) {
  return std::find_if(queue.begin(), queue.end(), [&](const auto& job) { return job->future == future; });
}

void Driver::submit(std::shared_ptr<Job> job, bool speculative, const Future& ahead) {
  if (ahead != nullptr && !abandoned_) take_over_ahead(ahead, job);
  Queue& queue = job->in_memory() ? in_memory_ : jobs_;
  queue.insert(speculative ? place_of_next(queue) : queue.end(), std::move(job));
}

// The place in the queue for a speculative job: after the job that was begun, and after the other jobs of the same
// unit. If a speculative job preceded the other jobs of a begun unit, those jobs would wait for later units.
Driver::Queue::iterator Driver::place_of_next(Queue& queue) {
  const auto& unit = begun_unit(queue);
  return std::find_if(queue.begin(), queue.end(), [&](const auto& job) {
    return job->phase != JobPhase::begun && !(unit && job->given.unit == unit);
  });
}

// Finds the job that reads ahead. Checks that `by` may take over this job, and that no held job will take it over.
std::shared_ptr<Job> Driver::require_ahead(const Future& ahead, const Job& by) {
  const auto found = find(jobs_ahead_, ahead);
  require(found != jobs_ahead_.end(), "the job to take over does not read ahead");
  require(std::none_of(held_.begin(), held_.end(), [&](const Held& held) { return held.ahead == ahead; }),
          "the job to take over belongs to another job");
  require(same_form((*found)->given, by.given), "the job to take over has another form");
  return *found;
}

void Driver::take_over_ahead(const Future& ahead, const std::shared_ptr<Job>& by) {
  const auto from = require_ahead(ahead, *by);
  jobs_ahead_.erase(find(jobs_ahead_, ahead));
  by->failure = from->failure;
  if (from->phase != JobPhase::ahead)
    return;  // `from` failed: its tiles are dropped, and its future is or will be done
  if (!take_over(*from, by, tile_numel_, tile_bytes_)) drop_ahead(*from);
  finish(*from);
}

// Held jobs.

void Driver::hold(const std::shared_ptr<Job>& job, bool speculative, const Future& ahead,
                  const std::vector<Future>& after) {
  if (ahead != nullptr && !abandoned_) static_cast<void>(require_ahead(ahead, *job));
  job->phase = JobPhase::held;
  job->awaited = after.size();
  held_.push_back({job, speculative, ahead});
  for (const Future& each : after) {
    // The callback must not own the future that owns the callback.
    each->then([this, inbox = inbox_, job, raw = each.get()] {
      inbox->post([this, job, failure = raw->failure()] { arrived(job, failure); });
    });
  }
}

void Driver::arrived(const std::shared_ptr<Job>& job, const std::optional<Failure>& failure) {
  if (job->phase != JobPhase::held) return;
  if (failure) {
    drop_held(take_held(job->future), *failure);
  } else if (--job->awaited == 0) {
    enter(take_held(job->future));
  }
}

void Driver::enter(const Held& held) {
  held.job->go(JobPhase::queued);
  // The job that read ahead may have been withdrawn while this job was held.
  const bool still_ahead = held.ahead != nullptr && find(jobs_ahead_, held.ahead) != jobs_ahead_.end();
  submit(held.job, held.speculative, still_ahead ? held.ahead : nullptr);
}

// Fails the job, and drops the tiles that were read ahead for it.
void Driver::drop_held(const Held& held, const Failure& why) {
  held.job->failure = why;
  finish(*held.job);
  if (held.ahead != nullptr) static_cast<void>(withdraw(held.ahead));
}

// Removes a job from the held jobs, and returns it; returns an empty Held if the job is not held.
Driver::Held Driver::take_held(const Future& future) {
  const auto found =
      std::find_if(held_.begin(), held_.end(), [&](const Held& held) { return held.job->future == future; });
  if (found == held_.end()) return {};
  Held held = std::move(*found);
  held_.erase(found);
  return held;
}

bool Driver::may_withdraw(const Future& future) {
  if (std::any_of(held_.begin(), held_.end(), [&](const Held& held) { return held.job->future == future; })) {
    return true;
  }
  const auto all = queues();
  return std::any_of(all.begin(), all.end(), [&](Queue* queue) {
    const auto found = find(*queue, future);
    return found != queue->end() && is_untouched(**found);
  });
}

bool Driver::withdraw_all(const std::vector<Future>& jobs) {
  if (!std::all_of(jobs.begin(), jobs.end(), [&](const Future& job) { return may_withdraw(job); })) return false;
  for (const Future& job : jobs) withdraw(job);
  return true;
}

bool Driver::withdraw(const Future& future) {
  if (const Held held = take_held(future); held.job != nullptr) {
    drop_held(held, canceled("the update was canceled"));
    return true;
  }
  for (Queue* queue : queues()) {
    const auto found = find(*queue, future);
    if (found == queue->end()) continue;
    const auto job = *found;
    const bool untouched = is_untouched(*job);
    if (untouched || queue == &jobs_ahead_) queue->erase(found);  // a job that has failed is removed anyway
    if (!untouched) return false;
    if (!job->failure) job->failure = canceled("the update was canceled");
    drop_ahead(*job);
    finish(*job);
    return true;
  }
  return false;
}

void Driver::cancel(const Future& future) {
  if (withdraw(future)) return;
  for (Queue* queue : {&jobs_, &in_memory_}) {
    const auto found = find(*queue, future);
    if (found != queue->end()) fail(**found, canceled("the update was canceled"));
  }
}

// The driver's next action.

void Driver::run() {
  for (;;) {
    inbox_->run();
    if (abandoned_) give_up_all(*abandoned_);
    if (stopping_) give_up_all(canceled("the update pipeline was closed"));
    if (start_next_tile() || read_next_ahead() || compute_next()) continue;
    if (stopping_ && idle()) return;
    wait();
  }
}

bool Driver::idle() const {
  return jobs_.empty() && in_memory_.empty() && reading_.empty() && count(TilePhase::writing) == 0 &&
         tiles_ahead() == 0;
}

void Driver::wait() {
  const std::uint64_t began = now_ns();
  inbox_->wait();
  const std::uint64_t ns = now_ns() - began;
  if (!reading_.empty()) {
    counters_.read_wait_ns += ns;
  } else if (count(TilePhase::writing) > 0) {
    counters_.write_wait_ns += ns;
  }
}

// Records that a tile of the first job was started or passed over; `end` is the end of this tile.
void Driver::advance(Queue& queue, std::uint64_t end) {
  const auto job = queue.front();
  begun_unit(queue) = job->given.unit;
  job->next = end;
  if (end == job->given.numel) {
    queue.pop_front();
    job->go(JobPhase::ending);
  } else if (job->phase == JobPhase::queued) {
    job->go(JobPhase::begun);
  }
}

// Starts the first job's next tile, or passes over the tile if there is nothing to do for it. Returns false if there is
// no job, or no buffer for the tile.
bool Driver::start_next_tile() {
  if (jobs_.empty()) return false;
  const auto job = jobs_.front();
  if (job->failure) {
    jobs_.pop_front();
    give_up(job);
    return true;
  }
  const std::uint64_t first = job->next;
  const std::uint64_t end = std::min<std::uint64_t>(first + tile_numel_, job->given.numel);
  const bool wanted = job->anything_to_do(first, end);
  const bool was_read_ahead = !job->ahead.empty();
  if (wanted && !was_read_ahead && !staging_.has_free()) return false;
  if (!wanted && was_read_ahead) drop_next(*job);
  advance(jobs_, end);
  if (!wanted) {
    tell(*job);
    finish_if_ended(*job);
    return true;
  }
  std::shared_ptr<Tile> tile;
  if (was_read_ahead) {
    tile = job->ahead.front();
    job->ahead.pop_front();
    go(*tile, TilePhase::reading);
    ++counters_.ahead;
  } else {
    tile = take_tile(job, first, TilePhase::reading);
  }
  ++job->uncomputed;
  reading_.push_back(tile);
  read(tile);
  return true;
}

// Starts to read the next tile of a job that reads ahead, or gives up the job if it has failed. A job that reads ahead
// stays in its queue until it is taken over or withdrawn.
bool Driver::read_next_ahead() {
  for (const auto& job : jobs_ahead_) {
    if (job->phase != JobPhase::ahead) continue;
    if (job->failure) {
      give_up(job);
      return true;
    }
    if (job->next_ahead == job->given.numel || !jobs_.empty()) continue;
    if (!staging_.has_free() || tiles_ahead() >= staging_.ahead_tiles_max()) continue;
    const auto tile = take_tile(job, job->next_ahead, TilePhase::ahead);
    job->next_ahead += tile->numel;
    job->ahead.push_back(tile);
    read(tile);
    return true;
  }
  return false;
}

// Computes the next tile if the tile has been read, or passes over the tile if its job failed. If the next tile has not
// been read, computes a tile of a job in memory.
bool Driver::compute_next() {
  if (reading_.empty() || reading_.front()->pending > 0) return compute_in_memory();
  const auto tile = reading_.front();
  reading_.pop_front();
  if (tile->job->failure) {
    --tile->job->uncomputed;
    leave(tile);
  } else {
    compute(tile);
  }
  return true;
}

// The counterpart of start_next_tile for jobs in memory: a started tile is computed at once. Returns false if there is
// no job.
bool Driver::compute_in_memory() {
  if (in_memory_.empty()) return false;
  const auto job = in_memory_.front();
  if (job->failure) {
    in_memory_.pop_front();
    give_up(job);
    return true;
  }
  const std::size_t tiles = jobs_.empty() && reading_.empty() ? kTilesInMemory : 1;
  const std::uint64_t first = job->next;
  const std::uint64_t end = std::min<std::uint64_t>(first + tiles * tile_numel_, job->given.numel);
  advance(in_memory_, end);
  if (!job->anything_to_do(first, end)) {
    tell(*job);
    finish_if_ended(*job);
    return true;
  }
  const auto tile = take_tile(job, first, TilePhase::reading, tiles);
  ++job->uncomputed;
  read(tile);
  compute(tile);
  return true;
}

void Driver::compute(const std::shared_ptr<Tile>& tile) {
  Job& job = *tile->job;
  go(*tile, TilePhase::computing);
  const std::uint64_t began = now_ns();
  const auto damage = update_tile(*tile, *pool_, isa_, [this] { inbox_->run(); });
  const std::uint64_t ended = now_ns();
  log_.add({began, ended, tile->first, tile->numel, job.given.tag});
  counters_.adam_ns += ended - began;
  --job.uncomputed;
  if (damage) {
    fail(job, *damage);
    leave(tile);
    return;
  }
  ++counters_.tiles;
  const std::vector<State> states = tile->written_states();
  if (job.written(State::weight)) ++job.weight_writes;
  if (states.empty()) {
    leave(tile);
  } else {
    go(*tile, TilePhase::writing);
    transfer(tile, OpKind::write, states);
  }
  tell(job);
}

// Transitions of a tile.

std::shared_ptr<Tile> Driver::take_tile(const std::shared_ptr<Job>& job, std::uint64_t first, TilePhase phase,
                                        std::size_t tiles) {
  auto tile = std::make_shared<Tile>();
  tile->job = job;
  tile->phase = phase;
  tile->first = first;
  tile->numel = static_cast<std::size_t>(std::min<std::uint64_t>(tiles * tile_numel_, job->given.numel - first));
  if (phase == TilePhase::ahead || !job->in_memory()) tile->buffer = staging_.take();
  ++counts_[static_cast<std::size_t>(phase)];
  ++job->tiles;
  return tile;
}

void Driver::go(Tile& tile, TilePhase to) {
  --counts_[static_cast<std::size_t>(tile.phase)];
  tile.go(to);
  ++counts_[static_cast<std::size_t>(to)];
}

void Driver::read(const std::shared_ptr<Tile>& tile) { transfer(tile, OpKind::read, tile->place_states(tile_numel_)); }

void Driver::transfer(const std::shared_ptr<Tile>& tile, OpKind kind, const std::vector<State>& states) {
  tile->pending += static_cast<unsigned>(states.size());
  for (const State state : states) {
    const Future future = engine_->submit(tile->request(kind, state));
    // The callback must not own the future that owns the callback.
    future->then([this, inbox = inbox_, tile, state, raw = future.get()]() mutable {
      inbox->post(
          [this, tile = std::move(tile), state, failure = raw->failure()] { transferred(tile, state, failure); });
    });
  }
}

void Driver::transferred(const std::shared_ptr<Tile>& tile, State state, const std::optional<Failure>& failure) {
  Job& job = *tile->job;
  if (failure) fail(job, *failure);
  const bool written = tile->phase == TilePhase::writing;
  if (written && state == State::weight && --job.weight_writes == 0) tell(job);
  if (--tile->pending > 0) return;
  if (written || tile->phase == TilePhase::dropped) leave(tile);
}

// Removes a tile from the staging.
void Driver::leave(const std::shared_ptr<Tile>& tile) {
  go(*tile, TilePhase::gone);
  if (tile->buffer != nullptr) staging_.give_back(tile->buffer);
  --tile->job->tiles;
  finish_if_ended(*tile->job);
}

void Driver::drop_next(Job& job) {
  const auto tile = job.ahead.front();
  job.ahead.pop_front();
  go(*tile, TilePhase::dropped);
  if (tile->pending == 0) leave(tile);
}

// Invariant: the job is not in phase `ending` yet, so a tile that leaves cannot finish the job.
void Driver::drop_ahead(Job& job) {
  while (!job.ahead.empty()) drop_next(job);
}

// The end of a job.

void Driver::fail(Job& job, const Failure& failure) {
  const bool timeout = failure.kind == FailureKind::timeout;
  if (timeout) {
    if (!abandoned_) abandoned_ = failure;
    *gave_up_ = true;
    staging_.abandon();
  }
  // After a timeout a device may still use the job's memory: no other failure may hide a timeout.
  if (timeout || !job.failure) job.failure = failure;
}

// Starts no more tiles of a failed job, and drops the tiles that were read ahead.
void Driver::give_up(const std::shared_ptr<Job>& job) {
  if (job->phase == JobPhase::ending || job->phase == JobPhase::done) return;
  drop_ahead(*job);
  job->go(JobPhase::ending);
  finish_if_ended(*job);
}

// Fails the jobs whose tiles are not all started. Started tiles continue.
void Driver::give_up_all(const Failure& why) {
  for (const Held& held : std::exchange(held_, {})) {
    held.job->failure = why;
    finish(*held.job);
  }
  for (Queue* queue : queues()) {
    while (!queue->empty()) {
      const auto job = queue->front();
      queue->pop_front();
      if (!job->failure) job->failure = why;
      give_up(job);
    }
  }
}

// Completes the milestones that a job has reached.
void Driver::tell(Job& job) {
  if (job.next < job.given.numel || job.uncomputed > 0 || job.failure) return;
  job.future->computed.complete();
  if (job.weight_writes == 0) job.future->weights.complete();
}

void Driver::finish(Job& job) {
  job.go(JobPhase::done);
  job.future->complete_all(job.failure);
}

void Driver::finish_if_ended(Job& job) {
  if (job.phase == JobPhase::ending && job.tiles == 0) finish(job);
}

}  // namespace infinity
