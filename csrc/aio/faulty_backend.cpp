// A backend for tests: it passes blocks to a real backend and injects the faults of a plan. A lane uses this backend
// through the same interface as a real backend.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "aio/backend.hpp"
#include "base/page.hpp"

namespace infinity {
namespace {

// Aligned bounce buffer in which a block may be damaged without changing the caller's memory.
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
    const Fault* fault = plan_->next(op);
    if (fault == nullptr) return pass(op);
    BlockOp changed = op;
    const bool sync = op.kind == OpKind::sync;
    switch (fault->kind) {
      case FaultKind::error:
        return report(op.token, -fault->error_number);
      case FaultKind::cut:
        if (sync) return pass(op);
        changed.nbytes = static_cast<std::uint32_t>(op.nbytes / 2 / kPageBytes * kPageBytes);
        return pass(changed.nbytes > 0 ? changed : op);
      case FaultKind::flip:
        return sync ? pass(op) : flip(op);
      case FaultKind::stale:
        return report(op.token, sync ? 0 : static_cast<std::int32_t>(op.nbytes));
      case FaultKind::misdirect:
        changed.offset = op.offset >= op.nbytes ? op.offset - op.nbytes : op.offset + op.nbytes;
        return pass(changed);
      case FaultKind::delay:
        late_[op.token] = kLateness;
        return pass(op);
      case FaultKind::shuffle:
        shuffle(op.token, plan_->draw(*fault));
        return pass(op);
      case FaultKind::lose:
        return;
      case FaultKind::kill:
        static_cast<void>(std::raise(SIGKILL));
        return;
      case FaultKind::kill_after:
        deadly_.insert(op.token);
        return pass(op);
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
  static constexpr int kLateness = 4;           // number of completions that overtake a delayed op
  static constexpr std::uint64_t kLatest = 16;  // at most so many completions overtake a shuffled op
  static constexpr std::uint64_t kDawdleNs = 1'000'000;

  // Delays an op and pauses the device at random. Both delays are bounded, so no block is delayed forever.
  void shuffle(std::uint64_t token, std::uint64_t bits) {
    if (bits % 2 == 0) late_[token] = static_cast<int>(1 + bits / 2 % kLatest);
    if (bits / 64 % 8 == 0) std::this_thread::sleep_for(std::chrono::nanoseconds(bits / 512 % kDawdleNs));
  }

  void pass(const BlockOp& op) {
    ++outstanding_;
    if (op.kind != OpKind::read) written_[op.token] = {op, plan_->began(op)};
    inner_->submit(op);
  }

  // Stores a result that the next wait() on this thread returns.
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
    if (const auto written = written_.find(result.token); written != written_.end()) {
      plan_->ended(written->second.first, written->second.second, result.res);
      written_.erase(written);
    }
    if (deadly_.count(result.token) != 0) static_cast<void>(std::raise(SIGKILL));
    bounces_.erase(result.token);
    const auto found = to_flip_.find(result.token);
    if (found == to_flip_.end()) return;
    if (result.res > 0) found->second.data[result.res / 2] ^= std::byte{0x10};
    to_flip_.erase(found);
  }

  // Releases delayed results when enough others have overtaken them, or when nothing else is in flight.
  void release(std::vector<BlockResult>& results) {
    const auto due = [this](const BlockResult& result) { return outstanding_ == 0 || late_[result.token] <= 0; };
    const auto first_due =
        std::stable_partition(held_.begin(), held_.end(), [&](const BlockResult& result) { return !due(result); });
    std::sort(first_due, held_.end(), [this](const BlockResult& one, const BlockResult& other) {
      return late_[one.token] < late_[other.token];
    });
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
  std::unordered_map<std::uint64_t, int> late_;  // by token: number of completions that may still overtake the op
  std::unordered_map<std::uint64_t, BlockOp> to_flip_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Bounce>> bounces_;
  std::unordered_map<std::uint64_t, std::pair<BlockOp, std::uint64_t>> written_;  // op and its journal number
  std::unordered_set<std::uint64_t> deadly_;
  std::size_t outstanding_ = 0;     // number of ops inside `inner_`
  std::unique_ptr<Backend> inner_;  // declared last: destroyed before the memory that transfers use
};

}  // namespace

FaultPlan::FaultPlan(std::vector<Fault> faults, const std::string& journal)
    : faults_(std::move(faults)), seen_(faults_.size(), 0) {
  if (journal.empty()) return;
  journal_ = open(journal.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (journal_ < 0) throw std::system_error(errno, std::generic_category(), "open " + journal);
}

FaultPlan::~FaultPlan() {
  if (journal_ >= 0) close(journal_);
}

const Fault* FaultPlan::next(const BlockOp& op) {
  const std::lock_guard lock(mutex_);
  const Fault* found = nullptr;
  for (std::size_t index = 0; index < faults_.size(); ++index) {
    const Fault& fault = faults_[index];
    if (fault.operation && *fault.operation != op.kind) continue;
    if (op.offset < fault.begin || op.offset >= fault.end) continue;
    const std::uint64_t seen = seen_[index]++;
    if (found == nullptr && seen >= fault.index && seen - fault.index < fault.repeat) found = &fault;
  }
  return found;
}

std::uint64_t FaultPlan::draw(const Fault& fault) {
  const std::lock_guard lock(mutex_);
  std::uint64_t bits = fault.seed + ++draws_ * 0x9e3779b97f4a7c15;  // splitmix64
  bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9;
  bits = (bits ^ bits >> 27) * 0x94d049bb133111eb;
  return bits ^ bits >> 31;
}

std::uint64_t FaultPlan::began(const BlockOp& op) {
  if (journal_ < 0) return 0;
  const std::lock_guard lock(mutex_);
  append(op.kind == OpKind::sync ? 'S' : 'W', ++numbers_, 0, op, op.kind == OpKind::write);
  return numbers_;
}

void FaultPlan::ended(const BlockOp& op, std::uint64_t number, std::int32_t res) {
  if (journal_ < 0) return;
  const std::lock_guard lock(mutex_);
  append(op.kind == OpKind::sync ? 's' : 'w', number, res, op, false);
}

void FaultPlan::append(char letter, std::uint64_t number, std::int64_t res, const BlockOp& op, bool with_data) {
  const std::string& path = op.file->path();
  const std::uint64_t nbytes = with_data ? op.nbytes : 0;
  const std::array<std::uint64_t, 6> header = {static_cast<std::uint64_t>(static_cast<unsigned char>(letter)),
                                               number,
                                               static_cast<std::uint64_t>(res),
                                               op.offset,
                                               nbytes,
                                               path.size()};
  std::vector<std::byte> record(sizeof(header) + path.size() + nbytes);
  std::memcpy(record.data(), header.data(), sizeof(header));
  std::memcpy(record.data() + sizeof(header), path.data(), path.size());
  if (nbytes > 0) std::memcpy(record.data() + sizeof(header) + path.size(), op.data, nbytes);
  std::size_t done = 0;
  while (done < record.size()) {
    const ssize_t moved = write(journal_, record.data() + done, record.size() - done);
    if (moved < 0 && errno != EINTR) throw std::system_error(errno, std::generic_category(), "write the journal");
    if (moved > 0) done += static_cast<std::size_t>(moved);
  }
}

std::unique_ptr<Backend> make_faulty_backend(std::unique_ptr<Backend> inner, std::shared_ptr<FaultPlan> plan) {
  return std::make_unique<FaultyBackend>(std::move(inner), std::move(plan));
}

}  // namespace infinity
