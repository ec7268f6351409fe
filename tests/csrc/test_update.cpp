#include <doctest/doctest.h>

#include <cstring>
#include <thread>

#include "states.hpp"

using namespace infinity;
using namespace infinity::tests;

TEST_CASE("jobs from many threads are all done") {
  EngineOptions options;
  options.block_bytes = 2 * kPageBytes;
  Rig rig(options);
  UpdatePipeline pipeline(rig.engine, rig.pool, rig.staging->data(), rig.staging->nbytes(), kTile, kTileBytes, 2,
                          Isa::baseline);
  pipeline.trace(true, 1000);
  std::atomic<unsigned> failed{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&, thread] {
      for (int round = 0; round < 4; ++round) {
        if (wait(pipeline.submit(rig.job(thread % 2 == 0, static_cast<std::uint64_t>(thread)))) != nullptr) ++failed;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(failed == 0);
  CHECK(pipeline.counters().tiles == 3 * 4 * (kNumel / kTile));
  CHECK(pipeline.take_trace().events.size() == pipeline.counters().tiles);
}

TEST_CASE("without arithmetic the states stay as they are") {
  Rig rig({});
  const Pages before(3 * kNumel * 4, 11);
  const Pages after(3 * kNumel * 4);
  REQUIRE(wait(rig.engine->submit({OpKind::write, IoClass::states, rig.file, 0, before.data(), before.nbytes()})) ==
          nullptr);
  UpdatePipeline pipeline(rig.engine, rig.pool, rig.staging->data(), rig.staging->nbytes(), kTile, kTileBytes, 2,
                          Isa::baseline);
  CHECK(wait(pipeline.submit(rig.job(false))) == nullptr);
  REQUIRE(wait(rig.engine->submit({OpKind::read, IoClass::states, rig.file, 0, after.data(), after.nbytes()})) ==
          nullptr);
  CHECK(std::memcmp(before.data(), after.data(), before.nbytes()) == 0);
}

TEST_CASE("a device that is given up in the middle of a job fails it and whatever comes later") {
  for (std::uint64_t index = 0; index < 240; index += 23) {
    EngineOptions options;
    options.deadline = std::chrono::milliseconds(30);
    options.faults = {{index, FaultKind::lose, 0, 1}};
    auto rig = std::make_unique<Rig>(options);
    {
      UpdatePipeline pipeline(rig->engine, rig->pool, rig->staging->data(), rig->staging->nbytes(), kTile, kTileBytes,
                              2, Isa::baseline);
      std::vector<Future> futures;
      for (unsigned job = 0; job < 3; ++job) futures.push_back(pipeline.submit(rig->job(true, job)));
      const auto failure = wait(futures[0]);  // later jobs may have overtaken this job
      REQUIRE(failure != nullptr);
      CHECK_MESSAGE(failure->kind == FailureKind::timeout, failure->message);
      CHECK(wait(pipeline.submit(rig->job(true, 3))) != nullptr);
      CHECK(*pipeline.abandoned());
    }
  }
}

TEST_CASE("closing a pipeline completes every job") {
  for (int round = 0; round < 10; ++round) {
    Rig rig({});
    std::vector<Future> futures;
    {
      UpdatePipeline pipeline(rig.engine, rig.pool, rig.staging->data(), rig.staging->nbytes(), kTile, kTileBytes, 2,
                              Isa::baseline);
      for (unsigned job = 0; job < 3; ++job) futures.push_back(pipeline.submit(rig.job(true, job)));
    }
    for (const Future& future : futures) CHECK(future->done());
  }
}

TEST_CASE("jobs that read ahead, from many threads, are taken over or taken back, and the others go on") {
  EngineOptions options;
  options.block_bytes = 2 * kPageBytes;
  Rig rig(options);
  std::vector<std::thread> threads;
  std::atomic<unsigned> failed{0};
  std::vector<Future> left;
  const Pages lent(2 * kTileBytes);
  {
    UpdatePipeline pipeline(rig.engine, rig.pool, rig.staging->data(), rig.staging->nbytes(), kTile, kTileBytes, 2,
                            Isa::baseline);
    REQUIRE(pipeline.ahead_tiles_max() == 2);
    for (std::uint64_t thread = 0; thread < 3; ++thread) {
      threads.emplace_back([&, thread] {
        for (unsigned round = 0; round < 12; ++round) {
          const UpdateJob job = rig.job(true, thread);
          const Future ahead = pipeline.read_ahead(job);
          for (unsigned turn = 0; turn < 100 * (round % 3); ++turn) std::this_thread::yield();
          if (round % 4 == 3) {
            pipeline.cancel(ahead);
            if (wait(ahead) == nullptr) ++failed;
            continue;
          }
          const Future decided = pipeline.submit(job, round % 2 == 0, ahead);
          if (round % 4 == 2) pipeline.cancel(decided);
          const auto failure = wait(decided);
          if (failure != nullptr && failure->kind != FailureKind::canceled) ++failed;
          if (wait(ahead) != nullptr) ++failed;
        }
      });
    }
    for (unsigned round = 0; round < 8; ++round) {
      pipeline.lend(lent.data(), lent.nbytes());
      for (unsigned turn = 0; turn < 100; ++turn) std::this_thread::yield();
      if (!pipeline.reclaim(lent.data())) ++failed;
    }
    for (auto& thread : threads) thread.join();
    for (std::uint64_t job = 0; job < 3; ++job) left.push_back(pipeline.read_ahead(rig.job(true, job)));
    CHECK(pipeline.ahead_tiles_max() == 2);
    left.push_back(pipeline.submit(rig.job(true, 3), true, left[0]));
  }
  CHECK(failed == 0);
  for (const Future& future : left) CHECK(future->done());
}

TEST_CASE("a device that is given up fails jobs that read ahead, and those that take them over") {
  for (std::uint64_t index = 0; index < 8; ++index) {
    EngineOptions options;
    options.deadline = std::chrono::milliseconds(30);
    options.faults = {{index, FaultKind::lose, 0, 1}};
    auto rig = std::make_unique<Rig>(options);
    {
      UpdatePipeline pipeline(rig->engine, rig->pool, rig->staging->data(), rig->staging->nbytes(), kTile, kTileBytes,
                              2, Isa::baseline);
      const Future ahead = pipeline.read_ahead(rig->job(true));
      if (index % 2 == 0 && index < 6) static_cast<void>(wait(ahead));  // six reads: two tiles with three states each
      std::vector<Future> futures;
      try {
        futures.push_back(pipeline.submit(rig->job(true), false, ahead));
      } catch (const std::invalid_argument&) {
        CHECK(ahead->done());  // the device was given up before
        futures.push_back(pipeline.submit(rig->job(true)));
      }
      for (const Future& future : futures) {
        const auto failure = wait(future);
        REQUIRE(failure != nullptr);
        CHECK_MESSAGE(failure->kind == FailureKind::timeout, failure->message);
      }
      CHECK(wait(pipeline.read_ahead(rig->job(true, 2))) != nullptr);
      CHECK(*pipeline.abandoned());
    }
  }
}
