#include "aio/engine.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <future>
#include <limits>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace infinity {
namespace {

constexpr std::uint64_t kPage = 4096;
// Starvation ruled out: one block in so many goes to the classes in turn, whatever their rank.
constexpr unsigned kTurnEvery = 16;

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
}

// A request while it is being served. Touched by the I/O thread only.
struct Active {
  IoRequest io;
  Future future = std::make_shared<Completion>();
  std::size_t cut = 0;     // bytes handed out as blocks
  unsigned in_flight = 0;  // blocks
  std::optional<Failure> failure;
};

struct Block {
  std::shared_ptr<Active> request;
  std::size_t at = 0;  // bytes from the start of the request
  std::uint32_t nbytes = 0;
  unsigned retries = 0;
};

Failure describe(const IoRequest& io, std::size_t at, std::size_t nbytes, int error, const std::string& cause) {
  Failure failure;
  failure.operation = io.kind == OpKind::read ? "read" : "write";
  failure.path = io.file->path();
  failure.offset = io.offset + at;
  failure.nbytes = nbytes;
  failure.error_number = error;
  failure.message = failure.operation + " of " + std::to_string(nbytes) + " bytes at offset " +
                    std::to_string(failure.offset) + " of " + failure.path + ": " +
                    (cause.empty() ? std::string(std::strerror(error)) : cause);
  return failure;
}

Failure describe(const Block& block, int error, const std::string& cause) {
  return describe(block.request->io, block.at, block.nbytes, error, cause);
}

}  // namespace

struct IoEngine::Impl {
  EngineOptions options;
  std::string name;
  std::string reason;
  pid_t pid = getpid();
  std::unique_ptr<Backend> backend;  // created, used and destroyed by `thread`
  std::thread thread;

  std::mutex mutex;  // guards what follows, up to the blank line
  std::vector<std::shared_ptr<Active>> incoming;
  bool stop = false;
  EngineCounters counters;

  std::deque<std::shared_ptr<Active>> queues[kIoClasses];
  std::deque<Block> again;  // continuations and retries go before new blocks
  std::vector<Block> blocks;
  std::vector<std::uint64_t> free_tokens;
  unsigned in_flight = 0;
  unsigned turn = 0;
  std::uint64_t busy_since = 0;

  explicit Impl(EngineOptions given) : options(std::move(given)) {
    std::promise<void> ready;
    auto started = ready.get_future();
    thread = std::thread([this, ready = std::move(ready)]() mutable { run(ready); });
    try {
      started.get();
    } catch (...) {
      thread.join();
      throw;
    }
  }

  void open_backend() {
    if (options.engine == "threads") {
      backend = make_thread_backend(options.queue_depth, options.threads);
      reason = "asked for";
    } else {
      try {
        backend = make_uring_backend(options.queue_depth);
        reason = options.engine == "auto" ? "the kernel offers it" : "asked for";
      } catch (const std::system_error& error) {
        if (options.engine != "auto") throw;
        backend = make_thread_backend(options.queue_depth, options.threads);
        reason = std::string("io_uring is not usable: ") + error.what();
      }
    }
    name = backend->name();
    reason += "; " + backend->details();
    if (!options.faults.empty()) backend = make_faulty_backend(std::move(backend), options.faults);
    blocks.resize(options.queue_depth);
    for (unsigned token = 0; token < options.queue_depth; ++token) free_tokens.push_back(token);
  }

  void run(std::promise<void>& ready) {
    try {
      open_backend();
    } catch (...) {
      ready.set_exception(std::current_exception());
      return;
    }
    ready.set_value();
    std::vector<BlockResult> results;
    for (;;) {
      const bool stopping = take_incoming();
      if (stopping) cancel_queued();
      fill();
      if (stopping && in_flight == 0) break;
      results.clear();
      backend->wait(results);
      for (const BlockResult& result : results) settle(result);
    }
    backend.reset();
  }

  bool take_incoming() {
    const std::lock_guard lock(mutex);
    for (auto& request : incoming) queues[static_cast<std::size_t>(request->io.io_class)].push_back(std::move(request));
    incoming.clear();
    return stop;
  }

