#include "update/update.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "base/clock.hpp"
#include "base/require.hpp"
#include "update/tile.hpp"

namespace infinity {
namespace {

Failure canceled(const char* why) {
  Failure failure;
  failure.kind = FailureKind::canceled;
  failure.operation = "update";
  failure.error_number = ECANCELED;
  failure.cause = failure.message = why;
  return failure;
}

}  // namespace

struct UpdatePipeline::Impl {
  std::shared_ptr<IoEngine> engine;
  std::shared_ptr<ThreadPool> pool;
  std::size_t tile_numel;
  std::size_t tile_bytes;
  Isa isa;
  pid_t pid = getpid();
  TileLog log;

  mutable std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::deque<std::shared_ptr<Active>> jobs;   // not all tiles started
  std::deque<std::shared_ptr<Tile>> reading;  // in order; the front is the next to compute
  std::deque<std::shared_ptr<Active>> held;   // neither taken over nor taken back
  std::vector<std::byte*> free_slots;
  std::vector<Loan> loans;
  unsigned writing = 0;   // tiles
  std::size_t ahead = 0;  // tiles that were read while held, and that no job has taken up
  std::size_t ahead_max;
  bool stop = false;
  std::optional<Failure> abandoned;  // the timeout that ended the pipeline
  const std::shared_ptr<std::atomic<bool>> gave_up = std::make_shared<std::atomic<bool>>(false);
  UpdateCounters counters;

  std::thread driver;  // last: starts when everything else is there

