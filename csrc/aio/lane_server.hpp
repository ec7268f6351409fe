// The lane as its thread sees it: queues, blocks, results. Included by lane.cpp alone.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>

#include "aio/lane.hpp"
#include "base/clock.hpp"

namespace infinity {

// Starvation ruled out: one block in so many goes to the classes in turn, whatever their rank.
inline constexpr unsigned kTurnEvery = 16;

inline void add(std::atomic<std::uint64_t>& counter, std::uint64_t value) {
  counter.fetch_add(value, std::memory_order_relaxed);
}

inline std::string verb_of(OpKind kind) {
  if (kind == OpKind::sync) return "fdatasync";
  return kind == OpKind::read ? "read" : "write";
}

// What one lane has to do for a request. Touched by the lane's thread only.
struct Lane::Part {
  std::shared_ptr<Request> request;
  std::uint64_t members = 0;  // a bit for each member of the file that this lane serves
  std::size_t cut = 0;        // bytes of the request handed out as blocks, or another lane's
  unsigned in_flight = 0;     // blocks handed out and not finished

  [[nodiscard]] bool all_cut() const { return cut == request->io.nbytes; }

  // The block that comes next, of at most `nbytes_max`. A sync has one for each member.
  [[nodiscard]] Block next(const std::shared_ptr<Part>& self, std::uint64_t nbytes_max) const;

  // Moves `cut` past what other lanes serve.
  void skip() {
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
};

struct Lane::Block {
  std::shared_ptr<Part> part;
  const File* file = nullptr;
  std::size_t first = 0;     // bytes from the start of the request
  std::uint64_t offset = 0;  // of `first` in the file
  std::uint32_t nbytes = 0;
  std::uint32_t done = 0;  // bytes moved
  unsigned retries = 0;

  [[nodiscard]] Failure failure(int error, const std::string& cause, FailureKind kind = FailureKind::io) const {
    Failure failure;
    failure.kind = kind;
    failure.operation = verb_of(part->request->io.kind);
    failure.path = file->path();
    failure.offset = offset + done;
    failure.nbytes = nbytes - done;
    failure.error_number = error;
    failure.cause = cause.empty() ? std::string(std::strerror(error)) : cause;
    compose(failure);
    return failure;
  }
};

inline Lane::Block Lane::Part::next(const std::shared_ptr<Part>& self, std::uint64_t nbytes_max) const {
  const IoRequest& io = request->io;
  if (io.kind == OpKind::sync) return {self, io.file->members()[cut].get(), cut, 0, 1};
  const Place place = io.file->locate(io.offset + cut);
  const auto nbytes = std::min<std::uint64_t>({nbytes_max, io.nbytes - cut, place.nbytes});
  return {self, io.file->members()[place.member].get(), cut, place.offset, static_cast<std::uint32_t>(nbytes)};
}

// The lane as its thread sees it: queues, blocks, results.
class Lane::Server {
 public:
  Server(Lane& lane, Backend& backend)
      : lane_(lane), backend_(backend), depth_(lane.options_.queue_depth), blocks_(lane.options_.queue_depth) {
    for (unsigned token = 0; token < depth_; ++token) free_tokens_.push_back(token);
  }

  void run() {
    std::vector<BlockResult> results;
    for (;;) {
      const bool stopping = take_incoming();
      if (stopping) cancel_queued();
      fill();
      if (stopping && in_flight_ == 0) return;
      if (!may_wait()) continue;
      results.clear();
      // A deep queue is served by the handful: fewer system calls, and the rest keeps the device busy meanwhile.
      backend_.wait(results, std::max(in_flight_ / kHandfulOf, 1u));
      for (const BlockResult& result : results) settle(result);
    }
  }

 private:
  static constexpr unsigned kHandfulOf = 16;
  using Queue = std::deque<std::shared_ptr<Part>>;

  [[nodiscard]] bool has_room() const {
    return in_flight_ < depth_ && (in_flight_ == 0 || in_flight_bytes_ < lane_.options_.in_flight_bytes);
  }

  // A quarter of the depth and of the bytes is kept free of bulk traffic, so that a fetch starts at once.
  [[nodiscard]] bool bulk_has_room() const {
    const std::size_t bytes = lane_.options_.in_flight_bytes;
    return bulk_in_flight_ == 0 || (bulk_in_flight_ < depth_ - depth_ / 4 && bulk_in_flight_bytes_ < bytes - bytes / 4);
  }

