// In which order a lane serves the parts of requests, and how much of them may be in flight.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <vector>

#include "aio/part.hpp"

namespace infinity {

// A class is served before those after it (IoClass), and within a class the part that came first. No class starves: one
// block in kTurnEvery goes to the classes in turn, whatever their rank.
//
// Room: at most `depth` blocks, and no new block once `in_flight_bytes` are in flight; one block is always allowed. A
// quarter of both is kept free of bulk traffic (of all classes but the weights), so that a fetch starts at once.
class PartQueue {
 public:
  static constexpr unsigned kTurnEvery = 16;

  PartQueue(unsigned depth, std::size_t in_flight_bytes) : depth_(depth), in_flight_bytes_max_(in_flight_bytes) {}

  void add(std::shared_ptr<Part> part);
  void remove(const std::shared_ptr<Part>& part);
  // The part whose block goes next. It stays in the queue. Null: none is there, or only bulk that has no room.
  [[nodiscard]] std::shared_ptr<Part> next();
  // All parts, class by class; the queue is empty afterwards.
  [[nodiscard]] std::vector<std::shared_ptr<Part>> take_all();

  [[nodiscard]] bool has_room() const;
  [[nodiscard]] unsigned in_flight() const { return in_flight_; }
  // A block was handed to the device, and came back.
  void started(const Block& block);
  void ended(const Block& block);

 private:
  using Queue = std::deque<std::shared_ptr<Part>>;

  [[nodiscard]] Queue& of(IoClass io_class) { return queues_[static_cast<std::size_t>(io_class)]; }
  [[nodiscard]] bool bulk_has_room() const;

  const unsigned depth_;
  const std::size_t in_flight_bytes_max_;
  Queue queues_[kIoClasses];
  unsigned in_flight_ = 0;  // blocks
  std::size_t in_flight_bytes_ = 0;
  unsigned bulk_in_flight_ = 0;  // of those blocks
  std::size_t bulk_in_flight_bytes_ = 0;
  unsigned turn_ = 0;
};

}  // namespace infinity
