#include "update/job.hpp"

#include <stdexcept>
#include <string>

#include "base/require.hpp"
#include "update/tile.hpp"

namespace infinity {
namespace {

void check_stream(const StateStream& stream, const char* name) {
  const std::string what(name);
  if (!stream.given()) throw std::invalid_argument(what + " is neither in memory nor in a file");
  if (stream.file != nullptr && (stream.offset % kPageBytes != 0 || stream.write_offset % kPageBytes != 0 ||
                                 reinterpret_cast<std::uintptr_t>(stream.memory) % kPageBytes != 0)) {
    throw std::invalid_argument(what + " is not aligned to 4 KiB");
  }
}

// Returns null for a moment that is not moved. A moment is not moved if no rule uses it, unless its new values are
// written to other memory. A moment that no rule uses may be omitted. Without arithmetic, every given moment is moved.
const StateStream* check_moment(const StateStream& stream, bool arithmetic, bool used, const char* name) {
  if (!(arithmetic ? used || stream.source != nullptr : stream.given())) return nullptr;
  check_stream(stream, name);
  return &stream;
}

void check_tiles(const UpdateJob& job, std::size_t tile_numel) {
  require(job.format.moments != Moments::int8 || job.numel <= tile_numel || tile_numel % kChunkNumel == 0,
          "with int8 moments tile_numel must be a multiple of 262144, or a job must be one tile");
}

bool may_go(JobPhase from, JobPhase to) {
  switch (from) {
    case JobPhase::held:
      return to == JobPhase::queued || to == JobPhase::done;
    case JobPhase::ahead:
      return to == JobPhase::ending || to == JobPhase::done;
    case JobPhase::queued:
      return to == JobPhase::begun || to == JobPhase::ending || to == JobPhase::done;
    case JobPhase::begun:
      return to == JobPhase::ending;
    case JobPhase::ending:
      return to == JobPhase::done;
    case JobPhase::done:
      break;
  }
  return false;
}

}  // namespace

void Job::go(JobPhase to) {
  if (!may_go(phase, to)) throw std::logic_error("an update's job made an invalid transition");
  phase = to;
}

std::uint64_t Job::bytes(State state, std::uint64_t numel) const {
  switch (state) {
    case State::weight:
      return numel * itemsize(given.format.weight);
    case State::residual:
      return numel * residual_itemsize(given.format.master);
    case State::grad:
      return numel * itemsize(given.format.grad);
    case State::exp_avg:
    case State::exp_avg_sq:
      break;
  }
  return moment_bytes(given.format.moments, numel);
}

std::size_t Job::staged_bytes(std::size_t tile_numel) const {
  std::size_t sum = 0;
  for (const State state : kStates) {
    if (streams[state] != nullptr && streams[state]->memory == nullptr) sum += tile_bytes(state, tile_numel);
  }
  return sum;
}

std::pair<std::size_t, std::size_t> Job::piece(State state, std::size_t begin, std::size_t end) const {
  if (!int8(state)) return {bytes(state, begin), bytes(state, end)};
  const std::size_t from = begin / kChunkNumel * kChunkBytes + kScalesBytes + begin % kChunkNumel;
  return {from, from + (end - begin)};
}

bool Job::anything_to_do(std::uint64_t first, std::uint64_t end) const {
  if (given.whole) return true;
  return std::any_of(given.segments.begin(), given.segments.end(), [&](const Segment& segment) {
    return !segment.skip && segment.begin < end && segment.end > first;
  });
}

std::shared_ptr<Job> make_job(UpdateJob given, std::size_t tile_numel, std::size_t tile_bytes) {
  require(given.numel > 0, "a job needs at least one element");
  check_format(given.format);
  check_segments(given.segments, given.numel, given.format);
  check_tiles(given, tile_numel);
  auto job = std::make_shared<Job>();
  job->given = std::move(given);
  const UpdateJob& kept = job->given;
  const auto any = [&](bool (Hyperparameters::*uses)() const) {
    return std::any_of(kept.segments.begin(), kept.segments.end(),
                       [&](const Segment& segment) { return !segment.skip && (segment.hyper.*uses)(); });
  };
  check_stream(kept.weight, "weight");
  check_stream(kept.grad, "grad");
  require(kept.grad.source == nullptr, "gradients are read from memory only, and have no source");
  job->streams[State::weight] = &kept.weight;
  job->streams[State::grad] = &kept.grad;
  if (residual_itemsize(kept.format.master) > 0) {
    check_stream(kept.residual, "residual");
    job->streams[State::residual] = &kept.residual;
  }
  job->streams[State::exp_avg] =
      check_moment(kept.exp_avg, kept.arithmetic, any(&Hyperparameters::uses_exp_avg), "exp_avg");
  job->streams[State::exp_avg_sq] =
      check_moment(kept.exp_avg_sq, kept.arithmetic, any(&Hyperparameters::uses_exp_avg_sq), "exp_avg_sq");
  require(job->staged_bytes(tile_numel) <= tile_bytes, "a tile of this job does not fit into the staging");
  return job;
}

std::shared_ptr<Job> make_job_ahead(UpdateJob given, std::size_t tile_numel, std::size_t tile_bytes) {
  require(given.numel > 0, "a job needs at least one element");
  check_format(given.format);
  check_tiles(given, tile_numel);
  auto job = std::make_shared<Job>();
  job->given = std::move(given);
  job->phase = JobPhase::ahead;
  const auto read_ahead = [&](State state, const StateStream& stream) {
    if (!stream.given()) return;
    check_stream(stream, "a state that is read ahead");
    require(stream.memory == nullptr && stream.source == nullptr, "a state in memory cannot be read ahead");
    job->streams[state] = &stream;
  };
  read_ahead(State::weight, job->given.weight);
  read_ahead(State::residual, job->given.residual);
  read_ahead(State::exp_avg, job->given.exp_avg);
  read_ahead(State::exp_avg_sq, job->given.exp_avg_sq);
  require(job->staged_bytes(tile_numel) <= tile_bytes, "a tile of this job does not fit into the staging");
  return job;
}

bool take_over(Job& from, const std::shared_ptr<Job>& job, std::size_t tile_numel, std::size_t tile_bytes) {
  PerState<bool> read;
  std::size_t needed = from.staged_bytes(tile_numel);
  for (const State state : kStates) {
    const StateStream* stream = job->streams[state];
    if (stream == nullptr || stream->memory != nullptr) continue;
    const StateStream* ahead = from.streams[state];
    read[state] =
        ahead != nullptr && stream->read_from_file() && ahead->file == stream->file && ahead->offset == stream->offset;
    if (!read[state]) needed += job->tile_bytes(state, tile_numel);
  }
  if (needed > tile_bytes) return false;
  for (const auto& tile : from.ahead) {
    tile->job = job;
    for (const State state : kStates) {
      if (!read[state]) tile->memory[state] = nullptr;
    }
  }
  const auto count = static_cast<unsigned>(from.ahead.size());
  from.tiles -= count;
  job->tiles += count;
  job->ahead = std::exchange(from.ahead, {});
  return true;
}

}  // namespace infinity
