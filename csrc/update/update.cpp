#include "update/update.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

namespace infinity {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kSpanBytes = 256 << 10;  // checked or taken by one thread at a time
constexpr std::size_t kStreams = 4;            // weight, residual, exp_avg, exp_avg_sq

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
}

std::size_t round_up_to_page(std::size_t nbytes) { return (nbytes + kPage - 1) / kPage * kPage; }

// A job while it is being worked on. Guarded by Impl::mutex, but for `job`, which does not change.
struct Active {
  UpdateJob job;
  Future future = std::make_shared<Completion>();
  std::uint64_t cursor = 0;  // first element of the next tile
  unsigned tiles = 0;        // tiles started and not finished
  std::optional<Failure> failure;
  std::size_t itemsizes[kStreams] = {};
  const StateStream* streams[kStreams] = {};
};

struct Tile {
  std::shared_ptr<Active> owner;
  std::uint64_t first = 0;
  std::size_t numel = 0;
  std::size_t slot = 0;  // which piece of the staging
  std::byte* memory[kStreams] = {};
  unsigned pending = 0;  // transfers under way
};

void require(bool good, const char* message) {
  if (!good) throw std::invalid_argument(message);
}

void check_stream(const StateStream& stream, const char* name) {
  const std::string what(name);
  if (stream.memory == nullptr && stream.file == nullptr) {
    throw std::invalid_argument(what + " is neither in memory nor in a file");
  }
  if (stream.file != nullptr &&
      (stream.offset % kPage != 0 || reinterpret_cast<std::uintptr_t>(stream.memory) % kPage != 0)) {
    throw std::invalid_argument(what + " is not aligned to 4 KiB");
  }
}

void check_segments(const UpdateJob& job) {
  std::uint64_t end = 0;
  for (const Segment& segment : job.segments) {
    require(segment.begin >= end && segment.end >= segment.begin, "segments must be sorted and disjoint");
    require(segment.end <= job.numel, "a segment ends after the job");
    require(segment.skip || segment.step >= 1, "a segment's step counts from 1");
    end = segment.end;
  }
}

std::shared_ptr<Active> check(UpdateJob job) {
  require(job.numel > 0, "a job needs at least one element");
  require(job.grad != nullptr, "a job needs gradients in memory");
  require((job.format.master == Master::weight) == (job.format.weight == DType::fp32),
          "an fp32 weight is its own master; a 16-bit weight needs split16 or fp32");
  require(job.format.master != Master::split16 || job.format.weight == DType::bf16, "split16 needs bf16 weights");
  check_segments(job);
  check_stream(job.weight, "weight");
  check_stream(job.exp_avg, "exp_avg");
  check_stream(job.exp_avg_sq, "exp_avg_sq");
  if (job.format.master != Master::weight) check_stream(job.residual, "residual");
  auto active = std::make_shared<Active>();
  active->job = std::move(job);
  const UpdateJob& kept = active->job;
  active->streams[0] = &kept.weight;
  active->itemsizes[0] = itemsize(kept.format.weight);
  if (kept.format.master != Master::weight) {
    active->streams[1] = &kept.residual;
    active->itemsizes[1] = kept.format.master == Master::split16 ? 2 : 4;
  }
  active->streams[2] = &kept.exp_avg;
  active->streams[3] = &kept.exp_avg_sq;
  active->itemsizes[2] = active->itemsizes[3] = 4;
  return active;
}

bool anything_to_do(const UpdateJob& job, std::uint64_t first, std::uint64_t end) {
  return std::any_of(job.segments.begin(), job.segments.end(), [&](const Segment& segment) {
    return !segment.skip && segment.begin < end && segment.end > first;
  });
}

Failure canceled() {
  Failure failure;
  failure.kind = FailureKind::canceled;
  failure.operation = "update";
  failure.error_number = ECANCELED;
  failure.cause = failure.message = "the update pipeline was closed";
  return failure;
}

}  // namespace

