// The twin of a real backend that fails on request: behind the same interface, so that a lane cannot tell.
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "aio/backend.hpp"

namespace infinity {
namespace {

constexpr std::uint32_t kPage = 4096;

// Aligned memory in which a block may be damaged without touching the caller's.
class Bounce {
 public:
  explicit Bounce(std::size_t nbytes)
      : nbytes_(nbytes), memory_(mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    if (memory_ == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "memory for a fault");
  }
  ~Bounce() { munmap(memory_, nbytes_); }
  Bounce(const Bounce&) = delete;
  Bounce& operator=(const Bounce&) = delete;
  [[nodiscard]] std::byte* data() const { return static_cast<std::byte*>(memory_); }

 private:
  std::size_t nbytes_;
  void* memory_;
};

class FaultyBackend final : public Backend {
 public:
  FaultyBackend(std::unique_ptr<Backend> inner, std::shared_ptr<FaultPlan> plan)
      : plan_(std::move(plan)), inner_(std::move(inner)) {}

  std::string name() const override { return inner_->name(); }
  std::string details() const override { return inner_->details(); }
  void wake() override { inner_->wake(); }
  std::string register_memory(std::byte* data, std::size_t nbytes) override {
    return inner_->register_memory(data, nbytes);
  }
  void forget_file(std::uint64_t id) override { inner_->forget_file(id); }

  void submit(const BlockOp& op) override {
    const Fault* fault = plan_->next();
    if (fault == nullptr) return pass(op);
    BlockOp changed = op;
    switch (fault->kind) {
      case FaultKind::error:
        return report(op.token, -fault->error_number);
      case FaultKind::cut:
        changed.nbytes = op.nbytes / 2 / kPage * kPage;
        return pass(changed.nbytes > 0 ? changed : op);
      case FaultKind::flip:
        return flip(op);
      case FaultKind::stale:
        return report(op.token, static_cast<std::int32_t>(op.nbytes));
      case FaultKind::misdirect:
        changed.offset = op.offset >= op.nbytes ? op.offset - op.nbytes : op.offset + op.nbytes;
        return pass(changed);
      case FaultKind::delay:
        late_[op.token] = kLateness;
        return pass(op);
      case FaultKind::lose:
        return;
    }
  }

  void wait(std::vector<BlockResult>& results, unsigned) override {
    if (!reported_.empty()) {
      results.insert(results.end(), reported_.begin(), reported_.end());
      reported_.clear();
      return;
    }
    arrived_.clear();
    if (outstanding_ > 0 || held_.empty()) inner_->wait(arrived_, 1);
    for (const BlockResult& result : arrived_) {
      --outstanding_;
      finish(result);
      if (late_.count(result.token) != 0) {
        held_.push_back(result);
      } else {
        results.push_back(result);
        for (auto& [_, left] : late_) --left;
      }
    }
    release(results);
  }

 private:
  static constexpr int kLateness = 4;  // completions that overtake a delayed one, if there are so many

  void pass(const BlockOp& op) {
    ++outstanding_;
    inner_->submit(op);
  }

  // The next wait(), on this thread, returns it.
  void report(std::uint64_t token, std::int32_t res) { reported_.push_back({token, res}); }

  void flip(const BlockOp& op) {
    if (op.kind == OpKind::read) {
      to_flip_[op.token] = op;
      return pass(op);
    }
    auto bounce = std::make_unique<Bounce>(op.nbytes);
    std::memcpy(bounce->data(), op.data, op.nbytes);
    bounce->data()[op.nbytes / 2] ^= std::byte{0x10};
    BlockOp changed = op;
    changed.data = bounce->data();
    bounces_[op.token] = std::move(bounce);
    pass(changed);
  }

  void finish(const BlockResult& result) {
    bounces_.erase(result.token);
    const auto found = to_flip_.find(result.token);
    if (found == to_flip_.end()) return;
    if (result.res > 0) found->second.data[result.res / 2] ^= std::byte{0x10};
    to_flip_.erase(found);
  }

  // Delayed ones go on their way when enough have overtaken them, or nothing else is under way.
  void release(std::vector<BlockResult>& results) {
    const auto due = [this](const BlockResult& result) { return outstanding_ == 0 || late_[result.token] <= 0; };
    const auto first_due =
        std::stable_partition(held_.begin(), held_.end(), [&](const BlockResult& result) { return !due(result); });
    for (auto it = first_due; it != held_.end(); ++it) {
      late_.erase(it->token);
      results.push_back(*it);
    }
    held_.erase(first_due, held_.end());
  }

  std::shared_ptr<FaultPlan> plan_;
  std::vector<BlockResult> reported_;
  std::vector<BlockResult> arrived_;
  std::vector<BlockResult> held_;
  std::unordered_map<std::uint64_t, int> late_;  // by token: completions that still may overtake it
  std::unordered_map<std::uint64_t, BlockOp> to_flip_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Bounce>> bounces_;
  std::size_t outstanding_ = 0;     // ops inside `inner_`
  std::unique_ptr<Backend> inner_;  // last: gone before the memory its transfers use
};

}  // namespace

const Fault* FaultPlan::next() {
  const std::uint64_t index = submitted++;
  for (const Fault& fault : faults) {
    if (index >= fault.index && index - fault.index < fault.repeat) return &fault;
  }
  return nullptr;
}

std::unique_ptr<Backend> make_faulty_backend(std::unique_ptr<Backend> inner, std::shared_ptr<FaultPlan> plan) {
  return std::make_unique<FaultyBackend>(std::move(inner), std::move(plan));
}

}  // namespace infinity
