// The thread of a lane: the thread opens the backend, gives it blocks as long as there is room, and checks every
// result.
#include <algorithm>
#include <cerrno>
#include <deque>
#include <memory>
#include <mutex>
#include <system_error>
#include <utility>
#include <vector>

#include "aio/lane.hpp"
#include "aio/part.hpp"
#include "base/clock.hpp"

namespace infinity {
namespace {

void add(std::atomic<std::uint64_t>& counter, std::uint64_t value) {
  counter.fetch_add(value, std::memory_order_relaxed);
}

}  // namespace

// State of a lane that only the lane's thread uses.
class Lane::Server {
 public:
  Server(Lane& lane, Backend& backend)
      : lane_(lane),
        backend_(backend),
        parts_(lane.options_.queue_depth, lane.options_.in_flight_bytes),
        blocks_(lane.options_.queue_depth) {
    for (unsigned token = 0; token < lane.options_.queue_depth; ++token) free_tokens_.push_back(token);
  }

  void run() {
    std::vector<BlockResult> results;
    for (;;) {
      const bool stopping = take_incoming();
      if (stopping) cancel_queued();
      fill();
      if (stopping && parts_.in_flight() == 0) return;
      if (!may_wait()) continue;
      results.clear();
      // With many blocks in flight, wait for several results at once: waiting takes fewer system calls, and the other
      // blocks keep the device busy.
      backend_.wait(results, std::max(parts_.in_flight() / kHandfulOf, 1u));
      for (const BlockResult& result : results) take(result);
    }
  }

 private:
  static constexpr unsigned kHandfulOf = 16;

