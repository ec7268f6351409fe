// The optimizers' arithmetic. The memory has exactly the right size, so that a sanitizer detects every access beyond
// it. The bits of the results must be the same on every processor.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "cpu_adam/optimizer.hpp"

using namespace infinity;

namespace {

const std::vector<Rule> kRules{Rule::adamw, Rule::adam, Rule::lion, Rule::adagrad, Rule::sgd};
const std::vector<Moments> kMoments{Moments::fp32, Moments::bf16, Moments::int8};
const std::vector<std::pair<DType, Master>> kWeights{{DType::fp32, Master::weight},
                                                     {DType::bf16, Master::split16},
                                                     {DType::bf16, Master::fp32},
                                                     {DType::bf16, Master::none},
                                                     {DType::fp16, Master::fp32}};

// Reproducible numbers between -1 and 1. The distributions of the standard library differ between systems.
class Numbers {
 public:
  float next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(static_cast<std::int32_t>(state_ >> 32)) * 0x1p-31f;
  }

 private:
  std::uint64_t state_ = 42;
};

Hyperparameters hyper_of(Rule rule) {
  Hyperparameters hyper;
  hyper.rule = rule;
  hyper.lr = 1e-2;
  hyper.beta1 = 0.9;
  hyper.beta2 = 0.99;
  hyper.eps = 1e-8;
  hyper.weight_decay = 0.01;
  return hyper;
}

// States of one format. Each state is in a separate allocation of exactly its size.
struct States {
  StateFormat format;
  std::size_t numel;
  std::vector<std::byte> weight, residual, exp_avg, exp_avg_sq, grad;

  States(const StateFormat& kept, std::size_t count)
      : format(kept),
        numel(count),
        weight(count * itemsize(kept.weight)),
        residual(count * residual_itemsize(kept.master)),
        exp_avg(moment_bytes(kept.moments, count)),
        exp_avg_sq(moment_bytes(kept.moments, count)),
        grad(count * itemsize(kept.grad)) {
    Numbers numbers;
    std::vector<float> values(count);
    for (float& value : values) value = numbers.next();
    if (format.master == Master::split16) {
      encode_split16(values.data(), reinterpret_cast<std::uint16_t*>(weight.data()),
                     reinterpret_cast<std::int16_t*>(residual.data()), count);
    } else {
      round_weights(values.data(), weight.data(), format.weight, count);
      if (!residual.empty()) std::memcpy(residual.data(), values.data(), residual.size());
    }
  }

  void set_gradients(Numbers& numbers) {
    std::vector<float> values(numel);
    for (float& value : values) value = numbers.next();
    round_weights(values.data(), grad.data(), format.grad, numel);
  }

  bool step(const Hyperparameters& hyper, std::int64_t number, Isa isa) {
    const StateBuffers buffers{weight.data(), residual.data(), exp_avg.data(), exp_avg_sq.data(), grad.data()};
    const std::vector<Segment> segments{{0, numel, 512, 7, number, false, number == 1, 0.5f, hyper}};
    return optimizer_update(format, buffers, 0, 0, numel, segments, isa);
  }

  // FNV-1a hash of all states that an update writes.
  [[nodiscard]] std::uint64_t digest(std::uint64_t hash) const {
    for (const auto* memory : {&weight, &residual, &exp_avg, &exp_avg_sq}) {
      for (const std::byte byte : *memory) hash = (hash ^ static_cast<std::uint64_t>(byte)) * 1099511628211u;
    }
    return hash;
  }
};

std::uint64_t digest_of_everything(Isa isa) {
  std::uint64_t hash = 14695981039346656037u;
  for (const auto& [weight, master] : kWeights) {
    for (const Moments moments : kMoments) {
      for (const Rule rule : kRules) {
        States states({weight, master, DType::bf16, moments}, 1000);
        Numbers numbers;
        for (int number = 1; number <= 5; ++number) {
          states.set_gradients(numbers);
          REQUIRE(states.step(hyper_of(rule), number, isa));
        }
        hash = states.digest(hash);
      }
    }
  }
  return hash;
}

}  // namespace

TEST_CASE("every rule and format stays within its memory at every size") {
  for (const Isa isa : supported_isas()) {
    for (const auto& [weight, master] : kWeights) {
      for (const Moments moments : kMoments) {
        for (const std::size_t numel : {1, 2, 15, 17, 63, 255, 256, 257, 300, 511, 512, 1023}) {
          for (const Rule rule : kRules) {
            States states({weight, master, DType::fp16, moments}, numel);
            Numbers numbers;
            states.set_gradients(numbers);
            CHECK(states.step(hyper_of(rule), 1, isa));
            CHECK(states.step(hyper_of(rule), 2, isa));
          }
        }
      }
    }
  }
}

