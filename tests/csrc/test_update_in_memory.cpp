// Jobs that read and write no file. They are computed while other jobs wait for their files.
#include <doctest/doctest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <future>
#include <random>
#include <thread>

#include "states.hpp"

using namespace infinity;
using namespace infinity::tests;

namespace {

constexpr std::uint64_t kBytes = kNumel * 4;

// Blocks a thread until `go_on`, in the callback of a future that the thread completes. If the thread is the disk's, no
// transfer is completed meanwhile. If the thread is the driver's, its queues can be filled meanwhile.
class Blocked {
 public:
  // Args: submit: returns such a future. It is called again if the future was done before the callback was added.
  template <class Submit>
  explicit Blocked(const Submit& submit) {
    for (bool too_late = true; too_late;) {
      too_late = false;
      submit()->then([this, &too_late, caller = std::this_thread::get_id()] {
        if (std::this_thread::get_id() == caller) {
          too_late = true;
          return;
        }
        arrived_.set_value();
        released_.wait();
      });
    }
    arrived_.get_future().wait();
  }
  void go_on() { release_.set_value(); }

 private:
  std::promise<void> arrived_;
  std::promise<void> release_;
  std::future<void> released_ = release_.get_future();
};

StateStream in_memory(std::byte* memory) {
  StateStream stream;
  stream.memory = memory;
  return stream;
}

// The states of one job, and the values that are expected after its first step.
struct States {
  Pages memory{kStates, 3};
  Pages expected{kStates, 3};

  [[nodiscard]] UpdateJob job(const Rig& rig, std::uint64_t tag = 0) const {
    UpdateJob result = rig.job(true);
    result.weight = in_memory(memory.data());
    result.exp_avg = in_memory(memory.data() + kBytes);
    result.exp_avg_sq = in_memory(memory.data() + 2 * kBytes);
    result.tag = tag;
    return result;
  }
  void step(const UpdateJob& job) const {
    ThreadPool pool(1);
    StateBuffers buffers;
    buffers.weight = expected.data();
    buffers.residual = nullptr;
    buffers.exp_avg = expected.data() + kBytes;
    buffers.exp_avg_sq = expected.data() + 2 * kBytes;
    buffers.grad = job.grad.memory;
    static_cast<void>(optimizer_update(kFormat, buffers, 0, kNumel, job.segments, Isa::baseline, pool));
  }
  [[nodiscard]] bool right() const { return std::memcmp(memory.data(), expected.data(), kStates) == 0; }
  void reset() const { std::memcpy(memory.data(), expected.data(), kStates); }
};

struct MemoryRig : Rig {
  States states;
  Pages page{kPageBytes};
  UpdatePipeline pipeline{engine, pool, staging->data(), staging->nbytes(), kTile, kTileBytes, 2, Isa::baseline};

  explicit MemoryRig(const EngineOptions& options = {}) : Rig(options) {}

  [[nodiscard]] UpdateJob in_file(std::uint64_t tag, std::uint64_t tiles = kNumel / kTile) const {
    UpdateJob result = job(true);
    result.numel = tiles * kTile;
    result.segments[0].end = result.numel;
    result.tag = tag;
    return result;
  }
  // A read that has nothing to do with the jobs.
  [[nodiscard]] Future read() const {
    return engine->submit({OpKind::read, IoClass::states, file, 0, page.data(), page.nbytes()});
  }
  // The tags of the jobs, in the order in which their tiles were computed.
  std::vector<std::uint64_t> order() {
    std::vector<std::uint64_t> tags;
    for (const TileEvent& event : pipeline.take_trace().events) {
      if (tags.empty() || tags.back() != event.tag) tags.push_back(event.tag);
    }
    return tags;
  }
};

bool canceled(const Future& future) {
  const auto failure = wait(future);
  return failure != nullptr && failure->kind == FailureKind::canceled;
}

}  // namespace

