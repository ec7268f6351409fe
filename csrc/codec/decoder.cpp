#include "codec/decoder.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <thread>
#include <utility>

#include "base/inbox.hpp"
#include "base/require.hpp"
#include "base/thread_name.hpp"

namespace infinity {
namespace {

Failure closed() {
  constexpr auto kWhy = "the weight decoder was closed";
  return {FailureKind::canceled, "decode", "", 0, 0, ECANCELED, kWhy, kWhy};
}

// Only the decoder's thread accesses a job.
struct DecodeJob {
  std::vector<DecodePart> parts;
  std::vector<std::size_t> ends;  // for each part: number of tasks up to the part's end
  Future future = std::make_shared<Completion>();
  std::size_t waits = 0;  // number of futures that the job waits for
  std::optional<Failure> failure;
};
using Job = std::shared_ptr<DecodeJob>;

void check(const DecodePart& part) {
  require(part.weight.numel == 0 || (part.weight.data != nullptr && part.out != nullptr),
          "a weight to decode needs its encoded form, and memory for its values");
  static_cast<void>(codec_layout(part.weight.form, part.weight.numel, part.weight.row_numel));
}

}  // namespace

// Invariant: only the decoder's thread accesses `jobs` and `stopping`; the messages of the inbox run on this thread,
// too.
struct WeightDecoder::Impl {
  const std::shared_ptr<ThreadPool> pool;
  const Isa isa;
  const pid_t pid = getpid();
  const std::shared_ptr<Inbox> inbox = std::make_shared<Inbox>();  // outlives this object: reads may end late
  std::deque<Job> jobs;                                            // jobs that are not done, in the order of submission
  bool stopping = false;
  std::thread thread;  // declared last: the thread starts when all other members exist

  Impl(std::shared_ptr<ThreadPool> given_pool, Isa given_isa)
      : pool(std::move(given_pool)), isa(given_isa), thread([this] { run(); }) {}

  ~Impl() {
    inbox->post([this] { stopping = true; });
    thread.join();
  }

  void run() {
    name_thread("infinity-decode");
    for (;;) {
      inbox->run();
      if (stopping) cancel_waiting();
      if (take_next()) continue;
      if (stopping) return;
      inbox->wait();
    }
  }

  void submit(const Job& job, const std::vector<Future>& after) {
    jobs.push_back(job);
    job->waits = after.size();
    for (const Future& future : after) {
      if (future->done()) {  // a done future is handled at once: closing must not hide the future's failure
        arrived(*job, future->failure());
        continue;
      }
      // The callback must not own the future that owns the callback.
      future->then([to = inbox, job, raw = future.get()] {
        to->post([job, failure = raw->failure()] { arrived(*job, failure); });
      });
    }
  }

  static void arrived(DecodeJob& job, const std::optional<Failure>& failure) {
    --job.waits;
    if (!failure) return;
    const auto is_timeout = [](const Failure& known) { return known.kind == FailureKind::timeout; };
    if (!job.failure || (is_timeout(*failure) && !is_timeout(*job.failure))) job.failure = failure;
  }

  void cancel_waiting() {
    for (const Job& job : jobs) {
      if (job->waits > 0 && !job->failure) job->failure = closed();
      if (job->waits > 0) job->future->complete(job->failure);
    }
    std::erase_if(jobs, [](const Job& job) { return job->waits > 0; });
  }

  bool take_next() {
    const auto found = std::find_if(jobs.begin(), jobs.end(), [](const Job& job) { return job->waits == 0; });
    if (found == jobs.end()) return false;
    const Job job = *found;
    jobs.erase(found);
    if (!job->failure) decode(*job);
    job->future->complete(job->failure);
    return true;
  }

  void decode(const DecodeJob& job) const {
    const std::vector<std::size_t>& ends = job.ends;
    if (ends.empty()) return;
    const auto decode_one = [&](std::size_t task) {
      const auto part = static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), task) - ends.begin());
      const DecodePart& found = job.parts[part];
      decode_task(found.weight, task - (part > 0 ? ends[part - 1] : 0), found.out, found.dtype, isa);
    };
    pool->parallel_for(ends.back(), decode_one, nullptr, Urgency::urgent);
  }
};

WeightDecoder::WeightDecoder(std::shared_ptr<ThreadPool> pool, Isa isa) {
  require(pool != nullptr, "a weight decoder needs a pool");
  impl_ = std::make_unique<Impl>(std::move(pool), isa);
}

WeightDecoder::~WeightDecoder() {
  // In a forked child the thread does not exist: do not join the thread, and do not destroy the objects that it owns.
  if (getpid() != impl_->pid) static_cast<void>(impl_.release());
}

Future WeightDecoder::decode(std::vector<DecodePart> parts, std::vector<Future> after) {
  require(getpid() == impl_->pid, "a weight decoder was used in a forked child, where its thread does not exist");
  const auto job = std::make_shared<DecodeJob>();
  std::size_t tasks = 0;
  for (const DecodePart& part : parts) {
    check(part);
    job->ends.push_back(tasks += decode_tasks(part.weight));
  }
  job->parts = std::move(parts);
  impl_->inbox->post([impl = impl_.get(), job, after = std::move(after)] { impl->submit(job, after); });
  return job->future;
}

}  // namespace infinity
