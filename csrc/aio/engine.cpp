#include "aio/engine.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "base/page.hpp"
#include "base/require.hpp"
#include "base/thread_name.hpp"

namespace infinity {
namespace {

void check_options(const EngineOptions& options) {
  if (options.engine != "auto" && options.engine != "io_uring" && options.engine != "threads") {
    throw std::invalid_argument("unknown engine '" + options.engine + "'; use auto, io_uring or threads");
  }
  require(options.queue_depth > 0 && options.queue_depth <= 4096, "queue_depth must be between 1 and 4096");
  require(options.threads > 0, "threads must be positive");
  require(options.in_flight_bytes > 0, "in_flight_bytes must be positive");
  require(options.deadline > std::chrono::nanoseconds(0), "the deadline must be positive");
  require(options.block_bytes > 0 && options.block_bytes % kPageBytes == 0 && options.block_bytes <= (1u << 30),
          "block must be a positive multiple of 4 KiB, at most 1 GiB");
}

LaneOptions lane_options(const EngineOptions& options) {
  LaneOptions lane = options;
  if (!options.faults.empty() || !options.journal.empty()) {
    lane.plan = std::make_shared<FaultPlan>(options.faults, options.journal);
  }
  return lane;
}

}  // namespace

struct IoEngine::Impl {
  struct Memory {
    std::byte* data;
    std::size_t nbytes;
  };
  struct Device {
    dev_t number;
    bool known;  // false until a file is used
    std::shared_ptr<Lane> lane;
  };

  const LaneOptions options;
  const std::chrono::nanoseconds deadline;
  const pid_t pid = getpid();
  const std::shared_ptr<IoLog> log = std::make_shared<IoLog>();
  const std::shared_ptr<Lane> first = Lane::open(options);

  mutable std::mutex mutex;  // guards the members below
  std::condition_variable changed;
  std::vector<Device> devices;
  std::vector<Memory> registered;
  bool stop = false;

  std::thread watchdog;  // declared last: the thread starts when all other members exist

  explicit Impl(const EngineOptions& given) : options(lane_options(given)), deadline(given.deadline) {
    devices.push_back({0, false, first});
    watchdog = std::thread([this] {
      name_thread("infinity-watch");
      watch();
    });
  }

  ~Impl() {
    for (const Device& device : devices) device.lane->close();
    {
      const std::lock_guard lock(mutex);
      stop = true;
    }
    changed.notify_all();
    watchdog.join();
  }

  void watch() {
    constexpr auto kLongest = std::chrono::nanoseconds(std::chrono::seconds(5));
    const auto pause = std::clamp(deadline / 8, std::chrono::nanoseconds(std::chrono::milliseconds(1)), kLongest);
    std::unique_lock lock(mutex);
    while (!stop) {
      changed.wait_for(lock, pause);
      const std::vector<Device> now = devices;
      lock.unlock();
      for (const Device& device : now) device.lane->check(deadline);
      lock.lock();
    }
  }

  // Throws std::system_error if another lane cannot be opened.
  std::shared_ptr<Lane> lane_of(const File& file) {
    const std::lock_guard lock(mutex);
    for (Device& device : devices) {
      if (device.known && device.number == file.device()) return device.lane;
    }
    if (!devices.front().known) {
      devices.front() = {file.device(), true, first};
      first->run_on(file.numa_node());
      return first;
    }
    auto lane = Lane::open(options);
    lane->run_on(file.numa_node());
    for (const Memory& memory : registered) static_cast<void>(lane->register_memory(memory.data, memory.nbytes));
    devices.push_back({file.device(), true, lane});
    return lane;
  }

  // The lanes that serve a request. A lane's mask has one bit for each member of the file: set if this lane serves the
  // member.
  using Shares = std::vector<std::pair<std::shared_ptr<Lane>, std::uint64_t>>;

  Shares split(const IoRequest& io) {
    const SwapFile& file = *io.file;
    std::uint64_t touched = 0;
    const std::uint64_t all =
        file.members().size() == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << file.members().size()) - 1;
    if (io.kind == OpKind::sync) touched = all;
    for (std::uint64_t at = 0; at < io.nbytes && touched != all;) {
      const Place place = file.locate(io.offset + at);
      touched |= std::uint64_t{1} << place.member;
      at += std::min<std::uint64_t>(place.nbytes, io.nbytes - at);
    }
    Shares shares;
    for (std::size_t member = 0; member < file.members().size(); ++member) {
      if ((touched >> member & 1) == 0) continue;
      auto lane = lane_of(*file.members()[member]);
      file.members()[member]->watch(lane);
      const auto known =
          std::find_if(shares.begin(), shares.end(), [&](const auto& share) { return share.first == lane; });
      if (known == shares.end()) {
        shares.emplace_back(std::move(lane), std::uint64_t{1} << member);
      } else {
        known->second |= std::uint64_t{1} << member;
      }
    }
    return shares;
  }

