// One open file below a swap file.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace infinity {

// Observer of closing files. If a ring has registered a file, the file stays open, and its space stays allocated, until
// the ring forgets the file.
class FileWatcher {
 public:
  virtual ~FileWatcher() = default;
  virtual void file_closed(std::uint64_t id) = 0;
};

// Opened with O_CLOEXEC | O_NOFOLLOW and mode 0600, and with O_DIRECT if the file system supports direct I/O in blocks
// of 4 KiB (see direct()). The creator of the file deletes it, not this class.
class File {
 public:
  // `numa_node`: NUMA node of the disk that stores the file, or -1. Throws std::system_error whose what() names the
  // path and the step that failed.
  File(std::string path, bool create, bool direct, int numa_node = -1);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  [[nodiscard]] int fd() const { return fd_; }
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] bool direct() const { return direct_; }
  // Alignment in bytes that direct I/O needs for memory addresses, and for offsets and lengths (STATX_DIOALIGN; 4096 if
  // the kernel does not report it). 1 without direct I/O.
  [[nodiscard]] std::uint32_t memory_alignment() const { return memory_alignment_; }
  [[nodiscard]] std::uint32_t offset_alignment() const { return offset_alignment_; }
  // The file system that the file is on (st_dev). Files of one file system share a lane.
  [[nodiscard]] dev_t device() const { return device_; }
  [[nodiscard]] int numa_node() const { return numa_node_; }
  // Unlike a descriptor, an id is never reused in a process.
  [[nodiscard]] std::uint64_t id() const { return id_; }
  [[nodiscard]] std::uint64_t nbytes() const;  // throws std::system_error

  // Reserves the blocks, so that a full disk is an error now and not in the middle of a step. On failure the blocks
  // reserved so far are freed and std::system_error is thrown.
  void preallocate(std::uint64_t nbytes);
  // Truncates the file; throws std::system_error.
  void truncate(std::uint64_t nbytes);
  // Calls `watcher` once, when this file closes.
  void watch(const std::shared_ptr<FileWatcher>& watcher);

 private:
  void open(bool create);
  void inquire();

  std::string path_;
  int fd_ = -1;
  bool direct_ = false;
  std::uint32_t memory_alignment_ = 1;
  std::uint32_t offset_alignment_ = 1;
  dev_t device_ = 0;
  int numa_node_ = -1;
  std::uint64_t id_;
  std::mutex mutex_;  // guards watchers_
  std::vector<std::weak_ptr<FileWatcher>> watchers_;
};

}  // namespace infinity
