// The io_uring backend: one ring, which the lane's thread creates and uses. A read of an eventfd is always on the ring;
// a write to the eventfd completes the read, which wakes the thread.
#include "aio/backend.hpp"
#include "base/page.hpp"

#ifdef INFINITY_HAVE_URING
#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <system_error>

namespace infinity {
namespace {

constexpr unsigned kFilesMax = 128;                            // registered at the same time
constexpr unsigned kBuffersMax = 1024;                         // registered at the same time
constexpr std::size_t kBufferBytesMax = std::size_t{1} << 30;  // the kernel's limit for one registration
constexpr std::uint64_t kWakeToken = ~std::uint64_t{0};

// A ring may be mapped at the address of an earlier ring whose thread was never joined, because the earlier ring's
// device had been given up. The kernel orders the two rings: it unmaps the earlier ring before it maps the later one.
// ThreadSanitizer does not see this order, because liburing makes these system calls without libc. Called before a ring
// is closed, and before a new ring is used.
void order_rings() {
  static std::mutex rings;
  const std::lock_guard lock(rings);
}

std::string advice(int error) {
  switch (error) {
    case EPERM:
    case EACCES:
      return "the kernel refuses io_uring: Docker's default seccomp profile blocks it (run with --security-opt "
             "seccomp=unconfined or a profile that allows io_uring), or kernel.io_uring_disabled is set (sysctl)";
    case ENOSYS:
      return "this kernel has no io_uring, or hides it (Linux 5.6 or newer is needed)";
    case ENOMEM:
      return "not enough locked memory for the ring: raise the memlock limit (ulimit -l)";
    default:
      return "io_uring could not be set up";
  }
}

class UringBackend final : public Backend {
 public:
  explicit UringBackend(unsigned queue_depth) {
    open_ring(queue_depth + 1);  // one more entry for the wake-up read
    try {
      prove();
      // Both tables start empty. Kernels before 5.19 do not support such tables; on these kernels the ring works
      // without tables.
      fixed_files_ = io_uring_register_files_sparse(&ring_, kFilesMax) == 0;
      fixed_buffers_ = io_uring_register_buffers_sparse(&ring_, kBuffersMax) == 0;
    } catch (...) {
      release();
      throw;
    }
  }

  ~UringBackend() override { release(); }

  std::string name() const override { return "io_uring"; }
  std::string details() const override {
    return std::string("setup flags ") + flag_names_ + (fixed_files_ ? ", registered files" : "") +
           (buffers_.empty() ? "" : ", registered memory");
  }

  void submit(const BlockOp& op) override {
    const int index = index_of(*op.file);
    const int fd = index >= 0 ? index : op.file->fd();
    io_uring_sqe* sqe = next_sqe();
    if (op.kind == OpKind::sync) {
      io_uring_prep_fsync(sqe, fd, IORING_FSYNC_DATASYNC);
      if (index >= 0) sqe->flags |= IOSQE_FIXED_FILE;
      sqe->user_data = op.token;
      return;
    }
    const int buffer = buffer_of(op.data, op.nbytes);
    const bool read = op.kind == OpKind::read;
    const auto fixed = read ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED;
    const auto plain = read ? IORING_OP_READ : IORING_OP_WRITE;
    io_uring_prep_rw(buffer >= 0 ? fixed : plain, sqe, fd, op.data, op.nbytes, op.offset);
    if (buffer >= 0) sqe->buf_index = static_cast<__u16>(buffer);
    if (index >= 0) sqe->flags |= IOSQE_FIXED_FILE;
    sqe->user_data = op.token;
  }

  void wait(std::vector<BlockResult>& results, unsigned at_least) override {
    // A wake-up is also a completion: if several completions are requested, the wake-up counts as one of them.
    const int error = io_uring_submit_and_wait(&ring_, at_least);
    // EINTR and EBUSY occur again with the next call; any other error is a bug in the use of the ring.
    if (error < 0 && error != -EINTR && error != -EBUSY && error != -EAGAIN) {
      throw std::system_error(-error, std::generic_category(), "io_uring_submit_and_wait");
    }
    io_uring_cqe* cqe = nullptr;
    unsigned head = 0;
    unsigned seen = 0;
    bool woken = false;
    io_uring_for_each_cqe(&ring_, head, cqe) {
      ++seen;
      if (cqe->user_data == kWakeToken) {
        woken = true;
      } else {
        results.push_back({cqe->user_data, cqe->res});
      }
    }
    io_uring_cq_advance(&ring_, seen);
    if (woken) arm_wake();
  }

  std::string register_memory(std::byte* data, std::size_t nbytes) override {
    if (!fixed_buffers_) return "this kernel has no table of buffers (Linux 5.19 is needed)";
    for (std::size_t done = 0; done < nbytes; done += kBufferBytesMax) {
      if (buffers_.size() == kBuffersMax) return "more than " + std::to_string(kBuffersMax) + " GiB are registered";
      const iovec piece{data + done, std::min(kBufferBytesMax, nbytes - done)};
      const auto index = static_cast<unsigned>(buffers_.size());
      const int registered = io_uring_register_buffers_update_tag(&ring_, index, &piece, nullptr, 1);
      if (registered < 0) return refusal(-registered, nbytes);
      buffers_.push_back({data + done, piece.iov_len});
    }
    return "";
  }

  void forget_file(std::uint64_t id) override {
    const auto found = std::find(files_.begin(), files_.end(), id);
    if (found == files_.end()) return;
    const int none = -1;
    const auto index = static_cast<unsigned>(found - files_.begin());
    // This call cannot fail for an index in use; if it failed, the file would only stay open until the ring closes.
    static_cast<void>(io_uring_register_files_update(&ring_, index, &none, 1));
    *found = kNoFile;
  }

