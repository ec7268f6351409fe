#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <random>
#include <thread>

#include "base/bits.hpp"
#include "codec/codec.hpp"
#include "codec/decoder.hpp"
#include "codec/maps.hpp"
#include "scratch.hpp"

using namespace infinity;
using namespace infinity::tests;

namespace {

constexpr std::size_t kNumel = 2 * kCodecTaskNumel + 77;

std::vector<float> numbers(unsigned seed, std::size_t numel = kNumel) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(numel);
  for (float& value : values) value = normal(random) * std::exp2(static_cast<float>(random() % 200) - 100.0f);
  return values;
}

// An encoded weight, and the memory of its encoded form.
struct Stored {
  std::vector<float> memory;  // aligned
  EncodedWeight weight;
  CodecLayout layout;

  Stored(const WeightForm& form, std::size_t numel, std::size_t row_numel = 0)
      : layout(codec_layout(form, numel, row_numel)) {
    memory.resize(layout.nbytes / sizeof(float));
    weight = {reinterpret_cast<const std::byte*>(memory.data()), form, numel, row_numel};
  }

  template <class T>
  T* at(const CodecPart& part) {
    return reinterpret_cast<T*>(reinterpret_cast<std::byte*>(memory.data()) + part.begin);
  }
};

Stored encoded(const std::vector<float>& values, WeightCodec codec, Isa isa, ThreadPool& pool) {
  Stored stored(codec, values.size());
  encode_weights(values.data(), DType::fp32, values.size(), codec, stored.at<void>(stored.layout.codes),
                 stored.at<void>(stored.layout.scales), isa, pool);
  return stored;
}

Stored nested(const std::vector<float>& values, Isa isa, ThreadPool& pool) {
  Stored plain = encoded(values, WeightCodec::nf4_fp32, isa, pool);
  Stored stored(WeightCodec::nf4, values.size());
  const auto* const scales = plain.at<float>(plain.layout.scales);
  const std::size_t blocks = stored.layout.scales.nbytes;
  std::memcpy(stored.at<void>(stored.layout.codes), plain.at<void>(plain.layout.codes), stored.layout.codes.nbytes);
  const float offset = *std::max_element(scales, scales + blocks) / 7;
  *stored.at<float>(stored.layout.offset) = offset;
  nest_scales(scales, blocks, offset, stored.at<std::uint8_t>(stored.layout.scales),
              stored.at<float>(stored.layout.nested_scales));
  return stored;
}

std::vector<std::byte> decoded(const Stored& stored, DType dtype, Isa isa, ThreadPool& pool) {
  std::vector<std::byte> out(stored.weight.numel * itemsize(dtype));
  decode_weights(stored.weight, out.data(), dtype, isa, pool);
  return out;
}

std::vector<std::byte> rounded(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> out(values.size() * itemsize(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::fp32) std::memcpy(&out[4 * i], &values[i], 4);
    const std::uint32_t bits = bits_of(values[i]);
    const auto narrow = static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    const auto half = static_cast<Half>(values[i]);
    if (dtype == DType::bf16) std::memcpy(&out[2 * i], &narrow, 2);
    if (dtype == DType::fp16) std::memcpy(&out[2 * i], &half, 2);
  }
  return out;
}

// The number of an e4m3 code that is not NaN.
float e4m3(std::uint8_t code) {
  const int exponent = (code >> 3) & 15;
  const int mantissa = code & 7;
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                        : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return code >= 128 ? -magnitude : magnitude;
}

float fp8_value(Stored& stored, std::size_t i) {
  const WeightForm& form = stored.weight.form;
  const std::uint64_t columns = stored.weight.row_numel;
  const std::uint64_t blocks = (columns + form.block_columns - 1) / form.block_columns;
  const std::uint64_t block = i / columns / form.block_rows * blocks + i % columns / form.block_columns;
  return e4m3(stored.at<std::uint8_t>(stored.layout.codes)[i]) * stored.at<float>(stored.layout.scales)[block];
}

