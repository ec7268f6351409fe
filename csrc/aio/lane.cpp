#include "aio/lane.hpp"

#include <algorithm>
#include <cerrno>
#include <optional>
#include <system_error>
#include <utility>

#include "aio/part.hpp"
#include "base/clock.hpp"
#include "base/numa.hpp"
#include "base/thread_name.hpp"

namespace infinity {
namespace {

// Returns a Failure that covers the complete request. The path in the Failure is that of the request, because the
// lane's thread may reset io.file at any moment.
Failure describe(const Request& request, FailureKind kind, int error, const std::string& cause) {
  const IoRequest& io = request.io;
  return composed({kind, verb_of(io.kind), request.path, io.offset, io.nbytes, error, cause, ""});
}

}  // namespace

Lane::Lane(LaneOptions options) : options_(std::move(options)), started_ns_(options_.queue_depth) {}

Lane::~Lane() = default;

std::shared_ptr<Lane> Lane::open(LaneOptions options) {
  std::shared_ptr<Lane> lane(new Lane(std::move(options)));
  std::promise<void> opened;
  auto outcome = opened.get_future();
  // The thread keeps the lane alive: an abandoned lane must outlive its engine.
  lane->thread_ = std::thread([lane, opened = std::move(opened)]() mutable {
    name_thread("infinity-io");
    lane->serve(opened);
  });
  try {
    outcome.get();
  } catch (...) {
    lane->thread_.join();
    throw;
  }
  return lane;
}

void Lane::submit(std::shared_ptr<Request> request, std::uint64_t members) {
  Failure failure;
  {
    const std::lock_guard lock(mutex_);
    if (!abandoned_ && !stop_) {
      live_.insert(request);
      incoming_.emplace_back(std::move(request), members);
      if (!listening_) return;
      listening_ = false;
      backend_->wake();
      return;
    }
    failure = abandoned_ ? describe(*request, FailureKind::timeout, ETIMEDOUT, abandoned_because_)
                         : describe(*request, FailureKind::canceled, ECANCELED, "the engine was closed");
  }
  request->fail(std::move(failure));
  request->finish_part();
}

bool Lane::post(Task task) {
  const std::lock_guard lock(mutex_);
  if (backend_ == nullptr || abandoned_ || stop_) return false;
  tasks_.push_back(std::move(task));
  backend_->wake();
  return true;
}

std::string Lane::register_memory(std::byte* data, std::size_t nbytes) {
  auto answer = std::make_shared<std::promise<std::string>>();
  auto refusal = answer->get_future();
  if (!post([=](Backend& backend) { answer->set_value(backend.register_memory(data, nbytes)); })) {
    return "the engine is closed";
  }
  while (refusal.wait_for(std::chrono::milliseconds(100)) != std::future_status::ready) {
    const std::lock_guard lock(mutex_);
    if (abandoned_) return abandoned_because_;
  }
  return refusal.get();
}

void Lane::run_on(int numa_node) {
  if (numa_node >= 0) post([=](Backend&) { infinity::run_on_node(numa_node); });
}

void Lane::file_closed(std::uint64_t id) {
  post([=](Backend& backend) { backend.forget_file(id); });
}

void Lane::finished(const std::shared_ptr<Request>& request) {
  {
    const std::lock_guard lock(mutex_);
    live_.erase(request);
  }
  request->finish_part();
}

void Lane::check(std::chrono::nanoseconds deadline) {
  std::uint64_t oldest = ~std::uint64_t{0};
  for (const auto& started : started_ns_) {
    const std::uint64_t at = started;
    if (at != 0) oldest = std::min(oldest, at);
  }
  const std::uint64_t now = now_ns();
  if (oldest >= now || now - oldest <= static_cast<std::uint64_t>(deadline.count())) return;
  const double seconds = static_cast<double>(now - oldest) / 1e9;
  abandon("the device has not answered for " + std::to_string(seconds).substr(0, 6) + " s");
}

void Lane::abandon(const std::string& cause) {
  std::unordered_set<std::shared_ptr<Request>> live;
  std::string because;
  {
    const std::lock_guard lock(mutex_);
    if (abandoned_) return;
    abandoned_ = true;
    const std::uint64_t blocks = in_flight_;
    abandoned_because_ = cause + ", with " + std::to_string(blocks) + " blocks in flight (queue depth " +
                         std::to_string(options_.queue_depth) + ", engine " + name_ + ")";
    because = abandoned_because_;
    live = live_;
    if (backend_ != nullptr) backend_->wake();
  }
  changed_.notify_all();
  for (const auto& request : live) {
    request->abandon(describe(*request, FailureKind::timeout, ETIMEDOUT, because));
  }
}

void Lane::close() {
  std::unique_lock lock(mutex_);
  stop_ = true;
  if (backend_ != nullptr) backend_->wake();
  changed_.wait(lock, [this] { return ended_ || abandoned_; });
  const bool ended = ended_;
  lock.unlock();
  if (ended) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

LaneCounters Lane::counters() const {
  LaneCounters result;
  for (std::size_t index = 0; index < kIoClasses; ++index) {
    result.read_bytes[index] = read_bytes_[index];
    result.write_bytes[index] = write_bytes_[index];
  }
  result.operations = operations_;
  result.retries = retries_;
  result.short_transfers = short_transfers_;
  const std::uint64_t since = busy_since_ns_;
  const std::uint64_t now = now_ns();
  result.busy_ns = busy_ns_ + (since != 0 && since < now ? now - since : 0);
  result.in_flight = in_flight_;
  return result;
}

}  // namespace infinity
