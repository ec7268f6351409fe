#include "aio/part.hpp"

namespace infinity {

std::string verb_of(OpKind kind) {
  if (kind == OpKind::sync) return "fdatasync";
  return kind == OpKind::read ? "read" : "write";
}

Failure Block::failure(int error, const std::string& cause, FailureKind kind) const {
  Failure failure;
  failure.kind = kind;
  failure.operation = verb_of(io().kind);
  failure.path = file->path();
  failure.offset = offset + done;
  failure.nbytes = left();
  failure.error_number = error;
  failure.cause = cause.empty() ? std::string(std::strerror(error)) : cause;
  compose(failure);
  return failure;
}

Block Part::next(const std::shared_ptr<Part>& part, std::uint64_t nbytes_max) {
  const IoRequest& io = part->request->io;
  const std::size_t cut = part->cut;
  if (io.kind == OpKind::sync) return {part, io.file->members()[cut].get(), cut, 0, 1};
  const Place place = io.file->locate(io.offset + cut);
  const auto nbytes = std::min<std::uint64_t>({nbytes_max, io.nbytes - cut, place.nbytes});
  return {part, io.file->members()[place.member].get(), cut, place.offset, static_cast<std::uint32_t>(nbytes)};
}

void Part::skip() {
  const IoRequest& io = request->io;
  if (io.kind == OpKind::sync) {
    while (cut < io.nbytes && (members >> cut & 1) == 0) ++cut;
    return;
  }
  while (cut < io.nbytes) {
    const Place place = io.file->locate(io.offset + cut);
    if ((members >> place.member & 1) != 0) return;
    cut += static_cast<std::size_t>(std::min<std::uint64_t>(place.nbytes, io.nbytes - cut));
  }
}

}  // namespace infinity