  [[nodiscard]] std::vector<std::shared_ptr<Lane>> lanes() const {
    const std::lock_guard lock(mutex);
    std::vector<std::shared_ptr<Lane>> result;
    for (const Device& device : devices) result.push_back(device.lane);
    return result;
  }
};

IoEngine::IoEngine(EngineOptions options) {
  check_options(options);
  impl_ = std::make_unique<Impl>(options);
}

IoEngine::~IoEngine() {
  // In a forked child the threads do not exist: do not join the threads, and do not destroy the objects that they own.
  if (getpid() != impl_->pid) static_cast<void>(impl_.release());
}

void IoEngine::check(const IoRequest& request) {
  if (request.kind == OpKind::sync) return;
  require(request.file != nullptr && request.data != nullptr && request.nbytes > 0,
          "a request needs a file, memory and at least one byte");
  const auto address = reinterpret_cast<std::uintptr_t>(request.data);
  const ChecksumTable* sums = request.file->checksums();
  if ((request.file->direct() && address % kPageBytes != 0) ||
      ((request.file->direct() || sums != nullptr) &&
       (request.offset % kPageBytes != 0 || request.nbytes % kPageBytes != 0))) {
    throw std::invalid_argument("direct I/O needs memory, offset and length in multiples of 4 KiB; got address " +
                                std::to_string(address % kPageBytes) + " past one, offset " +
                                std::to_string(request.offset) + ", length " + std::to_string(request.nbytes));
  }
  const auto end =
      sums != nullptr ? sums->pages() * kPageBytes : static_cast<std::uint64_t>(std::numeric_limits<off_t>::max());
  if (request.offset > end || request.nbytes > end - request.offset) {
    // An offset beyond the range of off_t may have another meaning: for the kernel, -1 is "the current position".
    throw std::invalid_argument("a file cannot have offset " + std::to_string(request.offset) + " and " +
                                std::to_string(request.nbytes) + " bytes on");
  }
}

Future IoEngine::submit(const IoRequest& request) {
  check(request);
  Impl::Shares shares;
  try {
    shares = impl_->split(request);
  } catch (const std::system_error& error) {
    const std::string doing = "opening the queue of the device";
    const std::string& path = request.file->members()[0]->path();
    Failure failure{FailureKind::io, doing, path, 0, 0, error.code().value(), error.what(), ""};
    failure.message = doing + " of " + path + ": " + error.what();
    Future future = std::make_shared<Completion>();
    future->complete(std::move(failure));
    return future;
  }
  auto made = std::make_shared<Request>(request, static_cast<unsigned>(shares.size()), impl_->log);
  Future future = made->future;
  for (auto& [lane, members] : shares) lane->submit(made, members);
  return future;
}

Future IoEngine::submit_after(const std::shared_ptr<IoEngine>& engine, const Future& first, const IoRequest& request) {
  check(request);
  auto chained = std::make_shared<Completion>();
  // The callbacks must not own the futures that own the callbacks.
  first->then([engine, chained, request, done = first.get()] {
    if (done->failure()) {
      chained->complete(done->failure());
      return;
    }
    const Future second = engine->submit(request);
    second->then([chained, raw = second.get()] { chained->complete(raw->failure()); });
  });
  return chained;
}

Future IoEngine::sync(const std::shared_ptr<SwapFile>& file) {
  return submit({OpKind::sync, IoClass::weights, file, 0, nullptr, file->members().size()});
}

std::string IoEngine::register_memory(std::byte* data, std::size_t nbytes) {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->registered.push_back({data, nbytes});
  }
  std::string refused;
  for (const auto& lane : impl_->lanes()) {
    std::string reason = lane->register_memory(data, nbytes);
    if (refused.empty()) refused = std::move(reason);
  }
  return refused;
}

const std::string& IoEngine::name() const { return impl_->first->name(); }
const std::string& IoEngine::reason() const { return impl_->first->reason(); }

LaneCounters IoEngine::counters() const {
  LaneCounters sum;
  for (const auto& lane : impl_->lanes()) {
    const LaneCounters part = lane->counters();
    for (std::size_t index = 0; index < kIoClasses; ++index) {
      sum.read_bytes[index] += part.read_bytes[index];
      sum.write_bytes[index] += part.write_bytes[index];
    }
    sum.operations += part.operations;
    sum.retries += part.retries;
    sum.short_transfers += part.short_transfers;
    sum.busy_ns = std::max(sum.busy_ns, part.busy_ns);
    sum.in_flight += part.in_flight;
  }
  return sum;
}

void IoEngine::trace(bool on, std::size_t events_max) { impl_->log->record(on, events_max); }

IoLog::Taken IoEngine::take_trace() { return impl_->log->take(); }

}  // namespace infinity