// `element` is in the order of the stored codes.
float fp4_value(Stored& stored, std::size_t element) {
  const bool mx = stored.weight.form.codec == WeightCodec::mxfp4;
  constexpr float kMagnitudes[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const int code = stored.at<std::uint8_t>(stored.layout.codes)[element / 2] >> (element % 2 * 4) & 15;
  const float magnitude = kMagnitudes[code % 8];
  const std::uint8_t scale = stored.at<std::uint8_t>(stored.layout.scales)[element / (mx ? kMxfp4Group : kNvfp4Group)];
  // volatile, so that the compiler does not reassociate the products
  volatile const float wide =
      mx ? std::ldexp(1.0f, scale - 127) : e4m3(scale) * *stored.at<float>(stored.layout.nested_scales);
  return (code < 8 ? magnitude : -magnitude) * wide;
}

// Decodes the values one at a time, by the definitions of the codecs.
std::vector<float> values_of(Stored& stored) {
  std::vector<float> values(stored.weight.numel);
  const auto* const nibbles = stored.at<std::uint8_t>(stored.layout.codes);
  const auto* const bytes = stored.at<std::int8_t>(stored.layout.codes);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::size_t block = i / kCodecBlockNumel;
    const float nf4 = kNf4Map.values[i % 2 == 0 ? nibbles[i / 2] >> 4 : nibbles[i / 2] & 15];
    if (stored.weight.form.codec == WeightCodec::nf4) {
      const float scale = kDynamicMap.values[stored.at<std::uint8_t>(stored.layout.scales)[block]];
      // volatile, so that the compiler does not fuse this product with the sum.
      volatile const float wide = scale * stored.at<float>(stored.layout.nested_scales)[block / kNestedBlocks];
      values[i] = nf4 * (wide + *stored.at<float>(stored.layout.offset));
    } else if (stored.weight.form.codec == WeightCodec::nf4_fp32) {
      values[i] = nf4 * stored.at<float>(stored.layout.scales)[block];
    } else if (stored.weight.form.codec == WeightCodec::int8) {
      values[i] = static_cast<float>(bytes[i]) * float_of_bf16(stored.at<std::uint16_t>(stored.layout.scales)[block]);
    } else if (stored.weight.form.codec == WeightCodec::fp8_block) {
      values[i] = fp8_value(stored, i);
    } else if (stored.weight.form.codec == WeightCodec::int4_group) {
      const std::size_t group = i / stored.weight.form.block_columns;
      const int code = nibbles[i / 2] >> (i % 2 * 4) & 15;
      values[i] = static_cast<float>(code - 8) * float_of_bf16(stored.at<std::uint16_t>(stored.layout.scales)[group]);
    } else if (stored.weight.form.codec >= WeightCodec::mxfp4) {
      const std::size_t rows = stored.weight.form.matrix_rows;
      const std::size_t columns = stored.weight.row_numel;
      const std::size_t matrix = rows > 0 ? i / (rows * columns) : 0;
      const std::size_t transposed = rows > 0 ? (matrix * columns + i % columns) * rows + i / columns % rows : i;
      values[i] = fp4_value(stored, transposed);
    } else {
      const float value =
          static_cast<float>(bytes[i]) * stored.at<float>(stored.layout.scales)[i / stored.weight.row_numel];
      values[i] = value * 7.874015718698502e-3f;
    }
  }
  return values;
}

Failure failed(FailureKind kind) { return {kind, "read", "swap", 4096, 512, 5, "it was not to be", "a message"}; }

}  // namespace

TEST_CASE("on every instruction set codes get the values that the definitions say, one at a time") {
  ThreadPool pool(2);
  for (const Isa isa : supported_isas()) {
    std::vector<Stored> all;
    all.push_back(nested(numbers(1), isa, pool));
    all.push_back(encoded(numbers(2), WeightCodec::nf4_fp32, isa, pool));
    all.push_back(encoded(numbers(3), WeightCodec::int8, isa, pool));
    all.emplace_back(WeightCodec::int8_rows, 1003 * 77, 77);
    std::memcpy(all.back().memory.data(), numbers(4, 20'000).data(), 77'000);
    const std::vector<float> scales = numbers(5, 1003);
    std::memcpy(all.back().at<void>(all.back().layout.scales), scales.data(), scales.size() * 4);
    for (const std::size_t columns : {77, 128}) {  // rows that begin anywhere, and aligned rows
      all.emplace_back(weight_form("fp8_block:100x64:fp32"), 1003 * columns, columns);
      Stored& stored = all.back();
      std::mt19937 random(6);
      auto* const codes = stored.at<std::uint8_t>(stored.layout.codes);
      for (std::size_t i = 0; i < stored.weight.numel; ++i) {
        codes[i] = static_cast<std::uint8_t>(random() % 127 + 128 * (random() % 2));
      }
      const std::vector<float> block_scales = numbers(7, stored.layout.scales.nbytes / 4);
      std::memcpy(stored.at<void>(stored.layout.scales), block_scales.data(), stored.layout.scales.nbytes);
    }
    const std::pair<const char*, std::size_t> fp4[] = {
        {"mxfp4", 160}, {"mxfp4:96", 77}, {"nvfp4:factor", 48}, {"int4_group:48:bf16", 96}};
    for (const auto& [codec, row_numel] : fp4) {
      all.emplace_back(weight_form(codec), row_numel * 96 * 19, row_numel);
      Stored& stored = all.back();
      std::mt19937 random(8);
      const auto fill = [&](const CodecPart& part, unsigned end) {
        for (std::size_t i = 0; i < part.nbytes; ++i) {
          stored.at<std::uint8_t>(part)[i] = static_cast<std::uint8_t>(random() % end);
        }
      };
      fill(stored.layout.codes, 256);
      fill(stored.layout.scales, 127);  // no NaN
      if (stored.layout.nested_scales.nbytes > 0) *stored.at<float>(stored.layout.nested_scales) = 0.3f;
    }
    for (Stored& stored : all) {
      const std::vector<float> values = values_of(stored);
      for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
        CHECK(decoded(stored, dtype, isa, pool) == rounded(values, dtype));
      }
    }
  }
}