  Impl(std::shared_ptr<IoEngine> io, std::shared_ptr<ThreadPool> threads, std::byte* memory, std::size_t slots,
       std::size_t numel, std::size_t nbytes, std::size_t held_tiles, Isa kernels)
      : engine(std::move(io)),
        pool(std::move(threads)),
        tile_numel(numel),
        tile_bytes(nbytes),
        isa(kernels),
        ahead_max(held_tiles) {
    for (std::size_t slot = slots; slot-- > 0;) free_slots.push_back(memory + slot * tile_bytes);
    driver = std::thread([this] { run(); });
  }

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      if (abandoned) cancel_all(lock, *abandoned);
      if (stop) cancel_all(lock, canceled("the update pipeline was closed"));
      if (start_next_tile(lock) || read_ahead(lock)) continue;
      if (!reading.empty() && reading.front()->pending == 0) {
        auto tile = reading.front();
        reading.pop_front();
        compute(lock, tile);
        continue;
      }
      if (stop && reading.empty() && writing == 0 && ahead == 0 && jobs.empty()) return;
      const std::uint64_t began = now_ns();
      const bool for_read = !reading.empty();
      const bool for_write = !for_read && writing > 0;
      changed.wait(lock);
      if (for_read) counters.read_wait_ns += now_ns() - began;
      if (for_write) counters.write_wait_ns += now_ns() - began;
    }
  }

  // Jobs whose tiles are not all started are given up; what is in flight goes on.
  void cancel_all(std::unique_lock<std::mutex>& lock, const Failure& why) {
    for (auto* queue : {&jobs, &held}) {
      while (!queue->empty()) {
        auto active = queue->front();
        queue->pop_front();
        if (!active->failure) active->failure = why;
        give_up(lock, active);
      }
    }
  }

  // Starts no more tiles of a failed job, and drops those that were read ahead. Once.
  void give_up(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Active>& active) {
    if (active->cursor == active->job.numel) return;
    drop_staged(lock, *active);
    active->cursor = active->job.numel;
    finish_if_done(lock, active);
  }

  // Invariant: the cursor of the job is not at its end, so that no tile that goes finishes it.
  void drop_staged(std::unique_lock<std::mutex>& lock, Active& active) {
    while (!active.staged.empty()) drop_next(lock, active);
  }

  void drop_next(std::unique_lock<std::mutex>& lock, Active& active) {
    auto tile = active.staged.front();
    active.staged.pop_front();
    tile->dropped = true;
    if (tile->pending == 0) tile_done(lock, tile, ahead);
  }

  // Starts the reads of the next tile that has something to do. False when there is none, or no staging.
  bool start_next_tile(std::unique_lock<std::mutex>& lock) {
    if (jobs.empty()) return false;
    auto active = jobs.front();
    while (!active->failure && active->cursor < active->job.numel) {
      const std::uint64_t end = tile_end(*active, active->cursor);
      const bool wanted = anything_to_do(active->job, active->cursor, end);
      if (wanted && active->staged.empty() && free_slots.empty()) return false;
      if (!wanted && !active->staged.empty()) drop_next(lock, *active);
      auto tile = wanted ? next_tile(active) : nullptr;
      active->cursor = end;
      if (!wanted) continue;
      if (end == active->job.numel) jobs.pop_front();
      reading.push_back(tile);
      ++active->uncomputed;
      start_reads(lock, tile);
      return true;
    }
    jobs.pop_front();
    if (active->failure) {
      give_up(lock, active);
    } else {
      tell(lock, active);
      finish_if_done(lock, active);
    }
    return true;
  }

  // The tile at the cursor: read ahead, or a new one.
  std::shared_ptr<Tile> next_tile(const std::shared_ptr<Active>& active) {
    if (active->staged.empty()) return new_tile(active, active->cursor);
    auto tile = active->staged.front();
    active->staged.pop_front();
    --ahead;
    ++counters.ahead;
    return tile;
  }

  std::uint64_t tile_end(const Active& active, std::uint64_t first) const {
    return std::min<std::uint64_t>(first + tile_numel, active.job.numel);
  }

  std::shared_ptr<Tile> new_tile(const std::shared_ptr<Active>& active, std::uint64_t first) {
    auto tile = std::make_shared<Tile>();
    tile->owner = active;
    tile->first = first;
    tile->numel = static_cast<std::size_t>(tile_end(*active, first) - first);
    tile->slot = free_slots.back();
    free_slots.pop_back();
    ++active->tiles;
    return tile;
  }

  // Starts the reads of a held job's next tile, or ends one that failed; it stays where whoever decides it finds it.
  bool read_ahead(std::unique_lock<std::mutex>& lock) {
    for (const auto& each : held) {
      const auto active = each;  // the queue may change while the lock is released
      if (active->failure && active->cursor < active->job.numel) {
        give_up(lock, active);
        return true;
      }
      if (active->failure || active->ahead == active->job.numel) continue;
      if (!jobs.empty() || free_slots.empty() || ahead >= ahead_max) continue;
      auto tile = new_tile(active, active->ahead);
      active->ahead += tile->numel;
      active->staged.push_back(tile);
      ++ahead;
      start_reads(lock, tile);
      return true;
    }
    return false;
  }

  void start_reads(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Tile>& tile) {
    const Active& active = *tile->owner;
    std::vector<IoRequest> requests;
    for (std::size_t index = 0; index < kStreams; ++index) {
      const StateStream* stream = active.streams[index];
      if (stream == nullptr || tile->memory[index] != nullptr) continue;
      if (stream->memory != nullptr) {
        tile->memory[index] = stream->memory + active.bytes(index, tile->first);
      } else {
        tile->memory[index] = tile->slot + tile->used;
        tile->used += active.tile_bytes(index, tile_numel);
      }
      if (stream->read_from_file()) requests.push_back(request_of(*tile, OpKind::read, index));
    }
    transfer(lock, tile, requests, [this](std::unique_lock<std::mutex>& locked, const std::shared_ptr<Tile>& read) {
      if (read->dropped) return tile_done(locked, read, ahead);
      changed.notify_all();
    });
  }

  void compute(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Tile>& tile) {
    ++writing;
    if (tile->owner->failure) {
      --tile->owner->uncomputed;
      return tile_done(lock, tile, writing);
    }
    lock.unlock();
    const std::uint64_t began = now_ns();
    auto damage = update_tile(*tile, *pool, isa);
    const std::uint64_t ended = now_ns();
    log.add({began, ended, tile->first, tile->numel, tile->owner->job.tag});
    lock.lock();
    counters.adam_ns += ended - began;
    --tile->owner->uncomputed;
    if (damage) {
      if (!tile->owner->failure) tile->owner->failure = std::move(damage);
      return tile_done(lock, tile, writing);
    }
    ++counters.tiles;
    std::vector<IoRequest> requests;
    for (std::size_t index = 0; index < kStreams; ++index) {
      if (tile->owner->written(index)) requests.push_back(request_of(*tile, OpKind::write, index));
    }
    const auto owner = tile->owner;
    if (owner->written(0)) ++owner->weight_writes;
    if (requests.empty()) {
      tile_done(lock, tile, writing);
    } else {
      transfer(lock, tile, requests,
               [this](std::unique_lock<std::mutex>& locked, const std::shared_ptr<Tile>& written) {
                 tile_done(locked, written, writing);
               });
    }
    tell(lock, owner);
  }

  // Completes what is known of a job that goes well before all of it is done.
  void tell(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Active>& active) {
    if (active->cursor < active->job.numel || active->uncomputed > 0 || active->failure) return;
    const bool weights = active->weight_writes == 0;
    lock.unlock();
    active->future->computed.complete();
    if (weights) active->future->weights.complete();
    lock.lock();
  }

  using Done = std::function<void(std::unique_lock<std::mutex>&, const std::shared_ptr<Tile>&)>;

  // Starts the transfers with the lock released (a future may complete at once); `done` runs under the lock after the
  // last.
  //
  // Invariant: whoever makes the last transfer count notifies under the same lock, so that this object outlives it.
  void transfer(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Tile>& tile,
                const std::vector<IoRequest>& requests, const Done& done) {
    if (requests.empty()) return;
    tile->pending += static_cast<unsigned>(requests.size());
    lock.unlock();
    for (const IoRequest& io : requests) {
      const bool weights = io.kind == OpKind::write && io.data == tile->memory[0];
      const Future future = engine->submit(io);
      // The callback must not own the future that owns it.
      future->then([this, tile, done, weights, raw = future.get()] {
        std::unique_lock locked(mutex);
        if (raw->failure()) {
          const bool timeout = raw->failure()->kind == FailureKind::timeout;
          if (timeout && !abandoned) abandoned = raw->failure();
          if (timeout) *gave_up = true;
          // A timeout says that the job's memory may be in use: no other failure may hide it.
          if (timeout || !tile->owner->failure) tile->owner->failure = raw->failure();
        }
        if (weights && --tile->owner->weight_writes == 0) tell(locked, tile->owner);
        if (--tile->pending == 0) done(locked, tile);
      });
    }
    lock.lock();
  }

  void give_slot_back(std::byte* slot) {
    const auto loan = std::find_if(loans.begin(), loans.end(), [&](const Loan& each) { return each.has(slot); });
    if (loan != loans.end() && loan->ending) {
      --loan->slots;
    } else {
      free_slots.push_back(slot);
    }
  }

  // A tile leaves the staging. `among`: those it is counted among.
  template <typename Count>
  void tile_done(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Tile>& tile, Count& among) {
    --tile->owner->tiles;
    give_slot_back(tile->slot);
    finish_if_done(lock, tile->owner);
    --among;  // last: the destructor waits for it, and then this object is gone
    changed.notify_all();
  }

  void finish_if_done(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Active>& active) {
    const bool started_all = active->cursor == active->job.numel;
    if (!started_all || active->tiles > 0) {
      // A failed job starts no more tiles: give_up moves its cursor to the end.
      return;
    }
    const auto failure = active->failure;
    lock.unlock();
    active->future->complete_all(failure);
    lock.lock();
  }

  using Queue = std::deque<std::shared_ptr<Active>>;

  static Queue::iterator find(Queue& queue, const Future& job) {
    return std::find_if(queue.begin(), queue.end(), [&](const auto& active) { return active->future == job; });
  }

  // A job that is decided takes the place of a held one. Returns that where its future is to be completed.
  std::shared_ptr<Active> replace_held(std::unique_lock<std::mutex>& lock, const Future& job,
                                       const std::shared_ptr<Active>& by) {
    const auto found = find(held, job);
    require(found != held.end(), "the job to take over is not held");
    const auto from = *found;
    const StateFormat &had = from->job.format, &has = by->job.format;
    require(from->job.numel == by->job.numel && had.weight == has.weight && had.master == has.master &&
                had.moments == has.moments,
            "the job to take over has another form");
    held.erase(found);
    by->failure = from->failure;
    if (from->cursor == from->job.numel) return nullptr;  // it failed, and its future is, or will be, completed
    if (!take_over(*from, by, tile_numel, tile_bytes)) drop_staged(lock, *from);
    return from;
  }
};

