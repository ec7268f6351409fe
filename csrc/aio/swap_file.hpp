// The file of requests: one range of bytes, striped over one file per path, with its checksums.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "aio/file.hpp"
#include "base/checksum.hpp"
#include "base/future.hpp"

namespace infinity {

// Bytes [offset, offset + nbytes) of member `member` are those from a logical offset on.
struct Place {
  std::size_t member;
  std::uint64_t offset;
  std::uint64_t nbytes;
};

// Stripes of `stripe_bytes` are assigned to the members in a fixed cycle in which member i occurs `shares[i]` times,
// evenly spread, so that any longer range loads the disks in proportion to their shares. Each member has its stripes in
// ascending order.
//
// Invariant: a 4 KiB page is in one member.
class SwapFile {
 public:
  static constexpr std::size_t kMembersMax = 64;

  explicit SwapFile(std::shared_ptr<File> file);
  // Throws std::invalid_argument: no member or too many, a share of 0, stripes that are no multiple of 4 KiB.
  SwapFile(std::vector<std::shared_ptr<File>> members, std::vector<unsigned> shares, std::uint64_t stripe_bytes);

  [[nodiscard]] const std::vector<std::shared_ptr<File>>& members() const { return members_; }
  // True if any member uses direct I/O, so that requests must be aligned.
  [[nodiscard]] bool direct() const { return direct_; }
  [[nodiscard]] Place locate(std::uint64_t offset) const;
  // Number of the first `nbytes` logical bytes that are in `member`.
  [[nodiscard]] std::uint64_t member_bytes(std::size_t member, std::uint64_t nbytes) const;

  // Reserves the blocks on every member. On failure all blocks are freed and std::system_error is thrown.
  void preallocate(std::uint64_t nbytes);

  // Remembers the checksum of every page that is written from now on, and checks every page that is read. Requests must
  // be within `nbytes`. Must be called before the first request.
  void keep_checksums(std::uint64_t nbytes);
  [[nodiscard]] const ChecksumTable* checksums() const { return checksums_ ? &*checksums_ : nullptr; }
  // Remembers the checksums of complete pages that are about to be written. Does nothing without checksums.
  void take(std::uint64_t offset, const std::byte* data, std::size_t nbytes);
  // The same as take, with checksums of the pages that were computed before.
  void put(std::uint64_t offset, const std::vector<PageChecksum>& sums);
  // The sums of blocks of complete pages, computed from the remembered checksums; empty without checksums.
  [[nodiscard]] std::vector<BlockSum> block_sums(std::uint64_t offset, std::uint64_t nbytes) const;
  // The first of these pages, which were read, that differs from its remembered checksum; the failure names file and
  // place.
  [[nodiscard]] std::optional<Failure> check(std::uint64_t offset, const std::byte* data, std::size_t nbytes) const;

 private:
  std::vector<std::shared_ptr<File>> members_;
  std::uint64_t stripe_bytes_ = 0;    // 0: one member, no stripes
  std::vector<std::uint32_t> cycle_;  // member of each stripe of a cycle
  std::vector<std::uint32_t> rank_;   // number of stripes of the same member before it in the cycle
  std::vector<unsigned> shares_;      // stripes of each member in a cycle
  bool direct_ = false;
  std::optional<ChecksumTable> checksums_;
};

}  // namespace infinity