TEST_CASE("a job in memory is computed while the one before it waits for the disk") {
  MemoryRig rig;
  Blocked disk([&] { return rig.read(); });
  const auto first = rig.pipeline.submit(rig.in_file(1));
  const UpdateJob job = rig.states.job(rig);
  const auto beside = rig.pipeline.submit(job);
  CHECK(wait(beside) == nullptr);
  CHECK_FALSE(first->computed.done());
  CHECK(beside->computed.done());
  CHECK(beside->weights.done());
  rig.states.step(job);
  CHECK(rig.states.right());
  disk.go_on();
  CHECK(wait(first) == nullptr);
  CHECK(rig.pipeline.counters().tiles == 2 * (kNumel / kTile));
}

TEST_CASE("a tile that is read comes before those in memory, which keep their order: a speculative one is the next") {
  MemoryRig rig;
  const UpdateJob file = rig.in_file(1, 2);
  const Future ahead = rig.pipeline.read_ahead(file);
  while (rig.engine->counters().read_bytes[static_cast<unsigned>(IoClass::states)] < 2 * 3 * kTile * 4) {
  }
  const Future input = std::make_shared<Completion>();
  std::vector<Future> futures = {rig.pipeline.submit(file, false, ahead, {input})};
  Blocked driver([&] { return rig.pipeline.submit(rig.states.job(rig)); });
  rig.pipeline.trace(true, 1000);
  futures.push_back(rig.pipeline.submit(rig.states.job(rig, 2)));
  futures.push_back(rig.pipeline.submit(rig.states.job(rig, 3)));
  futures.push_back(rig.pipeline.submit(rig.states.job(rig, 4), true));
  input->complete();
  driver.go_on();
  for (const Future& future : futures) CHECK(wait(future) == nullptr);
  CHECK(rig.order() == std::vector<std::uint64_t>{1, 4, 2, 3});
  CHECK(rig.pipeline.counters().ahead == 2);
}

TEST_CASE("a unit that was begun is finished before a speculative job of another one comes") {
  MemoryRig rig;
  const auto job = [&](std::uint64_t tag, std::uint64_t unit) {
    UpdateJob result = rig.states.job(rig, tag);
    result.unit = unit;
    return result;
  };
  Blocked driver([&] { return rig.pipeline.submit(job(0, 7)); });
  rig.pipeline.trace(true, 1000);
  std::vector<Future> futures;
  for (const std::uint64_t tag : {1, 2}) futures.push_back(rig.pipeline.submit(job(tag, 7), true));
  for (const std::uint64_t tag : {3, 4}) futures.push_back(rig.pipeline.submit(job(tag, 8), true));
  futures.push_back(rig.pipeline.submit(job(5, 9), true));
  driver.go_on();
  for (const Future& future : futures) CHECK(wait(future) == nullptr);
  CHECK(rig.order() == std::vector<std::uint64_t>{1, 2, 5, 4, 3});
}

TEST_CASE("jobs are taken back together, or none of them where one was begun") {
  bool all_waited = false;
  for (int attempt = 0; attempt < 12 && !all_waited; ++attempt) {
    MemoryRig rig;
    Blocked driver([&] { return rig.pipeline.submit(rig.states.job(rig)); });
    const Future input = std::make_shared<Completion>();
    const Future held = rig.pipeline.submit(rig.states.job(rig), true, nullptr, {input});
    const Future queued = rig.pipeline.submit(rig.states.job(rig), true);
    const Future other = rig.pipeline.submit(rig.states.job(rig), true);
    const Future done = std::make_shared<Completion>();
    auto asked =
        std::async(std::launch::async, [&] { return rig.pipeline.withdraw({{queued, done}, {held, other}, {held}}); });
    // A sleep, because no call says whether the other thread has called `withdraw`.
    std::this_thread::sleep_for(std::chrono::milliseconds(1 << attempt));
    driver.go_on();
    const std::vector<bool> taken_back = asked.get();
    input->complete();
    CHECK(canceled(held) == (taken_back[1] || taken_back[2]));
    CHECK(canceled(other) == taken_back[1]);
    CHECK(wait(queued) == nullptr);
    all_waited = taken_back == std::vector<bool>{false, true, false};
  }
  CHECK(all_waited);
}

