// One tile of a job: its parts of the states, and the work on them once they are in memory. The pipeline around it is
// in driver.cpp.
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

//   ahead     ──▶ reading    its job comes to it, and reads the states that were not read ahead
//   ahead     ──▶ dropped    its job does not need it, or is over
//   reading   ──▶ computing  all its states are in memory
//   reading   ──▶ gone       its job failed
//   computing ──▶ writing
//   computing ──▶ gone       it is damaged, or nothing of it is written to a file
//   writing, dropped ──▶ gone   when no transfer is under way
enum class TilePhase : std::uint8_t { ahead, dropped, reading, computing, writing, gone };
inline constexpr std::size_t kTilePhases = 6;

// Only the driver's thread changes it. While it is computed, the threads of the pool read what does not change
// meanwhile: all but its phase and `pending`.
struct Tile {
  std::shared_ptr<Job> job;
  TilePhase phase;
  std::uint64_t first = 0;
  std::size_t numel = 0;
  std::byte* buffer = nullptr;    // of the staging; null: its job is in memory
  std::size_t used = 0;           // bytes of the buffer
  PerState<std::byte*> memory{};  // null: not read yet, or the job has no such state
  unsigned pending = 0;           // transfers under way

  // Throws std::logic_error for a step that is not listed above.
  void go(TilePhase to);

  // Finds memory for the states that have none yet. Returns those that are to be read there from the file.
  [[nodiscard]] std::vector<State> place_states(std::size_t tile_numel);
  [[nodiscard]] std::vector<State> written_states() const;

  // The tile's part of a state as the engine moves it.
  [[nodiscard]] IoRequest request(OpKind kind, State state) const;
};

// Updates a tile whose states are in memory, by all threads: each takes a piece that fits its cache, checks the pages
// that were read, updates them, and takes the checksums of what is to be written.
//
// `between`: see ThreadPool::parallel_for.
//
// Returns the damage that comes first in the tile. Then nothing of the tile may be written, and what the file should
// hold stays what it was.
[[nodiscard]] std::optional<Failure> update_tile(const Tile& tile, ThreadPool& pool, Isa isa,
                                                 const std::function<void()>& between);

}  // namespace infinity
