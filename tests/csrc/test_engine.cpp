// Many threads use one engine, with faults. The tests are meant for the sanitizers, but also run without them.
#include <doctest/doctest.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "scratch.hpp"

using namespace infinity;
using namespace infinity::tests;

namespace {

constexpr std::size_t kRegion = 64 * kPageBytes;

std::shared_ptr<SwapFile> striped(Directory& here, Directory& there, std::uint64_t nbytes) {
  const std::vector<std::shared_ptr<File>> members{here.file("a"), there.file("b"), here.file("c")};
  auto file = std::make_shared<SwapFile>(members, std::vector<unsigned>{2, 1, 1}, 4 * kPageBytes);
  file->preallocate(nbytes);
  file->keep_checksums(nbytes);
  return file;
}

EngineOptions options_of(const std::string& engine) {
  EngineOptions options;
  options.engine = engine;
  options.block_bytes = 3 * kPageBytes;
  options.queue_depth = 8;
  options.in_flight_bytes = 16 * kPageBytes;
  options.threads = 3;
  return options;
}

const std::vector<std::string> kEngines = {"auto", "threads"};

}  // namespace

TEST_CASE("threads that write and read at once get their own bytes back") {
  for (const std::string& name : kEngines) {
    Directory here;
    Directory there("/dev/shm");
    EngineOptions options = options_of(name);
    for (std::uint64_t index = 0; index < 4000; index += 7) {
      const auto kind = static_cast<FaultKind>(index % 3 == 0   ? FaultKind::cut
                                               : index % 3 == 1 ? FaultKind::delay
                                                                : FaultKind::error);
      options.faults.push_back({index, kind, kind == FaultKind::error ? EINTR : 0, 1});
    }
    IoEngine engine(options);
    constexpr unsigned kThreads = 4;
    constexpr unsigned kRounds = 12;
    const auto file = striped(here, there, kThreads * kRegion);
    std::atomic<unsigned> wrong{0};
    std::vector<std::thread> threads;
    for (unsigned thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, thread] {
        const auto io_class = static_cast<IoClass>(thread % kIoClasses);
        for (unsigned round = 1; round <= kRounds; ++round) {
          const Pages data(kRegion, thread * 1000 + round);
          const Pages back(kRegion);
          const std::uint64_t at = thread * kRegion;
          if (wait(engine.submit({OpKind::write, io_class, file, at, data.data(), kRegion})) != nullptr) ++wrong;
          if (wait(engine.submit({OpKind::read, io_class, file, at, back.data(), kRegion})) != nullptr) ++wrong;
          if (std::memcmp(data.data(), back.data(), kRegion) != 0) ++wrong;
        }
      });
    }
    for (auto& thread : threads) thread.join();
    CHECK(wrong == 0);
    const LaneCounters counters = engine.counters();
    CHECK(counters.in_flight == 0);
    CHECK(counters.retries > 0);
    CHECK(counters.short_transfers > 0);
  }
}

TEST_CASE("an engine that closes completes every future, and files may close first") {
  for (const std::string& name : kEngines) {
    for (int round = 0; round < 20; ++round) {
      Directory here;
      const Pages data(kRegion, 1);
      std::vector<Future> futures;
      {
        IoEngine engine(options_of(name));
        static_cast<void>(engine.register_memory(data.data(), kRegion));
        for (int index = 0; index < 16; ++index) {
          const auto file = std::make_shared<SwapFile>(here.file(std::to_string(index)));
          futures.push_back(engine.submit({OpKind::write, IoClass::states, file, 0, data.data(), kRegion}));
        }
      }
      for (const Future& future : futures) {
        REQUIRE(future->done());
        if (future->failure()) CHECK(future->failure()->kind == FailureKind::canceled);
      }
    }
  }
}

TEST_CASE("files come and go while their blocks are in flight") {
  for (const std::string& name : kEngines) {
    Directory here;
    IoEngine engine(options_of(name));
    const Pages data(kRegion, 2);
    std::vector<Future> futures;
    for (int index = 0; index < 300; ++index) {
      const auto file = std::make_shared<SwapFile>(here.file(std::to_string(index % 150)));
      futures.push_back(engine.submit({OpKind::write, IoClass::weights, file, 0, data.data(), 4 * kPageBytes}));
    }
    for (const Future& future : futures) CHECK(wait(future) == nullptr);
  }
}

