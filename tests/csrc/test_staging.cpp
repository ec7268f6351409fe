#include <doctest/doctest.h>

#include <chrono>
#include <stdexcept>

#include "scratch.hpp"
#include "update/job.hpp"
#include "update/staging.hpp"
#include "update/tile.hpp"

using namespace infinity;
using namespace infinity::tests;

namespace {

bool answered(const std::future<bool>& answer) {
  return answer.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

}  // namespace

TEST_CASE("lent memory is reclaimed once none of its buffers is in use, and is not handed out again") {
  const Pages own(2 * kPageBytes);
  const Pages lent(2 * kPageBytes + 100);
  Staging staging(own.data(), 2, kPageBytes, 1);
  CHECK(staging.ahead_tiles_max() == 1);
  staging.lend(lent.data(), 2 * kPageBytes + 100);
  CHECK(staging.ahead_tiles_max() == 3);
  std::byte* const buffer = staging.take();
  CHECK(buffer == lent.data());
  auto answer = staging.reclaim(lent.data());
  CHECK(staging.ahead_tiles_max() == 1);
  CHECK_FALSE(answered(answer));
  CHECK_THROWS_AS(static_cast<void>(staging.reclaim(lent.data())), std::invalid_argument);
  staging.give_back(buffer);
  REQUIRE(answered(answer));
  CHECK(answer.get());
  CHECK(staging.take() == own.data());
  CHECK(staging.take() == own.data() + kPageBytes);
  CHECK_FALSE(staging.has_free());
  CHECK_THROWS_AS(static_cast<void>(staging.reclaim(lent.data())), std::invalid_argument);
}

TEST_CASE("no buffer is handed out after a device was given up, and nothing is reclaimed") {
  const Pages own(2 * kPageBytes);
  const Pages lent(kPageBytes);
  const Pages late(kPageBytes);
  Staging staging(own.data(), 2, kPageBytes, 0);
  staging.lend(lent.data(), kPageBytes);
  std::byte* const buffer = staging.take();
  auto waiting = staging.reclaim(lent.data());
  staging.abandon();
  REQUIRE(answered(waiting));
  CHECK_FALSE(waiting.get());
  staging.give_back(buffer);
  CHECK_FALSE(staging.has_free());
  staging.lend(late.data(), kPageBytes);
  CHECK_FALSE(staging.has_free());
  CHECK_FALSE(staging.reclaim(late.data()).get());
}

TEST_CASE("a job and a tile take the steps of their notes and no others") {
  Job job;
  CHECK_THROWS_AS(job.go(JobPhase::ahead), std::logic_error);
  job.go(JobPhase::begun);
  CHECK_THROWS_AS(job.go(JobPhase::done), std::logic_error);
  job.go(JobPhase::ending);
  job.go(JobPhase::done);
  CHECK_THROWS_AS(job.go(JobPhase::ending), std::logic_error);
  Tile tile;
  tile.phase = TilePhase::ahead;
  CHECK_THROWS_AS(tile.go(TilePhase::computing), std::logic_error);
  tile.go(TilePhase::dropped);
  CHECK_THROWS_AS(tile.go(TilePhase::reading), std::logic_error);
  tile.go(TilePhase::gone);
  CHECK_THROWS_AS(tile.go(TilePhase::gone), std::logic_error);
}
