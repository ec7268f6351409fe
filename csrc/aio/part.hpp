// A lane's part of a request, the division of a part into blocks of one transfer each, the order in which parts are
// served, and the limits on blocks in flight.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "aio/request.hpp"

namespace infinity {

struct Part;

struct Block {
  std::shared_ptr<Part> part;
  const File* file = nullptr;
  std::size_t first = 0;     // bytes from the start of the request
  std::uint64_t offset = 0;  // offset of `first` in the file
  std::uint32_t nbytes = 0;
  std::uint32_t done = 0;  // bytes moved
  unsigned retries = 0;

  [[nodiscard]] std::uint32_t left() const { return nbytes - done; }
  [[nodiscard]] inline const IoRequest& io() const;
  [[nodiscard]] Failure failure(int error, const std::string& cause, FailureKind kind = FailureKind::io) const;
};

// One lane's part of a request. Only the lane's thread accesses a part.
struct Part {
  std::shared_ptr<Request> request;
  std::uint64_t members = 0;  // a bit for each member of the file that this lane serves
  std::size_t cut = 0;        // bytes of the request that were handed out as blocks, or that another lane serves
  unsigned in_flight = 0;     // blocks handed out and not finished

  [[nodiscard]] bool all_cut() const { return cut == request->io.nbytes; }
  // Drops the bytes that were not handed out, so that the part has no more blocks.
  void drop_rest() { cut = request->io.nbytes; }

  // The next block, of at most `nbytes_max`; the call does not hand the block out. A sync has one block for each
  // member.
  [[nodiscard]] static Block next(const std::shared_ptr<Part>& part, std::uint64_t nbytes_max);
  // Advances `cut` past the bytes that other lanes serve.
  void skip();
};

inline const IoRequest& Block::io() const { return part->request->io; }

// "read", "write" or "fdatasync": the operation in a Failure.
[[nodiscard]] std::string verb_of(OpKind kind);

// A class is served before the classes after it (IoClass), and parts of one class in the order in which they were
// queued. No class starves: one block in kTurnEvery is chosen from the classes in rotation, regardless of their rank.
//
// Limits: at most `depth` blocks are in flight, and no new block starts once `in_flight_bytes` are in flight. One block
// is always allowed. Bulk traffic (all classes except weights) must leave a quarter of both limits free, so that a
// fetch starts at once.
class PartQueue {
 public:
  static constexpr unsigned kTurnEvery = 16;

  PartQueue(unsigned depth, std::size_t in_flight_bytes) : depth_(depth), in_flight_bytes_max_(in_flight_bytes) {}

  void add(std::shared_ptr<Part> part);
  void remove(const std::shared_ptr<Part>& part);
  // The part from which the next block is taken. The part stays in the queue. Null: the queue is empty, or contains
  // only bulk traffic and the limits leave no room for bulk.
  [[nodiscard]] std::shared_ptr<Part> next();
  // All parts, class by class; the queue is empty afterwards.
  [[nodiscard]] std::vector<std::shared_ptr<Part>> take_all();

  [[nodiscard]] bool has_room() const;
  [[nodiscard]] unsigned in_flight() const { return in_flight_; }
  // Called when a block was given to the device, and when the block's result has arrived.
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
  unsigned bulk_in_flight_ = 0;  // bulk traffic among these blocks
  std::size_t bulk_in_flight_bytes_ = 0;
  unsigned turn_ = 0;
};

}  // namespace infinity
