#include "aio/swap_file.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <system_error>
#include <utility>

#include "base/page.hpp"
#include "base/require.hpp"

namespace infinity {
namespace {

// Smooth weighted round robin: in each turn, every member's credit grows by the member's share. The member with the
// most credit is picked, and its credit falls by the sum of all shares.
std::vector<std::uint32_t> make_cycle(const std::vector<unsigned>& shares) {
  const auto total = std::accumulate(shares.begin(), shares.end(), std::int64_t{0});
  std::vector<std::int64_t> credit(shares.size(), 0);
  std::vector<std::uint32_t> cycle;
  for (std::int64_t turn = 0; turn < total; ++turn) {
    for (std::size_t member = 0; member < shares.size(); ++member) credit[member] += shares[member];
    const auto richest = std::max_element(credit.begin(), credit.end());
    *richest -= total;
    cycle.push_back(static_cast<std::uint32_t>(richest - credit.begin()));
  }
  return cycle;
}

}  // namespace

SwapFile::SwapFile(std::shared_ptr<File> file) : members_{std::move(file)}, direct_(members_[0]->direct()) {}

SwapFile::SwapFile(std::vector<std::shared_ptr<File>> members, std::vector<unsigned> shares, std::uint64_t stripe_bytes)
    : members_(std::move(members)), shares_(std::move(shares)) {
  require(!members_.empty() && members_.size() <= kMembersMax && members_.size() == shares_.size(),
          "a swap file needs 1 to 64 members, each with a share");
  constexpr unsigned kShareMax = 1024;
  require(std::all_of(shares_.begin(), shares_.end(), [](unsigned share) { return share > 0 && share <= kShareMax; }),
          "a share must be between 1 and 1024");
  require(stripe_bytes > 0 && stripe_bytes % kPageBytes == 0, "stripes must be a positive multiple of 4 KiB");
  direct_ = std::any_of(members_.begin(), members_.end(), [](const auto& file) { return file->direct(); });
  if (members_.size() == 1) return;
  stripe_bytes_ = stripe_bytes;
  cycle_ = make_cycle(shares_);
  std::vector<std::uint32_t> seen(members_.size(), 0);
  for (const std::uint32_t member : cycle_) rank_.push_back(seen[member]++);
}

Place SwapFile::locate(std::uint64_t offset) const {
  if (stripe_bytes_ == 0) return {0, offset, std::numeric_limits<std::uint64_t>::max() - offset};
  const std::uint64_t stripe = offset / stripe_bytes_;
  const std::uint64_t within = offset % stripe_bytes_;
  const std::size_t turn = stripe % cycle_.size();
  const std::size_t member = cycle_[turn];
  const std::uint64_t own = stripe / cycle_.size() * shares_[member] + rank_[turn];
  return {member, own * stripe_bytes_ + within, stripe_bytes_ - within};
}

std::uint64_t SwapFile::member_bytes(std::size_t member, std::uint64_t nbytes) const {
  if (stripe_bytes_ == 0) return nbytes;
  const std::uint64_t stripes = (nbytes + stripe_bytes_ - 1) / stripe_bytes_;
  const auto rest = static_cast<std::ptrdiff_t>(stripes % cycle_.size());
  const auto in_rest = std::count(cycle_.begin(), cycle_.begin() + rest, static_cast<std::uint32_t>(member));
  return (stripes / cycle_.size() * shares_[member] + static_cast<std::uint64_t>(in_rest)) * stripe_bytes_;
}

void SwapFile::preallocate(std::uint64_t nbytes) {
  std::vector<std::uint64_t> before;
  for (const auto& member : members_) before.push_back(member->nbytes());
  std::size_t done = 0;
  try {
    for (; done < members_.size(); ++done) members_[done]->preallocate(member_bytes(done, nbytes));
  } catch (const std::system_error&) {
    for (std::size_t member = 0; member < done; ++member) members_[member]->truncate(before[member]);
    throw;
  }
}

void SwapFile::keep_checksums(std::uint64_t nbytes) {
  checksums_.emplace(static_cast<std::size_t>(round_up_to_page(nbytes) / kPageBytes));
}

void SwapFile::take(std::uint64_t offset, const std::byte* data, std::size_t nbytes) {
  if (checksums_) checksums_->take(offset / kPageBytes, data, nbytes / kPageBytes);
}

void SwapFile::put(std::uint64_t offset, const std::vector<PageChecksum>& sums) {
  if (checksums_) checksums_->put(offset / kPageBytes, sums);
}

std::vector<BlockSum> SwapFile::block_sums(std::uint64_t offset, std::uint64_t nbytes) const {
  if (!checksums_) return {};
  return checksums_->block_sums(static_cast<std::size_t>(offset / kPageBytes),
                                static_cast<std::size_t>(nbytes / kPageBytes));
}

std::optional<Failure> SwapFile::check(std::uint64_t offset, const std::byte* data, std::size_t nbytes) const {
  if (!checksums_) return std::nullopt;
  const std::size_t page = checksums_->first_difference(offset / kPageBytes, data, nbytes / kPageBytes);
  if (page == ChecksumTable::kNone) return std::nullopt;
  const Place place = locate(offset + page * kPageBytes);
  return composed({FailureKind::corruption, "read", members_[place.member]->path(), place.offset, kPageBytes, 0,
                   "the data read differ from the data written", ""});
}

}  // namespace infinity
