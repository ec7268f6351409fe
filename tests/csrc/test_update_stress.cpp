#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "scratch.hpp"
#include "update/update.hpp"

using namespace infinity;
using namespace infinity::tests;

namespace {

constexpr std::uint64_t kNumel = 10 * 4096 + 1000;  // the last tile is shorter
constexpr std::size_t kTile = 4096;
constexpr std::uint64_t kState = (kNumel * 4 + kPageBytes - 1) / kPageBytes * kPageBytes;  // bytes of one state
const StateFormat kFormat{DType::fp32, Master::weight, DType::fp32, Moments::fp32};
const std::size_t kTileBytes = UpdatePipeline::staging_tile_bytes(kFormat, kTile, true);

// One unit of one thread. It has three states, each with two copies in the file. The first states may also be in
// memory, with a second memory for new values. The unit also has the expected values, which are updated in one piece.
class Unit {
 public:
  Unit(const std::shared_ptr<IoEngine>& engine, const std::shared_ptr<SwapFile>& file, unsigned index)
      : engine_(engine),
        file_(file),
        base_(index * 6 * kState),
        grad_(kState, 100 + index),
        memory_{Pages(3 * kState), Pages(3 * kState)},
        back_(kState) {
    for (auto& state : expected_) state = std::make_unique<Pages>(kState);
    for (unsigned state = 0; state < 3; ++state) {
      CHECK(wait(engine->submit({OpKind::write, IoClass::states, file, at(state), data(state), kState})) == nullptr);
    }
    auto* grad = reinterpret_cast<float*>(grad_.data());
    for (std::uint64_t element = 0; element < kNumel; ++element) grad[element] = 1e-3f * float(element % 97) - 0.05f;
  }

  // The job of the next step. A speculative job reads the current copies and writes the other copies. Any other job
  // overwrites the current copies.
  [[nodiscard]] UpdateJob job(bool speculative, unsigned in_memory) const {
    UpdateJob result;
    result.format = kFormat;
    result.numel = kNumel;
    result.segments = segments();
    StateStream* streams[] = {&result.weight, &result.exp_avg, &result.exp_avg_sq};
    for (unsigned state = 0; state < 3; ++state) {
      *streams[state] = {nullptr, file_, at(state), speculative ? other(state) : at(state)};
    }
    for (unsigned state = 0; state < in_memory; ++state) {
      streams[state]->memory = memory(speculative ? 1 - current_memory_ : current_memory_, state);
      streams[state]->source = speculative ? memory(current_memory_, state) : nullptr;
    }
    result.grad.memory = grad_.data();
    result.whole = speculative;
    return result;
  }

  // Copies the expected values of these states into the current memory.
  void bring(unsigned in_memory) {
    for (unsigned state = 0; state < in_memory; ++state) {
      std::memcpy(memory(current_memory_, state), data(state), kState);
    }
  }
  [[nodiscard]] bool right_in_memory(unsigned in_memory) const {
    for (unsigned state = 0; state < in_memory; ++state) {
      if (std::memcmp(memory(current_memory_, state), data(state), kNumel * 4) != 0) return false;
    }
    return true;
  }

  // Records that the step was applied. Returns false if the states in memory do not have the expected values.
  [[nodiscard]] bool done(bool speculative, unsigned in_memory, ThreadPool& pool) {
    StateBuffers buffers;
    buffers.weight = data(0);
    buffers.residual = nullptr;
    buffers.exp_avg = data(1);
    buffers.exp_avg_sq = data(2);
    buffers.grad = grad_.data();
    static_cast<void>(optimizer_update(kFormat, buffers, 0, kNumel, segments(), Isa::baseline, pool));
    if (speculative) copy_ = 1 - copy_;
    if (speculative && in_memory > 0) current_memory_ = 1 - current_memory_;
    ++step_;
    return right_in_memory(in_memory);
  }

  // A read of the new weights, which begins when the weights are written, as a fetch does.
  [[nodiscard]] Future read_after(const Future& weights, bool speculative) {
    return IoEngine::submit_after(
        engine_, weights,
        {OpKind::read, IoClass::weights, file_, speculative ? other(0) : at(0), back_.data(), kState});
  }
  [[nodiscard]] bool read_new() const { return std::memcmp(back_.data(), data(0), kNumel * 4) == 0; }

  // Returns whether the current copies have the expected values. Updates that were undone must not have changed them.
  [[nodiscard]] bool right() {
    for (unsigned state = 0; state < 3; ++state) {
      if (wait(engine_->submit({OpKind::read, IoClass::states, file_, at(state), back_.data(), kState})) != nullptr)
        return false;
      if (std::memcmp(back_.data(), data(state), kNumel * 4) != 0) return false;
    }
    return true;
  }

 private:
  [[nodiscard]] std::uint64_t at(unsigned state) const { return base_ + (2 * state + copy_) * kState; }
  [[nodiscard]] std::uint64_t other(unsigned state) const { return base_ + (2 * state + 1 - copy_) * kState; }
  [[nodiscard]] std::byte* data(unsigned state) const { return expected_[state]->data(); }
  [[nodiscard]] std::byte* memory(unsigned which, unsigned state) const {
    return memory_[which].data() + state * kState;
  }
  [[nodiscard]] std::vector<Segment> segments() const {
    Segment segment{};
    segment.end = kNumel;
    segment.step = step_;
    segment.hyper.lr = 1e-3;
    segment.hyper.beta1 = 0.9;
    segment.hyper.beta2 = 0.99;
    segment.hyper.eps = 1e-8;
    return {segment};
  }