  // Returns true if the lane is closed or abandoned.
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
      auto part = std::make_shared<Part>(Part{std::move(request), members});
      part->skip();
      parts_.add(std::move(part));
    }
    return stopping;
  }

  // Returns false if there is a new task, or a new request that can be started now.
  bool may_wait() {
    const std::lock_guard lock(lane_.mutex_);
    if (!lane_.tasks_.empty() || (parts_.has_room() && !lane_.incoming_.empty())) return false;
    lane_.listening_ = parts_.has_room();
    return true;
  }

  void cancel_queued() {
    for (const auto& part : parts_.take_all()) {
      if (!part->request->failed()) {
        const Block rest = Part::next(part, 1u << 30);
        part->request->fail(rest.failure(ECANCELED, "the engine was closed", FailureKind::canceled));
      }
      part->drop_rest();
      if (part->in_flight == 0) lane_.finished(part->request);
    }
  }

  void fill() {
    while (parts_.has_room()) {
      if (!again_.empty()) {
        Block block = std::move(again_.front());
        again_.pop_front();
        if (block.part->request->failed()) {
          finish(block);
        } else {
          start(std::move(block));
        }
      } else if (const auto part = parts_.next()) {
        start_next(part);
      } else {
        return;
      }
    }
  }

  void start_next(const std::shared_ptr<Part>& part) {
    if (part->request->failed()) part->drop_rest();  // another lane failed it
    if (part->all_cut()) {
      parts_.remove(part);
      if (part->in_flight == 0) lane_.finished(part->request);
      return;
    }
    const IoRequest& io = part->request->io;
    Block block = Part::next(part, lane_.options_.block_bytes);
    part->cut += block.nbytes;
    part->skip();
    ++part->in_flight;
    if (part->all_cut()) parts_.remove(part);
    if (io.kind == OpKind::write && !io.caller_checks) {
      io.file->take(io.offset + block.first, io.data + block.first, block.nbytes);
    }
    start(std::move(block));
  }

  void start(Block block) {
    const IoRequest& io = block.io();
    const std::uint64_t token = free_tokens_.back();
    free_tokens_.pop_back();
    std::byte* data = io.kind == OpKind::sync ? nullptr : io.data + block.first + block.done;
    const BlockOp op{io.kind, block.file, data, block.left(), block.offset + block.done, token};
    const std::uint64_t now = now_ns();
    block.part->request->started(now);
    lane_.started_ns_[token] = now;
    if (parts_.in_flight() == 0) lane_.busy_since_ns_ = now;
    parts_.started(block);
    blocks_[token] = std::move(block);
    lane_.in_flight_ = parts_.in_flight();
    add(lane_.operations_, 1);
    backend_.submit(op);
  }

  // Every result passes through this function, so that only bytes that were moved are reported as moved.
  void take(const BlockResult& result) {
    Block block = std::move(blocks_[result.token]);
    blocks_[result.token] = Block{};
    record_end(block, result.token);
    Request& request = *block.part->request;
    const std::uint32_t asked = block.left();
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
    lane_.started_ns_[token] = 0;
    free_tokens_.push_back(token);
    parts_.ended(block);
    if (parts_.in_flight() == 0) {
      add(lane_.busy_ns_, now_ns() - lane_.busy_since_ns_);
      lane_.busy_since_ns_ = 0;
    }
    lane_.in_flight_ = parts_.in_flight();
  }

  // Returns true if the rest of the block was queued; false if the request has failed.
  bool continue_short(Block& block, std::uint32_t moved) {
    Request& request = *block.part->request;
    const bool reading = request.io.kind == OpKind::read;
    // Direct I/O must continue at a boundary of the device's blocks: the bytes that were moved after the last boundary
    // are moved again.
    const std::uint32_t kept = moved / block.file->offset_alignment() * block.file->offset_alignment();
    if (moved == 0 && reading) {
      request.fail(block.failure(0, "the file ends before the data does; was it truncated?"));
      return false;
    }
    if (kept == 0 && ++block.retries > kRetriesMax) {
      // A read that repeatedly moves only part of one device block has reached the end of a file whose length is no
      // multiple of the device's blocks.
      request.fail(reading ? block.failure(0, "the file ends before the data does; was it truncated?")
                           : block.failure(EIO, "the device repeatedly transferred 0 bytes"));
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
    if (part.request->failed() && !part.all_cut()) {
      parts_.remove(block.part);
      part.drop_rest();
    }
    if (part.in_flight == 0 && part.all_cut()) lane_.finished(part.request);
  }

  Lane& lane_;
  Backend& backend_;
  PartQueue parts_;
  std::deque<Block> again_;    // continuations and retries, which are submitted before new blocks
  std::vector<Block> blocks_;  // blocks in flight, by token
  std::vector<std::uint64_t> free_tokens_;
};

std::unique_ptr<Backend> Lane::make_backend() {
  std::unique_ptr<Backend> backend;
  if (options_.engine == "threads") {
    backend = make_thread_backend(options_.queue_depth, options_.threads);
    reason_ = "asked for";
  } else {
    try {
      backend = make_uring_backend(options_.queue_depth);
      reason_ = options_.engine == "auto" ? "the kernel supports it" : "asked for";
    } catch (const std::system_error& error) {
      if (options_.engine != "auto") throw;
      backend = make_thread_backend(options_.queue_depth, options_.threads);
      reason_ = std::string("io_uring is not usable: ") + error.what();
    }
  }
  name_ = backend->name();
  reason_ += "; " + backend->details();
  return options_.plan == nullptr ? std::move(backend) : make_faulty_backend(std::move(backend), options_.plan);
}

void Lane::serve(std::promise<void>& opened) {
  std::unique_ptr<Backend> backend;
  try {
    backend = make_backend();
  } catch (...) {
    opened.set_exception(std::current_exception());
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    backend_ = backend.get();
  }
  opened.set_value();
  try {
    Server(*this, *backend).run();
  } catch (const std::exception& error) {
    // The ring itself failed: it is unknown which transfers the kernel still does.
    abandon(std::string("the I/O thread failed: ") + error.what());
  }
  {
    const std::lock_guard lock(mutex_);
    backend_ = nullptr;
    ended_ = true;
  }
  changed_.notify_all();
}

}  // namespace infinity
