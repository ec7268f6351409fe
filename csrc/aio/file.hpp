// One open swap file.
#pragma once

#include <cstdint>
#include <string>

namespace infinity {

// Opened O_CLOEXEC | O_NOFOLLOW, mode 0600, O_DIRECT where the file system takes it (direct() tells).
// Not deleted here: whoever created it decides.
class File {
 public:
  // Throws std::system_error whose what() names the path and the step that failed.
  File(std::string path, bool create, bool direct);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  [[nodiscard]] int fd() const { return fd_; }
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] bool direct() const { return direct_; }

  // Reserves the blocks so that a full disk is an error here and not in the middle of a step. On failure the space
  // taken so far is given back and std::system_error is thrown.
  void preallocate(std::uint64_t nbytes);

 private:
  std::string path_;
  int fd_ = -1;
  bool direct_ = false;
};

}  // namespace infinity