  void cancel_queued() {
    for (auto& queue : queues) {
      for (auto& request : queue) {
        if (!request->failure) {
          request->failure = describe(request->io, request->cut, request->io.nbytes - request->cut, ECANCELED,
                                      "the engine was closed");
        }
        request->cut = request->io.nbytes;
        if (request->in_flight == 0) complete(*request);
      }
      queue.clear();
    }
  }

  void fill() {
    while (in_flight < options.queue_depth) {
      if (!again.empty()) {
        Block block = std::move(again.front());
        again.pop_front();
        if (block.request->failure) {
          finish_block(block);
        } else {
          start(std::move(block));
        }
      } else if (auto* queue = next_queue()) {
        start(cut_block(*queue));
      } else {
        return;
      }
    }
  }

  std::deque<std::shared_ptr<Active>>* next_queue() {
    const std::size_t first = ++turn % kTurnEvery == 0 ? turn / kTurnEvery % kIoClasses : 0;
    for (std::size_t step = 0; step < kIoClasses; ++step) {
      auto& queue = queues[(first + step) % kIoClasses];
      if (!queue.empty()) return &queue;
    }
    return nullptr;
  }

  Block cut_block(std::deque<std::shared_ptr<Active>>& queue) {
    const std::shared_ptr<Active> request = queue.front();
    const std::size_t nbytes = std::min(options.block_bytes, request->io.nbytes - request->cut);
    Block block{request, request->cut, static_cast<std::uint32_t>(nbytes), 0};
    request->cut += nbytes;
    ++request->in_flight;
    if (request->cut == request->io.nbytes) queue.pop_front();
    return block;
  }

  void start(Block block) {
    const IoRequest& io = block.request->io;
    const std::uint64_t token = free_tokens.back();
    free_tokens.pop_back();
    const BlockOp op{io.kind, io.file->fd(), io.data + block.at, block.nbytes, io.offset + block.at, token};
    blocks[token] = std::move(block);
    if (in_flight++ == 0) busy_since = now_ns();
    backend->submit(op);
    const std::lock_guard lock(mutex);
    ++counters.operations;
  }

  // Every result passes here: nothing that did not move is reported as moved.
  void settle(const BlockResult& result) {
    Block block = std::move(blocks[result.token]);
    free_tokens.push_back(result.token);
    if (--in_flight == 0) {
      const std::lock_guard lock(mutex);
      counters.busy_ns += now_ns() - busy_since;
    }
    Active& request = *block.request;
    if (result.res < 0) {
      const int error = -result.res;
      if ((error == EINTR || error == EAGAIN) && block.retries < kRetriesMax && !request.failure) {
        ++block.retries;
        const std::lock_guard lock(mutex);
        ++counters.retries;
        again.push_back(std::move(block));
        return;
      }
      if (!request.failure) request.failure = describe(block, error, "");
    } else if (static_cast<std::uint32_t>(result.res) < block.nbytes && !request.failure) {
      if (continue_short(block, static_cast<std::uint32_t>(result.res))) return;
    } else if (!request.failure) {
      count(request.io, block.nbytes);
    }
    finish_block(block);
  }

  // True when the rest of the block was queued; false when it can not be moved.
  bool continue_short(Block& block, std::uint32_t moved) {
    Active& request = *block.request;
    // Direct I/O goes on from a page border, so bytes after the last one are moved twice.
    const std::uint32_t kept = request.io.file->direct() ? static_cast<std::uint32_t>(moved / kPage * kPage) : moved;
    if (moved == 0 && request.io.kind == OpKind::read) {
      request.failure = describe(block, 0, "the file ends before the data does; was it truncated?");
      return false;
    }
    if (kept == 0 && ++block.retries > kRetriesMax) {
      // A read that never gets past part of a page has met the end of a file that is no multiple of 4 KiB long.
      request.failure = request.io.kind == OpKind::read
                            ? describe(block, 0, "the file ends before the data does; was it truncated?")
                            : describe(block, EIO, "the device keeps moving nothing");
      return false;
    }
    count(request.io, kept);
    block.at += kept;
    block.nbytes -= kept;
    again.push_back(std::move(block));
    const std::lock_guard lock(mutex);
    ++counters.short_transfers;
    return true;
  }