UpdatePipeline::UpdatePipeline(std::shared_ptr<IoEngine> engine, std::shared_ptr<ThreadPool> pool, std::byte* staging,
                               std::size_t staging_bytes, std::size_t tile_numel, std::size_t tile_bytes,
                               std::size_t held_tiles_max, Isa isa) {
  require(engine != nullptr && pool != nullptr && staging != nullptr,
          "an update pipeline needs an engine, a pool, staging");
  require(tile_numel > 0 && tile_numel % kCutNumel == 0, "tile_numel must be a positive multiple of 4096 elements");
  require(reinterpret_cast<std::uintptr_t>(staging) % kPageBytes == 0, "staging must be aligned to 4 KiB");
  require(tile_bytes > 0 && tile_bytes % kPageBytes == 0, "tile_bytes must be a positive multiple of 4096");
  const std::size_t slots = staging_bytes / tile_bytes;
  require(slots >= 2 && slots - 2 >= held_tiles_max, "staging must hold two tiles beside those of held jobs");
  impl_ = std::make_unique<Impl>(std::move(engine), std::move(pool), staging, slots, tile_numel, tile_bytes,
                                 held_tiles_max, isa);
}

UpdatePipeline::~UpdatePipeline() {
  if (getpid() != impl_->pid) {
    // In a forked child the driver does not exist: neither join it nor destroy what it holds.
    static_cast<void>(impl_.release());
    return;
  }
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stop = true;
  }
  impl_->changed.notify_all();
  impl_->driver.join();
}