TEST_CASE("a job in memory takes no staging, and its tiles with nothing to do are passed over") {
  MemoryRig rig;
  Blocked disk([&] { return rig.read(); });
  const auto first = rig.pipeline.submit(rig.in_file(1));  // its reads use all of the staging
  UpdateJob job = rig.states.job(rig);
  job.segments[0].begin = 3 * kTile;
  job.segments[0].end = 5 * kTile;
  CHECK(wait(rig.pipeline.submit(job)) == nullptr);
  job.segments.clear();
  CHECK(wait(rig.pipeline.submit(job)) == nullptr);
  CHECK(rig.pipeline.counters().tiles == 2);
  disk.go_on();
  CHECK(wait(first) == nullptr);
}

TEST_CASE("jobs in memory and in the file, kept, withdrawn and canceled from many threads, end in the right bits") {
  MemoryRig rig;
  std::atomic<unsigned> wrong{0};
  std::atomic<unsigned> withdrawn{0};
  std::atomic<unsigned> done{0};
  std::vector<std::thread> threads;
  for (unsigned thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937 random(thread);
      const States own;
      const States other;
      // A job behind another job can usually be withdrawn. Thread 0 repeats until one job was withdrawn.
      for (unsigned round = 0; round < 30 || (thread == 0 && withdrawn == 0 && round < 2000); ++round) {
        if (thread == 3) {
          if (wait(rig.pipeline.submit(rig.in_file(0), random() % 2 == 0)) != nullptr) ++wrong;
          continue;
        }
        own.reset();
        const UpdateJob job = own.job(rig);
        const unsigned fate = random() % 3;
        const Future before = fate == 1 ? rig.pipeline.submit(other.job(rig)) : nullptr;
        const auto future = rig.pipeline.submit(job, fate != 1 && random() % 2 == 0);
        for (unsigned turn = fate == 1 ? 0 : random() % 200; turn > 0; --turn) std::this_thread::yield();
        if (fate == 0) rig.pipeline.cancel(future);
        const bool taken_back = fate == 1 && rig.pipeline.withdraw({{future}}).front();
        const auto failure = wait(future);
        if (before != nullptr && wait(before) != nullptr) ++wrong;
        if (taken_back) ++withdrawn;
        if (failure == nullptr) {
          ++done;
          own.step(job);
          if (taken_back || !own.right()) ++wrong;
        } else if (failure->kind != FailureKind::canceled || !(fate == 0 || (taken_back && own.right()))) {
          ++wrong;
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(withdrawn > 0);
  CHECK(done > 0);
}

TEST_CASE("closing a pipeline completes the jobs in memory") {
  for (unsigned round = 0; round < 10; ++round) {
    std::vector<Future> futures;
    const Future input = std::make_shared<Completion>();
    {
      MemoryRig rig;
      for (unsigned job = 0; job < 3; ++job) {
        futures.push_back(rig.pipeline.submit(rig.states.job(rig), job == 2));
        futures.push_back(rig.pipeline.submit(rig.in_file(job)));
      }
      futures.push_back(rig.pipeline.submit(rig.states.job(rig), false, nullptr, {input}));
    }
    for (const Future& future : futures) CHECK(future->done());
    CHECK(canceled(futures.back()));
    input->complete();
  }
}

TEST_CASE("a device that is given up fails jobs in memory, too") {
  EngineOptions options;
  options.deadline = std::chrono::milliseconds(30);
  options.faults = {{4, FaultKind::lose, 0, 1}};
  MemoryRig rig(options);
  CHECK(wait(rig.pipeline.submit(rig.in_file(0)))->kind == FailureKind::timeout);
  CHECK(wait(rig.pipeline.submit(rig.states.job(rig)))->kind == FailureKind::timeout);
}