  std::shared_ptr<IoEngine> engine_;
  std::shared_ptr<SwapFile> file_;
  std::uint64_t base_;
  Pages grad_;
  Pages memory_[2];
  Pages back_;
  std::unique_ptr<Pages> expected_[3];
  std::int64_t step_ = 1;
  unsigned copy_ = 0;
  unsigned current_memory_ = 0;
};

struct Counts {
  std::atomic<unsigned> speculative{0}, undone{0}, withdrawn{0}, done{0}, wrong{0};
};

// Runs the rounds of one unit. In a round, a speculative update is kept, withdrawn or canceled at a random moment. If
// it was not kept, a decided update follows. A fetch begins when the weights of the update are written. The states in
// memory are compared as soon as the update is computed.
void play(UpdatePipeline& pipeline, Unit& unit, unsigned seed, unsigned rounds, Counts& counts) {
  std::mt19937 random(seed);
  ThreadPool pool(1);
  for (unsigned round = 0; round < rounds; ++round) {
    const unsigned in_memory = std::array{0U, 1U, 3U}[random() % 3];  // states in memory: none, weights, or all
    unit.bring(in_memory);
    bool speculative = random() % 4 != 0;
    UpdateFuture job;
    if (speculative) {
      job = pipeline.submit(unit.job(true, in_memory), random() % 2 == 0);
      if (random() % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
      const unsigned fate = random() % 3;
      if (fate == 0) pipeline.cancel(job);
      const bool taken_back = fate == 1 && pipeline.withdraw({{job}}).front();
      if (taken_back) ++counts.withdrawn;
      if (fate == 0 || taken_back) {
        const auto failure = wait(job);  // the job may have been done before it was canceled
        if (failure != nullptr && failure->kind != FailureKind::canceled) ++counts.wrong;
        if (!unit.right() || !unit.right_in_memory(in_memory)) ++counts.wrong;
        ++counts.undone;
        speculative = false;
      }
    }
    if (speculative) {
      ++counts.speculative;
    } else {
      job = pipeline.submit(unit.job(false, in_memory), random() % 4 == 0);
    }
    const Future fetch = unit.read_after(Future(job, &job->weights), speculative);
    if (wait(Future(job, &job->computed)) != nullptr || !unit.done(speculative, in_memory, pool)) ++counts.wrong;
    if (wait(fetch) != nullptr || !unit.read_new()) ++counts.wrong;
    if (wait(job) != nullptr || !unit.right()) ++counts.wrong;
    ++counts.done;
  }
}

void stress(const std::string& name, unsigned threads, unsigned rounds) {
  EngineOptions options;
  options.engine = name;
  options.block_bytes = 2 * kPageBytes;
  Fault fault{0, FaultKind::shuffle};
  fault.repeat = ~std::uint64_t{0};
  fault.seed = 7;
  options.faults = {fault};
  Directory directory;
  auto engine = std::make_shared<IoEngine>(options);
  auto file = std::make_shared<SwapFile>(directory.file("states"));
  file->preallocate(threads * 6 * kState);
  file->keep_checksums(threads * 6 * kState);
  const Pages staging(3 * kTileBytes);
  UpdatePipeline pipeline(engine, std::make_shared<ThreadPool>(2), staging.data(), staging.nbytes(), kTile, kTileBytes,
                          1, Isa::baseline);
  Counts counts;
  std::vector<std::unique_ptr<Unit>> units;
  for (unsigned index = 0; index < threads; ++index) units.push_back(std::make_unique<Unit>(engine, file, index));
  std::vector<std::thread> running;
  for (unsigned index = 0; index < threads; ++index) {
    running.emplace_back([&, index] { play(pipeline, *units[index], index + 1, rounds, counts); });
  }
  for (auto& thread : running) thread.join();
  CHECK(counts.wrong == 0);
  CHECK(counts.done == threads * rounds);
  CHECK(counts.speculative > 0);
  CHECK(counts.undone > 0);
  CHECK(counts.withdrawn > 0);
}

}  // namespace

TEST_CASE("speculative updates kept, withdrawn and canceled from many threads end in the right bits") {
  stress("threads", 4, 25);
  stress("auto", 4, 25);
}

TEST_CASE("a pipeline that is closed while others submit and cancel completes every job") {
  for (unsigned round = 0; round < 5; ++round) {
    EngineOptions options;
    options.block_bytes = 2 * kPageBytes;
    Fault fault{0, FaultKind::shuffle};
    fault.repeat = ~std::uint64_t{0};
    fault.seed = round;
    options.faults = {fault};
    Directory directory;
    auto engine = std::make_shared<IoEngine>(options);
    auto file = std::make_shared<SwapFile>(directory.file("states"));
    file->preallocate(3 * 6 * kState);
    const Pages staging(3 * kTileBytes);
    std::vector<Future> futures;
    std::vector<Future> fetches;
    std::vector<std::unique_ptr<Unit>> units;
    for (unsigned index = 0; index < 3; ++index) units.push_back(std::make_unique<Unit>(engine, file, index));
    {
      UpdatePipeline pipeline(engine, std::make_shared<ThreadPool>(2), staging.data(), staging.nbytes(), kTile,
                              kTileBytes, 1, Isa::baseline);
      for (const auto& unit : units) {
        futures.push_back(pipeline.submit(unit->job(true, 0), true));
        fetches.push_back(unit->read_after(futures.back(), true));
      }
      std::thread canceling([&] { pipeline.cancel(futures[1]); });
      canceling.join();
    }
    for (const Future& future : futures) CHECK(future->done());
    for (const Future& fetch : fetches) wait(fetch);
    for (const auto& unit : units) CHECK(unit->right());
  }
}
