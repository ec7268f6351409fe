// What a lane makes of a request: its part, which it cuts to blocks, each of them one transfer.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "aio/request.hpp"

namespace infinity {

struct Part;

struct Block {
  std::shared_ptr<Part> part;
  const File* file = nullptr;
  std::size_t first = 0;     // bytes from the start of the request
  std::uint64_t offset = 0;  // of `first` in the file
  std::uint32_t nbytes = 0;
  std::uint32_t done = 0;  // bytes moved
  unsigned retries = 0;

  [[nodiscard]] std::uint32_t left() const { return nbytes - done; }
  [[nodiscard]] inline const IoRequest& io() const;
  [[nodiscard]] Failure failure(int error, const std::string& cause, FailureKind kind = FailureKind::io) const;
};

// What one lane does of a request. Only the lane's thread touches it.
struct Part {
  std::shared_ptr<Request> request;
  std::uint64_t members = 0;  // a bit for each member of the file that this lane serves
  std::size_t cut = 0;        // bytes of the request that were handed out as blocks, or that another lane serves
  unsigned in_flight = 0;     // blocks handed out and not finished

  [[nodiscard]] bool all_cut() const { return cut == request->io.nbytes; }
  // No more blocks are handed out.
  void drop_rest() { cut = request->io.nbytes; }

  // The block that comes next, of at most `nbytes_max`; it is not handed out yet. A sync has one for each member.
  [[nodiscard]] static Block next(const std::shared_ptr<Part>& part, std::uint64_t nbytes_max);
  // Moves `cut` past what other lanes serve.
  void skip();
};

inline const IoRequest& Block::io() const { return part->request->io; }

// "read", "write" or "fdatasync": the operation in a Failure.
[[nodiscard]] std::string verb_of(OpKind kind);

}  // namespace infinity
