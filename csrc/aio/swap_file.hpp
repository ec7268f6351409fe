// The file that requests address: one range of bytes, striped over one file per path, with checksums of its pages.
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

// Bytes [offset, offset + nbytes) of member `member`, which contain the data from a given logical offset on.
struct Place {
  std::size_t member;
  std::uint64_t offset;
  std::uint64_t nbytes;
};

// Stripes of `stripe_bytes` are assigned to the members in a fixed cycle in which member i occurs `shares[i]` times,
// evenly spread, so that any longer range loads the disks in proportion to their shares. Each member contains its
// stripes in ascending order.
//
// Invariant: no 4 KiB page is divided between two members.
class SwapFile {
 public:
  static constexpr std::size_t kMembersMax = 64;

  explicit SwapFile(std::shared_ptr<File> file);
  // Throws std::invalid_argument if there is no member or too many, if a share is 0, or if stripes are no multiple of 4
  // KiB.
  SwapFile(std::vector<std::shared_ptr<File>> members, std::vector<unsigned> shares, std::uint64_t stripe_bytes);

  [[nodiscard]] const std::vector<std::shared_ptr<File>>& members() const { return members_; }
  // True if any member uses direct I/O, so that requests must be aligned.
  [[nodiscard]] bool direct() const { return direct_; }
  [[nodiscard]] Place locate(std::uint64_t offset) const;
  // How many of the first `nbytes` logical bytes are in `member`.
  [[nodiscard]] std::uint64_t member_bytes(std::size_t member, std::uint64_t nbytes) const;

  // Reserves the blocks on every member. On failure all blocks are freed and std::system_error is thrown.
  void preallocate(std::uint64_t nbytes);

  // From this call on, the checksum of every page that is written is remembered, and every page that is read is
  // checked. Requests must be within `nbytes`. Must be called before the first request.
  void keep_checksums(std::uint64_t nbytes);
  [[nodiscard]] const ChecksumTable* checksums() const { return checksums_ ? &*checksums_ : nullptr; }
  // Remembers the checksums of complete pages that are about to be written. Does nothing without checksums.
  void take(std::uint64_t offset, const std::byte* data, std::size_t nbytes);
  // The same as take, with checksums that the caller has computed.
  void put(std::uint64_t offset, const std::vector<PageChecksum>& sums);
  // The sums of blocks of complete pages, computed from the remembered checksums; empty without checksums.
  [[nodiscard]] std::vector<BlockSum> block_sums(std::uint64_t offset, std::uint64_t nbytes) const;
  // Compares pages that were read with their remembered checksums. Returns a failure for the first page that differs;
  // the failure names the file and the offset.
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
