#include "aio/part_queue.hpp"

#include <algorithm>
#include <utility>

namespace infinity {

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
