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

bool anything_to_do(const UpdateJob& job, std::uint64_t first, std::uint64_t end) {
  if (job.whole) return true;
  return std::any_of(job.segments.begin(), job.segments.end(), [&](const Segment& segment) {
    return !segment.skip && segment.begin < end && segment.end > first;
  });
}

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
  std::byte* staging;
  std::size_t tile_numel;
  std::size_t tile_bytes;
  Isa isa;
  pid_t pid = getpid();
  TileLog log;

  mutable std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::deque<std::shared_ptr<Active>> jobs;   // not all tiles started
  std::deque<std::shared_ptr<Tile>> reading;  // in order; the front is the next to compute
  std::vector<std::size_t> free_slots;
  unsigned writing = 0;  // tiles
  bool stop = false;
  std::optional<Failure> abandoned;  // the timeout that ended the pipeline
  UpdateCounters counters;

  std::thread driver;  // last: starts when everything else is there

  Impl(std::shared_ptr<IoEngine> io, std::shared_ptr<ThreadPool> threads, std::byte* memory, std::size_t slots,
       std::size_t numel, std::size_t nbytes, Isa kernels)
      : engine(std::move(io)),
        pool(std::move(threads)),
        staging(memory),
        tile_numel(numel),
        tile_bytes(nbytes),
        isa(kernels) {
    for (std::size_t slot = slots; slot-- > 0;) free_slots.push_back(slot);
    driver = std::thread([this] { run(); });
  }

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      if (abandoned) cancel_all(lock, *abandoned);
      if (stop) cancel_all(lock, canceled("the update pipeline was closed"));
      if (start_next_tile(lock)) continue;
      if (!reading.empty() && reading.front()->pending == 0) {
        auto tile = reading.front();
        reading.pop_front();
        compute(lock, tile);
        continue;
      }
      if (stop && reading.empty() && writing == 0 && jobs.empty()) return;
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
    while (!jobs.empty()) {
      auto active = jobs.front();
      jobs.pop_front();
      if (!active->failure) active->failure = why;
      active->cursor = active->job.numel;
      finish_if_done(lock, active);
    }
  }

  // Starts the reads of the next tile that has something to do. False when there is none, or no staging.
  bool start_next_tile(std::unique_lock<std::mutex>& lock) {
    if (jobs.empty() || free_slots.empty()) return false;
    auto active = jobs.front();
    if (active->failure) active->cursor = active->job.numel;
    while (active->cursor < active->job.numel) {
      const std::uint64_t first = active->cursor;
      const std::uint64_t end = std::min<std::uint64_t>(first + tile_numel, active->job.numel);
      active->cursor = end;
      if (!anything_to_do(active->job, first, end)) continue;
      auto tile = std::make_shared<Tile>();
      tile->owner = active;
      tile->first = first;
      tile->numel = static_cast<std::size_t>(end - first);
      tile->slot = free_slots.back();
      free_slots.pop_back();
      ++active->tiles;
      if (active->cursor == active->job.numel) jobs.pop_front();
      reading.push_back(tile);
      start_reads(lock, tile);
      return true;
    }
    jobs.pop_front();
    finish_if_done(lock, active);
    return true;
  }

  void start_reads(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Tile>& tile) {
    const Active& active = *tile->owner;
    std::byte* free = staging + tile->slot * tile_bytes;
    std::vector<IoRequest> requests;
    for (std::size_t index = 0; index < kStreams; ++index) {
      const StateStream* stream = active.streams[index];
      if (stream == nullptr) continue;
      const std::uint64_t at = active.bytes(index, tile->first);
      if (stream->memory != nullptr) {
        tile->memory[index] = stream->memory + at;
      } else {
        tile->memory[index] = free;
        free += active.tile_bytes(index, tile_numel);
      }
      if (stream->read_from_file()) requests.push_back(request(OpKind::read, tile, index));
    }
    transfer(lock, tile, requests,
             [this](std::unique_lock<std::mutex>&, const std::shared_ptr<Tile>&) { changed.notify_all(); });
  }

  void compute(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Tile>& tile) {
    ++writing;
    if (tile->owner->failure) return tile_done(lock, tile);
    lock.unlock();
    const std::uint64_t began = now_ns();
    auto damage = update_tile(*tile, *pool, isa);
    const std::uint64_t ended = now_ns();
    log.add({began, ended, tile->first, tile->numel, tile->owner->job.tag});
    lock.lock();
    counters.adam_ns += ended - began;
    if (damage) {
      if (!tile->owner->failure) tile->owner->failure = std::move(damage);
      return tile_done(lock, tile);
    }
    ++counters.tiles;
    std::vector<IoRequest> requests;
    for (std::size_t index = 0; index < kStreams; ++index) {
      if (tile->owner->written(index)) requests.push_back(request(OpKind::write, tile, index));
    }
    if (requests.empty()) return tile_done(lock, tile);
    transfer(lock, tile, requests, [this](std::unique_lock<std::mutex>& held, const std::shared_ptr<Tile>& written) {
      tile_done(held, written);
    });
  }

  IoRequest request(OpKind kind, const std::shared_ptr<Tile>& tile, std::size_t index) const {
    const Active& active = *tile->owner;
    const StateStream& stream = *active.streams[index];
    const std::uint64_t offset = kind == OpKind::read ? stream.offset : stream.write_offset;
    return {kind,
            IoClass::states,
            stream.file,
            offset + active.bytes(index, tile->first),
            tile->memory[index],
            round_up_to_page(active.bytes(index, tile->numel)),
            true,
            active.job.tag};
  }

  using Done = std::function<void(std::unique_lock<std::mutex>&, const std::shared_ptr<Tile>&)>;

  // Starts the transfers with the lock released (a future may complete at once); `done` runs under the lock after the
  // last.
  //
  // Invariant: whoever makes the last transfer count notifies under the same lock, so that this object outlives it.
  void transfer(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Tile>& tile,
                const std::vector<IoRequest>& requests, const Done& done) {
    if (requests.empty()) return;
    tile->pending = static_cast<unsigned>(requests.size());
    lock.unlock();
    for (const IoRequest& io : requests) {
      const Future future = engine->submit(io);
      // The callback must not own the future that owns it.
      future->then([this, tile, done, raw = future.get()] {
        std::unique_lock held(mutex);
        if (raw->failure()) {
          const bool timeout = raw->failure()->kind == FailureKind::timeout;
          if (timeout && !abandoned) abandoned = raw->failure();
          // A timeout says that the job's memory may be in use: no other failure may hide it.
          if (timeout || !tile->owner->failure) tile->owner->failure = raw->failure();
        }
        if (--tile->pending == 0) done(held, tile);
      });
    }
    lock.lock();
  }

  void tile_done(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Tile>& tile) {
    --tile->owner->tiles;
    free_slots.push_back(tile->slot);
    finish_if_done(lock, tile->owner);
    --writing;  // last: the destructor waits for it, and then this object is gone
    changed.notify_all();
  }

  void finish_if_done(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Active>& active) {
    const bool started_all = active->cursor == active->job.numel;
    if (!started_all || active->tiles > 0) {
      // A failed job starts no more tiles: start_next_tile moves its cursor to the end.
      return;
    }
    const auto failure = active->failure;
    lock.unlock();
    active->future->complete(failure);
    lock.lock();
  }
};

