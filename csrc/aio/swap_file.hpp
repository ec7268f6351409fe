// The file as requests see it: one range of bytes, striped over one file per path, with its checksums.
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

// Bytes [offset, offset + nbytes) of member `member` hold what follows a logical offset.
struct Place {
  std::size_t member;
  std::uint64_t offset;
  std::uint64_t nbytes;
};

// Stripes of `stripe_bytes` go round the members in a fixed cycle in which member i occurs `shares[i]` times, spread
// evenly, so that any longer range loads the disks in proportion to their shares. Each member's stripes lie in order.
//
// Invariant: a 4 KiB page lies in one member.
class SwapFile {
 public:
  static constexpr std::size_t kMembersMax = 64;

  explicit SwapFile(std::shared_ptr<File> file);
  // Throws std::invalid_argument: no member or too many, a share of 0, stripes that are no multiple of 4 KiB.
  SwapFile(std::vector<std::shared_ptr<File>> members, std::vector<unsigned> shares, std::uint64_t stripe_bytes);

  [[nodiscard]] const std::vector<std::shared_ptr<File>>& members() const { return members_; }
  // True when any member uses direct I/O, so that requests must be aligned.
  [[nodiscard]] bool direct() const { return direct_; }
  [[nodiscard]] Place locate(std::uint64_t offset) const;
  // Bytes of `member` that hold the first `nbytes` logical bytes.
  [[nodiscard]] std::uint64_t member_bytes(std::size_t member, std::uint64_t nbytes) const;

  // Reserves the blocks on every member. On failure all the space is given back and std::system_error is thrown.
  void preallocate(std::uint64_t nbytes);

  // From now on every page written is remembered and every page read is checked; requests must lie within `nbytes`.
  // Must come before the first request.
  void keep_checksums(std::uint64_t nbytes);
  [[nodiscard]] const ChecksumTable* checksums() const { return checksums_ ? &*checksums_ : nullptr; }
  // Remembers the checksums of whole pages that are about to be written. Does nothing without checksums.
  void take(std::uint64_t offset, const std::byte* data, std::size_t nbytes);
  // As take, with the sums of the pages computed before.
  void put(std::uint64_t offset, const std::vector<PageChecksum>& sums);
  // The sums of the blocks of whole pages, from what was remembered; empty without checksums.
  [[nodiscard]] std::vector<BlockSum> block_sums(std::uint64_t offset, std::uint64_t nbytes) const;
  // The first of these pages, which were read, that differs from what was remembered; its file and place are named.
  [[nodiscard]] std::optional<Failure> check(std::uint64_t offset, const std::byte* data, std::size_t nbytes) const;

 private:
  std::vector<std::shared_ptr<File>> members_;
  std::uint64_t stripe_bytes_ = 0;    // 0: one member, no stripes
  std::vector<std::uint32_t> cycle_;  // the member of each stripe of a cycle
  std::vector<std::uint32_t> rank_;   // how many stripes of the same member come before it in the cycle
  std::vector<unsigned> shares_;      // stripes of each member in a cycle
  bool direct_ = false;
  std::optional<ChecksumTable> checksums_;
};

}  // namespace infinity