TEST_CASE("a device that loses a block fails all its requests and none hangs") {
  for (const std::string& name : kEngines) {
    for (int round = 0; round < 5; ++round) {
      Directory here;
      Directory there("/dev/shm");
      EngineOptions options = options_of(name);
      options.deadline = std::chrono::milliseconds(50);
      options.faults.push_back({static_cast<std::uint64_t>(5 + round), FaultKind::lose, 0, 1});
      // Never freed, because the lost device may still use this memory.
      auto* data = new Pages(kRegion, 3);
      std::atomic<unsigned> timeouts{0};
      {
        IoEngine engine(options);
        const auto file = striped(here, there, 4 * kRegion);
        std::vector<std::thread> threads;
        for (unsigned thread = 0; thread < 4; ++thread) {
          threads.emplace_back([&, thread] {
            for (int index = 0; index < 10; ++index) {
              const auto failure =
                  wait(engine.submit({OpKind::write, IoClass::states, file, thread * kRegion, data->data(), kRegion}));
              if (failure != nullptr && failure->kind == FailureKind::timeout) ++timeouts;
            }
          });
        }
        for (auto& thread : threads) thread.join();
      }
      CHECK(timeouts > 0);
    }
  }
}

TEST_CASE("a trace that is taken while requests end has each of them once") {
  for (const std::string& name : kEngines) {
    Directory here;
    Directory there("/dev/shm");
    IoEngine engine(options_of(name));
    constexpr unsigned kThreads = 3;
    constexpr unsigned kRounds = 40;
    constexpr std::size_t kRoom = 4;  // room for so few events that some are dropped
    const auto file = striped(here, there, kThreads * kRegion);
    engine.trace(true, kRoom);
    std::atomic<unsigned> running{kThreads};
    std::vector<std::thread> threads;
    for (unsigned thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, thread] {
        const Pages data(kRegion, thread + 1);
        for (unsigned round = 0; round < kRounds; ++round) {
          wait(engine.submit({OpKind::write, IoClass::states, file, thread * kRegion, data.data(), kRegion}));
        }
        --running;
      });
    }
    std::uint64_t seen = 0;
    std::uint64_t nbytes = 0;
    const auto count = [&] {
      const IoLog::Taken taken = engine.take_trace();
      CHECK(taken.events.size() <= kRoom);
      for (const IoEvent& event : taken.events) {
        nbytes += event.nbytes;
        CHECK(event.begin_ns <= event.start_ns);
        CHECK(event.start_ns <= event.end_ns);
      }
      seen += taken.events.size() + taken.dropped;
      return taken.dropped;
    };
    std::uint64_t dropped = 0;
    while (running > 0) dropped += count();
    for (auto& thread : threads) thread.join();
    dropped += count();
    CHECK(seen == kThreads * kRounds);
    CHECK(nbytes == (seen - dropped) * kRegion);
    engine.trace(false, 0);
    const Pages data(kRegion, 9);
    wait(engine.submit({OpKind::write, IoClass::states, file, 0, data.data(), kRegion}));
    CHECK(engine.take_trace().events.empty());
  }
}

TEST_CASE("damage is found in whatever piece of a striped file it is") {
  for (const std::string& name : kEngines) {
    Directory here;
    Directory there("/dev/shm");
    EngineOptions options = options_of(name);
    for (const FaultKind kind : {FaultKind::flip, FaultKind::stale, FaultKind::misdirect}) {
      options.faults = {{4, kind, 0, 1}};
      IoEngine engine(options);
      const auto file = striped(here, there, kRegion);
      const Pages data(kRegion, 4 + static_cast<unsigned>(kind));
      const Pages back(kRegion);
      CHECK(wait(engine.submit({OpKind::write, IoClass::states, file, 0, data.data(), kRegion})) == nullptr);
      const auto failure = wait(engine.submit({OpKind::read, IoClass::states, file, 0, back.data(), kRegion}));
      REQUIRE(failure != nullptr);
      CHECK(failure->kind == FailureKind::corruption);
    }
  }
}
