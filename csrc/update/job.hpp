// A job of the update pipeline, and its state.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include "base/future.hpp"
#include "base/page.hpp"
#include "update/update.hpp"

namespace infinity {

enum class State : std::uint8_t { weight, residual, exp_avg, exp_avg_sq, grad };

inline constexpr std::array kStates = {State::weight, State::residual, State::exp_avg, State::exp_avg_sq, State::grad};

[[nodiscard]] constexpr bool is_moment(State state) { return state == State::exp_avg || state == State::exp_avg_sq; }

// A table with one value for each state.
template <class Value>
class PerState {
 public:
  [[nodiscard]] Value& operator[](State state) { return values_[static_cast<std::size_t>(state)]; }
  [[nodiscard]] const Value& operator[](State state) const { return values_[static_cast<std::size_t>(state)]; }

 private:
  std::array<Value, kStates.size()> values_{};
};

struct Tile;

//   held   ──▶ queued  the futures that it waits for are done
//   held   ──▶ done    one of these futures failed, or the job is withdrawn or given up
//   ahead  ──▶ ending  it failed
//   ahead  ──▶ done    another job takes it over, or it is withdrawn; tiles that are still being read are dropped
//   queued ──▶ begun   its first tile was started, or passed over because it has nothing to do
//   queued ──▶ ending  its only tile was started or passed over, or it failed
//   queued ──▶ done    it is withdrawn
//   begun  ──▶ ending  its last tile was started or passed over, or it failed
//   ending ──▶ done    none of its tiles is in the staging any more
enum class JobPhase : std::uint8_t {
  held,    // the job's inputs are not ready yet
  ahead,   // the job reads ahead; it computes and writes nothing
  queued,  // no tile of the job was begun, except tiles taken over from a job that read ahead
  begun,
  ending,  // the job starts no more tiles
  done,    // the job's future is done
};

// Only the driver's thread accesses a job, except `given` and `streams`, which do not change once the job is made.
struct Job {
  UpdateJob given;
  PerState<const StateStream*> streams{};  // pointers into `given`; null for a state that the job does not have
  UpdateFuture future = std::make_shared<UpdateCompletion>();
  JobPhase phase = JobPhase::queued;
  std::uint64_t next = 0;        // first element of the next tile to start
  std::uint64_t next_ahead = 0;  // first element of the next tile to read ahead
  unsigned tiles = 0;            // tiles in the staging
  unsigned uncomputed = 0;       // started tiles that are not computed yet
  unsigned weight_writes = 0;    // weight writes in flight
  std::size_t awaited = 0;       // futures that the job waits for
  // Tiles that this job read ahead, or took over from a job that read ahead; in order, from `next` on.
  std::deque<std::shared_ptr<Tile>> ahead;
  std::optional<Failure> failure;

  // Throws std::logic_error for a transition that is not listed above.
  void go(JobPhase to);

  [[nodiscard]] bool int8(State state) const { return is_moment(state) && given.format.moments == Moments::int8; }
  [[nodiscard]] bool written(State state) const {
    return state != State::grad && streams[state] != nullptr && streams[state]->file != nullptr;
  }

  // Whether the job neither reads nor writes a file.
  [[nodiscard]] bool in_memory() const {
    return ahead.empty() && std::all_of(kStates.begin(), kStates.end(), [this](State state) {
             return streams[state] == nullptr || streams[state]->file == nullptr;
           });
  }

  // Bytes of the first `numel` elements of a state. If a tile may begin at element `numel`, the result is also the
  // offset in bytes of this element.
  [[nodiscard]] std::uint64_t bytes(State state, std::uint64_t numel) const;

  // Bytes of a state's part of the largest tile, rounded up to complete pages.
  [[nodiscard]] std::size_t tile_bytes(State state, std::size_t tile_numel) const {
    return round_up_to_page(bytes(state, std::min<std::uint64_t>(tile_numel, given.numel)));
  }

  // Bytes of staging that a tile needs.
  [[nodiscard]] std::size_t staged_bytes(std::size_t tile_numel) const;

  // Elements [begin, end) of a tile as a byte range of the tile's part of a state. The elements are in one chunk. For
  // int8, the byte range is that of the elements' codes.
  [[nodiscard]] std::pair<std::size_t, std::size_t> piece(State state, std::size_t begin, std::size_t end) const;

  // Whether any element in [first, end) must be moved.
  [[nodiscard]] bool anything_to_do(std::uint64_t first, std::uint64_t end) const;
};

// Makes a job that is ready to run. Throws std::invalid_argument if the job is inconsistent, or if its tiles do not fit
// into a buffer of the staging.
[[nodiscard]] std::shared_ptr<Job> make_job(UpdateJob given, std::size_t tile_numel, std::size_t tile_bytes);

// Makes a job that reads ahead. The job's streams are the streams that the job reads. Throws the exceptions of
// make_job.
[[nodiscard]] std::shared_ptr<Job> make_job_ahead(UpdateJob given, std::size_t tile_numel, std::size_t tile_bytes);

// Transfers to `job` the tiles of `from` that are in the staging. A tile keeps the states that both jobs read from the
// same place. Returns false, and changes nothing, if a buffer has no room for the states that `job` reads in addition.
// If the result is false, the caller must drop the tiles.
[[nodiscard]] bool take_over(Job& from, const std::shared_ptr<Job>& job, std::size_t tile_numel,
                             std::size_t tile_bytes);

}  // namespace infinity
