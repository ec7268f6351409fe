#include "aio/file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace infinity {

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
  int error = 0;
  if (nbytes > 0 && fallocate(fd_, 0, 0, static_cast<off_t>(nbytes)) != 0) {
    error = errno;
    // Without fallocate the C library writes zeros: slower, the same guarantee.
    if (error == EOPNOTSUPP) error = posix_fallocate(fd_, 0, static_cast<off_t>(nbytes));
  }
  if (error == 0) return;
  // A failed preallocation keeps what it had grabbed: give it back.
  if (ftruncate(fd_, before.st_size) != 0 && error == 0) error = errno;
  throw std::system_error(error, std::generic_category(), "preallocate " + path_);
}

}  // namespace infinity
