#include <doctest/doctest.h>

#include <cerrno>
#include <cstring>
#include <future>
#include <random>
#include <thread>

#include "device/uploads.hpp"
#include "fake_device.hpp"
#include "scratch.hpp"

using namespace infinity;
using namespace infinity::tests;

namespace {

constexpr std::size_t kPiece = 4 * kPageBytes;
constexpr std::size_t kFile = 64 * kPiece;
void* const kStream = handle(1);
void* const kOther = handle(2);
void* const kReady = handle(500);

Failure broken(const std::string& cause) {
  Failure failure;
  failure.cause = cause;
  return failure;
}

struct UploadRig {
  Directory directory;
  std::shared_ptr<SwapFile> file;
  std::shared_ptr<IoEngine> engine;
  Pages data{kFile, 3};
  Pages memory{kFile};  // the device's memory
  // Never freed, because a device that was given up may still use this memory.
  Pages* bounce;

  FakeDevice device;
  std::unique_ptr<Uploads> uploads;

  explicit UploadRig(EngineOptions options = {}, unsigned pieces = 3, unsigned seed = 0)
      : bounce(new Pages(pieces * kPiece)), device(seed) {
    options.block_bytes = 2 * kPageBytes;
    engine = std::make_shared<IoEngine>(options);
    file = std::make_shared<SwapFile>(directory.file("weights"));
    file->preallocate(kFile);
    file->keep_checksums(kFile);
    IoEngine plain({});
    REQUIRE(wait(plain.submit({OpKind::write, IoClass::weights, file, 0, data.data(), kFile})) == nullptr);
    std::vector<void*> events;
    for (unsigned index = 0; index < pieces; ++index) events.push_back(handle(100 + index));
    open(events);
  }

  void open(const std::vector<void*>& events) {
    uploads = std::make_unique<Uploads>(engine, device.gate(), bounce->data(), bounce->nbytes(), kPiece, events);
  }

  // The upload of bytes [begin, begin + nbytes) of the file to the same offset of the device's memory.
  [[nodiscard]] UploadPart part(std::size_t begin, std::size_t nbytes, Future after = nullptr) const {
    return {file, begin, nbytes, memory.data() + begin, true, std::move(after)};
  }
  [[nodiscard]] UploadJob job(std::size_t begin, std::size_t nbytes, void* stream = kStream) const {
    return {{part(begin, nbytes)}, stream, {}, kReady};
  }
  [[nodiscard]] bool there(std::size_t begin, std::size_t nbytes) const {
    return std::memcmp(data.data() + begin, memory.data() + begin, nbytes) == 0;
  }
  [[nodiscard]] bool untouched(std::size_t begin, std::size_t nbytes) const {
    return std::all_of(memory.data() + begin, memory.data() + begin + nbytes,
                       [](std::byte each) { return each == std::byte{0}; });
  }
  [[nodiscard]] bool abandoned() const { return *uploads->abandoned(); }
};

}  // namespace

TEST_CASE("weights arrive whole, in however many pieces, once the device has reached the event") {
  for (const unsigned pieces : {1, 2, 5, 40}) {
    UploadRig rig({}, pieces, pieces);
    const std::size_t odd = 7 * kPiece + 3000;  // the last page is incomplete
    UploadJob job{
        {rig.part(0, odd), rig.part(8 * kPiece, 100), rig.part(9 * kPiece, 20 * kPiece)}, kStream, {}, kReady};
    CHECK(wait(rig.uploads->upload(job)) == nullptr);
    CHECK_FALSE(rig.device.gate()->synchronize(kReady));
    CHECK(rig.there(0, odd));
    CHECK(rig.untouched(odd, 8 * kPiece - odd));
    CHECK(rig.there(8 * kPiece, 100));
    CHECK(rig.there(9 * kPiece, 20 * kPiece));
    const UploadCounters counters = rig.uploads->counters();
    CHECK(counters.pieces == 8 + 1 + 20);
    CHECK(counters.read_bytes == odd + 100 + 20 * kPiece);
    CHECK((counters.without_a_piece > 0) == (pieces < 29));
  }
}