TEST_CASE("on every instruction set values get the nearest codes") {
  ThreadPool pool(2);
  const std::vector<float> values = numbers(6);
  for (const Isa isa : supported_isas()) {
    Stored nf4 = encoded(values, WeightCodec::nf4_fp32, isa, pool);
    Stored int8 = encoded(values, WeightCodec::int8, isa, pool);
    constexpr auto kBounds = bounds_of(kNf4Map);
    for (std::size_t begin = 0; begin < kNumel; begin += kCodecBlockNumel) {
      const std::size_t end = std::min(begin + kCodecBlockNumel, kNumel);
      float absmax = 0;
      for (std::size_t i = begin; i < end; ++i) absmax = std::max(absmax, std::fabs(values[i]));
      REQUIRE(nf4.at<float>(nf4.layout.scales)[begin / kCodecBlockNumel] == absmax);
      const float step = float_of_bf16(int8.at<std::uint16_t>(int8.layout.scales)[begin / kCodecBlockNumel]);
      REQUIRE((step >= absmax / 127 && step <= absmax / 127 * 1.01f));
      for (std::size_t i = begin; i < end; ++i) {
        const float scaled = end - begin == kCodecBlockNumel ? values[i] * (1.0f / absmax) : values[i] / absmax;
        const auto code = std::count_if(std::begin(kBounds.values), std::end(kBounds.values),
                                        [scaled](float bound) { return bound < scaled; });
        const auto byte = nf4.at<std::uint8_t>(nf4.layout.codes)[i / 2];
        REQUIRE((i % 2 == 0 ? byte >> 4 : byte & 15) == code);
        REQUIRE(int8.at<std::int8_t>(int8.layout.codes)[i] == std::nearbyint(values[i] / step));
      }
    }
  }
}

