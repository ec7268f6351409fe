// Access of native threads to the runtime of a device (CUDA, HIP, or an imitation in a test), through a table of the
// runtime's functions.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "base/future.hpp"
#include "base/require.hpp"

namespace infinity {

// Functions with the signatures of the CUDA runtime. Each function returns 0, or an error number of the runtime.
// Streams and events are handles of the runtime; device addresses are passed as pointers.
struct DeviceCalls {
  int (*enter)(int device) = nullptr;  // cudaSetDevice; may be null
  int (*copy)(void* to, const void* from, std::size_t nbytes, int kind, void* stream) = nullptr;  // cudaMemcpyAsync
  int (*record)(void* event, void* stream) = nullptr;                                             // cudaEventRecord
  int (*wait)(void* stream, void* event, unsigned flags) = nullptr;                               // cudaStreamWaitEvent
  int (*synchronize)(void* event) = nullptr;  // cudaEventSynchronize
};

// [Note: one gate] This library links no device's runtime: the code that loaded the runtime passes the addresses of its
// functions. The functions may also be callbacks into Python, which take the GIL.
//
// Invariant: no lock is held during a call, because a thread that has the GIL might wait for that lock.
class DeviceGate {
 public:
  // Throws std::invalid_argument if a function other than `enter` is missing.
  DeviceGate(int device, DeviceCalls calls) : device_(device), calls_(calls) {
    require(calls.copy != nullptr && calls.record != nullptr && calls.wait != nullptr && calls.synchronize != nullptr,
            "a device's gate needs the functions copy, record, wait and synchronize");
  }

  // Each function returns the reason if the runtime refused, or nothing after success.

  // Each thread calls this function once, before its first call of another function.
  [[nodiscard]] std::optional<Failure> enter() const {
    return calls_.enter == nullptr ? std::nullopt : failure("choosing the device", calls_.enter(device_));
  }
  // Queues a copy between host and device, in the direction that follows from the addresses.
  [[nodiscard]] std::optional<Failure> copy(void* to, const void* from, std::size_t nbytes, void* stream) const {
    constexpr int kDefault = 4;  // cudaMemcpyDefault
    return failure("copying", calls_.copy(to, from, nbytes, kDefault, stream));
  }
  // The event happens once the stream has done all work that was queued before this call.
  [[nodiscard]] std::optional<Failure> record(void* event, void* stream) const {
    return failure("recording an event", calls_.record(event, stream));
  }
  // Work that is queued on the stream after this call begins only after the event has happened.
  [[nodiscard]] std::optional<Failure> wait(void* stream, void* event) const {
    return failure("having a stream wait", calls_.wait(stream, event, 0));
  }
  // Blocks the calling thread until the event has happened.
  [[nodiscard]] std::optional<Failure> synchronize(void* event) const {
    return failure("waiting for an event", calls_.synchronize(event));
  }

 private:
  [[nodiscard]] std::optional<Failure> failure(const char* doing, int error) const {
    if (error == 0) return std::nullopt;
    Failure result;
    result.kind = FailureKind::device;
    result.operation = doing;
    result.path = "device " + std::to_string(device_);
    result.cause = "the device's runtime returned error " + std::to_string(error);
    result.message = result.operation + " on " + result.path + ": " + result.cause;
    return result;
  }

  const int device_;
  const DeviceCalls calls_;
};

}  // namespace infinity
