#include "update/update.hpp"

#include <unistd.h>

#include <future>
#include <thread>
#include <utility>

#include "base/inbox.hpp"
#include "base/require.hpp"
#include "base/thread_name.hpp"
#include "update/driver.hpp"

namespace infinity {

struct UpdatePipeline::Impl {
  const std::size_t tile_numel;
  const std::size_t tile_bytes;
  const pid_t pid = getpid();
  const std::shared_ptr<Inbox> inbox = std::make_shared<Inbox>();
  const int nice;
  Driver driver;
  std::thread thread;  // declared last: the thread starts when all other members exist

  Impl(std::shared_ptr<IoEngine> engine, std::shared_ptr<ThreadPool> pool, Staging staging, std::size_t numel,
       std::size_t nbytes, Isa isa)
      : tile_numel(numel),
        tile_bytes(nbytes),
        nice(pool->nice()),
        driver(inbox, std::move(engine), std::move(pool), std::move(staging), numel, nbytes, isa),
        thread([this] {
          name_thread("infinity-update");
          yield_by(nice);
          driver.run();
        }) {}

  ~Impl() {
    inbox->post([this] { driver.stop(); });
    thread.join();
  }

  void post(Inbox::Message message) {
    require(getpid() == pid, "an update pipeline was used in a forked child, where its thread does not exist");
    inbox->post(std::move(message));
  }

  // Runs `call` on the driver's thread. Returns the result of `call`, or throws the exception that `call` threw.
  template <class Call>
  auto ask(Call call) {
    // Shared, because the driver's thread may still use the task after the result is available.
    const auto task = std::make_shared<std::packaged_task<decltype(call())()>>(std::move(call));
    auto answer = task->get_future();
    post([task] { (*task)(); });
    return answer.get();
  }
};

UpdatePipeline::UpdatePipeline(std::shared_ptr<IoEngine> engine, std::shared_ptr<ThreadPool> pool, std::byte* staging,
                               std::size_t staging_bytes, std::size_t tile_numel, std::size_t tile_bytes,
                               std::size_t ahead_tiles_max, Isa isa) {
  require(engine != nullptr && pool != nullptr && staging != nullptr,
          "an update pipeline needs an engine, a pool, staging");
  require(tile_numel > 0 && tile_numel % kCutNumel == 0, "tile_numel must be a positive multiple of 4096 elements");
  require(reinterpret_cast<std::uintptr_t>(staging) % kPageBytes == 0, "staging must be aligned to 4 KiB");
  require(tile_bytes > 0 && tile_bytes % kPageBytes == 0, "tile_bytes must be a positive multiple of 4096");
  const std::size_t buffers = staging_bytes / tile_bytes;
  require(buffers >= 2 && buffers - 2 >= ahead_tiles_max,
          "staging must hold two tiles besides those that are read ahead");
  impl_ = std::make_unique<Impl>(std::move(engine), std::move(pool),
                                 Staging(staging, buffers, tile_bytes, ahead_tiles_max), tile_numel, tile_bytes, isa);
}

UpdatePipeline::~UpdatePipeline() {
  // In a forked child the threads do not exist: do not join the threads, and do not destroy the objects that they own.
  if (getpid() != impl_->pid) static_cast<void>(impl_.release());
}

UpdateFuture UpdatePipeline::submit(UpdateJob job, bool speculative, const Future& ahead,
                                    const std::vector<Future>& after) {
  const auto made = make_job(std::move(job), impl_->tile_numel, impl_->tile_bytes);
  const auto begin = [driver = &impl_->driver, made, speculative, ahead, after] {
    if (after.empty()) {
      driver->submit(made, speculative, ahead);
    } else {
      driver->hold(made, speculative, ahead, after);
    }
  };
  if (ahead != nullptr) {
    impl_->ask(begin);  // waits for the driver, because the driver may refuse the job
  } else {
    impl_->post(begin);
  }
  return made->future;
}

UpdateFuture UpdatePipeline::read_ahead(UpdateJob job) {
  const auto made = make_job_ahead(std::move(job), impl_->tile_numel, impl_->tile_bytes);
  impl_->post([driver = &impl_->driver, made] { driver->read_ahead(made); });
  return made->future;
}

std::size_t UpdatePipeline::ahead_tiles_max() const {
  return impl_->ask([&] { return impl_->driver.staging().ahead_tiles_max(); });
}

void UpdatePipeline::lend(std::byte* memory, std::size_t nbytes) {
  require(memory != nullptr && reinterpret_cast<std::uintptr_t>(memory) % kPageBytes == 0,
          "lent memory must be aligned to 4 KiB");
  impl_->post([driver = &impl_->driver, memory, nbytes] { driver->staging().lend(memory, nbytes); });
}

bool UpdatePipeline::reclaim(std::byte* memory) {
  return impl_->ask([&] { return impl_->driver.staging().reclaim(memory); }).get();
}

std::vector<bool> UpdatePipeline::withdraw(const std::vector<std::vector<Future>>& lists) {
  if (lists.empty()) return {};
  return impl_->ask([&] {
    std::vector<bool> taken_back;
    for (const std::vector<Future>& jobs : lists) taken_back.push_back(impl_->driver.withdraw_all(jobs));
    return taken_back;
  });
}

void UpdatePipeline::cancel(const Future& job) {
  impl_->ask([&] { impl_->driver.cancel(job); });
}

std::size_t UpdatePipeline::staging_tile_bytes(const StateFormat& format, std::size_t numel, bool gradients) {
  const std::size_t moment = round_up_to_page(moment_bytes(format.moments, numel));
  return round_up_to_page(numel * itemsize(format.weight)) +
         round_up_to_page(numel * residual_itemsize(format.master)) + 2 * moment +
         (gradients ? round_up_to_page(numel * sizeof(float)) : 0);
}

void UpdatePipeline::trace(bool on, std::size_t events_max) { impl_->driver.log().record(on, events_max); }

TileLog::Taken UpdatePipeline::take_trace() { return impl_->driver.log().take(); }

std::shared_ptr<const std::atomic<bool>> UpdatePipeline::abandoned() const { return impl_->driver.gave_up(); }

UpdateCounters UpdatePipeline::counters() const {
  return impl_->ask([&] { return impl_->driver.counters(); });
}

}  // namespace infinity