TEST_CASE("the bits are those of every other processor") {
  // A change of the arithmetic changes this number. Change the number only if results are meant to change.
  constexpr std::uint64_t kDigest = 3385934951862632011u;
  for (const Isa isa : supported_isas()) {
    INFO(isa_name(isa));
    CHECK(digest_of_everything(isa) == kDigest);
  }
}

TEST_CASE("moments stay within their memory on both sides of a chunk") {
  for (const std::size_t numel : {kChunkNumel - 1, kChunkNumel, kChunkNumel + 1}) {
    std::vector<float> values(numel);
    Numbers numbers;
    for (float& value : values) value = std::fabs(numbers.next());
    for (const Isa isa : supported_isas()) {
      for (const Moments moments : kMoments) {
        std::vector<std::byte> data(moment_bytes(moments, numel));
        std::vector<float> back(numel);
        encode_moments(moments, false, values.data(), data.data(), numel, isa);
        decode_moments(moments, false, data.data(), back.data(), numel, isa);
        for (std::size_t at = 0; at < numel; at += 997) CHECK(std::fabs(back[at] - values[at]) < 0.05f);
      }
    }
  }
}

TEST_CASE("a whole that is cut between partials has the same ones in its parts") {
  ThreadPool pool(2);
  constexpr std::size_t kNumel = 4 * kPartialNumel + 77;
  std::vector<float> whole(kNumel);
  for (std::size_t at = 0; at < kNumel; ++at) whole[at] = 0.1f * static_cast<float>(at % 1013);
  for (const std::uint64_t first : {std::uint64_t{0}, std::uint64_t{256}, std::uint64_t{kPartialNumel - 1}}) {
    const auto all = sums_of_squares(whole.data(), DType::fp32, first, kNumel, Isa::baseline, pool);
    CHECK(all.size() == (first % kPartialNumel + kNumel + kPartialNumel - 1) / kPartialNumel);
    for (const std::uint64_t cut : {kPartialNumel, 3 * kPartialNumel}) {
      const auto before = static_cast<std::size_t>(cut - first);
      auto parts = sums_of_squares(whole.data(), DType::fp32, first, before, Isa::baseline, pool);
      const auto rest = sums_of_squares(whole.data() + before, DType::fp32, cut, kNumel - before, Isa::baseline, pool);
      parts.insert(parts.end(), rest.begin(), rest.end());
      CHECK(parts == all);
    }
  }
  CHECK(sums_of_squares(whole.data(), DType::fp32, 5, 0, Isa::baseline, pool).empty());
}

TEST_CASE("gradients land within their memory at every size") {
  ThreadPool pool(2);
  for (const std::size_t numel : {std::size_t{1}, std::size_t{17}, std::size_t{1023}, kPartialNumel + 5}) {
    for (const DType source : {DType::fp32, DType::bf16, DType::fp16}) {
      std::vector<float> values(numel, 0.5f);
      std::vector<std::byte> from(numel * itemsize(source));
      std::vector<std::byte> same(numel * itemsize(source));
      std::vector<float> wide(numel, 1.0f);
      round_weights(values.data(), from.data(), source, numel);
      for (const Isa isa : supported_isas()) {
        const auto sum = [&](void* into, DType dtype, bool add) {
          const auto parts = land_gradient(into, dtype, from.data(), source, 0, numel, add, isa, pool);
          return std::accumulate(parts.begin(), parts.end(), 0.0);
        };
        const auto count = static_cast<double>(numel);
        CHECK(sum(same.data(), source, false) == 0.25 * count);
        CHECK(sum(wide.data(), DType::fp32, false) == 0.25 * count);
        CHECK(sum(wide.data(), DType::fp32, true) == count);
      }
    }
  }
}

TEST_CASE("segments and formats that cannot be are refused") {
  const StateFormat format{DType::bf16, Master::split16, DType::bf16, Moments::int8};
  const auto segment = [](std::uint64_t begin, std::uint64_t end) {
    Segment result{};
    result.begin = begin;
    result.end = end;
    result.step = 1;
    return result;
  };
  CHECK_NOTHROW(check_segments({segment(0, 10), segment(256, 300)}, 300, format));
  CHECK_THROWS_WITH(check_segments({segment(0, 10), segment(100, 200)}, 300, format),
                    "with int8 moments a segment must begin at a multiple of 256");
  CHECK_THROWS(check_segments({segment(0, 301)}, 300, format));
  CHECK_THROWS(check_segments({segment(10, 20), segment(0, 5)}, 300, format));
  CHECK_THROWS(check_format({DType::fp32, Master::split16, DType::fp32, Moments::fp32}));
  CHECK_THROWS(check_format({DType::fp16, Master::none, DType::fp32, Moments::fp32}));
}
