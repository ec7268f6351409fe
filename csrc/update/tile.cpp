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

// Whether a state has checksums and some of its pages were read or will be written.
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

// The pages of elements [begin, end) of all states.
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

// The current values of a state whose new values are written to other memory; the pointer is to the tile's element 0.
const std::byte* source_of(const Tile& tile, State state) {
  const StateStream* stream = tile.job->streams[state];
  if (stream == nullptr || stream->source == nullptr) return nullptr;
  return stream->source + tile.job->bytes(state, tile.first);
}

// Copies bytes [begin, end) of the tile's part of a state from the state's source.
void bring(const Tile& tile, State state, std::size_t begin, std::size_t end) {
  std::memcpy(tile.memory[state] + begin, source_of(tile, state) + begin, end - begin);
}

// The states whose new values are written to other memory than that of the current values.
std::vector<State> states_apart(const Tile& tile) {
  std::vector<State> result;
  std::copy_if(kStates.begin(), kStates.end(), std::back_inserter(result),
               [&](State state) { return source_of(tile, state) != nullptr; });
  return result;
}

// Copies the pages of scales from their source before any piece is updated, because the update of a piece changes only
// some of the scales of its chunk.
void bring_scales(const Tile& tile) {
  for (const State state : states_apart(tile)) {
    if (!tile.job->int8(state)) continue;
    for (std::size_t at = 0; at < tile.numel; at += kChunkNumel) {
      const std::size_t from = at / kChunkNumel * kChunkBytes;
      bring(tile, state, from, from + kScalesBytes);
    }
  }
}

// The last page of a state is written completely. If the state has a source, the bytes after the last element were not
// read. These bytes are set to zero, so that two runs write the same bytes. This also holds for new values in memory
// that are not written now, because a later commit may write them.
void zero_padding(const Tile& tile) {
  for (const State state : states_apart(tile)) {
    const std::uint64_t end = tile.job->bytes(state, tile.numel);
    std::memset(tile.memory[state] + end, 0, round_up_to_page(end) - end);
  }
}

bool changes(const UpdateJob& job, const Segment& segment, State state) {
  if (!job.arithmetic || segment.skip) return false;
  if (state == State::exp_avg) return segment.hyper.uses_exp_avg();
  return state != State::exp_avg_sq || segment.hyper.uses_exp_avg_sq();
}

// Copies from the source those elements in [begin, end) that the update does not change; the update itself reads all
// other elements from the source.
void bring_rest(const Tile& tile, std::size_t begin, std::size_t end) {
  const UpdateJob& job = tile.job->given;
  for (const State state : states_apart(tile)) {
    const auto bring_elements = [&](std::size_t from, std::size_t to) {
      if (from >= to) return;
      const auto [first, last] = tile.job->piece(state, from, to);
      bring(tile, state, first, last);
    };
    std::size_t done = begin;
    for (const Segment& segment : job.segments) {
      if (segment.end <= tile.first + begin || !changes(job, segment, state)) continue;
      if (segment.begin >= tile.first + end) break;
      bring_elements(done, std::max<std::uint64_t>(segment.begin, tile.first + begin) - tile.first);
      done = std::min<std::uint64_t>(segment.end, tile.first + end) - tile.first;
    }
    bring_elements(done, end);
  }
}

StateMemory memory_of(const Tile& tile, State state) {
  StateMemory memory(tile.memory[state]);
  if (const std::byte* source = source_of(tile, state)) memory.from = source;
  const StateStream* stream = tile.job->streams[state];
  memory.past_caches = stream != nullptr && stream->file == nullptr && (memory.apart() || state == State::weight);
  return memory;
}

void update_piece(const Tile& tile, std::size_t begin, std::size_t end, Isa isa) {
  const UpdateJob& job = tile.job->given;
  bring_rest(tile, begin, end);
  if (!job.arithmetic) return;
  const StateBuffers buffers{memory_of(tile, State::weight), memory_of(tile, State::residual),
                             memory_of(tile, State::exp_avg), memory_of(tile, State::exp_avg_sq),
                             tile.memory[State::grad]};
  const bool finite = optimizer_update(job.format, buffers, tile.first, begin, end, job.segments, isa);
  if (!finite && job.not_finite != nullptr) *job.not_finite = true;
}

// Chooses the class of a transfer. New weights may soon be fetched again, and the next units wait for the reads of
// their states, so all other writes come last.
IoClass class_of(OpKind kind, State state) {
  if (kind == OpKind::read) return IoClass::states;
  return state == State::weight ? IoClass::weights : IoClass::writeback;
}

}  // namespace

void Tile::go(TilePhase to) {
  if (!may_go(phase, to)) throw std::logic_error("a tile of an update made an invalid transition");
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
  // The pages of scales belong to no piece: these pages are checked and copied before the pieces are updated, and their
  // checksums are taken after the pieces were updated.
  if (auto damage = first_damage(scale_pages(tile, Pages::read))) return damage;
  bring_scales(tile);
  zero_padding(tile);
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