  // True when the lane is closed or abandoned.
  bool take_incoming() {
    std::vector<std::pair<std::shared_ptr<Request>, std::uint64_t>> requests;
    std::vector<Task> tasks;
    bool stopping = false;
    {
      const std::lock_guard lock(lane_.mutex_);
      lane_.listening_ = false;
      requests.swap(lane_.incoming_);
      tasks.swap(lane_.tasks_);
      stopping = lane_.stop_ || lane_.abandoned_;
    }
    for (const Task& task : tasks) task(backend_);
    for (auto& [request, members] : requests) {
      auto& queue = queues_[static_cast<std::size_t>(request->io.io_class)];
      queue.push_back(std::make_shared<Part>(Part{std::move(request), members}));
      queue.back()->skip();
    }
    return stopping;
  }

  // False when something came in that could be started, or must be done, now.
  bool may_wait() {
    const std::lock_guard lock(lane_.mutex_);
    if (!lane_.tasks_.empty() || (has_room() && !lane_.incoming_.empty())) return false;
    lane_.listening_ = has_room();
    return true;
  }

  void cancel_queued() {
    for (Queue& queue : queues_) {
      for (const auto& part : queue) {
        const IoRequest& io = part->request->io;
        if (!part->request->failed()) {
          const Block rest = part->next(part, 1u << 30);
          part->request->fail(rest.failure(ECANCELED, "the engine was closed", FailureKind::canceled));
        }
        part->cut = io.nbytes;
        if (part->in_flight == 0) lane_.finished(part->request);
      }
      queue.clear();
    }
  }

  void fill() {
    while (has_room()) {
      if (!again_.empty()) {
        Block block = std::move(again_.front());
        again_.pop_front();
        if (block.part->request->failed()) {
          finish(block);
        } else {
          start(std::move(block));
        }
      } else if (Queue* queue = next_queue()) {
        start_next(*queue);
      } else {
        return;
      }
    }
  }

  Queue* next_queue() {
    const std::size_t first = ++turn_ % kTurnEvery == 0 ? turn_ / kTurnEvery % kIoClasses : 0;
    for (std::size_t step = 0; step < kIoClasses; ++step) {
      const std::size_t index = (first + step) % kIoClasses;
      const bool bulk = index != static_cast<std::size_t>(IoClass::weights);
      if (!queues_[index].empty() && (!bulk || bulk_has_room())) return &queues_[index];
    }
    return nullptr;
  }

  void start_next(Queue& queue) {
    const std::shared_ptr<Part> part = queue.front();
    if (part->request->failed()) part->cut = part->request->io.nbytes;  // by another lane
    if (part->all_cut()) {
      queue.pop_front();
      if (part->in_flight == 0) lane_.finished(part->request);
      return;
    }
    const IoRequest& io = part->request->io;
    Block block = part->next(part, lane_.options_.block_bytes);
    part->cut += block.nbytes;
    part->skip();
    ++part->in_flight;
    if (part->all_cut()) queue.pop_front();
    if (io.kind == OpKind::write && !io.caller_checks) {
      io.file->take(io.offset + block.first, io.data + block.first, block.nbytes);
    }
    start(std::move(block));
  }

  void start(Block block) {
    const IoRequest& io = block.part->request->io;
    const std::uint64_t token = free_tokens_.back();
    free_tokens_.pop_back();
    std::byte* data = io.kind == OpKind::sync ? nullptr : io.data + block.first + block.done;
    const BlockOp op{io.kind, block.file, data, block.nbytes - block.done, block.offset + block.done, token};
    const std::uint64_t now = now_ns();
    block.part->request->started(now);
    blocks_[token] = std::move(block);
    lane_.started_ns_[token] = now;
    if (in_flight_++ == 0) lane_.busy_since_ns_ = now;
    in_flight_bytes_ += op.nbytes;
    if (io.io_class != IoClass::weights) {
      ++bulk_in_flight_;
      bulk_in_flight_bytes_ += op.nbytes;
    }
    lane_.in_flight_ = in_flight_;
    add(lane_.operations_, 1);
    backend_.submit(op);
  }

