#include "update/tile.hpp"

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/require.hpp"

namespace infinity {
namespace {

static_assert(kCutNumel % kPageBytes == 0, "one byte per element, and a cut is still between pages");

void check_stream(const StateStream& stream, const char* name) {
  const std::string what(name);
  if (!stream.given()) throw std::invalid_argument(what + " is neither in memory nor in a file");
  if (!stream.current && stream.file == nullptr) throw std::invalid_argument(what + " is read from no file");
  if (stream.file != nullptr && (stream.offset % kPageBytes != 0 || stream.write_offset % kPageBytes != 0 ||
                                 reinterpret_cast<std::uintptr_t>(stream.memory) % kPageBytes != 0)) {
    throw std::invalid_argument(what + " is not aligned to 4 KiB");
  }
}

// A moment that no rule uses may be left out, and is not moved. Without arithmetic what is given is moved.
const StateStream* check_moment(const StateStream& stream, bool arithmetic, bool used, const char* name) {
  if (!(arithmetic ? used : stream.given())) return nullptr;
  check_stream(stream, name);
  return &stream;
}

void check_tiles(const UpdateJob& job, std::size_t tile_numel) {
  require(job.format.moments != Moments::int8 || job.numel <= tile_numel || tile_numel % kChunkNumel == 0,
          "with int8 moments tile_numel must be a multiple of 262144, or a job must be one tile");
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
bool checked(const Active& active, std::size_t index, Pages which) {
  const StateStream* stream = active.streams[index];
  if (stream == nullptr || stream->file == nullptr || stream->file->checksums() == nullptr) return false;
  return which == Pages::written ? active.written(index) : stream->read_from_file();
}

Span span_of(const Tile& tile, std::size_t index, Pages which, std::size_t begin, std::size_t end) {
  const Active& active = *tile.owner;
  const StateStream& stream = *active.streams[index];
  const std::uint64_t offset = which == Pages::read ? stream.offset : stream.write_offset;
  return {stream.file.get(), offset + active.bytes(index, tile.first) + begin, tile.memory[index] + begin,
          round_up_to_page(end - begin)};
}

// Elements [begin, end) of all streams.
std::vector<Span> pages(const Tile& tile, Pages which, std::size_t begin, std::size_t end) {
  std::vector<Span> result;
  for (std::size_t index = 0; index < kStreams; ++index) {
    const Active& active = *tile.owner;
    if (!checked(active, index, which)) continue;
    const auto [from, to] = active.piece(index, begin, end);
    result.push_back(span_of(tile, index, which, from, to));
  }
  return result;
}

std::vector<Span> scale_pages(const Tile& tile, Pages which) {
  std::vector<Span> result;
  for (std::size_t index = 0; index < kStreams; ++index) {
    if (!tile.owner->int8(index) || !checked(*tile.owner, index, which)) continue;
    for (std::size_t at = 0; at < tile.numel; at += kChunkNumel) {
      const std::size_t from = at / kChunkNumel * kChunkBytes;
      result.push_back(span_of(tile, index, which, from, from + kScalesBytes));
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

// The weights of a piece whose new values go to another place of memory.
void bring_piece(const Tile& tile, std::size_t begin, std::size_t end) {
  const std::byte* source = tile.owner->job.weight.source;
  if (source == nullptr) return;
  const auto [from, to] = tile.owner->piece(0, begin, end);
  std::memcpy(tile.memory[0] + from, source + tile.owner->bytes(0, tile.first) + from, to - from);
}

void update_piece(const Tile& tile, std::size_t begin, std::size_t end, Isa isa) {
  const UpdateJob& job = tile.owner->job;
  if (!job.arithmetic) return;
  StateBuffers buffers;
  buffers.weight = tile.memory[0];
  buffers.residual = tile.memory[1];
  buffers.exp_avg = tile.memory[2];
  buffers.exp_avg_sq = tile.memory[3];
  buffers.grad = tile.memory[kGrad];
  buffers.weight_past_caches = job.weight.file == nullptr && job.weight.source == nullptr;
  const bool finite = optimizer_update(job.format, buffers, tile.first, begin, end, job.segments, job.grad_scale, isa);
  if (!finite && job.not_finite != nullptr) *job.not_finite = true;
}

// New weights may be fetched again at once, and the next units' states are waited for: the rest has time.
IoClass class_of(OpKind kind, std::size_t index) {
  if (kind == OpKind::read) return IoClass::states;
  return index == 0 ? IoClass::weights : IoClass::writeback;
}

}  // namespace

bool anything_to_do(const UpdateJob& job, std::uint64_t first, std::uint64_t end) {
  if (job.whole) return true;
  return std::any_of(job.segments.begin(), job.segments.end(), [&](const Segment& segment) {
    return !segment.skip && segment.begin < end && segment.end > first;
  });
}

IoRequest request_of(const Tile& tile, OpKind kind, std::size_t index) {
  const Active& active = *tile.owner;
  const StateStream& stream = *active.streams[index];
  const std::uint64_t offset = kind == OpKind::read ? stream.offset : stream.write_offset;
  return {kind,
          class_of(kind, index),
          stream.file,
          offset + active.bytes(index, tile.first),
          tile.memory[index],
          round_up_to_page(active.bytes(index, tile.numel)),
          true,
          active.job.tag};
}

std::shared_ptr<Active> activate(UpdateJob job, std::size_t tile_numel, std::size_t tile_bytes) {
  require(job.numel > 0, "a job needs at least one element");
  check_format(job.format);
  check_segments(job.segments, job.numel, job.format);
  check_tiles(job, tile_numel);
  auto active = std::make_shared<Active>();
  active->job = std::move(job);
  const UpdateJob& kept = active->job;
  const auto any = [&](bool (Hyperparameters::*uses)() const) {
    return std::any_of(kept.segments.begin(), kept.segments.end(),
                       [&](const Segment& segment) { return !segment.skip && (segment.hyper.*uses)(); });
  };
  check_stream(kept.weight, "weight");
  check_stream(kept.grad, "grad");
  require(kept.residual.source == nullptr && kept.exp_avg.source == nullptr && kept.exp_avg_sq.source == nullptr &&
              kept.grad.source == nullptr,
          "only weights have a source");
  active->streams[0] = &kept.weight;
  active->streams[kGrad] = &kept.grad;
  if (residual_itemsize(kept.format.master) > 0) {
    check_stream(kept.residual, "residual");
    active->streams[1] = &kept.residual;
  }
  active->streams[2] = check_moment(kept.exp_avg, kept.arithmetic, any(&Hyperparameters::uses_exp_avg), "exp_avg");
  active->streams[3] =
      check_moment(kept.exp_avg_sq, kept.arithmetic, any(&Hyperparameters::uses_exp_avg_sq), "exp_avg_sq");
  require(active->staged_bytes(tile_numel) <= tile_bytes, "a tile of this job does not fit the staging");
  return active;
}

std::shared_ptr<Active> activate_held(UpdateJob job, std::size_t tile_numel, std::size_t tile_bytes) {
  require(job.numel > 0, "a job needs at least one element");
  check_format(job.format);
  check_tiles(job, tile_numel);
  auto active = std::make_shared<Active>();
  active->job = std::move(job);
  const UpdateJob& kept = active->job;
  const StateStream* given[] = {&kept.weight, &kept.residual, &kept.exp_avg, &kept.exp_avg_sq};
  for (std::size_t index = 0; index < kGrad; ++index) {
    if (!given[index]->given()) continue;
    check_stream(*given[index], "what is read ahead");
    require(given[index]->memory == nullptr && given[index]->source == nullptr, "what is in memory is not read ahead");
    active->streams[index] = given[index];
  }
  require(active->staged_bytes(tile_numel) <= tile_bytes, "a tile of this job does not fit the staging");
  return active;
}

bool take_over(Active& held, const std::shared_ptr<Active>& job, std::size_t tile_numel, std::size_t tile_bytes) {
  bool read[kStreams] = {};
  std::size_t needed = held.staged_bytes(tile_numel);
  for (std::size_t index = 0; index < kStreams; ++index) {
    const StateStream* stream = job->streams[index];
    if (stream == nullptr || stream->memory != nullptr) continue;
    const StateStream* ahead = held.streams[index];
    read[index] =
        ahead != nullptr && stream->read_from_file() && ahead->file == stream->file && ahead->offset == stream->offset;
    if (!read[index]) needed += job->tile_bytes(index, tile_numel);
  }
  if (needed > tile_bytes) return false;
  for (const auto& tile : held.staged) {
    tile->owner = job;
    for (std::size_t index = 0; index < kStreams; ++index) {
      if (!read[index]) tile->memory[index] = nullptr;
    }
  }
  const auto count = static_cast<unsigned>(held.staged.size());
  held.tiles -= count;
  job->tiles += count;
  job->staged = std::move(held.staged);
  held.staged.clear();
  return true;
}

std::optional<Failure> update_tile(const Tile& tile, ThreadPool& pool, Isa isa) {
  // The pages of scales belong to no piece: they are checked before and taken after.
  if (auto damage = first_damage(scale_pages(tile, Pages::read))) return damage;
  const std::size_t task = task_numel();
  const std::size_t tasks = (tile.numel + task - 1) / task;
  std::vector<std::optional<Failure>> damage(tasks);
  std::vector<std::vector<Sums>> sums(tasks);
  pool.parallel_for(tasks, [&](std::size_t index) {
    const std::size_t begin = index * task;
    const std::size_t end = std::min(begin + task, tile.numel);
    damage[index] = first_damage(pages(tile, Pages::read, begin, end));
    if (damage[index]) return;
    bring_piece(tile, begin, end);
    update_piece(tile, begin, end, isa);
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

}  // namespace infinity
