// One tile of a job: the tile's parts of the states, and the computation once these parts are in memory. driver.cpp
// contains the pipeline that uses the tiles.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/thread_pool.hpp"
#include "update/job.hpp"

namespace infinity {

//   ahead     ──▶ reading    the job needs it next, and reads the states that were not read ahead
//   ahead     ──▶ dropped    the job does not need it, or has ended
//   reading   ──▶ computing  all its states are in memory
//   reading   ──▶ gone       its job failed
//   computing ──▶ writing
//   computing ──▶ gone       it is damaged, or no state of it is written to a file
//   writing, dropped ──▶ gone   no transfer is in flight any more
enum class TilePhase : std::uint8_t { ahead, dropped, reading, computing, writing, gone };
inline constexpr std::size_t kTilePhases = 6;

// Only the driver's thread changes a tile. While the tile is computed, the threads of the pool read its members, except
// its phase and `pending`, which may change during the computation.
struct Tile {
  std::shared_ptr<Job> job;
  TilePhase phase;
  std::uint64_t first = 0;
  std::size_t numel = 0;
  std::byte* buffer = nullptr;    // buffer of the staging; null: the job is in memory
  std::size_t used = 0;           // bytes of the buffer
  PerState<std::byte*> memory{};  // null: not read yet, or the job has no such state
  unsigned pending = 0;           // transfers in flight

  // Throws std::logic_error for a transition that is not listed above.
  void go(TilePhase to);

  // Finds memory for the states that have no memory yet. Returns those states that must be read from the file into this
  // memory.
  [[nodiscard]] std::vector<State> place_states(std::size_t tile_numel);
  [[nodiscard]] std::vector<State> written_states() const;

  // The request to the engine that moves the tile's part of a state.
  [[nodiscard]] IoRequest request(OpKind kind, State state) const;
};

// Updates a tile whose states are in memory, with all threads of the pool. Each thread works on a piece that fits its
// cache: it checks the pages that were read, updates the elements, and computes the checksums of the pages to write.
//
// `between`: see ThreadPool::parallel_for.
//
// Returns the first damage in the tile. If there is damage, nothing of the tile may be written, and the remembered
// checksums of the file are unchanged.
[[nodiscard]] std::optional<Failure> update_tile(const Tile& tile, ThreadPool& pool, Isa isa,
                                                 const std::function<void()>& between);

}  // namespace infinity
