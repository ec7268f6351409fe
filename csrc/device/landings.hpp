// Gradients that come down from a device: a native thread waits until they are in host memory and adds up what is new.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/future.hpp"
#include "base/thread_pool.hpp"
#include "cpu_adam/optimizer.hpp"
#include "device/gate.hpp"

namespace infinity {

// A piece of a landing. Without `source` the gradient is in `target`, and only its sums of squares are taken, as by
// sums_of_squares. With `source` it is copied to `target` or added to it, as by land_gradient.
struct LandingPiece {
  std::byte* target = nullptr;
  DType dtype = DType::fp32;          // of `target`
  std::uint64_t numel = 0;            // elements
  const std::byte* source = nullptr;  // apart from `target`
  DType source_dtype = DType::fp32;
  bool add = false;
  std::uint64_t first = 0;  // of the whole that the elements belong to, where they begin
};

// The memory of the pieces is not used any more once it is done.
struct LandingCompletion : Completion {
  std::vector<std::vector<double>>
      sums;  // of squares of each piece's target; there once this is done without a failure
};
using LandingFuture = std::shared_ptr<LandingCompletion>;

// One thread lands what it is given, in the order of the calls. After an error of the runtime nothing lands any more:
// that landing fails, and every later one does with the same error.
class Landings {
 public:
  Landings(std::shared_ptr<const DeviceGate> gate, std::shared_ptr<ThreadPool> pool, Isa isa);
  // Waits for all that was given.
  ~Landings();
  Landings(const Landings&) = delete;
  Landings& operator=(const Landings&) = delete;

  // Once `event` is reached; null: at once. Throws std::invalid_argument for pieces that cannot land.
  LandingFuture land(void* event, std::vector<LandingPiece> pieces);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace infinity
