// The memory in which tiles are staged, divided into buffers of one tile each.
#pragma once

#include <cstddef>
#include <future>
#include <vector>

namespace infinity {

// Only the driver's thread accesses the staging.
//
// Invariant: after abandon() no buffer is handed out any more, not even a buffer that was given back, because a device
// that was given up may still write to it.
class Staging {
 public:
  Staging(std::byte* memory, std::size_t buffers, std::size_t buffer_bytes, std::size_t ahead_tiles_max);

  [[nodiscard]] bool has_free() const { return !free_.empty(); }
  [[nodiscard]] std::byte* take();
  void give_back(std::byte* buffer);
  // Largest number of tiles that may be read ahead: a fixed number plus the number of lent buffers.
  [[nodiscard]] std::size_t ahead_tiles_max() const;

  // Adds as many buffers as fit in memory that is lent to the staging.
  void lend(std::byte* memory, std::size_t nbytes);
  // Stops handing out buffers of memory that was lent. The returned future is true once no buffer of the memory is in
  // use, and false once the staging is abandoned. Throws std::invalid_argument if the memory was not lent, or was
  // already reclaimed.
  [[nodiscard]] std::future<bool> reclaim(const std::byte* memory);

  void abandon();

 private:
  struct Loan {
    std::byte* begin;
    std::byte* end;
    std::size_t buffers;           // number of buffers; once `ending` is set, the number of buffers in use
    bool ending = false;           // no buffer is handed out any more
    std::promise<bool> reclaimed;  // set when the loan ends

    [[nodiscard]] bool has(const std::byte* buffer) const { return begin <= buffer && buffer < end; }
  };

  void add(std::byte* memory, std::size_t buffers);

  const std::size_t buffer_bytes_;
  const std::size_t ahead_tiles_max_;
  std::vector<std::byte*> free_;  // the last free buffer is handed out next
  std::vector<Loan> loans_;
  bool abandoned_ = false;
};

}  // namespace infinity