TEST_CASE("the first copy waits for the events of the job, and nothing before it does") {
  for (unsigned seed = 0; seed < 10; ++seed) {
    UploadRig rig({}, 4, seed);
    // The slot is in use: a computation still reads its old contents.
    std::byte seen{1};
    rig.device.launch(kOther, [&] { seen = rig.memory.data()[0]; });
    rig.device.record_on_host(handle(300), kOther);
    rig.device.record_on_host(handle(301), kOther);
    UploadJob job = rig.job(0, 3 * kPiece);
    job.waits = {handle(300), handle(301)};
    CHECK(wait(rig.uploads->upload(job)) == nullptr);
    CHECK_FALSE(rig.device.gate()->synchronize(kReady));
    CHECK(seen == std::byte{0});
    CHECK(rig.there(0, 3 * kPiece));
  }
}

TEST_CASE("a piece is used again only when the device has read it") {
  for (unsigned seed = 0; seed < 10; ++seed) {
    UploadRig rig({}, 2, seed);
    std::vector<Future> futures;
    for (unsigned index = 0; index < 8; ++index) {
      futures.push_back(
          rig.uploads->upload(rig.job(index * 4 * kPiece, 4 * kPiece, index % 2 == 0 ? kStream : kOther)));
    }
    for (const Future& future : futures) CHECK(wait(future) == nullptr);
    rig.uploads.reset();
    CHECK(rig.there(0, 32 * kPiece));
  }
}

TEST_CASE("a part waits for its `after`, and fails as this does") {
  UploadRig rig;
  const auto after = std::make_shared<Completion>();
  UploadJob job{{rig.part(0, kPiece), rig.part(kPiece, kPiece, after)}, kStream, {}, kReady};
  const Future held = rig.uploads->upload(job);
  const Future next = rig.uploads->upload(rig.job(2 * kPiece, kPiece));
  while (rig.uploads->counters().read_bytes < kPiece) {
  }
  CHECK(rig.uploads->counters().pieces == 1);
  CHECK_FALSE(held->done());
  CHECK_FALSE(next->done());  // jobs end in their order
  after->complete();
  CHECK(wait(held) == nullptr);
  CHECK(wait(next) == nullptr);
  job.parts[1].after = std::make_shared<Completion>();
  const Future failing = rig.uploads->upload(job);
  job.parts[1].after->complete(broken("the update"));
  CHECK(wait(failing)->cause == "the update");
  CHECK(wait(rig.uploads->upload(rig.job(0, kFile))) == nullptr);
}

TEST_CASE("an error of the runtime at any call fails a job, whose copies are over when its future is done") {
  // The calls are: enter; wait, copy and record for the first piece; copy and record for each other piece; synchronize
  // before a piece of the bounce buffer is used again.
  unsigned done = 0;
  unsigned failed = 0;
  unsigned went_on = 0;
  for (unsigned call = 0; call < 40; ++call) {
    UploadRig rig({}, 2, call);
    rig.uploads.reset();
    rig.device.fail(rig.device.calls() + call, 700);
    rig.open({handle(100), handle(101)});
    UploadJob job = rig.job(0, 8 * kPiece);
    job.waits = {handle(300)};
    const Future first = rig.uploads->upload(job);
    const auto failure = wait(first);
    const auto next = wait(rig.uploads->upload(rig.job(20 * kPiece, 2 * kPiece)));
    for (const auto& each : {failure, next}) {
      if (each != nullptr) CHECK(each->cause == "the device's runtime returned error 700");
    }
    if (failure == nullptr) {
      ++done;
    } else {
      ++failed;
      CHECK((next == nullptr) == (!rig.abandoned() && call > 0));
    }
    if (failure != nullptr && next == nullptr) {
      ++went_on;
      rig.device.run_all();
      CHECK(rig.there(20 * kPiece, 2 * kPiece));
    }
    rig.uploads.reset();
    rig.device.run_all();
    CHECK((failure != nullptr || rig.there(0, 8 * kPiece)));
  }
  CHECK(done > 0);
  CHECK(failed > 15);
  CHECK(went_on > 4);
}