  void count(const IoRequest& io, std::uint64_t nbytes) {
    const auto index = static_cast<std::size_t>(io.io_class);
    const std::lock_guard lock(mutex);
    (io.kind == OpKind::read ? counters.read_bytes : counters.write_bytes)[index] += nbytes;
  }

  void finish_block(const Block& block) {
    Active& request = *block.request;
    --request.in_flight;
    if (request.failure && request.cut < request.io.nbytes) drop_rest(block.request);
    if (request.in_flight == 0 && request.cut == request.io.nbytes) complete(request);
  }

  static void complete(Active& request) {
    request.io.file.reset();  // first: who sees the future done and closes the file finds it closed
    request.future->complete(request.failure);
  }

  void drop_rest(const std::shared_ptr<Active>& request) {
    auto& queue = queues[static_cast<std::size_t>(request->io.io_class)];
    queue.erase(std::remove(queue.begin(), queue.end(), request), queue.end());
    request->cut = request->io.nbytes;
  }
};

IoEngine::IoEngine(EngineOptions options) {
  if (options.engine != "auto" && options.engine != "io_uring" && options.engine != "threads") {
    throw std::invalid_argument("unknown engine '" + options.engine + "'; use auto, io_uring or threads");
  }
  if (options.queue_depth == 0 || options.queue_depth > 4096) {
    throw std::invalid_argument("queue_depth must be between 1 and 4096");
  }
  if (options.threads == 0) throw std::invalid_argument("threads must be positive");
  if (options.block_bytes == 0 || options.block_bytes % kPage != 0 || options.block_bytes > (1u << 30)) {
    throw std::invalid_argument("block must be a positive multiple of 4 KiB, at most 1 GiB");
  }
  impl_ = std::make_unique<Impl>(std::move(options));
}

IoEngine::~IoEngine() {
  if (getpid() != impl_->pid) {
    // In a forked child the I/O thread does not exist: neither join it nor destroy what it holds.
    static_cast<void>(impl_.release());
    return;
  }
  {
    // wake() under the lock: the thread destroys the backend once it saw `stop`.
    const std::lock_guard lock(impl_->mutex);
    impl_->stop = true;
    impl_->backend->wake();
  }
  impl_->thread.join();
}

Future IoEngine::submit(const IoRequest& request) {
  if (request.file == nullptr || request.data == nullptr || request.nbytes == 0) {
    throw std::invalid_argument("a request needs a file, memory and at least one byte");
  }
  const auto address = reinterpret_cast<std::uintptr_t>(request.data);
  if (request.file->direct() && (address % kPage != 0 || request.offset % kPage != 0 || request.nbytes % kPage != 0)) {
    throw std::invalid_argument("direct I/O needs memory, offset and length in multiples of 4 KiB; got address " +
                                std::to_string(address % kPage) + " past one, offset " +
                                std::to_string(request.offset) + ", length " + std::to_string(request.nbytes));
  }
  constexpr auto kEnd = static_cast<std::uint64_t>(std::numeric_limits<off_t>::max());
  if (request.offset > kEnd || request.nbytes > kEnd - request.offset) {
    // -1 would even mean "the current position" to the kernel.
    throw std::invalid_argument("no file reaches to offset " + std::to_string(request.offset) + " and " +
                                std::to_string(request.nbytes) + " bytes on");
  }
  auto active = std::make_shared<Active>();
  active->io = request;
  Future future = active->future;
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->incoming.push_back(std::move(active));
    // Under the lock: the backend is destroyed only after `stop` was seen.
    if (!impl_->stop) impl_->backend->wake();
  }
  return future;
}

const std::string& IoEngine::name() const { return impl_->name; }
const std::string& IoEngine::reason() const { return impl_->reason; }

EngineCounters IoEngine::counters() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->counters;
}

}  // namespace infinity
