#include "update/staging.hpp"

#include <algorithm>
#include <utility>

#include "base/require.hpp"

namespace infinity {

Staging::Staging(std::byte* memory, std::size_t buffers, std::size_t buffer_bytes, std::size_t ahead_tiles_max)
    : buffer_bytes_(buffer_bytes), ahead_tiles_max_(ahead_tiles_max) {
  add(memory, buffers);
}

void Staging::add(std::byte* memory, std::size_t buffers) {
  if (abandoned_) return;
  for (std::size_t index = buffers; index-- > 0;) free_.push_back(memory + index * buffer_bytes_);
}

std::byte* Staging::take() {
  std::byte* const buffer = free_.back();
  free_.pop_back();
  return buffer;
}

void Staging::give_back(std::byte* buffer) {
  if (abandoned_) return;
  const auto loan = std::find_if(loans_.begin(), loans_.end(), [&](const Loan& each) { return each.has(buffer); });
  if (loan == loans_.end() || !loan->ending) {
    free_.push_back(buffer);
  } else if (--loan->buffers == 0) {
    std::promise<bool> reclaimed = std::move(loan->reclaimed);
    loans_.erase(loan);
    reclaimed.set_value(true);
  }
}

std::size_t Staging::ahead_tiles_max() const {
  std::size_t sum = ahead_tiles_max_;
  for (const Loan& loan : loans_) sum += loan.ending ? 0 : loan.buffers;
  return sum;
}

void Staging::lend(std::byte* memory, std::size_t nbytes) {
  const std::size_t buffers = nbytes / buffer_bytes_;
  loans_.push_back({memory, memory + nbytes, buffers, false, {}});
  add(memory, buffers);
}

std::future<bool> Staging::reclaim(const std::byte* memory) {
  const auto loan = std::find_if(loans_.begin(), loans_.end(), [&](const Loan& each) { return each.begin == memory; });
  require(loan != loans_.end() && !loan->ending, "the memory to reclaim was not lent");
  loan->ending = true;
  loan->buffers -= std::erase_if(free_, [&](const std::byte* buffer) { return loan->has(buffer); });
  std::future<bool> answer = loan->reclaimed.get_future();
  if (abandoned_) {
    loan->reclaimed.set_value(false);
  } else if (loan->buffers == 0) {
    loan->reclaimed.set_value(true);
    loans_.erase(loan);
  }
  return answer;
}

void Staging::abandon() {
  if (std::exchange(abandoned_, true)) return;
  free_.clear();
  for (Loan& loan : loans_) {
    if (loan.ending) loan.reclaimed.set_value(false);
  }
}

}  // namespace infinity