TEST_CASE("nothing of a failed job is in flight when its future fails") {
  for (unsigned seed = 0; seed < 20; ++seed) {
    EngineOptions options;
    options.faults = {{4 + seed % 8, FaultKind::error, EIO, 1}};
    options.faults[0].operation = OpKind::read;
    UploadRig rig(options, 3, seed);
    const auto failure = wait(rig.uploads->upload(rig.job(0, 8 * kPiece)));
    REQUIRE(failure != nullptr);
    CHECK(failure->error_number == EIO);
    // The device's memory is free again: no copy may overwrite values that are written now.
    std::memset(rig.memory.data(), 7, 8 * kPiece);
    rig.device.run_all();
    CHECK(std::all_of(rig.memory.data(), rig.memory.data() + 8 * kPiece,
                      [](std::byte each) { return each == std::byte{7}; }));
    CHECK(wait(rig.uploads->upload(rig.job(0, 8 * kPiece))) == nullptr);
    rig.device.run_all();
    CHECK(rig.there(0, 8 * kPiece));
  }
}

TEST_CASE("a device that is given up fails every job, and its bounce buffer is not used again") {
  for (std::uint64_t index = 0; index < 12; index += 3) {
    EngineOptions options;
    options.deadline = std::chrono::milliseconds(30);
    options.faults = {{index, FaultKind::lose, 0, 1}};
    options.faults[0].operation = OpKind::read;
    UploadRig rig(options);
    std::vector<Future> futures;
    for (unsigned job = 0; job < 3; ++job)
      futures.push_back(rig.uploads->upload(rig.job(job * 8 * kPiece, 8 * kPiece)));
    const auto first = wait(futures[0]);
    REQUIRE(first != nullptr);
    CHECK(first->kind == FailureKind::timeout);
    for (const Future& future : futures) CHECK(wait(future)->kind == FailureKind::timeout);
    const std::uint64_t pieces = rig.uploads->counters().pieces;
    CHECK(wait(rig.uploads->upload(rig.job(0, kPiece)))->kind == FailureKind::timeout);
    CHECK(rig.uploads->counters().pieces == pieces);
    CHECK(rig.abandoned());
  }
}

TEST_CASE("a job that is canceled fails once nothing of it is in flight, and the others go on") {
  UploadRig rig({}, 2);
  std::promise<void> reached;
  std::promise<void> go_on;
  rig.device.synchronizing = [&, once = false](void*) mutable {
    if (std::exchange(once, true)) return;
    reached.set_value();
    go_on.get_future().wait();
  };
  const Future begun = rig.uploads->upload(rig.job(0, 10 * kPiece));
  const Future queued = rig.uploads->upload(rig.job(20 * kPiece, 4 * kPiece));
  const Future last = rig.uploads->upload(rig.job(30 * kPiece, 4 * kPiece));
  reached.get_future().wait();  // no piece of the bounce buffer is free for the first job
  rig.uploads->cancel(begun);
  rig.uploads->cancel(queued);
  CHECK_FALSE(begun->done());
  go_on.set_value();
  for (const Future& future : {begun, queued}) {
    const auto failure = wait(future);
    REQUIRE(failure != nullptr);
    CHECK(failure->error_number == ECANCELED);
  }
  CHECK(wait(last) == nullptr);
  rig.uploads->cancel(last);  // the job is done already, so this has no effect
  rig.uploads.reset();
  CHECK_FALSE(last->failure());
  CHECK(rig.untouched(4 * kPiece, 26 * kPiece));
  CHECK(rig.there(30 * kPiece, 4 * kPiece));
}

