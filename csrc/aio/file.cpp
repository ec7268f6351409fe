#include "aio/file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/page.hpp"

namespace infinity {
namespace {

std::atomic<std::uint64_t> next_id{1};

struct Alignment {
  std::uint32_t memory;
  std::uint32_t offset;
};

// Linux 6.1 and later report the alignment (STATX_DIOALIGN, stx_dio_mem_align and the next field). The headers may be
// older than the kernel: wheels are built with such headers. In that case the older struct has unused space at the
// offset of these fields.
constexpr unsigned kStatxAlignment = 0x2000;
constexpr std::size_t kStatxAlignmentOffset = 0x98;
static_assert(kStatxAlignmentOffset + sizeof(Alignment) <= sizeof(struct statx));
#ifdef STATX_DIOALIGN
static_assert(kStatxAlignment == STATX_DIOALIGN);
static_assert(kStatxAlignmentOffset == offsetof(struct statx, stx_dio_mem_align));
static_assert(kStatxAlignmentOffset + offsetof(Alignment, offset) == offsetof(struct statx, stx_dio_offset_align));
#endif

// Alignment that direct I/O on this file needs; {0, 0} if the file system reports that direct I/O is not supported.
// Kernels before 6.1 and some file systems do not report the alignment. In that case the result is 4 KiB, which every
// disk with blocks of up to 4 KiB accepts.
Alignment direct_alignment(int fd) {
  struct statx info{};
  Alignment found{kPageBytes, kPageBytes};
  if (statx(fd, "", AT_EMPTY_PATH, kStatxAlignment, &info) == 0 && (info.stx_mask & kStatxAlignment) != 0) {
    std::memcpy(&found, reinterpret_cast<const std::byte*>(&info) + kStatxAlignmentOffset, sizeof(found));
  }
  return found;
}

// Reserves the blocks of a file, and repeats the call if a signal interrupts it. Returns an errno value, as
// reserve_by_writing does.
int reserve(int fd, off_t nbytes) {
  for (;;) {
    if (fallocate(fd, 0, 0, nbytes) == 0) return 0;
    if (errno != EINTR) return errno;
  }
}

// If the file system does not support fallocate, the C library writes one byte per block; this is slower and also
// reserves the blocks. Direct I/O refuses a write of one byte, so direct I/O is switched off during these writes.
// After these writes the file's pages are dropped from the page cache.
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

File::File(std::string path, bool create, bool direct, int numa_node)
    : path_(std::move(path)), direct_(direct), numa_node_(numa_node), id_(next_id++) {
  open(create);
  try {
    inquire();
  } catch (...) {
    close(fd_);
    throw;
  }
}

void File::open(bool create) {
  const int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW | (create ? O_CREAT : 0);
  fd_ = ::open(path_.c_str(), flags | (direct_ ? O_DIRECT : 0), 0600);
  if (fd_ < 0 && direct_ && errno == EINVAL) {
    // The file system has no direct I/O (some network and memory file systems): use the page cache.
    direct_ = false;
    fd_ = ::open(path_.c_str(), flags, 0600);
  }
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "open " + path_);
}

void File::inquire() {
  struct stat info{};
  if (fstat(fd_, &info) != 0) throw std::system_error(errno, std::generic_category(), "stat " + path_);
  device_ = info.st_dev;
  if (!direct_) return;
  const Alignment alignment = direct_alignment(fd_);
  // The engine moves multiples of 4 KiB. A file that needs larger blocks, or has no direct I/O, uses the page cache.
  if (alignment.offset == 0 || alignment.offset > kPageBytes || alignment.memory > kPageBytes) {
    const int flags = fcntl(fd_, F_GETFL);
    if (flags < 0 || fcntl(fd_, F_SETFL, flags & ~O_DIRECT) != 0) {
      throw std::system_error(errno, std::generic_category(), "leave direct I/O on " + path_);
    }
    direct_ = false;
    return;
  }
  memory_alignment_ = alignment.memory == 0 ? 1 : alignment.memory;
  offset_alignment_ = alignment.offset;
}

File::~File() {
  close(fd_);
  const std::lock_guard lock(mutex_);
  for (const auto& watcher : watchers_) {
    if (const auto alive = watcher.lock()) alive->file_closed(id_);
  }
}

void File::watch(const std::shared_ptr<FileWatcher>& watcher) {
  const std::lock_guard lock(mutex_);
  for (const auto& known : watchers_) {
    if (!known.owner_before(watcher) && !watcher.owner_before(known)) return;
  }
  watchers_.push_back(watcher);
}

std::uint64_t File::nbytes() const {
  struct stat info{};
  if (fstat(fd_, &info) != 0) throw std::system_error(errno, std::generic_category(), "stat " + path_);
  return static_cast<std::uint64_t>(info.st_size);
}

void File::truncate(std::uint64_t nbytes) {
  if (ftruncate(fd_, static_cast<off_t>(nbytes)) != 0) {
    throw std::system_error(errno, std::generic_category(), "truncate " + path_);
  }
}

void File::preallocate(std::uint64_t nbytes) {
  const std::uint64_t before = this->nbytes();
  if (nbytes == 0) return;
  int error = reserve(fd_, static_cast<off_t>(nbytes));
  if (error == EOPNOTSUPP) error = reserve_by_writing(fd_, static_cast<off_t>(nbytes));
  if (error == 0) return;
  // A failed preallocation keeps the blocks that were reserved before the failure: free these blocks. If freeing them
  // fails, too, the first error is thrown.
  static_cast<void>(!ftruncate(fd_, static_cast<off_t>(before)));
  throw std::system_error(error, std::generic_category(), "preallocate " + path_);
}

}  // namespace infinity
