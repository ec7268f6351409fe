#include "aio/file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace infinity {
namespace {

// Both return an errno value. A signal may interrupt a long reservation: it is asked for again.
int reserve(int fd, off_t nbytes) {
  for (;;) {
    if (fallocate(fd, 0, 0, nbytes) == 0) return 0;
    if (errno != EINTR) return errno;
  }
}

// Without fallocate the C library writes a byte per block: slower, the same guarantee. Direct I/O would refuse so small
// a write, so the descriptor goes through the page cache for as long, and nothing of that stays cached.
int reserve_by_writing(int fd, off_t nbytes) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags & ~O_DIRECT) != 0) return errno;
  int error = posix_fallocate(fd, 0, nbytes);
  if (error == 0 && fdatasync(fd) != 0) error = errno;
  posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  if (fcntl(fd, F_SETFL, flags) != 0 && error == 0) error = errno;
  return error;
}

}  // namespace

File::File(std::string path, bool create, bool direct) : path_(std::move(path)), direct_(direct) {
  const int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW | (create ? O_CREAT : 0);
  fd_ = open(path_.c_str(), flags | (direct ? O_DIRECT : 0), 0600);
  if (fd_ < 0 && direct && errno == EINVAL) {
    // The file system has no direct I/O (some network and memory file systems): go through the page cache.
    direct_ = false;
    fd_ = open(path_.c_str(), flags, 0600);
  }
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "open " + path_);
}

File::~File() { close(fd_); }

void File::preallocate(std::uint64_t nbytes) {
  struct stat before{};
  if (fstat(fd_, &before) != 0) throw std::system_error(errno, std::generic_category(), "stat " + path_);
  if (nbytes == 0) return;
  int error = reserve(fd_, static_cast<off_t>(nbytes));
  if (error == EOPNOTSUPP) error = reserve_by_writing(fd_, static_cast<off_t>(nbytes));
  if (error == 0) return;
  // A failed preallocation keeps what it had grabbed: give it back. What is thrown is why it failed, whether or not
  // this works.
  static_cast<void>(!ftruncate(fd_, before.st_size));
  throw std::system_error(error, std::generic_category(), "preallocate " + path_);
}

}  // namespace infinity
