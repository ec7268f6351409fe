// Choice of kernels, and division of weights into tasks.
#include "codec/codec.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

#include "base/rounding.hpp"
#include "codec/kernels.hpp"

namespace infinity {
namespace {

// Size in bytes from which the first values of a decoded weight have left a core's L2 before they are read.
constexpr std::size_t kPastCachesBytes = std::size_t{2} << 20;

const CodecKernels& kernels_for(Isa isa) {
#ifdef INFINITY_X86
  if (isa == Isa::avx512) return avx512::kCodecKernels;
  if (isa == Isa::avx2) return avx2::kCodecKernels;
#endif
  static_cast<void>(isa);
  return baseline::kCodecKernels;  // on 64-bit ARM the baseline has NEON
}

std::size_t tasks_of(std::uint64_t numel, std::size_t task_numel = kCodecTaskNumel) {
  return static_cast<std::size_t>((numel + task_numel - 1) / task_numel);
}

// Number of elements of a task.
std::size_t task_numel(const EncodedWeight& weight) {
  const auto rows = static_cast<std::size_t>(weight.form.matrix_rows);
  return rows == 0 ? kCodecTaskNumel : kTransposedColumns * rows;
}

void lower_to(std::atomic<std::uint64_t>& least, std::uint64_t value) {
  std::uint64_t before = least;
  while (value < before && !least.compare_exchange_weak(before, value)) {
  }
}

}  // namespace

void encode_weights(const void* values, DType dtype, std::uint64_t numel, WeightCodec codec, void* codes, void* scales,
                    Isa isa, ThreadPool& pool) {
  if (codec != WeightCodec::nf4_fp32 && codec != WeightCodec::int8) {
    throw std::invalid_argument("values are encoded to nf4_fp32 or int8; nest_scales makes nf4 of nf4_fp32");
  }
  const CodecKernels& kernels = kernels_for(isa);
  std::atomic<std::uint64_t> refused{numel};  // the first element that is not finite
  pool.parallel_for(tasks_of(numel), [&](std::size_t task) {
    const IeeeArithmetic ieee;
    const std::size_t begin = task * kCodecTaskNumel;
    const std::size_t count = std::min<std::size_t>(kCodecTaskNumel, numel - begin);
    const std::size_t block = begin / kCodecBlockNumel;
    const auto* const from = static_cast<const std::byte*>(values) + begin * itemsize(dtype);
    const std::size_t done = codec == WeightCodec::nf4_fp32
                                 ? kernels.encode_nf4(from, dtype, count, static_cast<std::uint8_t*>(codes) + begin / 2,
                                                      static_cast<float*>(scales) + block)
                                 : kernels.encode_int8(from, dtype, count, static_cast<std::int8_t*>(codes) + begin,
                                                       static_cast<std::uint16_t*>(scales) + block);
    if (done < count) lower_to(refused, begin + done);
  });
  if (refused < numel) {
    throw std::invalid_argument("element " + std::to_string(refused) + " of the values is not finite");
  }
}

std::size_t decode_tasks(const EncodedWeight& weight) { return tasks_of(weight.numel, task_numel(weight)); }

void decode_task(const EncodedWeight& weight, std::size_t task, void* out, DType dtype, Isa isa) {
  const IeeeArithmetic ieee;
  const std::size_t begin = task * task_numel(weight);
  const std::size_t end = begin + std::min<std::size_t>(task_numel(weight), weight.numel - begin);
  const bool past_caches = weight.numel * itemsize(dtype) >= kPastCachesBytes;
  const CodecLayout layout = codec_layout(weight.form, weight.numel, weight.row_numel);
  const auto codec = static_cast<std::size_t>(weight.form.codec);
  kernels_for(isa).decode[codec]({weight, layout, begin, end, {out, dtype, past_caches}});
}

void decode_weights(const EncodedWeight& weight, void* out, DType dtype, Isa isa, ThreadPool& pool) {
  pool.parallel_for(
      decode_tasks(weight), [&](std::size_t task) { decode_task(weight, task, out, dtype, isa); }, nullptr,
      Urgency::urgent);
}

}  // namespace infinity
