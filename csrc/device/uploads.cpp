#include "device/uploads.hpp"

#include <unistd.h>

#include <algorithm>
#include <limits>
#include <thread>
#include <utility>

#include "base/inbox.hpp"
#include "base/page.hpp"
#include "base/require.hpp"
#include "base/thread_name.hpp"
#include "device/upload_driver.hpp"

namespace infinity {

struct Uploads::Impl {
  std::byte* const bounce;
  const pid_t pid = getpid();
  const std::shared_ptr<Inbox> inbox = std::make_shared<Inbox>();
  UploadDriver driver;
  std::thread thread;  // declared last: the thread starts when all other members exist

  Impl(std::shared_ptr<IoEngine> engine, std::shared_ptr<const DeviceGate> gate, std::byte* memory,
       std::vector<UploadPiece> pieces, std::size_t piece_bytes)
      : bounce(memory),
        driver(inbox, std::move(engine), std::move(gate), std::move(pieces), piece_bytes),
        thread([this] {
          name_thread("infinity-upload");
          driver.run();
        }) {}

  ~Impl() {
    inbox->post([this] { driver.stop(); });
    thread.join();
  }

  void post(Inbox::Message message) const {
    require(getpid() == pid, "uploads were used in a forked child, where their thread does not exist");
    inbox->post(std::move(message));
  }

  void check(const UploadPart& part) const {
    constexpr std::uint64_t kBytesMax = std::numeric_limits<std::int64_t>::max() - kPageBytes;
    require(part.file != nullptr && part.nbytes > 0, "a part of an upload needs a file and at least one byte");
    require(part.nbytes <= kBytesMax && part.offset <= kBytesMax, "a file cannot be that long");
    require(part.offset % kPageBytes == 0, "a part of an upload must begin at a multiple of 4 KiB of its file");
    IoEngine::check({OpKind::read, IoClass::weights, part.file, part.offset, bounce, round_up_to_page(part.nbytes)});
  }
};

Uploads::Uploads(std::shared_ptr<IoEngine> engine, std::shared_ptr<const DeviceGate> gate, std::byte* bounce,
                 std::size_t bounce_bytes, std::size_t piece_bytes, const std::vector<void*>& events) {
  require(engine != nullptr && gate != nullptr && bounce != nullptr, "uploads need an engine, a gate, a bounce buffer");
  require(reinterpret_cast<std::uintptr_t>(bounce) % kPageBytes == 0, "the bounce buffer must be aligned to 4 KiB");
  require(piece_bytes > 0 && piece_bytes % kPageBytes == 0, "piece_bytes must be a positive multiple of 4096");
  require(!events.empty(), "uploads need an event for each piece of the bounce buffer, and at least one piece");
  require(bounce_bytes / piece_bytes >= events.size(), "the bounce buffer must hold a piece for each event");
  std::vector<void*> different = events;
  std::sort(different.begin(), different.end());
  require(std::adjacent_find(different.begin(), different.end()) == different.end(),
          "each piece of the bounce buffer needs an event of its own");
  std::vector<UploadPiece> pieces;
  for (void* const event : events) pieces.push_back({bounce + pieces.size() * piece_bytes, event});
  impl_ = std::make_unique<Impl>(std::move(engine), std::move(gate), bounce, std::move(pieces), piece_bytes);
}

Uploads::~Uploads() {
  // In a forked child the threads do not exist: do not join the threads, and do not destroy the objects that they own.
  if (getpid() != impl_->pid) static_cast<void>(impl_.release());
}

Future Uploads::upload(UploadJob job) {
  require(!job.parts.empty(), "an upload needs at least one part");
  for (const UploadPart& part : job.parts) impl_->check(part);
  const auto made = std::make_shared<UploadWork>();
  made->given = std::move(job);
  impl_->post([driver = &impl_->driver, made] { driver->submit(made); });
  return made->future;
}

void Uploads::cancel(const Future& job) {
  impl_->post([driver = &impl_->driver, job] { driver->cancel(job); });
}

UploadCounters Uploads::counters() const { return impl_->driver.counters(); }

std::shared_ptr<const std::atomic<bool>> Uploads::abandoned() const { return impl_->driver.gave_up(); }

}  // namespace infinity
