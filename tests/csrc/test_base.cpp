#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "base/checksum.hpp"
#include "base/future.hpp"
#include "base/inbox.hpp"
#include "base/numa.hpp"
#include "base/thread_pool.hpp"
#include "scratch.hpp"

using namespace infinity;
using namespace infinity::tests;

TEST_CASE("lists of processors are read as the kernel writes them") {
  CHECK(parse_cpu_list("0-3,8,10-11") == std::vector<int>{0, 1, 2, 3, 8, 10, 11});
  CHECK(parse_cpu_list("5") == std::vector<int>{5});
  CHECK(parse_cpu_list("").empty());
  CHECK_THROWS_AS(parse_cpu_list("a"), std::invalid_argument);
  CHECK_THROWS_AS(parse_cpu_list("3-1"), std::invalid_argument);
}

TEST_CASE("every page has a checksum of its own") {
  const Pages data(64 * kPageBytes, 7);
  ChecksumTable table(64);
  table.take(0, data.data(), 64);
  CHECK(table.first_difference(0, data.data(), 64) == ChecksumTable::kNone);
  for (const std::size_t page : {0, 31, 63}) {
    data.data()[page * kPageBytes + 4095] ^= std::byte{1};
    CHECK(table.first_difference(0, data.data(), 64) == page);
    CHECK(table.first_difference(page, data.data() + page * kPageBytes, 1) == 0);
    data.data()[page * kPageBytes + 4095] ^= std::byte{1};
  }
}

TEST_CASE("pages never taken read as zeros") {
  const Pages zeros(3 * kPageBytes);
  const ChecksumTable table(3);
  CHECK(table.first_difference(0, zeros.data(), 3) == ChecksumTable::kNone);
}

TEST_CASE("a future completes once, whoever is first") {
  for (int round = 0; round < 200; ++round) {
    Completion completion;
    std::atomic<int> first{0};
    std::atomic<int> called{0};
    completion.then([&] { ++called; });
    std::vector<std::thread> threads;
    for (int index = 0; index < 3; ++index) threads.emplace_back([&] { first += completion.complete() ? 1 : 0; });
    completion.wait();
    for (auto& thread : threads) thread.join();
    CHECK(first == 1);
    CHECK(called == 1);
  }
}

TEST_CASE("a pool runs every task once") {
  ThreadPool pool(3);
  for (int round = 0; round < 100; ++round) {
    std::array<std::atomic<int>, 50> done{};
    pool.parallel_for(done.size(), [&](std::size_t index) { ++done[index]; });
    for (const auto& count : done) CHECK(count == 1);
  }
}

TEST_CASE("threads leave a loop for one that is urgent, after the task that they are at") {
  ThreadPool pool(2);
  constexpr std::size_t kMany = std::size_t{1} << 20;
  std::atomic<std::size_t> ordinary{0};
  std::atomic<bool> urgent_is_done{false};
  std::thread other([&] {
    pool.parallel_for(kMany, [&](std::size_t) {
      ++ordinary;
      if (!urgent_is_done) std::this_thread::sleep_for(std::chrono::microseconds(50));
    });
  });
  while (ordinary < 8) std::this_thread::yield();
  std::atomic<int> begun{0};
  pool.parallel_for(
      2,
      [&](std::size_t) {
        ++begun;
        while (begun < 2) std::this_thread::yield();  // a single thread would never begin the second task
      },
      nullptr, Urgency::urgent);
  CHECK(ordinary < kMany);
  urgent_is_done = true;
  other.join();
  CHECK(ordinary == kMany);
}

TEST_CASE("the caller of a pool runs what comes between its tasks, and nobody else does") {
  for (const unsigned threads : {1, 3}) {
    ThreadPool pool(threads);
    std::atomic<int> mine{0};
    int between = 0;
    const auto caller = std::this_thread::get_id();
    pool.parallel_for(
        50, [&](std::size_t) { mine += std::this_thread::get_id() == caller ? 1 : 0; },
        [&] {
          CHECK(std::this_thread::get_id() == caller);
          ++between;
        });
    CHECK(between == mine);
  }
}

TEST_CASE("an inbox runs the messages of each thread in the order in which they were posted") {
  Inbox inbox;
  std::array<std::vector<int>, 3> seen;
  std::vector<std::thread> threads;
  for (std::size_t thread = 0; thread < seen.size(); ++thread) {
    threads.emplace_back([&, thread] {
      for (int index = 0; index < 200; ++index) inbox.post([&, thread, index] { seen[thread].push_back(index); });
    });
  }
  std::size_t count = 0;
  while (count < 3 * 200) {
    inbox.wait();
    inbox.run();
    count = 0;
    for (const auto& each : seen) count += each.size();
  }
  for (auto& thread : threads) thread.join();
  for (const auto& each : seen) CHECK(std::is_sorted(each.begin(), each.end()));
}
