// io_uring: one ring, created and used by the engine's thread; an eventfd read on the ring wakes it.
#include "aio/backend.hpp"

#ifdef INFINITY_HAVE_URING
#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace infinity {
namespace {

constexpr std::uint64_t kWakeToken = ~std::uint64_t{0};

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
  explicit UringBackend(unsigned queue_depth) : capacity_(queue_depth) {
    open_ring(queue_depth + 1);  // one more for the wake-up read
    try {
      prove();
    } catch (...) {
      release();
      throw;
    }
  }

  ~UringBackend() override { release(); }

  std::string name() const override { return "io_uring"; }
  std::string details() const override { return std::string("setup flags ") + flag_names_; }
  unsigned capacity() const override { return capacity_; }

  void submit(const BlockOp& op) override {
    io_uring_sqe* sqe = next_sqe();
    if (op.kind == OpKind::read) {
      io_uring_prep_read(sqe, op.fd, op.data, op.nbytes, op.offset);
    } else {
      io_uring_prep_write(sqe, op.fd, op.data, op.nbytes, op.offset);
    }
    sqe->user_data = op.token;
  }

  void wait(std::vector<BlockResult>& results) override {
    const int error = io_uring_submit_and_wait(&ring_, 1);
    // EINTR and EBUSY come again with the next call; anything else is a bug in how we use the ring.
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

  void wake() override {
    const std::uint64_t one = 1;
    // Cannot fail but by overflow, and then the thread is awake already.
    static_cast<void>(!write(wake_fd_, &one, sizeof(one)));
  }

 private:
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
      if (error == 0) return;
      if (error != -EINVAL) break;
    }
    throw std::system_error(-error, std::generic_category(), advice(-error));
  }

  // A ring can be set up and still refuse to work (io_uring_enter filtered, or a kernel before 5.6 that has no read):
  // the read we need anyway is tried once on an eventfd that has something to read.
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
    io_uring_queue_exit(&ring_);
    if (wake_fd_ >= 0) close(wake_fd_);
  }

  io_uring_sqe* next_sqe() {
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    if (sqe == nullptr) {  // continuations may fill the queue before it was handed over
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

  const unsigned capacity_;
  io_uring ring_{};
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