  // Every result passes here: nothing that did not move is reported as moved.
  void settle(const BlockResult& result) {
    Block block = std::move(blocks_[result.token]);
    blocks_[result.token] = Block{};
    record_end(block, result.token);
    Request& request = *block.part->request;
    const std::uint32_t asked = block.nbytes - block.done;
    if (request.io.kind == OpKind::sync) {
      if (result.res < 0) request.fail(block.failure(-result.res, ""));
    } else if (result.res < 0) {
      const int error = -result.res;
      if ((error == EINTR || error == EAGAIN) && block.retries < kRetriesMax && !request.failed()) {
        ++block.retries;
        add(lane_.retries_, 1);
        again_.push_back(std::move(block));
        return;
      }
      request.fail(block.failure(error, ""));
    } else if (static_cast<std::uint32_t>(result.res) < asked) {
      if (!request.failed() && continue_short(block, static_cast<std::uint32_t>(result.res))) return;
    } else {
      count(request.io, asked);
      block.done = block.nbytes;
      if (request.io.kind == OpKind::read && !request.failed()) verify(block);
    }
    finish(block);
  }

  void record_end(const Block& block, std::uint64_t token) {
    const std::uint64_t now = now_ns();
    lane_.latency_[static_cast<std::size_t>(block.part->request->io.kind)].add(now - lane_.started_ns_[token]);
    lane_.started_ns_[token] = 0;
    free_tokens_.push_back(token);
    in_flight_bytes_ -= block.nbytes - block.done;
    if (block.part->request->io.io_class != IoClass::weights) {
      --bulk_in_flight_;
      bulk_in_flight_bytes_ -= block.nbytes - block.done;
    }
    if (--in_flight_ == 0) {
      add(lane_.busy_ns_, now - lane_.busy_since_ns_);
      lane_.busy_since_ns_ = 0;
    }
    lane_.in_flight_ = in_flight_;
  }

  // True when the rest of the block was queued; false when it can not be moved.
  bool continue_short(Block& block, std::uint32_t moved) {
    Request& request = *block.part->request;
    const bool reading = request.io.kind == OpKind::read;
    // Direct I/O goes on from a border of the device's blocks, so bytes after the last one are moved twice.
    const std::uint32_t kept = moved / block.file->offset_alignment() * block.file->offset_alignment();
    if (moved == 0 && reading) {
      request.fail(block.failure(0, "the file ends before the data does; was it truncated?"));
      return false;
    }
    if (kept == 0 && ++block.retries > kRetriesMax) {
      // A read that never gets past part of a device's block has met the end of a file of an odd length.
      request.fail(reading ? block.failure(0, "the file ends before the data does; was it truncated?")
                           : block.failure(EIO, "the device keeps moving nothing"));
      return false;
    }
    count(request.io, kept);
    block.done += kept;
    add(lane_.short_transfers_, 1);
    again_.push_back(std::move(block));
    return true;
  }

  static void verify(const Block& block) {
    Request& request = *block.part->request;
    const IoRequest& io = request.io;
    if (io.caller_checks) return;
    if (auto damage = io.file->check(io.offset + block.first, io.data + block.first, block.nbytes)) {
      request.fail(std::move(*damage));
    }
  }

  void count(const IoRequest& io, std::uint64_t nbytes) {
    const auto index = static_cast<std::size_t>(io.io_class);
    add((io.kind == OpKind::read ? lane_.read_bytes_ : lane_.write_bytes_)[index], nbytes);
  }

  void finish(const Block& block) {
    Part& part = *block.part;
    --part.in_flight;
    if (part.request->failed() && !part.all_cut()) drop_rest(block.part);
    if (part.in_flight == 0 && part.all_cut()) lane_.finished(part.request);
  }

  void drop_rest(const std::shared_ptr<Part>& part) {
    Queue& queue = queues_[static_cast<std::size_t>(part->request->io.io_class)];
    queue.erase(std::remove(queue.begin(), queue.end(), part), queue.end());
    part->cut = part->request->io.nbytes;
  }

  Lane& lane_;
  Backend& backend_;
  const unsigned depth_;
  Queue queues_[kIoClasses];
  std::deque<Block> again_;  // continuations and retries go before new blocks
  std::vector<Block> blocks_;
  std::vector<std::uint64_t> free_tokens_;
  unsigned in_flight_ = 0;
  unsigned bulk_in_flight_ = 0;  // of them, not weights
  std::size_t bulk_in_flight_bytes_ = 0;
  std::size_t in_flight_bytes_ = 0;
  unsigned turn_ = 0;
};

}  // namespace infinity
