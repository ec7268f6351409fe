#include "update/tile.hpp"

#include <cstring>
#include <stdexcept>

namespace infinity {
namespace {

static_assert(kCutNumel % kPageBytes == 0, "one byte per element, and a cut is still between pages");

bool may_go(TilePhase from, TilePhase to) {
  switch (from) {
    case TilePhase::ahead:
      return to == TilePhase::reading || to == TilePhase::dropped;
    case TilePhase::reading:
      return to == TilePhase::computing || to == TilePhase::gone;
    case TilePhase::computing:
      return to == TilePhase::writing || to == TilePhase::gone;
    case TilePhase::dropped:
    case TilePhase::writing:
      return to == TilePhase::gone;
    case TilePhase::gone:
      break;
  }
  return false;
}

// Pages of one state of a tile, in memory and in the file.
struct Span {
  SwapFile* file;
  std::uint64_t offset;
  std::byte* data;
  std::size_t nbytes;
};
enum class Pages : std::uint8_t { read, written };

// Whether checksums are kept of a state, and pages of it were read, or will be written.
bool checked(const Job& job, State state, Pages which) {
  const StateStream* stream = job.streams[state];
  if (stream == nullptr || stream->file == nullptr || stream->file->checksums() == nullptr) return false;
  return which == Pages::written ? job.written(state) : stream->read_from_file();
}

Span span_of(const Tile& tile, State state, Pages which, std::size_t begin, std::size_t end) {
  const Job& job = *tile.job;
  const StateStream& stream = *job.streams[state];
  const std::uint64_t offset = which == Pages::read ? stream.offset : stream.write_offset;
  return {stream.file.get(), offset + job.bytes(state, tile.first) + begin, tile.memory[state] + begin,
          round_up_to_page(end - begin)};
}

// Elements [begin, end) of all states.
std::vector<Span> pages(const Tile& tile, Pages which, std::size_t begin, std::size_t end) {
  std::vector<Span> result;
  for (const State state : kStates) {
    if (!checked(*tile.job, state, which)) continue;
    const auto [from, to] = tile.job->piece(state, begin, end);
    result.push_back(span_of(tile, state, which, from, to));
  }
  return result;
}

std::vector<Span> scale_pages(const Tile& tile, Pages which) {
  std::vector<Span> result;
  for (const State state : kStates) {
    if (!tile.job->int8(state) || !checked(*tile.job, state, which)) continue;
    for (std::size_t at = 0; at < tile.numel; at += kChunkNumel) {
      const std::size_t from = at / kChunkNumel * kChunkBytes;
      result.push_back(span_of(tile, state, which, from, from + kScalesBytes));
    }
  }
  return result;
}

std::optional<Failure> first_damage(const std::vector<Span>& spans) {
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

std::vector<Sums> sums_of(const std::vector<Span>& spans) {
  std::vector<Sums> result;
  for (const Span& part : spans) {
    Sums taken{part.file, part.offset, std::vector<PageChecksum>(part.nbytes / kPageBytes)};
    checksum_pages(part.data, taken.pages.size(), taken.pages.data());
    result.push_back(std::move(taken));
  }
  return result;
}

// Copies bytes [begin, end) of the tile's part of a state whose new values go to another place than the current ones.
void bring(const Tile& tile, State state, std::size_t begin, std::size_t end) {
  const std::byte* source = tile.job->streams[state]->source + tile.job->bytes(state, tile.first);
  std::memcpy(tile.memory[state] + begin, source + begin, end - begin);
}

// The states that are brought.
std::vector<State> brought_states(const Job& job) {
  std::vector<State> result;
  std::copy_if(kStates.begin(), kStates.end(), std::back_inserter(result),
               [&](State state) { return job.streams[state] != nullptr && job.streams[state]->source != nullptr; });
  return result;
}

void bring_piece(const Tile& tile, std::size_t begin, std::size_t end) {
  for (const State state : brought_states(*tile.job)) {
    const auto [from, to] = tile.job->piece(state, begin, end);
    bring(tile, state, from, to);
  }
}

// An update of a piece changes some of the scales of its chunk only, so each page of them is brought before all pieces.
void bring_scales(const Tile& tile) {
  for (const State state : brought_states(*tile.job)) {
    if (!tile.job->int8(state)) continue;
    for (std::size_t at = 0; at < tile.numel; at += kChunkNumel) {
      const std::size_t from = at / kChunkNumel * kChunkBytes;
      bring(tile, state, from, from + kScalesBytes);
    }
  }
}

void update_piece(const Tile& tile, std::size_t begin, std::size_t end, Isa isa) {
  const UpdateJob& job = tile.job->given;
  if (!job.arithmetic) return;
  StateBuffers buffers;
  buffers.weight = tile.memory[State::weight];
  buffers.residual = tile.memory[State::residual];
  buffers.exp_avg = tile.memory[State::exp_avg];
  buffers.exp_avg_sq = tile.memory[State::exp_avg_sq];
  buffers.grad = tile.memory[State::grad];
  buffers.weight_past_caches = job.weight.file == nullptr && job.weight.source == nullptr;
  const bool finite = optimizer_update(job.format, buffers, tile.first, begin, end, job.segments, isa);
  if (!finite && job.not_finite != nullptr) *job.not_finite = true;
}

// New weights may be fetched again at once, and the next units wait for their states: other writes come last.
IoClass class_of(OpKind kind, State state) {
  if (kind == OpKind::read) return IoClass::states;
  return state == State::weight ? IoClass::weights : IoClass::writeback;
}

}  // namespace

void Tile::go(TilePhase to) {
  if (!may_go(phase, to)) throw std::logic_error("a tile of an update takes an impossible step");
  phase = to;
}

std::vector<State> Tile::place_states(std::size_t tile_numel) {
  std::vector<State> to_read;
  for (const State state : kStates) {
    const StateStream* stream = job->streams[state];
    if (stream == nullptr || memory[state] != nullptr) continue;
    if (stream->memory != nullptr) {
      memory[state] = stream->memory + job->bytes(state, first);
    } else {
      memory[state] = buffer + used;
      used += job->tile_bytes(state, tile_numel);
    }
    if (stream->read_from_file()) to_read.push_back(state);
  }
  return to_read;
}

std::vector<State> Tile::written_states() const {
  std::vector<State> result;
  std::copy_if(kStates.begin(), kStates.end(), std::back_inserter(result),
               [this](State state) { return job->written(state); });
  return result;
}

IoRequest Tile::request(OpKind kind, State state) const {
  const StateStream& stream = *job->streams[state];
  const std::uint64_t offset = kind == OpKind::read ? stream.offset : stream.write_offset;
  return {kind,          class_of(kind, state),
          stream.file,   offset + job->bytes(state, first),
          memory[state], round_up_to_page(job->bytes(state, numel)),
          true,          job->given.tag};
}

std::optional<Failure> update_tile(const Tile& tile, ThreadPool& pool, Isa isa, const std::function<void()>& between) {
  // The pages of scales belong to no piece: they are checked and brought before, and taken after.
  if (auto damage = first_damage(scale_pages(tile, Pages::read))) return damage;
  bring_scales(tile);
  const std::size_t task = task_numel();
  const std::size_t tasks = (tile.numel + task - 1) / task;
  std::vector<std::optional<Failure>> damage(tasks);
  std::vector<std::vector<Sums>> sums(tasks);
  pool.parallel_for(
      tasks,
      [&](std::size_t index) {
        const std::size_t begin = index * task;
        const std::size_t end = std::min(begin + task, tile.numel);
        damage[index] = first_damage(pages(tile, Pages::read, begin, end));
        if (damage[index]) return;
        bring_piece(tile, begin, end);
        update_piece(tile, begin, end, isa);
        sums[index] = sums_of(pages(tile, Pages::written, begin, end));
      },
      between);
  const auto first = std::find_if(damage.begin(), damage.end(), [](const auto& found) { return found.has_value(); });
  if (first != damage.end()) return std::move(*first);
  sums.push_back(sums_of(scale_pages(tile, Pages::written)));
  for (const std::vector<Sums>& piece : sums) {
    for (const Sums& taken : piece) taken.file->put(taken.offset, taken.pages);
  }
  return std::nullopt;
}

}  // namespace infinity
