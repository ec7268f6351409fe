// Decoding of weights that are stored in 4 or 8 bits per value: a native thread decodes the weights once they are read.
#pragma once

#include <memory>
#include <vector>

#include "base/future.hpp"
#include "codec/codec.hpp"

namespace infinity {

// A weight to decode, and the destination of its values. `out` is aligned to the dtype and does not overlap the weight.
struct DecodePart {
  EncodedWeight weight;
  std::byte* out = nullptr;
  DType dtype = DType::bf16;
};

//   waiting ──▶ ready  all futures that the job waits for are done
//   waiting ──▶ done   the decoder was closed
//   ready   ──▶ done   the job was decoded, or a future that the job waited for failed
//
// One thread takes the ready jobs in the order in which they were submitted, and decodes them with the pool. A waiting
// job delays no other job. The thread completes the futures: their callbacks must not block.
class WeightDecoder {
 public:
  // Throws std::invalid_argument without a pool.
  WeightDecoder(std::shared_ptr<ThreadPool> pool, Isa isa);
  // Decodes the ready jobs. Waiting jobs fail as canceled, or with the failure of a future that they wait for.
  ~WeightDecoder();
  WeightDecoder(const WeightDecoder&) = delete;
  WeightDecoder& operator=(const WeightDecoder&) = delete;

  // Decodes the parts when all futures in `after` are done. If any of these futures failed, nothing is decoded, and the
  // returned future fails with the first of these failures. A timeout takes precedence over every other failure,
  // because after a timeout a device may still use the memory. Once the future is done, the memory of the parts is not
  // used any more. Throws std::invalid_argument for a part without memory.
  Future decode(std::vector<DecodePart> parts, std::vector<Future> after = {});

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace infinity