struct UpdatePipeline::Impl {
  std::shared_ptr<IoEngine> engine;
  std::shared_ptr<ThreadPool> pool;
  std::byte* staging;
  std::size_t tile_numel;
  Isa isa;
  pid_t pid = getpid();

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
       std::size_t numel, Isa kernels)
      : engine(std::move(io)), pool(std::move(threads)), staging(memory), tile_numel(numel), isa(kernels) {
    for (std::size_t slot = slots; slot-- > 0;) free_slots.push_back(slot);
    driver = std::thread([this] { run(); });
  }

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      if (abandoned) cancel(lock, *abandoned);
      if (stop) cancel(lock, canceled());
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
  void cancel(std::unique_lock<std::mutex>& lock, const Failure& why) {
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
    std::byte* piece = staging + tile->slot * staging_tile_bytes(tile_numel);
    std::vector<IoRequest> requests;
    for (std::size_t index = 0; index < kStreams; ++index) {
      const StateStream* stream = active.streams[index];
      if (stream == nullptr) continue;
      const std::size_t at = tile->first * active.itemsizes[index];
      if (stream->memory != nullptr) {
        tile->memory[index] = stream->memory + at;
      } else {
        tile->memory[index] = piece + index * tile_numel * sizeof(float);
        requests.push_back(request(OpKind::read, tile, index));
      }
    }
    transfer(lock, tile, requests,
             [this](std::unique_lock<std::mutex>&, const std::shared_ptr<Tile>&) { changed.notify_all(); });
  }

  void compute(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Tile>& tile) {
    ++writing;
    if (tile->owner->failure) return tile_done(lock, tile);
    lock.unlock();
    const UpdateJob& job = tile->owner->job;
    if (auto damage = check(*tile)) {
      lock.lock();
      if (!tile->owner->failure) tile->owner->failure = std::move(damage);
      return tile_done(lock, tile);
    }
    const std::uint64_t began = now_ns();
    AdamBuffers buffers;
    buffers.weight = tile->memory[0];
    buffers.residual = tile->memory[1];
    buffers.exp_avg = reinterpret_cast<float*>(tile->memory[2]);
    buffers.exp_avg_sq = reinterpret_cast<float*>(tile->memory[3]);
    buffers.grad = job.grad + tile->first * itemsize(job.format.grad);
    if (job.arithmetic) {
      adam_update(job.format, buffers, tile->first, tile->numel, job.segments, job.grad_scale, isa, *pool);
    }
    const std::uint64_t took = now_ns() - began;
    take(*tile);
    lock.lock();
    counters.adam_ns += took;
    ++counters.tiles;
    std::vector<IoRequest> requests;
    for (std::size_t index = 0; index < kStreams; ++index) {
      const StateStream* stream = tile->owner->streams[index];
      if (stream != nullptr && stream->file != nullptr) requests.push_back(request(OpKind::write, tile, index));
    }
    if (requests.empty()) return tile_done(lock, tile);
    transfer(lock, tile, requests, [this](std::unique_lock<std::mutex>& held, const std::shared_ptr<Tile>& written) {
      tile_done(held, written);
    });
  }

  // A tile's pages are checked and taken here, by all threads, while Adam has, or will have, them in the cache.
  struct Span {
    SwapFile* file;
    std::uint64_t offset;
    std::byte* data;
    std::size_t nbytes;
  };

  // The spans of a tile's streams that are in a file; of those that were read, when `read`.
  [[nodiscard]] std::vector<Span> spans(const Tile& tile, bool read) const {
    std::vector<Span> result;
    for (std::size_t index = 0; index < kStreams; ++index) {
      const StateStream* stream = tile.owner->streams[index];
      if (stream == nullptr || stream->file == nullptr || stream->file->checksums() == nullptr) continue;
      if (read && stream->memory != nullptr) continue;
      const std::size_t item = tile.owner->itemsizes[index];
      const std::size_t nbytes = round_up_to_page(tile.numel * item);
      for (std::size_t at = 0; at < nbytes; at += kSpanBytes) {
        result.push_back({stream->file.get(), stream->offset + tile.first * item + at, tile.memory[index] + at,
                          std::min(kSpanBytes, nbytes - at)});
      }
    }
    return result;
  }

  [[nodiscard]] std::optional<Failure> check(const Tile& tile) const {
    const std::vector<Span> parts = spans(tile, true);
    std::vector<std::optional<Failure>> damage(parts.size());
    pool->parallel_for(parts.size(), [&](std::size_t index) {
      const Span& span = parts[index];
      damage[index] = span.file->check(span.offset, span.data, span.nbytes);
    });
    const auto first = std::find_if(damage.begin(), damage.end(), [](const auto& found) { return found.has_value(); });
    return first == damage.end() ? std::nullopt : std::move(*first);
  }

  void take(const Tile& tile) const {
    const std::vector<Span> parts = spans(tile, false);
    pool->parallel_for(parts.size(), [&](std::size_t index) {
      const Span& span = parts[index];
      span.file->take(span.offset, span.data, span.nbytes);
    });
  }

  IoRequest request(OpKind kind, const std::shared_ptr<Tile>& tile, std::size_t index) const {
    const Active& active = *tile->owner;
    const StateStream& stream = *active.streams[index];
    return {kind,
            IoClass::states,
            stream.file,
            stream.offset + tile->first * active.itemsizes[index],
            tile->memory[index],
            round_up_to_page(tile->numel * active.itemsizes[index]),
            true};
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
                               std::size_t staging_bytes, std::size_t tile_numel, Isa isa) {
  require(engine != nullptr && pool != nullptr && staging != nullptr,
          "an update pipeline needs an engine, a pool, staging");
  require(tile_numel > 0 && tile_numel % kPage == 0, "tile_numel must be a positive multiple of 4096 elements");
  require(reinterpret_cast<std::uintptr_t>(staging) % kPage == 0, "staging must be aligned to 4 KiB");
  const std::size_t slots = staging_bytes / staging_tile_bytes(tile_numel);
  require(slots >= 2, "staging must hold at least two tiles");
  impl_ = std::make_unique<Impl>(std::move(engine), std::move(pool), staging, slots, tile_numel, isa);
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
  auto active = check(std::move(job));
  Future future = active->future;
  {
    const std::lock_guard lock(impl_->mutex);
    if (impl_->stop) throw std::invalid_argument("the update pipeline is closed");
    impl_->jobs.push_back(std::move(active));
  }
  impl_->changed.notify_all();
  return future;
}

bool UpdatePipeline::abandoned() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->abandoned.has_value();
}

UpdateCounters UpdatePipeline::counters() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->counters;
}

}  // namespace infinity
