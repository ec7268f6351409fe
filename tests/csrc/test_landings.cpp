#include <doctest/doctest.h>

#include <cstring>
#include <future>
#include <random>
#include <thread>

#include "device/landings.hpp"
#include "fake_device.hpp"
#include "scratch.hpp"

using namespace infinity;
using namespace infinity::tests;

namespace {

constexpr std::size_t kNumel = 200'000;
constexpr Isa kIsa = Isa::baseline;

std::vector<float> numbers(unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(kNumel);
  for (float& value : values) value = normal(random);
  return values;
}

std::byte* bytes(std::vector<float>& values) { return reinterpret_cast<std::byte*>(values.data()); }

}  // namespace

TEST_CASE("what lands has the bits and the sums of the functions that do the same at once") {
  ThreadPool alone(1);
  const auto pool = std::make_shared<ThreadPool>(3);
  FakeDevice device;
  Landings landings(device.gate(), pool, kIsa);
  std::vector<float> first = numbers(1);
  std::vector<float> second = numbers(2);
  std::vector<float> half = numbers(3);  // as bf16, these are twice as many values
  std::vector<float> summed = second;
  std::vector<float> wide(kNumel);
  const std::vector<std::vector<double>> sums = {
      sums_of_squares(first.data(), DType::fp32, 0, kNumel, kIsa, alone),
      land_gradient(summed.data(), DType::fp32, first.data(), DType::fp32, 0, kNumel, true, kIsa, alone),
      land_gradient(wide.data(), DType::fp32, half.data(), DType::bf16, 0, kNumel, false, kIsa, alone)};
  std::vector<float> widened(kNumel);
  const auto future = landings.land(nullptr, {{bytes(first), DType::fp32, kNumel},
                                              {bytes(second), DType::fp32, kNumel, bytes(first), DType::fp32, true},
                                              {bytes(widened), DType::fp32, kNumel, bytes(half), DType::bf16}});
  CHECK(wait(future) == nullptr);
  REQUIRE(future->sums.size() == 3);
  for (std::size_t i = 0; i < sums.size(); ++i) {  // compares bits, because random bits may be NaN in bf16
    REQUIRE(future->sums[i].size() == sums[i].size());
    CHECK(std::memcmp(future->sums[i].data(), sums[i].data(), sums[i].size() * sizeof(double)) == 0);
  }
  CHECK(std::memcmp(second.data(), summed.data(), kNumel * 4) == 0);
  CHECK(std::memcmp(widened.data(), wide.data(), kNumel * 4) == 0);
}

TEST_CASE("a gradient lands once its event is reached") {
  for (unsigned seed = 0; seed < 20; ++seed) {
    FakeDevice device(seed);
    Landings landings(device.gate(), std::make_shared<ThreadPool>(2), kIsa);
    ThreadPool alone(1);
    const std::vector<float> from = numbers(seed);
    std::vector<std::vector<float>> targets(4, std::vector<float>(kNumel));
    std::vector<LandingFuture> futures;
    for (unsigned index = 0; index < 4; ++index) {
      void* const stream = handle(1 + index % 2);
      void* const to = targets[index].data();
      device.launch(stream, [&from, to] { std::memcpy(to, from.data(), kNumel * 4); });
      device.record_on_host(handle(100 + index), stream);
      futures.push_back(landings.land(handle(100 + index), {{bytes(targets[index]), DType::fp32, kNumel}}));
    }
    const std::vector<double> sum = sums_of_squares(from.data(), DType::fp32, 0, kNumel, kIsa, alone);
    for (const auto& future : futures) {
      REQUIRE(wait(future) == nullptr);
      CHECK(future->sums == std::vector<std::vector<double>>{sum});
    }
  }
}

TEST_CASE("landings are in the order of the calls, and closing waits for all of them") {
  std::vector<float> values = numbers(1);
  std::vector<LandingFuture> futures;
  std::vector<void*> order;
  {
    FakeDevice device;
    std::promise<void> go_on;
    device.synchronizing = [&, gate = go_on.get_future().share()](void* event) {
      gate.wait();
      order.push_back(event);
    };
    Landings landings(device.gate(), std::make_shared<ThreadPool>(1), kIsa);
    for (unsigned index = 1; index < 6; ++index) {
      futures.push_back(landings.land(handle(index), {{bytes(values), DType::fp32, 16}}));
    }
    CHECK_FALSE(futures.front()->done());
    go_on.set_value();
  }
  for (const auto& future : futures) {
    REQUIRE(future->done());
    CHECK_FALSE(future->failure());
  }
  CHECK(order == std::vector<void*>{handle(1), handle(2), handle(3), handle(4), handle(5)});
}

TEST_CASE("an error of the runtime at any call fails that landing and every later one") {
  for (unsigned call = 0; call < 4; ++call) {  // call 0 chooses the device
    FakeDevice device;
    device.fail(call, 700);
    Landings landings(device.gate(), std::make_shared<ThreadPool>(2), kIsa);
    std::vector<float> source = numbers(1);
    for (unsigned index = 1; index < 6; ++index) {
      std::vector<float> target(kNumel);
      const auto future =
          landings.land(handle(index), {{bytes(target), DType::fp32, kNumel, bytes(source), DType::fp32, true}});
      const auto failure = wait(future);
      const bool landed = index < call;
      CHECK((failure == nullptr) == landed);
      CHECK((target == source) == landed);
      CHECK(future->sums.size() == (landed ? 1 : 0));
      if (failure != nullptr) CHECK(failure->cause == "the device's runtime returned error 700");
    }
    CHECK(device.calls() == std::max(call + 1, 1u));  // after the error, no function of the device is called
  }
}

TEST_CASE("pieces that cannot land are refused") {
  FakeDevice device;
  Landings landings(device.gate(), std::make_shared<ThreadPool>(1), kIsa);
  std::vector<float> values(16);
  const auto refused = [&](const LandingPiece& piece) {
    CHECK_THROWS_AS(static_cast<void>(landings.land(nullptr, {piece})), std::invalid_argument);
  };
  refused({nullptr, DType::fp32, 4});
  refused({bytes(values), DType::fp32, 4, nullptr, DType::fp32, true});
  refused({bytes(values), DType::bf16, 4, bytes(values) + 32, DType::bf16, true});
  refused({bytes(values), DType::bf16, 4, bytes(values) + 32, DType::fp32});
}

TEST_CASE("landings from many threads are all done") {
  FakeDevice device(5);
  Landings landings(device.gate(), std::make_shared<ThreadPool>(2), kIsa);
  std::vector<std::thread> threads;
  std::atomic<unsigned> wrong{0};
  for (unsigned thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&, thread] {
      ThreadPool alone(1);
      std::vector<float> source = numbers(thread);
      std::vector<float> target(kNumel);
      std::vector<float> expected(kNumel);
      for (unsigned round = 0; round < 10; ++round) {
        const std::vector<double> sum =
            land_gradient(expected.data(), DType::fp32, source.data(), DType::fp32, 0, kNumel, true, kIsa, alone);
        device.record_on_host(handle(10 + thread), handle(1 + thread));
        const auto future = landings.land(handle(10 + thread),
                                          {{bytes(target), DType::fp32, kNumel, bytes(source), DType::fp32, true}});
        if (wait(future) != nullptr || future->sums != std::vector<std::vector<double>>{sum} || target != expected)
          ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
}
