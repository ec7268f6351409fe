// One tile of a job: its parts of the streams, and the work on them once they are in memory. The pipeline around it is
// in update.cpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "base/future.hpp"
#include "base/thread_pool.hpp"
#include "update/update.hpp"

namespace infinity {

inline constexpr std::size_t kStreams = 5;  // weight, residual, exp_avg, exp_avg_sq, grad
inline constexpr std::size_t kGrad = 4;     // is only read

[[nodiscard]] constexpr std::size_t round_up_to_page(std::size_t nbytes) {
  return (nbytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

// A job while it is being worked on. Guarded by the pipeline's mutex, but for `job` and `streams`, which do not change.
struct Active {
  UpdateJob job;
  Future future = std::make_shared<Completion>();
  std::uint64_t cursor = 0;  // first element of the next tile
  unsigned tiles = 0;        // tiles started and not finished
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

// The job, ready to be worked on. Throws std::invalid_argument when it is inconsistent, or its tiles do not fit.
[[nodiscard]] std::shared_ptr<Active> activate(UpdateJob job, std::size_t tile_numel, std::size_t tile_bytes);

// Updates a tile whose streams are in memory, by all threads: each takes a piece that fits its cache, checks the pages
// that were read, updates them, and takes the checksums of what is to be written.
//
// After damage nothing of the tile may be written, and what the file should hold stays what it was; returned is the
// damage that comes first in the tile.
[[nodiscard]] std::optional<Failure> update_tile(const Tile& tile, ThreadPool& pool, Isa isa);

}  // namespace infinity