  void wake() override {
    const std::uint64_t one = 1;
    // The write fails only if the eventfd's counter overflows, and in that case the thread is awake already.
    static_cast<void>(!write(wake_fd_, &one, sizeof(one)));
  }

 private:
  static constexpr std::uint64_t kNoFile = 0;

  struct Buffer {
    std::byte* data;
    std::size_t nbytes;
  };

  static std::string refusal(int error, std::size_t nbytes) {
    std::string text = "the kernel did not register " + std::to_string(nbytes >> 20) + " MiB with io_uring (" +
                       std::strerror(error) + ")";
    if (error == ENOMEM) text += ": raise the memlock limit (ulimit -l)";
    return text;
  }

  // The index of a file in the ring's table, or -1. A file is added to the table at its first use.
  int index_of(const File& file) {
    if (!fixed_files_) return -1;
    const auto found = std::find(files_.begin(), files_.end(), file.id());
    if (found != files_.end()) return static_cast<int>(found - files_.begin());
    auto free = std::find(files_.begin(), files_.end(), kNoFile);
    if (free == files_.end()) {
      if (files_.size() == kFilesMax) return -1;
      files_.push_back(kNoFile);
      free = files_.end() - 1;
    }
    const int fd = file.fd();
    const auto index = static_cast<int>(free - files_.begin());
    if (io_uring_register_files_update(&ring_, static_cast<unsigned>(index), &fd, 1) != 1) return -1;
    *free = file.id();
    return index;
  }

  // The registered range that contains all of a block, or -1.
  int buffer_of(const std::byte* data, std::size_t nbytes) const {
    for (std::size_t index = 0; index < buffers_.size(); ++index) {
      const Buffer& buffer = buffers_[index];
      if (data < buffer.data || data + nbytes > buffer.data + buffer.nbytes) continue;
      // Linux before 6.7 computes an empty first segment for this offset, and the transfer fails.
      return data - buffer.data == kPageBytes ? -1 : static_cast<int>(index);
    }
    return -1;
  }

  void open_ring(unsigned entries) {
    struct Setup {
      unsigned flags;
      const char* names;
    };
    static constexpr Setup kSetups[] = {
        {IORING_SETUP_SUBMIT_ALL | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,  // Linux 6.1
         "SUBMIT_ALL, SINGLE_ISSUER, DEFER_TASKRUN"},
        {IORING_SETUP_SUBMIT_ALL | IORING_SETUP_COOP_TASKRUN, "SUBMIT_ALL, COOP_TASKRUN"},  // 5.19
        {IORING_SETUP_SUBMIT_ALL, "SUBMIT_ALL"},                                            // 5.18
        {0, "none"},
    };
    int error = 0;
    for (const Setup& setup : kSetups) {
      io_uring_params params{};
      params.flags = setup.flags;
      error = io_uring_queue_init_params(entries, &ring_, &params);
      flag_names_ = setup.names;
      if (error == 0) return order_rings();
      if (error != -EINVAL) break;
    }
    throw std::system_error(-error, std::generic_category(), advice(-error));
  }

  // A ring can be set up and still refuse to work: io_uring_enter may be filtered, and kernels before 5.6 do not
  // support reads. So the wake-up read, which is needed anyway, is tried once on an eventfd that is ready to be read.
  void prove() {
    wake_fd_ = eventfd(1, EFD_CLOEXEC);
    if (wake_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    arm_wake();
    int error = 0;
    do {
      error = io_uring_submit_and_wait(&ring_, 1);
    } while (error == -EINTR);
    io_uring_cqe* cqe = nullptr;
    if (error >= 0) error = io_uring_peek_cqe(&ring_, &cqe);
    if (error == 0 && cqe->res < 0) error = cqe->res;
    if (error < 0) throw std::system_error(-error, std::generic_category(), advice(-error));
    io_uring_cqe_seen(&ring_, cqe);
    arm_wake();
  }

  void release() {
    order_rings();
    io_uring_queue_exit(&ring_);
    if (wake_fd_ >= 0) close(wake_fd_);
  }

  io_uring_sqe* next_sqe() {
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    if (sqe == nullptr) {  // continuations may have filled the submission queue
      io_uring_submit(&ring_);
      sqe = io_uring_get_sqe(&ring_);
    }
    if (sqe == nullptr) throw std::system_error(EBUSY, std::generic_category(), "the io_uring queue stays full");
    return sqe;
  }

  void arm_wake() {
    io_uring_sqe* sqe = next_sqe();
    io_uring_prep_read(sqe, wake_fd_, &wake_value_, sizeof(wake_value_), 0);
    sqe->user_data = kWakeToken;
  }

  io_uring ring_{};
  bool fixed_files_ = false;
  bool fixed_buffers_ = false;
  std::vector<std::uint64_t> files_;  // ids, by index
  std::vector<Buffer> buffers_;       // by index
  const char* flag_names_ = "";
  int wake_fd_ = -1;
  std::uint64_t wake_value_ = 0;
};

}  // namespace

std::unique_ptr<Backend> make_uring_backend(unsigned queue_depth) {
  return std::make_unique<UringBackend>(queue_depth);
}

}  // namespace infinity

#else
#include <cerrno>
#include <system_error>

namespace infinity {

std::unique_ptr<Backend> make_uring_backend(unsigned) {
  throw std::system_error(ENOSYS, std::generic_category(),
                          "built without liburing (install liburing-dev and build again)");
}

}  // namespace infinity
#endif