TEST_CASE("jobs of many threads whose reads end in any order are decoded whole") {
  ThreadPool alone(1);
  Stored stored = nested(numbers(7), select_isa(), alone);
  const std::vector<std::byte> expected = decoded(stored, DType::bf16, select_isa(), alone);
  WeightDecoder decoder(std::make_shared<ThreadPool>(2), select_isa());
  constexpr std::size_t kThreads = 4;
  constexpr std::size_t kJobs = 10;
  std::vector<std::vector<std::byte>> outs(kThreads * kJobs * 2, std::vector<std::byte>(expected.size()));
  std::vector<std::thread> threads;
  for (std::size_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937 random(static_cast<unsigned>(thread));
      std::vector<Future> reads;
      std::vector<Future> jobs;
      for (std::size_t job = 0; job < kJobs; ++job) {
        std::vector<Future> after(random() % 3);
        for (Future& read : after) reads.push_back(read = std::make_shared<Completion>());
        std::vector<DecodePart> parts;
        for (std::size_t part = 0; part < 2; ++part) {
          parts.push_back({stored.weight, outs[(thread * kJobs + job) * 2 + part].data(), DType::bf16});
        }
        jobs.push_back(decoder.decode(std::move(parts), std::move(after)));
      }
      std::shuffle(reads.begin(), reads.end(), random);
      for (const Future& read : reads) read->complete();
      for (const Future& job : jobs) job->wait();
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(std::all_of(outs.begin(), outs.end(), [&](const auto& out) { return out == expected; }));
}

TEST_CASE("a job whose reads are late holds nobody back, and of those that are ready the first is decoded first") {
  ThreadPool alone(1);
  Stored stored = encoded(numbers(8, 5000), WeightCodec::int8, select_isa(), alone);
  std::vector<std::byte> out(5000 * 4);
  const DecodePart part{stored.weight, out.data(), DType::fp32};
  std::vector<int> order;
  std::optional<WeightDecoder> decoder(std::in_place, std::make_shared<ThreadPool>(2), select_isa());
  const Future late = std::make_shared<Completion>();
  const Future first = decoder->decode({part}, {late, late});
  first->then([&order] { order.push_back(1); });
  CHECK(wait(decoder->decode({part})) == nullptr);
  CHECK_FALSE(first->done());
  // While a callback blocks the thread, the reads of both jobs end. The reads of the later job end first.
  const Future soon = std::make_shared<Completion>();
  const Future blocked = std::make_shared<Completion>();
  const Future go_on = std::make_shared<Completion>();
  const Future begin = std::make_shared<Completion>();
  decoder->decode({}, {begin})->then([&] {
    blocked->complete();
    go_on->wait();
  });
  begin->complete();
  blocked->wait();
  const Future second = decoder->decode({part}, {soon});
  second->then([&order] { order.push_back(2); });
  soon->complete();
  late->complete();
  go_on->complete();
  CHECK(wait(second) == nullptr);
  CHECK(wait(first) == nullptr);
  decoder.reset();  // all callbacks have run
  CHECK(order == std::vector<int>{1, 2});
}

TEST_CASE("a job fails as the first of its reads that did, once all have ended, but a timeout is not hidden") {
  WeightDecoder decoder(std::make_shared<ThreadPool>(1), select_isa());
  ThreadPool alone(1);
  Stored stored = encoded(numbers(9, 64), WeightCodec::int8, select_isa(), alone);
  std::vector<std::byte> out(64 * 4, std::byte{7});
  for (const bool timeout : {false, true}) {
    std::vector<Future> reads(3);
    for (Future& read : reads) read = std::make_shared<Completion>();
    const Future job = decoder.decode({{stored.weight, out.data(), DType::fp32}}, reads);
    reads[1]->complete(failed(FailureKind::corruption));
    CHECK(wait(decoder.decode({})) == nullptr);
    CHECK_FALSE(job->done());
    reads[0]->complete(failed(timeout ? FailureKind::timeout : FailureKind::io));
    reads[2]->complete();
    const auto failure = wait(job);
    REQUIRE(failure != nullptr);
    CHECK(failure->kind == (timeout ? FailureKind::timeout : FailureKind::corruption));
    CHECK(failure->path == "swap");
    CHECK(failure->message == "a message");
  }
  CHECK(std::all_of(out.begin(), out.end(), [](std::byte byte) { return byte == std::byte{7}; }));
}

TEST_CASE("closing decodes what is ready and cancels what waits, whose reads may end later") {
  ThreadPool alone(1);
  Stored stored = encoded(numbers(10), WeightCodec::int8, select_isa(), alone);
  const std::vector<std::byte> expected = decoded(stored, DType::bf16, select_isa(), alone);
  std::vector<std::vector<std::byte>> outs(4, std::vector<std::byte>(expected.size()));
  const Future late = std::make_shared<Completion>();
  const Future lost = std::make_shared<Completion>();
  std::vector<Future> jobs;
  Future waits;
  Future timed_out;
  {
    WeightDecoder decoder(std::make_shared<ThreadPool>(2), select_isa());
    for (auto& out : outs) jobs.push_back(decoder.decode({{stored.weight, out.data(), DType::bf16}}));
    waits = decoder.decode({{stored.weight, outs[0].data(), DType::bf16}}, {late});
    lost->complete(failed(FailureKind::timeout));
    timed_out = decoder.decode({{stored.weight, outs[0].data(), DType::bf16}}, {lost, late});
  }
  for (const Future& job : jobs) CHECK(wait(job) == nullptr);
  for (const auto& out : outs) CHECK(out == expected);
  REQUIRE(wait(waits) != nullptr);
  CHECK(wait(waits)->kind == FailureKind::canceled);
  CHECK(wait(timed_out)->kind == FailureKind::timeout);
  late->complete();
}

TEST_CASE("arguments that cannot be are refused") {
  ThreadPool pool(1);
  CHECK_THROWS_AS(WeightDecoder(nullptr, select_isa()), std::invalid_argument);
  WeightDecoder decoder(std::make_shared<ThreadPool>(1), select_isa());
  CHECK_THROWS_AS(decoder.decode({DecodePart{{nullptr, WeightCodec::int8, 64, 0}, nullptr, DType::bf16}}),
                  std::invalid_argument);
  CHECK_THROWS_AS(static_cast<void>(codec_layout(WeightCodec::int8_rows, 64, 7)), std::invalid_argument);
  CHECK_THROWS_AS(static_cast<void>(codec_layout(weight_form("fp8_block:8x8:bf16"), 64, 7)), std::invalid_argument);
  CHECK_THROWS_AS(static_cast<void>(weight_form("fp8_block:8x8")), std::invalid_argument);
  CHECK_THROWS_AS(static_cast<void>(weight_form("nvfp4")), std::invalid_argument);
  CHECK_THROWS_AS(static_cast<void>(codec_layout(weight_form("mxfp4:32"), 96, 2)), std::invalid_argument);
  std::vector<float> values = numbers(11, 1000);
  values[777] = values[900] = INFINITY;
  CHECK_THROWS_WITH(encoded(values, WeightCodec::int8, select_isa(), pool), "element 777 of the values is not finite");
}
