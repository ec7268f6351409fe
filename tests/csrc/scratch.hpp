// Files and memory for the C++ tests.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "aio/engine.hpp"
#include "base/arena.hpp"

namespace infinity::tests {

// A directory that the destructor of this object removes. The parent "/dev/shm" is on another device than "/tmp".
class Directory {
 public:
  explicit Directory(const std::string& parent = "") {
    const char* temporary = std::getenv("TMPDIR");
    path_ = (parent.empty() ? std::string(temporary != nullptr ? temporary : "/tmp") : parent) + "/infinity-XXXXXX";
    if (mkdtemp(path_.data()) == nullptr) throw std::runtime_error("no directory " + path_);
  }
  ~Directory() {
    for (const std::string& name : names_) unlink(name.c_str());
    rmdir(path_.c_str());
  }
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;

  std::shared_ptr<File> file(const std::string& name) {
    names_.push_back(path_ + "/" + name);
    return std::make_shared<File>(names_.back(), true, true);
  }

 private:
  std::string path_;
  std::vector<std::string> names_;
};

// Page-aligned memory filled with numbers that depend on `seed`.
class Pages {
 public:
  explicit Pages(std::size_t nbytes, unsigned seed = 0) : arena_(nbytes, false) {
    if (seed == 0) return;
    std::mt19937_64 random(seed);
    auto* words = reinterpret_cast<std::uint64_t*>(arena_.address());
    for (std::size_t at = 0; at < nbytes / 8; ++at) words[at] = random();
  }
  [[nodiscard]] std::byte* data() const { return arena_.address(); }
  [[nodiscard]] std::size_t nbytes() const { return arena_.nbytes(); }

 private:
  Arena arena_;
};

// Waits for a request, and returns its failure, or null. The result is a copy, because it may outlive the future.
inline std::shared_ptr<const Failure> wait(const Future& future) {
  future->wait();
  return future->failure() ? std::make_shared<const Failure>(*future->failure()) : nullptr;
}

}  // namespace infinity::tests
