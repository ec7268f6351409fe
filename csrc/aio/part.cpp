#include "aio/part.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace infinity {

std::string verb_of(OpKind kind) {
  if (kind == OpKind::sync) return "fdatasync";
  return kind == OpKind::read ? "read" : "write";
}

Failure Block::failure(int error, const std::string& cause, FailureKind kind) const {
  return composed({kind, verb_of(io().kind), file->path(), offset + done, left(), error,
                   cause.empty() ? std::string(std::strerror(error)) : cause, ""});
}

Block Part::next(const std::shared_ptr<Part>& part, std::uint64_t nbytes_max) {
  const IoRequest& io = part->request->io;
  const std::size_t cut = part->cut;
  if (io.kind == OpKind::sync) return {part, io.file->members()[cut].get(), cut, 0, 1};
  const Place place = io.file->locate(io.offset + cut);
  const auto nbytes = std::min<std::uint64_t>({nbytes_max, io.nbytes - cut, place.nbytes});
  return {part, io.file->members()[place.member].get(), cut, place.offset, static_cast<std::uint32_t>(nbytes)};
}

void Part::skip() {
  const IoRequest& io = request->io;
  if (io.kind == OpKind::sync) {
    while (cut < io.nbytes && (members >> cut & 1) == 0) ++cut;
    return;
  }
  while (cut < io.nbytes) {
    const Place place = io.file->locate(io.offset + cut);
    if ((members >> place.member & 1) != 0) return;
    cut += static_cast<std::size_t>(std::min<std::uint64_t>(place.nbytes, io.nbytes - cut));
  }
}

void PartQueue::add(std::shared_ptr<Part> part) { of(part->request->io.io_class).push_back(std::move(part)); }

void PartQueue::remove(const std::shared_ptr<Part>& part) {
  Queue& queue = of(part->request->io.io_class);
  const auto found = std::find(queue.begin(), queue.end(), part);
  if (found != queue.end()) queue.erase(found);
}

std::shared_ptr<Part> PartQueue::next() {
  const std::size_t first = ++turn_ % kTurnEvery == 0 ? turn_ / kTurnEvery % kIoClasses : 0;
  for (std::size_t step = 0; step < kIoClasses; ++step) {
    const auto io_class = static_cast<IoClass>((first + step) % kIoClasses);
    const Queue& queue = of(io_class);
    if (!queue.empty() && (io_class == IoClass::weights || bulk_has_room())) return queue.front();
  }
  return nullptr;
}

std::vector<std::shared_ptr<Part>> PartQueue::take_all() {
  std::vector<std::shared_ptr<Part>> result;
  for (Queue& queue : queues_) {
    std::move(queue.begin(), queue.end(), std::back_inserter(result));
    queue.clear();
  }
  return result;
}

bool PartQueue::has_room() const {
  return in_flight_ < depth_ && (in_flight_ == 0 || in_flight_bytes_ < in_flight_bytes_max_);
}

bool PartQueue::bulk_has_room() const {
  return bulk_in_flight_ == 0 || (bulk_in_flight_ < depth_ - depth_ / 4 &&
                                  bulk_in_flight_bytes_ < in_flight_bytes_max_ - in_flight_bytes_max_ / 4);
}

void PartQueue::started(const Block& block) {
  ++in_flight_;
  in_flight_bytes_ += block.left();
  if (block.io().io_class == IoClass::weights) return;
  ++bulk_in_flight_;
  bulk_in_flight_bytes_ += block.left();
}

void PartQueue::ended(const Block& block) {
  --in_flight_;
  in_flight_bytes_ -= block.left();
  if (block.io().io_class == IoClass::weights) return;
  --bulk_in_flight_;
  bulk_in_flight_bytes_ -= block.left();
}

}  // namespace infinity