UpdatePipeline::UpdatePipeline(std::shared_ptr<IoEngine> engine, std::shared_ptr<ThreadPool> pool, std::byte* staging,
                               std::size_t staging_bytes, std::size_t tile_numel, std::size_t tile_bytes, Isa isa) {
  require(engine != nullptr && pool != nullptr && staging != nullptr,
          "an update pipeline needs an engine, a pool, staging");
  require(tile_numel > 0 && tile_numel % kCutNumel == 0, "tile_numel must be a positive multiple of 4096 elements");
  require(reinterpret_cast<std::uintptr_t>(staging) % kPageBytes == 0, "staging must be aligned to 4 KiB");
  require(tile_bytes > 0 && tile_bytes % kPageBytes == 0, "tile_bytes must be a positive multiple of 4096");
  const std::size_t slots = staging_bytes / tile_bytes;
  require(slots >= 2, "staging must hold at least two tiles");
  impl_ = std::make_unique<Impl>(std::move(engine), std::move(pool), staging, slots, tile_numel, tile_bytes, isa);
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

Future UpdatePipeline::submit(UpdateJob job) {
  auto active = activate(std::move(job), impl_->tile_numel, impl_->tile_bytes);
  Future future = active->future;
  {
    const std::lock_guard lock(impl_->mutex);
    if (impl_->stop) throw std::invalid_argument("the update pipeline is closed");
    impl_->jobs.push_back(std::move(active));
  }
  impl_->changed.notify_all();
  return future;
}

bool UpdatePipeline::withdraw(const Future& job) {
  {
    const std::lock_guard lock(impl_->mutex);
    const auto found = std::find_if(impl_->jobs.begin(), impl_->jobs.end(),
                                    [&](const auto& active) { return active->future == job && active->cursor == 0; });
    if (found == impl_->jobs.end()) return false;
    impl_->jobs.erase(found);
  }
  job->complete(canceled("the update was taken back"));
  return true;
}

void UpdatePipeline::cancel(const Future& job) {
  if (withdraw(job)) return;
  std::unique_lock lock(impl_->mutex);
  const auto found =
      std::find_if(impl_->jobs.begin(), impl_->jobs.end(), [&](const auto& active) { return active->future == job; });
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

bool UpdatePipeline::abandoned() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->abandoned.has_value();
}

UpdateCounters UpdatePipeline::counters() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->counters;
}

}  // namespace infinity
