// Random bits for stochastic rounding: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2,
// 3"), a pure function of key and counter.
constexpr std::uint64_t kPhiloxMultipliers[2] = {0xD2511F53u, 0xCD9E8D57u};
constexpr std::uint64_t kPhiloxWeyl[2] = {0x9E3779B9u, 0xBB67AE85u};
constexpr std::size_t kCountersPerBlock = 32;  // each counter yields 8 sixteen-bit numbers

// The values that are rounded: each kind of value has its own random bits.
enum class Stream : std::uint32_t { exp_avg, exp_avg_sq, weight };

// Sixteen random bits for each element of a block. Counter: (block·32 + i, step, stream); key: seed. The first two
// words of the 32 counters are for elements 0 … 127, the other two words for elements 128 … 255.
void random_bits(std::uint64_t seed, std::int64_t step, std::uint64_t block, Stream stream,
                 std::uint16_t (&out)[kBlockNumel]) {
  constexpr std::size_t kCounters = sizeof(Words) / 8;
  for (std::size_t at = 0; at < kCountersPerBlock; at += kCounters) {
    const std::uint64_t counter = block * kCountersPerBlock + at;
    Words low;
    for (std::size_t lane = 0; lane < kCounters; ++lane) low[lane] = counter + lane;
    Words c0 = low & 0xffffffffu;
    Words c1 = low >> 32;
    Words c2 = (static_cast<std::uint64_t>(step) & 0xffffffffu) + Words{};
    Words c3 = static_cast<std::uint64_t>(stream) + Words{};
    std::uint64_t key0 = seed & 0xffffffffu;
    std::uint64_t key1 = seed >> 32;
    for (int round = 0; round < 10; ++round) {
      const Words product0 = multiply_low(c0, kPhiloxMultipliers[0] + Words{});
      const Words product1 = multiply_low(c2, kPhiloxMultipliers[1] + Words{});
      c0 = (product1 >> 32) ^ c1 ^ key0;
      c1 = product1 & 0xffffffffu;
      c2 = (product0 >> 32) ^ c3 ^ key1;
      c3 = product0 & 0xffffffffu;
      key0 = (key0 + kPhiloxWeyl[0]) & 0xffffffffu;
      key1 = (key1 + kPhiloxWeyl[1]) & 0xffffffffu;
    }
    store(out + at * 4, c0 | (c1 << 32));
    store(out + kBlockNumel / 2 + at * 4, c2 | (c3 << 32));
  }
}
