// Weights that arrive in 4 or 8 bits: a native thread decodes them once they are read.
#pragma once

#include <memory>
#include <vector>

#include "base/future.hpp"
#include "codec/codec.hpp"

namespace infinity {

// A weight and where its values go, aligned to the dtype and apart from the weight.
struct DecodePart {
  EncodedWeight weight;
  std::byte* out = nullptr;
  DType dtype = DType::bf16;
};

//   waiting ──▶ ready  all that it waits for is done
//   waiting ──▶ done   the decoder was closed
//   ready   ──▶ done   it was decoded, or something that it waited for failed
//
// One thread takes the jobs that are ready in the order in which they were submitted, and decodes them with the pool. A
// job that waits holds nobody back. The futures are completed by the thread: their callbacks must not block.
class WeightDecoder {
 public:
  // Throws std::invalid_argument without a pool.
  WeightDecoder(std::shared_ptr<ThreadPool> pool, Isa isa);
  // Decodes the jobs that are ready. Those that wait fail as canceled, or as what they wait for failed.
  ~WeightDecoder();
  WeightDecoder(const WeightDecoder&) = delete;
  WeightDecoder& operator=(const WeightDecoder&) = delete;

  // Decodes the parts when all of `after` is done. Where one of these failed nothing is decoded, and the future fails
  // with the failure of the first that did; a timeout comes before every other, because it says that memory may be in
  // use. The memory of the parts is not used any more once the future is done. Throws std::invalid_argument for a part
  // without memory.
  Future decode(std::vector<DecodePart> parts, std::vector<Future> after = {});

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace infinity
