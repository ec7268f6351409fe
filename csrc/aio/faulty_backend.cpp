// The twin of a real backend that fails on request: behind the same interface, so that the engine cannot tell.
#include <utility>

#include "aio/backend.hpp"

namespace infinity {
namespace {

constexpr std::uint32_t kPage = 4096;

class FaultyBackend final : public Backend {
 public:
  FaultyBackend(std::unique_ptr<Backend> inner, std::vector<Fault> faults)
      : inner_(std::move(inner)), faults_(std::move(faults)) {}

  std::string name() const override { return inner_->name(); }
  std::string details() const override { return inner_->details(); }
  unsigned capacity() const override { return inner_->capacity(); }
  void wake() override { inner_->wake(); }

  void submit(const BlockOp& op) override {
    const std::uint64_t index = submitted_++;
    for (const Fault& fault : faults_) {
      if (index < fault.index || index - fault.index >= fault.repeat) continue;
      if (fault.error_number != 0) {
        failed_.push_back({op.token, -fault.error_number});  // the next wait(), on this thread, returns it
        return;
      }
      BlockOp cut = op;
      cut.nbytes = op.nbytes / 2 / kPage * kPage;
      if (cut.nbytes > 0) {
        inner_->submit(cut);
        return;
      }
    }
    inner_->submit(op);
  }

  void wait(std::vector<BlockResult>& results) override {
    if (!failed_.empty()) {
      results.insert(results.end(), failed_.begin(), failed_.end());
      failed_.clear();
      return;
    }
    inner_->wait(results);
  }

 private:
  std::unique_ptr<Backend> inner_;
  std::vector<Fault> faults_;
  std::vector<BlockResult> failed_;
  std::uint64_t submitted_ = 0;
};

}  // namespace

std::unique_ptr<Backend> make_faulty_backend(std::unique_ptr<Backend> inner, std::vector<Fault> faults) {
  return std::make_unique<FaultyBackend>(std::move(inner), std::move(faults));
}

}  // namespace infinity
