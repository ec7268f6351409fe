// Jobs that wait for their inputs.
#include <doctest/doctest.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <future>
#include <random>
#include <thread>

#include "states.hpp"

using namespace infinity;
using namespace infinity::tests;

namespace {

Failure broken(const std::string& cause) {
  Failure failure;
  failure.cause = cause;
  return failure;
}

Future pending() { return std::make_shared<Completion>(); }

// Returns whether the call throws std::invalid_argument. The exception itself is not read, because ThreadSanitizer does
// not know how threads synchronize their uses of an exception.
template <class Call>
bool refuses(const Call& call) {
  try {
    static_cast<void>(call());
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

struct HeldRig : Rig {
  UpdatePipeline pipeline{engine, pool, staging->data(), staging->nbytes(), kTile, kTileBytes, 2, Isa::baseline};

  explicit HeldRig(const EngineOptions& options = {}) : Rig(options) {}

  UpdateFuture hold(std::uint64_t which, const std::vector<Future>& after, const Future& ahead = nullptr) {
    return pipeline.submit(job(true, which), false, ahead, after);
  }
  // Waits until the driver has handled everything that was posted to it before.
  void settle() { static_cast<void>(pipeline.counters()); }
};

}  // namespace

TEST_CASE("a job is held until all that it waits for is done") {
  HeldRig rig;
  const Future one = pending();
  const Future other = pending();
  const auto job = rig.hold(0, {one, other});
  one->complete();
  CHECK(wait(rig.pipeline.submit(rig.job(true, 1))) == nullptr);  // other jobs are not held
  CHECK(rig.pipeline.counters().tiles == kNumel / kTile);
  CHECK_FALSE(job->done());
  other->complete();
  CHECK(wait(job) == nullptr);
  CHECK(rig.pipeline.counters().tiles == 2 * kNumel / kTile);
  CHECK(wait(rig.hold(0, {one, other})) == nullptr);  // both inputs were done before
}

TEST_CASE("a job that is held fails as the first that fails of what it waits for") {
  HeldRig rig;
  const Future one = pending();
  const Future other = pending();
  const auto job = rig.hold(0, {one, other});
  other->complete(broken("the second"));
  const auto failure = wait(job);
  REQUIRE(failure != nullptr);
  CHECK(failure->cause == "the second");
  CHECK(wait(Future(job, &job->computed))->cause == "the second");
  one->complete(broken("the first"));
  rig.settle();
  CHECK(wait(job)->cause == "the second");
  CHECK(rig.pipeline.counters().tiles == 0);
  CHECK(rig.engine->counters().operations == 0);
}

TEST_CASE("a job that is held can be withdrawn and canceled, and what was read ahead for it is dropped") {
  for (const bool cancel : {false, true}) {
    HeldRig rig;
    const Future input = pending();
    const Future ahead = rig.pipeline.read_ahead(rig.job(true));
    const auto job = rig.hold(0, {input}, ahead);
    rig.settle();
    CHECK_FALSE(ahead->done());
    if (cancel) {
      rig.pipeline.cancel(job);
    } else {
      CHECK(rig.pipeline.withdraw({{job}}).front());
    }
    for (const Future& each : {Future(job), ahead}) {
      REQUIRE(each->done());
      CHECK(each->failure()->kind == FailureKind::canceled);
    }
    input->complete();
    rig.settle();
    CHECK(rig.pipeline.counters().tiles == 0);
    CHECK(wait(rig.pipeline.submit(rig.job(true))) == nullptr);  // the job can use all of the staging
    CHECK_FALSE(rig.pipeline.withdraw({{job}}).front());
  }
}

TEST_CASE("a job that is held takes over what was read ahead when it enters") {
  HeldRig rig;
  const Future input = pending();
  const Future ahead = rig.pipeline.read_ahead(rig.job(true));
  const auto job = rig.hold(0, {input}, ahead);
  CHECK(refuses([&] { return rig.hold(0, {input}, ahead); }));
  CHECK(refuses([&] { return rig.pipeline.submit(rig.job(true), false, ahead); }));
  rig.settle();
  CHECK_FALSE(ahead->done());
  while (rig.engine->counters().read_bytes[static_cast<unsigned>(IoClass::states)] < 2 * 3 * kTile * 4) {
  }
  input->complete();
  CHECK(wait(job) == nullptr);
  CHECK(wait(ahead) == nullptr);
  CHECK(rig.pipeline.counters().ahead == 2);
}

TEST_CASE("a job that is held reads for itself when the job that read ahead is withdrawn") {
  HeldRig rig;
  const Future input = pending();
  const Future ahead = rig.pipeline.read_ahead(rig.job(true));
  const auto job = rig.hold(0, {input}, ahead);
  CHECK(rig.pipeline.withdraw({{ahead}}).front());
  input->complete();
  CHECK(wait(job) == nullptr);
  CHECK(rig.pipeline.counters().ahead == 0);
}

TEST_CASE("a speculative job that was held is the next, a decided one the last, when it enters") {
  HeldRig rig;
  rig.pipeline.trace(true, 1000);
  const auto tagged = [&](std::uint64_t which) {
    UpdateJob job = rig.job(true, which % kJobs);
    job.tag = which;
    return job;
  };
  const Future input = pending();
  std::vector<Future> futures;
  futures.push_back(rig.pipeline.submit(tagged(1), true, nullptr, {input}));
  futures.push_back(rig.pipeline.submit(tagged(2), false, nullptr, {input}));
  // While the driver completes a job, the test fills the driver's queue.
  std::promise<void> arrived;
  std::promise<void> go_on;
  const Future start = pending();
  const auto first = rig.pipeline.submit(tagged(4), false, nullptr, {start});
  first->then([&] {
    arrived.set_value();
    go_on.get_future().wait();
  });
  start->complete();
  arrived.get_future().wait();
  futures.push_back(rig.pipeline.submit(tagged(3)));
  futures.push_back(rig.pipeline.submit(tagged(5), true));
  input->complete();
  go_on.set_value();
  for (const Future& future : futures) CHECK(wait(future) == nullptr);
  std::vector<std::uint64_t> order;
  for (const TileEvent& event : rig.pipeline.take_trace().events) {
    if (order.empty() || order.back() != event.tag) order.push_back(event.tag);
  }
  CHECK(order == std::vector<std::uint64_t>{4, 1, 5, 3, 2});
}

TEST_CASE("closing a pipeline fails a job that is held, and what it waited for may end later") {
  const Future input = pending();
  UpdateFuture job;
  Future ahead;
  {
    HeldRig rig;
    ahead = rig.pipeline.read_ahead(rig.job(true));
    job = rig.hold(0, {input}, ahead);
  }
  for (const Future& each : {Future(job), ahead}) {
    REQUIRE(each->done());
    CHECK(each->failure()->error_number == ECANCELED);
  }
  input->complete();
}

TEST_CASE("a device that is given up fails the jobs that are held") {
  EngineOptions options;
  options.deadline = std::chrono::milliseconds(30);
  options.faults = {{4, FaultKind::lose, 0, 1}};
  HeldRig rig(options);
  const Future input = pending();
  const auto job = rig.hold(0, {input});
  CHECK(wait(rig.pipeline.submit(rig.job(true, 1)))->kind == FailureKind::timeout);
  CHECK(wait(job)->kind == FailureKind::timeout);
  CHECK(wait(rig.hold(2, {input}))->kind == FailureKind::timeout);
  input->complete();
}

TEST_CASE("jobs that are held, taken back or closed at random moments are all done") {
  for (unsigned round = 0; round < 6; ++round) {
    std::vector<Future> futures;
    std::vector<Future> inputs;
    std::atomic<unsigned> wrong{0};
    {
      HeldRig rig;
      std::vector<std::thread> threads;
      std::mutex mutex;  // guards `futures` and `inputs`
      for (unsigned thread = 0; thread < 3; ++thread) {
        threads.emplace_back([&, thread] {
          std::mt19937 random(round * 10 + thread);
          for (unsigned turn = 0; turn < 8; ++turn) {
            const Future one = pending();
            const Future other = pending();
            const Future ahead = random() % 2 == 0 ? rig.pipeline.read_ahead(rig.job(true, thread)) : nullptr;
            const auto job =
                rig.pipeline.submit(rig.job(true, thread), random() % 2 == 0, ahead, std::vector<Future>{one, other});
            {
              const std::lock_guard lock(mutex);
              futures.insert(futures.end(), {job, ahead == nullptr ? job : ahead});
              inputs.insert(inputs.end(), {one, other});
            }
            if (turn == 7) continue;  // the job of the last turn is left until the pipeline is closed
            const unsigned fate = random() % 4;
            const bool fails = random() % 4 == 0;
            std::thread arriving([&] {
              one->complete();
              other->complete(fails ? std::optional(broken("the input")) : std::nullopt);
            });
            if (fate == 0) rig.pipeline.cancel(job);
            if (fate == 1) static_cast<void>(rig.pipeline.withdraw({{job}}));
            const auto failure = wait(job);
            arriving.join();
            if (failure == nullptr) {
              if (fails) ++wrong;
            } else if (failure->kind == FailureKind::canceled ? fate > 1 : failure->cause != "the input" || !fails) {
              ++wrong;
            }
          }
        });
      }
      for (auto& thread : threads) thread.join();
    }
    for (const Future& input : inputs) input->complete();
    CHECK(wrong == 0);
    for (const Future& future : futures) CHECK(future->done());
  }
}
