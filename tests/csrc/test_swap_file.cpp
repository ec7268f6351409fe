#include <doctest/doctest.h>

#include <set>

#include "scratch.hpp"

using namespace infinity;
using namespace infinity::tests;

TEST_CASE("stripes cover every member's bytes exactly once") {
  Directory directory;
  const std::vector<std::vector<unsigned>> layouts = {{1}, {1, 1}, {3, 1}, {7, 5, 1, 1}};
  for (const auto& shares : layouts) {
    std::vector<std::shared_ptr<File>> members;
    for (std::size_t index = 0; index < shares.size(); ++index)
      members.push_back(directory.file(std::to_string(index)));
    const std::uint64_t stripe = 3 * kPageBytes;
    const SwapFile file(members, shares, stripe);
    const std::uint64_t nbytes = 101 * stripe;
    std::set<std::pair<std::size_t, std::uint64_t>> places;
    std::vector<std::uint64_t> end(shares.size(), 0);
    for (std::uint64_t at = 0; at < nbytes; at += kPageBytes) {
      const Place place = file.locate(at);
      CHECK(place.nbytes >= kPageBytes);
      CHECK(places.emplace(place.member, place.offset).second);
      end[place.member] = std::max(end[place.member], place.offset + kPageBytes);
    }
    for (std::size_t member = 0; member < shares.size(); ++member)
      CHECK(file.member_bytes(member, nbytes) == end[member]);
  }
}
