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
      return "this kernel has no io_uring (5.1 or newer is needed)";
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
    wake_fd_ = eventfd(0, EFD_CLOEXEC);
    if (wake_fd_ < 0) {
      const int error = errno;
      io_uring_queue_exit(&ring_);
      throw std::system_error(error, std::generic_category(), "eventfd");
    }
    arm_wake();
    // A ring can be set up and still refuse to work: try the read we need anyway.
    const int submitted = io_uring_submit(&ring_);
    if (submitted < 0) {
      io_uring_queue_exit(&ring_);
      close(wake_fd_);
      throw std::system_error(-submitted, std::generic_category(), advice(-submitted));
    }
  }

  ~UringBackend() override {
    io_uring_queue_exit(&ring_);
    close(wake_fd_);
  }

  std::string name() const override { return "io_uring"; }
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
    static constexpr unsigned kFlags[] = {
        IORING_SETUP_SUBMIT_ALL | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
        IORING_SETUP_SUBMIT_ALL | IORING_SETUP_COOP_TASKRUN,
        0,
    };
    int error = 0;
    for (const unsigned flags : kFlags) {
      io_uring_params params{};
      params.flags = flags;
      error = io_uring_queue_init_params(entries, &ring_, &params);
      if (error == 0) return;
      if (error != -EINVAL) break;
    }
    throw std::system_error(-error, std::generic_category(), advice(-error));
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
