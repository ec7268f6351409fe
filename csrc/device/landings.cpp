#include "device/landings.hpp"

#include <unistd.h>

#include <optional>
#include <thread>
#include <utility>

#include "base/inbox.hpp"
#include "base/require.hpp"
#include "base/thread_name.hpp"

namespace infinity {
namespace {

void check(const LandingPiece& piece) {
  require(piece.target != nullptr || piece.numel == 0, "a piece of a landing has no target");
  require(!piece.add || piece.source != nullptr, "a piece that is added to its target needs a source");
  if (piece.source == nullptr) return;
  require(piece.dtype == DType::fp32 || piece.dtype == piece.source_dtype,
          "a gradient lands in its own dtype or in fp32");
  require(!piece.add || piece.dtype == DType::fp32, "gradients are added up in fp32 only");
}

}  // namespace

// Invariant: only the landings' thread accesses `broken` and `stopping`, in messages of the inbox.
struct Landings::Impl {
  const std::shared_ptr<const DeviceGate> gate;
  const std::shared_ptr<ThreadPool> pool;
  const Isa isa;
  const pid_t pid = getpid();
  Inbox inbox;
  std::optional<Failure> broken;  // the runtime's first error
  bool stopping = false;
  std::thread thread;  // declared last: the thread starts when all other members exist

  Impl(std::shared_ptr<const DeviceGate> given_gate, std::shared_ptr<ThreadPool> given_pool, Isa given_isa)
      : gate(std::move(given_gate)), pool(std::move(given_pool)), isa(given_isa), thread([this] { run(); }) {}

  ~Impl() {
    inbox.post([this] { stopping = true; });
    thread.join();
  }

  void run() {
    name_thread("infinity-land");
    broken = gate->enter();
    while (!stopping) {
      inbox.wait();
      inbox.run();
    }
  }

  void land(void* event, const std::vector<LandingPiece>& pieces, LandingCompletion& future) {
    if (!broken && event != nullptr) broken = gate->synchronize(event);
    if (!broken) {
      for (const LandingPiece& piece : pieces) future.sums.push_back(land(piece));
    }
    future.complete(broken);
  }

  [[nodiscard]] std::vector<double> land(const LandingPiece& piece) const {
    const auto numel = static_cast<std::size_t>(piece.numel);
    if (piece.source == nullptr) return sums_of_squares(piece.target, piece.dtype, piece.first, numel, isa, *pool);
    return land_gradient(piece.target, piece.dtype, piece.source, piece.source_dtype, piece.first, numel, piece.add,
                         isa, *pool);
  }
};

Landings::Landings(std::shared_ptr<const DeviceGate> gate, std::shared_ptr<ThreadPool> pool, Isa isa) {
  require(gate != nullptr && pool != nullptr, "landings need a gate and a pool");
  impl_ = std::make_unique<Impl>(std::move(gate), std::move(pool), isa);
}

Landings::~Landings() {
  // In a forked child the thread does not exist: do not join the thread, and do not destroy the objects that it owns.
  if (getpid() != impl_->pid) static_cast<void>(impl_.release());
}

LandingFuture Landings::land(void* event, std::vector<LandingPiece> pieces) {
  require(getpid() == impl_->pid, "landings were used in a forked child, where their thread does not exist");
  for (const LandingPiece& piece : pieces) check(piece);
  auto future = std::make_shared<LandingCompletion>();
  impl_->inbox.post(
      [impl = impl_.get(), event, pieces = std::move(pieces), future] { impl->land(event, pieces, *future); });
  return future;
}

}  // namespace infinity
