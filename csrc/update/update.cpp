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
constexpr std::size_t kStreams = 4;  // weight, residual, exp_avg, exp_avg_sq
static_assert(kCutNumel % kPage == 0, "one byte per element, and a cut is still between pages");

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
  const StateStream* streams[kStreams] = {};  // null: the job has none

  [[nodiscard]] bool int8(std::size_t index) const { return index >= 2 && job.format.moments == Moments::int8; }

  // Bytes of the first `numel` elements of a stream, and where element `numel` begins, if a tile may begin there.
  [[nodiscard]] std::uint64_t bytes(std::size_t index, std::uint64_t numel) const {
    if (index == 0) return numel * itemsize(job.format.weight);
    if (index == 1) return numel * residual_itemsize(job.format.master);
    return moment_bytes(job.format.moments, numel);
  }

  // Bytes of a stream's part of the largest tile, in pages.
  [[nodiscard]] std::size_t tile_bytes(std::size_t index, std::size_t tile_numel) const {
    return round_up_to_page(bytes(index, std::min<std::uint64_t>(tile_numel, job.numel)));
  }

  // Elements [begin, end) of a tile, all of one chunk, as bytes of the tile's part of a stream. Int8: their codes.
  [[nodiscard]] std::pair<std::size_t, std::size_t> piece(std::size_t index, std::size_t begin, std::size_t end) const {
    if (!int8(index)) return {bytes(index, begin), bytes(index, end)};
    const std::size_t from = begin / kChunkNumel * kChunkBytes + kScalesBytes + begin % kChunkNumel;
    return {from, from + (end - begin)};
  }
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

bool given(const StateStream& stream) { return stream.memory != nullptr || stream.file != nullptr; }

// A moment that no rule uses may be left out, and is not moved. Without arithmetic what is given is moved.
const StateStream* check_moment(const StateStream& stream, bool arithmetic, bool used, const char* name) {
  if (!(arithmetic ? used : given(stream))) return nullptr;
  check_stream(stream, name);
  return &stream;
}

