// One tile of a job: its parts of the streams, and the work on them once they are in memory. The pipeline around it is
// in update.cpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include "base/future.hpp"
#include "base/page.hpp"
#include "base/thread_pool.hpp"
#include "update/update.hpp"

namespace infinity {

inline constexpr std::size_t kStreams = 5;  // weight, residual, exp_avg, exp_avg_sq, grad
inline constexpr std::size_t kGrad = 4;     // is only read

struct Tile;

// A job while it is being worked on. Guarded by the pipeline's mutex, but for `job` and `streams`, which do not change.
struct Active {
  UpdateJob job;
  UpdateFuture future = std::make_shared<UpdateCompletion>();
  std::uint64_t cursor = 0;    // first element of the next tile
  std::uint64_t ahead = 0;     // held: first element of the next tile to read
  unsigned tiles = 0;          // tiles started, or read ahead, and not finished
  unsigned uncomputed = 0;     // of those that were started
  unsigned weight_writes = 0;  // under way
  // Read while the job, or the one that it took them over from, was held; in order, from the cursor on.
  std::deque<std::shared_ptr<Tile>> staged;
  std::optional<Failure> failure;
  const StateStream* streams[kStreams] = {};  // null: the job has none

  [[nodiscard]] bool int8(std::size_t index) const {
    return index >= 2 && index != kGrad && job.format.moments == Moments::int8;
  }
  [[nodiscard]] bool written(std::size_t index) const {
    return index != kGrad && streams[index] != nullptr && streams[index]->file != nullptr;
  }

  // Bytes of the first `numel` elements of a stream, and where element `numel` begins, if a tile may begin there.
  [[nodiscard]] std::uint64_t bytes(std::size_t index, std::uint64_t numel) const {
    if (index == 0) return numel * itemsize(job.format.weight);
    if (index == 1) return numel * residual_itemsize(job.format.master);
    if (index == kGrad) return numel * itemsize(job.format.grad);
    return moment_bytes(job.format.moments, numel);
  }

  // Bytes of a stream's part of the largest tile, in pages.
  [[nodiscard]] std::size_t tile_bytes(std::size_t index, std::size_t tile_numel) const {
    return round_up_to_page(bytes(index, std::min<std::uint64_t>(tile_numel, job.numel)));
  }

  // Bytes of the staging that a tile needs.
  [[nodiscard]] std::size_t staged_bytes(std::size_t tile_numel) const {
    std::size_t sum = 0;
    for (std::size_t index = 0; index < kStreams; ++index) {
      if (streams[index] != nullptr && streams[index]->memory == nullptr) sum += tile_bytes(index, tile_numel);
    }
    return sum;
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
  std::byte* slot = nullptr;         // its piece of the staging
  std::byte* memory[kStreams] = {};  // null: not read yet, or the job has no such stream
  std::size_t used = 0;              // bytes of its piece of the staging
  unsigned pending = 0;              // transfers under way
  bool dropped = false;              // read ahead for nothing: the piece is free once no transfer is under way
};

// Staging that belongs to somebody else.
struct Loan {
  std::byte* begin;
  std::byte* end;
  std::size_t slots;    // when it ends: those in use
  bool ending = false;  // no slot is given out any more

  [[nodiscard]] bool has(const std::byte* slot) const { return begin <= slot && slot < end; }
};

// Whether elements [first, end) of a job are to be moved.
[[nodiscard]] bool anything_to_do(const UpdateJob& job, std::uint64_t first, std::uint64_t end);

// A tile's part of a stream as the engine moves it.
[[nodiscard]] IoRequest request_of(const Tile& tile, OpKind kind, std::size_t index);

// The job, ready to be worked on. Throws std::invalid_argument when it is inconsistent, or its tiles do not fit.
[[nodiscard]] std::shared_ptr<Active> activate(UpdateJob job, std::size_t tile_numel, std::size_t tile_bytes);

// The same of a job that is held: its streams are those that are read ahead.
[[nodiscard]] std::shared_ptr<Active> activate_held(UpdateJob job, std::size_t tile_numel, std::size_t tile_bytes);

// Gives the tiles that `held` has in the staging to `job`, with what the two read from the same place. False where what
// `job` reads beside does not fit there, and nothing changed; then they are to be dropped.
bool take_over(Active& held, const std::shared_ptr<Active>& job, std::size_t tile_numel, std::size_t tile_bytes);

// Updates a tile whose streams are in memory, by all threads: each takes a piece that fits its cache, checks the pages
// that were read, updates them, and takes the checksums of what is to be written.
//
// After damage nothing of the tile may be written, and what the file should hold stays what it was; returned is the
// damage that comes first in the tile.
[[nodiscard]] std::optional<Failure> update_tile(const Tile& tile, ThreadPool& pool, Isa isa);

}  // namespace infinity
