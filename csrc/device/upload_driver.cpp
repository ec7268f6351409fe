#include "device/upload_driver.hpp"

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <utility>

#include "base/page.hpp"

namespace infinity {
namespace {

Failure canceled(const char* why) { return {FailureKind::canceled, "upload", "", 0, 0, ECANCELED, why, why}; }

bool may_go(UploadPhase from, UploadPhase to) {
  switch (from) {
    case UploadPhase::queued:
      return to == UploadPhase::reading || to == UploadPhase::ending;
    case UploadPhase::reading:
      return to == UploadPhase::copying || to == UploadPhase::ending;
    case UploadPhase::copying:
      return to == UploadPhase::ending || to == UploadPhase::done;
    case UploadPhase::ending:
      return to == UploadPhase::done;
    case UploadPhase::done:
      break;
  }
  return false;
}

}  // namespace

void UploadWork::go(UploadPhase to) {
  if (!may_go(phase, to)) throw std::logic_error("an upload made an invalid transition");
  phase = to;
}

UploadDriver::UploadDriver(std::shared_ptr<Inbox> inbox, std::shared_ptr<IoEngine> engine,
                           std::shared_ptr<const DeviceGate> gate, std::vector<UploadPiece> pieces,
                           std::size_t piece_bytes)
    : inbox_(std::move(inbox)),
      engine_(std::move(engine)),
      gate_(std::move(gate)),
      piece_bytes_(piece_bytes),
      free_(std::move(pieces)) {}

// Requests of callers.

void UploadDriver::submit(const Job& job) {
  jobs_.push_back(job);
  std::vector<UploadPart>& parts = job->given.parts;
  for (std::size_t part = 0; part < parts.size(); ++part) {
    // The callback must not own the future that owns the callback; for this reason the job must not own that future,
    // either.
    const Future after = std::exchange(parts[part].after, nullptr);
    job->arrived.push_back(after == nullptr);
    if (after == nullptr) continue;
    after->then([this, inbox = inbox_, job, part, raw = after.get()] {
      inbox->post([this, job, part, failure = raw->failure()] { arrived(job, part, failure); });
    });
  }
}

void UploadDriver::arrived(const Job& job, std::size_t part, const std::optional<Failure>& failure) {
  job->arrived[part] = true;
  if (failure && job->to_read()) fail(job, *failure);
}

void UploadDriver::cancel(const Future& future) {
  const auto found = std::find_if(jobs_.begin(), jobs_.end(), [&](const Job& job) { return job->future == future; });
  if (found == jobs_.end()) return;
  const Job job = *found;  // a copy, because the job leaves the list when it ends
  fail(job, canceled("the upload was canceled"));
}

UploadCounters UploadDriver::counters() const { return {read_bytes_, pieces_, without_a_piece_}; }

// The driver's next action.

void UploadDriver::run() {
  broken_ = gate_->enter();
  for (;;) {
    inbox_->run();
    if (broken_) fail_all();
    if (stopping_) cancel_waiting();
    if (copy_next() || read_next() || reuse_oldest()) continue;
    if (stopping_ && jobs_.empty()) break;
    inbox_->wait();
  }
  wait_for_all_copies();
}

// Queues the copy of the oldest piece in flight if this piece has been read.
bool UploadDriver::copy_next() {
  if (under_way_.empty() || !under_way_.front()->read) return false;
  const Transfer transfer = under_way_.front();
  under_way_.pop_front();
  copy(transfer);
  return true;
}

UploadDriver::Job UploadDriver::next_to_read() const {
  const auto found = std::find_if(jobs_.begin(), jobs_.end(), [](const Job& job) { return job->to_read(); });
  return found != jobs_.end() && (*found)->may_read() ? *found : nullptr;
}

// Starts the read of a job's next piece if a piece of the bounce buffer is free.
bool UploadDriver::read_next() {
  const Job job = next_to_read();
  if (job == nullptr) return false;
  if (free_.empty()) {
    if (!std::exchange(found_none_, true)) ++without_a_piece_;
    return false;
  }
  found_none_ = false;
  const UploadPart& part = job->given.parts[job->part];
  const std::uint64_t offset = part.offset + job->begin;
  const Transfer transfer = take_piece(job);
  under_way_.push_back(transfer);
  ++job->reads;
  ++pieces_;
  const Future future = engine_->submit({OpKind::read, IoClass::weights, part.file, offset, transfer->piece.memory,
                                         round_up_to_page(transfer->nbytes), !part.verify});
  // The callback must not own the future that owns the callback.
  future->then([this, inbox = inbox_, transfer, raw = future.get()] {
    inbox->post([this, transfer, failure = raw->failure()] { was_read(transfer, failure); });
  });
  return true;
}

// Takes a free piece of the bounce buffer for the job's next piece, and advances the job to the piece after it.
UploadDriver::Transfer UploadDriver::take_piece(const Job& job) {
  const UploadPart& part = job->given.parts[job->part];
  auto transfer = std::make_shared<UploadTransfer>();
  transfer->job = job;
  transfer->piece = free_.back();
  free_.pop_back();
  transfer->address = part.address + job->begin;
  transfer->nbytes = static_cast<std::size_t>(std::min<std::uint64_t>(piece_bytes_, part.nbytes - job->begin));
  job->begin += transfer->nbytes;
  if (job->begin == part.nbytes) {
    job->begin = 0;
    ++job->part;
  }
  transfer->last = job->part == job->given.parts.size();
  if (job->phase == UploadPhase::queued) job->go(UploadPhase::reading);
  if (transfer->last) job->go(UploadPhase::copying);
  return transfer;
}

// If a piece of the bounce buffer is needed and none is free, waits until the device has read the piece whose copy was
// queued first.
bool UploadDriver::reuse_oldest() {
  if (copied_.empty() || !free_.empty() || broken_ || next_to_read() == nullptr) return false;
  const Transfer oldest = copied_.front();
  copied_.pop_front();
  if (const auto failure = gate_->synchronize(oldest->piece.event)) {
    lose(*failure);
  } else {
    free(oldest->piece);
  }
  return true;
}

// Transitions of a piece.

void UploadDriver::was_read(const Transfer& transfer, const std::optional<Failure>& failure) {
  const Job& job = transfer->job;
  --job->reads;
  if (failure || job->phase == UploadPhase::ending) {
    under_way_.erase(std::find(under_way_.begin(), under_way_.end(), transfer));
    if (failure && failure->kind == FailureKind::timeout) lose(*failure);
    free(transfer->piece);
    if (failure) fail(job, *failure);
    end_if_idle(job);
    return;
  }
  transfer->read = true;
  read_bytes_ += transfer->nbytes;
}

void UploadDriver::copy(const Transfer& transfer) {
  UploadWork& job = *transfer->job;
  void* const stream = job.given.stream;
  auto failure = queue_waits(job);
  if (!failure) failure = gate_->copy(transfer->address, transfer->piece.memory, transfer->nbytes, stream);
  if (failure) {
    free(transfer->piece);
    fail(transfer->job, *failure);
    return;
  }
  job.copied = true;
  if ((failure = gate_->record(transfer->piece.event, stream))) {
    lose(*failure);  // it is unknown when the device will have read the piece
    fail(transfer->job, *failure);
    return;
  }
  copied_.push_back(transfer);
  if (!transfer->last) return;
  if ((failure = gate_->record(job.given.ready, stream))) {
    fail(transfer->job, *failure);
    return;
  }
  finish(transfer->job);
}

// Makes the stream wait for the job's events, before the job's first copy.
std::optional<Failure> UploadDriver::queue_waits(UploadWork& job) const {
  if (job.copied) return std::nullopt;
  for (void* const event : job.given.waits) {
    if (auto failure = gate_->wait(job.given.stream, event)) return failure;
  }
  return std::nullopt;
}

void UploadDriver::free(const UploadPiece& piece) {
  if (!*gave_up_) free_.push_back(piece);
}

// Records that the device may use a piece forever.
void UploadDriver::lose(const Failure& failure) {
  if (!broken_) broken_ = failure;
  *gave_up_ = true;
  free_.clear();
}

// The end of a job.

// Drops those pieces in flight of the job that were already read from the file.
void UploadDriver::fail(const Job& job, const Failure& failure) {
  if (job->phase == UploadPhase::done) return;
  // After a timeout a device may still use the memory: no other failure may hide a timeout.
  if (!job->failure || failure.kind == FailureKind::timeout) job->failure = failure;
  if (job->phase != UploadPhase::ending) job->go(UploadPhase::ending);
  const auto dropped = std::stable_partition(under_way_.begin(), under_way_.end(), [&](const Transfer& transfer) {
    return transfer->job != job || !transfer->read;
  });
  std::for_each(dropped, under_way_.end(), [this](const Transfer& transfer) { free(transfer->piece); });
  under_way_.erase(dropped, under_way_.end());
  end_if_idle(job);
}

void UploadDriver::fail_all() {
  for (const Job& job : std::deque<Job>(jobs_)) fail(job, *broken_);
}

void UploadDriver::cancel_waiting() {
  for (const Job& job : std::deque<Job>(jobs_)) {
    const bool waits = std::find(job->arrived.begin(), job->arrived.end(), false) != job->arrived.end();
    if (waits && job->to_read()) fail(job, canceled("the uploads were closed"));
  }
}

void UploadDriver::end_if_idle(const Job& job) {
  if (job->phase != UploadPhase::ending || job->reads > 0) return;
  wait_for_copies(job);
  finish(job);
}

// Invariant: the device has read every piece of the job whose copy was queued, or one of these pieces is lost.
void UploadDriver::wait_for_copies(const Job& job) {
  const auto own = std::stable_partition(copied_.begin(), copied_.end(),
                                         [&](const Transfer& transfer) { return transfer->job != job; });
  const std::vector<Transfer> waiting(own, copied_.end());
  copied_.erase(own, copied_.end());
  for (const Transfer& transfer : waiting) {
    if (const auto failure = gate_->synchronize(transfer->piece.event)) {
      lose(*failure);
    } else {
      free(transfer->piece);
    }
  }
}

void UploadDriver::wait_for_all_copies() {
  for (const Transfer& transfer : copied_) {
    if (const auto failure = gate_->synchronize(transfer->piece.event)) lose(*failure);
  }
  copied_.clear();
}

void UploadDriver::finish(const Job& job) {
  job->go(UploadPhase::done);
  jobs_.erase(std::find(jobs_.begin(), jobs_.end(), job));
  // Released first: a caller who sees the future done and closes the file must find the file closed.
  job->given.parts.clear();
  job->future->complete(job->failure);
}

}  // namespace infinity