std::shared_ptr<Active> check(UpdateJob job, std::size_t tile_numel, std::size_t tile_bytes) {
  require(job.numel > 0, "a job needs at least one element");
  require(job.grad != nullptr, "a job needs gradients in memory");
  check_format(job.format);
  check_segments(job.segments, job.numel, job.format);
  require(job.format.moments != Moments::int8 || job.numel <= tile_numel || tile_numel % kChunkNumel == 0,
          "with int8 moments tile_numel must be a multiple of 262144, or a job must be one tile");
  auto active = std::make_shared<Active>();
  active->job = std::move(job);
  const UpdateJob& kept = active->job;
  const auto any = [&](bool (Hyperparameters::*uses)() const) {
    return std::any_of(kept.segments.begin(), kept.segments.end(),
                       [&](const Segment& segment) { return !segment.skip && (segment.hyper.*uses)(); });
  };
  check_stream(kept.weight, "weight");
  active->streams[0] = &kept.weight;
  if (residual_itemsize(kept.format.master) > 0) {
    check_stream(kept.residual, "residual");
    active->streams[1] = &kept.residual;
  }
  active->streams[2] = check_moment(kept.exp_avg, kept.arithmetic, any(&Hyperparameters::uses_exp_avg), "exp_avg");
  active->streams[3] =
      check_moment(kept.exp_avg_sq, kept.arithmetic, any(&Hyperparameters::uses_exp_avg_sq), "exp_avg_sq");
  std::size_t staged = 0;
  for (std::size_t index = 0; index < kStreams; ++index) {
    const StateStream* stream = active->streams[index];
    if (stream != nullptr && stream->memory == nullptr) staged += active->tile_bytes(index, tile_numel);
  }
  require(staged <= tile_bytes, "a tile of this job does not fit the staging");
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
  std::size_t tile_bytes;
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
    const std::uint64_t began = now_ns();
    auto damage = work(*tile);
    const std::uint64_t took = now_ns() - began;
    lock.lock();
    counters.adam_ns += took;
    if (damage) {
      if (!tile->owner->failure) tile->owner->failure = std::move(damage);
      return tile_done(lock, tile);
    }
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

  // The update of a tile that is read, by all threads: each takes a piece that fits its cache, checks its pages,
  // updates them, and takes the checksums of what is to be written. The pages of scales belong to no piece: they are
  // checked before and taken after. After damage nothing of the tile is written, and what the file should hold stays
  // what it was; the damage that comes first in the tile is reported.
  [[nodiscard]] std::optional<Failure> work(const Tile& tile) {
    if (auto damage = first_damage(scale_pages(tile, Pages::read))) return damage;
    const std::size_t task = task_numel();
    const std::size_t tasks = (tile.numel + task - 1) / task;
    std::vector<std::optional<Failure>> damage(tasks);
    std::vector<std::vector<Sums>> sums(tasks);
    pool->parallel_for(tasks, [&](std::size_t index) {
      const std::size_t begin = index * task;
      const std::size_t end = std::min(begin + task, tile.numel);
      damage[index] = first_damage(pages(tile, Pages::read, begin, end));
      if (damage[index]) return;
      update(tile, begin, end);
      sums[index] = sums_of(pages(tile, Pages::written, begin, end));
    });
    const auto first = std::find_if(damage.begin(), damage.end(), [](const auto& found) { return found.has_value(); });
    if (first != damage.end()) return std::move(*first);
    sums.push_back(sums_of(scale_pages(tile, Pages::written)));
    for (const std::vector<Sums>& piece : sums) {
      for (const Sums& taken : piece) taken.file->put(taken.offset, taken.pages);
    }
    return std::nullopt;
  }

  void update(const Tile& tile, std::size_t begin, std::size_t end) const {
    const UpdateJob& job = tile.owner->job;
    if (!job.arithmetic) return;
    StateBuffers buffers;
    buffers.weight = tile.memory[0];
    buffers.residual = tile.memory[1];
    buffers.exp_avg = tile.memory[2];
    buffers.exp_avg_sq = tile.memory[3];
    buffers.grad = job.grad + tile.first * itemsize(job.format.grad);
    const bool finite =
        optimizer_update(job.format, buffers, tile.first, begin, end, job.segments, job.grad_scale, isa);
    if (!finite && job.not_finite != nullptr) *job.not_finite = true;
  }

  // Pages of one stream of a tile, in memory and in the file.
  struct Span {
    SwapFile* file;
    std::uint64_t offset;
    std::byte* data;
    std::size_t nbytes;
  };
  enum class Pages : std::uint8_t { read, written };

  // A stream whose checksums are kept, and of which pages were read, or will be written.
  [[nodiscard]] static bool checked(const Active& active, std::size_t index, Pages which) {
    const StateStream* stream = active.streams[index];
    if (stream == nullptr || stream->file == nullptr || stream->file->checksums() == nullptr) return false;
    return which == Pages::written || stream->memory == nullptr;
  }

  [[nodiscard]] static Span span(const Tile& tile, std::size_t index, std::size_t begin, std::size_t end) {
    const Active& active = *tile.owner;
    const StateStream& stream = *active.streams[index];
    return {stream.file.get(), stream.offset + active.bytes(index, tile.first) + begin, tile.memory[index] + begin,
            round_up_to_page(end - begin)};
  }

  // Elements [begin, end) of all streams.
  [[nodiscard]] static std::vector<Span> pages(const Tile& tile, Pages which, std::size_t begin, std::size_t end) {
    std::vector<Span> result;
    for (std::size_t index = 0; index < kStreams; ++index) {
      const Active& active = *tile.owner;
      if (!checked(active, index, which)) continue;
      const auto [from, to] = active.piece(index, begin, end);
      result.push_back(span(tile, index, from, to));
    }
    return result;
  }

  [[nodiscard]] static std::vector<Span> scale_pages(const Tile& tile, Pages which) {
    std::vector<Span> result;
    for (std::size_t index = 0; index < kStreams; ++index) {
      if (!tile.owner->int8(index) || !checked(*tile.owner, index, which)) continue;
      for (std::size_t at = 0; at < tile.numel; at += kChunkNumel) {
        const std::size_t from = at / kChunkNumel * kChunkBytes;
        result.push_back(span(tile, index, from, from + kScalesBytes));
      }
    }
    return result;
  }

  [[nodiscard]] static std::optional<Failure> first_damage(const std::vector<Span>& spans) {
    for (const Span& part : spans) {
      if (auto failure = part.file->check(part.offset, part.data, part.nbytes)) return failure;
    }
    return std::nullopt;
  }

  // Checksums of pages that are about to be written.
  struct Sums {
    SwapFile* file;
    std::uint64_t offset;
    std::vector<PageChecksum> pages;
  };

  [[nodiscard]] static std::vector<Sums> sums_of(const std::vector<Span>& spans) {
    std::vector<Sums> result;
    for (const Span& part : spans) {
      Sums taken{part.file, part.offset, std::vector<PageChecksum>(part.nbytes / kPage)};
      checksum_pages(part.data, taken.pages.size(), taken.pages.data());
      result.push_back(std::move(taken));
    }
    return result;
  }

  IoRequest request(OpKind kind, const std::shared_ptr<Tile>& tile, std::size_t index) const {
    const Active& active = *tile->owner;
    const StateStream& stream = *active.streams[index];
    return {kind,
            IoClass::states,
            stream.file,
            stream.offset + active.bytes(index, tile->first),
            tile->memory[index],
            round_up_to_page(active.bytes(index, tile->numel)),
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
                               std::size_t staging_bytes, std::size_t tile_numel, std::size_t tile_bytes, Isa isa) {
  require(engine != nullptr && pool != nullptr && staging != nullptr,
          "an update pipeline needs an engine, a pool, staging");
  require(tile_numel > 0 && tile_numel % kCutNumel == 0, "tile_numel must be a positive multiple of 4096 elements");
  require(reinterpret_cast<std::uintptr_t>(staging) % kPage == 0, "staging must be aligned to 4 KiB");
  require(tile_bytes > 0 && tile_bytes % kPage == 0, "tile_bytes must be a positive multiple of 4096");
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
  auto active = check(std::move(job), impl_->tile_numel, impl_->tile_bytes);
  Future future = active->future;
  {
    const std::lock_guard lock(impl_->mutex);
    if (impl_->stop) throw std::invalid_argument("the update pipeline is closed");
    impl_->jobs.push_back(std::move(active));
  }
  impl_->changed.notify_all();
  return future;
}

std::size_t UpdatePipeline::staging_tile_bytes(const StateFormat& format, std::size_t numel) {
  const std::size_t moment = round_up_to_page(moment_bytes(format.moments, numel));
  return round_up_to_page(numel * itemsize(format.weight)) +
         round_up_to_page(numel * residual_itemsize(format.master)) + 2 * moment;
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
