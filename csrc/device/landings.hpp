// Landing of gradients from a device: a native thread waits until the gradients are in host memory, and adds them to
// the gradients that landed before.
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

// A piece of a landing. If `source` is null, the gradient is already in `target`, and only the gradient's sums of
// squares are computed, as by sums_of_squares. If `source` is set, the gradient in `source` is copied or added to
// `target`, as by land_gradient.
struct LandingPiece {
  std::byte* target = nullptr;
  DType dtype = DType::fp32;          // dtype of `target`
  std::uint64_t numel = 0;            // number of elements
  const std::byte* source = nullptr;  // must not overlap `target`
  DType source_dtype = DType::fp32;
  bool add = false;
  std::uint64_t first = 0;  // index of the piece's first element in a larger array; see sums_of_squares
};

// Result of a landing. Once the landing is done, the memory of the pieces is not used any more.
struct LandingCompletion : Completion {
  std::vector<std::vector<double>>
      sums;  // sums of squares of each piece's target; set once the landing is done without a failure
};
using LandingFuture = std::shared_ptr<LandingCompletion>;

// One thread lands the gradients, in the order of the calls. After an error of the runtime nothing lands any more: the
// landing with the error fails, and every later landing fails with the same error.
class Landings {
 public:
  Landings(std::shared_ptr<const DeviceGate> gate, std::shared_ptr<ThreadPool> pool, Isa isa);
  // Waits for all landings that were queued.
  ~Landings();
  Landings(const Landings&) = delete;
  Landings& operator=(const Landings&) = delete;

  // Lands the pieces once `event` has happened; if `event` is null, at once. Throws std::invalid_argument for pieces
  // that cannot land.
  LandingFuture land(void* event, std::vector<LandingPiece> pieces);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace infinity