UpdateFuture UpdatePipeline::submit(UpdateJob job, bool first, const Future& held) {
  auto active = activate(std::move(job), impl_->tile_numel, impl_->tile_bytes);
  UpdateFuture future = active->future;
  std::shared_ptr<Active> replaced;
  {
    std::unique_lock lock(impl_->mutex);
    if (impl_->stop) throw std::invalid_argument("the update pipeline is closed");
    if (held != nullptr && !impl_->abandoned) replaced = impl_->replace_held(lock, held, active);
    auto& jobs = impl_->jobs;
    const bool front_begun = !jobs.empty() && jobs.front()->cursor > 0;  // no other one can have been
    jobs.insert(first ? jobs.begin() + (front_begun ? 1 : 0) : jobs.end(), std::move(active));
  }
  impl_->changed.notify_all();
  if (replaced != nullptr) replaced->future->complete_all(replaced->failure);
  return future;
}

UpdateFuture UpdatePipeline::hold(UpdateJob job) {
  auto active = activate_held(std::move(job), impl_->tile_numel, impl_->tile_bytes);
  UpdateFuture future = active->future;
  {
    const std::lock_guard lock(impl_->mutex);
    if (impl_->stop) throw std::invalid_argument("the update pipeline is closed");
    impl_->held.push_back(std::move(active));
  }
  impl_->changed.notify_all();
  return future;
}

std::size_t UpdatePipeline::held_tiles_max() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->ahead_max;
}

void UpdatePipeline::lend(std::byte* memory, std::size_t nbytes) {
  require(memory != nullptr && reinterpret_cast<std::uintptr_t>(memory) % kPageBytes == 0,
          "what is lent must be aligned to 4 KiB");
  const std::size_t slots = nbytes / impl_->tile_bytes;
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->loans.push_back({memory, memory + nbytes, slots});
    for (std::size_t slot = slots; slot-- > 0;) impl_->free_slots.push_back(memory + slot * impl_->tile_bytes);
    impl_->ahead_max += slots;
  }
  impl_->changed.notify_all();
}

bool UpdatePipeline::reclaim(std::byte* memory) {
  std::unique_lock lock(impl_->mutex);
  auto& loans = impl_->loans;
  const auto find = [&] {
    return std::find_if(loans.begin(), loans.end(), [&](const Loan& each) { return each.begin == memory; });
  };
  const auto loan = find();
  require(loan != loans.end() && !loan->ending, "what is reclaimed was not lent");
  loan->ending = true;
  impl_->ahead_max -= loan->slots;
  loan->slots -= std::erase_if(impl_->free_slots, [&](const std::byte* slot) { return loan->has(slot); });
  impl_->changed.wait(lock, [&] { return find()->slots == 0 || impl_->abandoned.has_value(); });
  if (impl_->abandoned) return false;
  loans.erase(find());
  return true;
}

bool UpdatePipeline::withdraw(const Future& job) {
  std::optional<Failure> failure;
  UpdateFuture future;
  {
    std::unique_lock lock(impl_->mutex);
    auto* queue = &impl_->held;
    auto found = Impl::find(*queue, job);
    if (found == queue->end()) {
      queue = &impl_->jobs;
      found = Impl::find(*queue, job);
    }
    if (found == queue->end()) return false;
    const auto active = *found;
    future = active->future;
    if (active->cursor == 0) failure = active->failure ? active->failure : canceled("the update was taken back");
    if (failure || queue == &impl_->held) queue->erase(found);  // a held job that failed is done
    if (!failure) return false;
    impl_->drop_staged(lock, *active);
  }
  impl_->changed.notify_all();
  future->complete_all(failure);
  return true;
}

void UpdatePipeline::cancel(const Future& job) {
  if (withdraw(job)) return;
  std::unique_lock lock(impl_->mutex);
  const auto found = Impl::find(impl_->jobs, job);
  if (found != impl_->jobs.end() && !(*found)->failure) (*found)->failure = canceled("the update was taken back");
  lock.unlock();
  impl_->changed.notify_all();
}

std::size_t UpdatePipeline::staging_tile_bytes(const StateFormat& format, std::size_t numel, bool gradients) {
  const std::size_t moment = round_up_to_page(moment_bytes(format.moments, numel));
  return round_up_to_page(numel * itemsize(format.weight)) +
         round_up_to_page(numel * residual_itemsize(format.master)) + 2 * moment +
         (gradients ? round_up_to_page(numel * sizeof(float)) : 0);
}

void UpdatePipeline::trace(bool on, std::size_t events_max) { impl_->log.record(on, events_max); }

TileLog::Taken UpdatePipeline::take_trace() { return impl_->log.take(); }

std::shared_ptr<const std::atomic<bool>> UpdatePipeline::abandoned() const { return impl_->gave_up; }

UpdateCounters UpdatePipeline::counters() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->counters;
}

}  // namespace infinity