TEST_CASE("closing finishes what was given, but for a job that waits for its `after`") {
  UploadRig rig;
  const auto after = std::make_shared<Completion>();
  std::vector<Future> futures;
  for (unsigned job = 0; job < 4; ++job) futures.push_back(rig.uploads->upload(rig.job(job * 8 * kPiece, 8 * kPiece)));
  const Future held = rig.uploads->upload({{rig.part(40 * kPiece, kPiece, after)}, kStream, {}, kReady});
  rig.uploads.reset();
  for (const Future& future : futures) {
    REQUIRE(future->done());
    CHECK_FALSE(future->failure());
  }
  REQUIRE(held->done());
  CHECK(held->failure()->error_number == ECANCELED);
  CHECK(rig.there(0, 32 * kPiece));
  after->complete();
}

TEST_CASE("jobs that cannot be done are refused") {
  UploadRig rig;
  const auto refused = [&](const UploadPart& part) {
    CHECK_THROWS_AS(static_cast<void>(rig.uploads->upload({{part}, kStream, {}, kReady})), std::invalid_argument);
  };
  CHECK_THROWS_AS(static_cast<void>(rig.uploads->upload({{}, kStream, {}, kReady})), std::invalid_argument);
  refused(rig.part(0, 0));
  refused(rig.part(100, kPiece));
  refused(rig.part(kFile, kPiece));
  refused({rig.file, 0, ~std::uint64_t{0}, rig.memory.data(), true, nullptr});
  refused({nullptr, 0, kPiece, rig.memory.data(), true, nullptr});
  CHECK_THROWS_AS(rig.open({}), std::invalid_argument);
  CHECK_THROWS_AS(rig.open({handle(1), handle(1)}), std::invalid_argument);
  CHECK_THROWS_AS(rig.open({handle(1), handle(2), handle(3), handle(4)}), std::invalid_argument);
}

TEST_CASE("uploads from many threads, canceled and failed at random, end whole or not at all") {
  for (unsigned round = 0; round < 4; ++round) {
    EngineOptions options;
    for (std::uint64_t index = 50; index < 2000; index += 97) {
      options.faults.push_back({index, FaultKind::error, EIO, 1});
      options.faults.back().operation = OpKind::read;
    }
    Fault shuffle{0, FaultKind::shuffle};
    shuffle.repeat = ~std::uint64_t{0};
    shuffle.seed = round;
    options.faults.push_back(shuffle);
    UploadRig rig(options, 3, round);
    std::atomic<unsigned> wrong{0};
    std::atomic<unsigned> good{0};
    std::vector<std::thread> threads;
    constexpr std::size_t kShare = 16 * kPiece;
    for (unsigned thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&, thread] {
        std::mt19937 random(round * 10 + thread);
        void* const stream = handle(1 + thread % 2);
        void* const ready = handle(500 + thread);
        const std::size_t base = thread * kShare;
        for (unsigned turn = 0; turn < 12; ++turn) {
          std::memset(rig.memory.data() + base, 0, kShare);
          const std::size_t cut = (1 + random() % 8) * kPiece;
          const auto after = std::make_shared<Completion>();
          const bool fails = random() % 6 == 0;
          UploadJob job{{rig.part(base, cut), rig.part(base + cut, kShare - cut, after)}, stream, {}, ready};
          const Future future = rig.uploads->upload(job);
          if (random() % 2 == 0) std::this_thread::yield();
          const bool cancels = random() % 4 == 0;
          if (cancels && random() % 2 == 0) rig.uploads->cancel(future);
          after->complete(fails ? std::optional(broken("the update")) : std::nullopt);
          if (cancels) rig.uploads->cancel(future);
          const auto failure = wait(future);
          if (failure != nullptr) {
            const bool expected = (failure->kind == FailureKind::canceled && cancels) ||
                                  (failure->cause == "the update" && fails) || failure->error_number == EIO;
            if (!expected) ++wrong;
            continue;
          }
          if (fails) ++wrong;
          if (rig.device.gate()->synchronize(ready)) ++wrong;
          if (!rig.there(base, kShare)) ++wrong;
          ++good;
        }
      });
    }
    for (auto& thread : threads) thread.join();
    CHECK(wrong == 0);
    CHECK(good > 0);
    CHECK_FALSE(rig.abandoned());
  }
}
