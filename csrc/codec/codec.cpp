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
constexpr std::size_t kGroupNumel = kNestedBlocks * kCodecBlockNumel;

const CodecKernels& kernels_for(Isa isa) {
#ifdef INFINITY_X86
  if (isa == Isa::avx512) return avx512::kCodecKernels;
  if (isa == Isa::avx2) return avx2::kCodecKernels;
#endif
  static_cast<void>(isa);
  return baseline::kCodecKernels;  // on 64-bit ARM the baseline has NEON
}

template <class T>
const T* part_at(const EncodedWeight& weight, const CodecPart& part) {
  return reinterpret_cast<const T*>(weight.data + part.begin);
}

// Elements [begin, end) of a weight; `begin` is the start of a group of nested scales.
struct Span {
  std::size_t begin;
  std::size_t end;
  std::byte* out;  // output of the complete weight
  DType dtype;
  bool past_caches;

  [[nodiscard]] DecodeOutput out_at(std::size_t element) const {
    return {out + element * itemsize(dtype), dtype, past_caches};
  }
};

void decode_nested(const EncodedWeight& weight, const CodecLayout& layout, const Span& span,
                   const CodecKernels& kernels) {
  const auto* const codes = part_at<std::uint8_t>(weight, layout.codes);
  const auto* const scale_codes = part_at<std::uint8_t>(weight, layout.scales);
  const auto* const nested = part_at<float>(weight, layout.nested_scales);
  const float offset = *part_at<float>(weight, layout.offset);
  alignas(64) float scales[kNestedBlocks];
  for (std::size_t at = span.begin; at < span.end; at += kGroupNumel) {
    const std::size_t numel = std::min(kGroupNumel, span.end - at);
    const std::size_t blocks = (numel + kCodecBlockNumel - 1) / kCodecBlockNumel;
    kernels.unnest(scale_codes + at / kCodecBlockNumel, nested[at / kGroupNumel], offset, scales, blocks);
    kernels.decode_nf4(codes + at / 2, scales, span.out_at(at), numel);
  }
}

void decode_rows(const EncodedWeight& weight, const CodecLayout& layout, const Span& span,
                 const CodecKernels& kernels) {
  const auto* const codes = part_at<std::int8_t>(weight, layout.codes);
  const auto* const scales = part_at<float>(weight, layout.scales);
  const auto row_numel = static_cast<std::size_t>(weight.row_numel);
  for (std::size_t at = span.begin; at < span.end;) {
    const std::size_t row = at / row_numel;
    const std::size_t end = std::min((row + 1) * row_numel, span.end);
    kernels.decode_row(codes + at, scales[row], span.out_at(at), end - at);
    at = end;
  }
}

void decode_span(const EncodedWeight& weight, const Span& span, const CodecKernels& kernels) {
  const CodecLayout layout = codec_layout(weight.codec, weight.numel, weight.row_numel);
  const std::size_t numel = span.end - span.begin;
  const std::size_t block = span.begin / kCodecBlockNumel;
  switch (weight.codec) {
    case WeightCodec::nf4:
      return decode_nested(weight, layout, span, kernels);
    case WeightCodec::nf4_fp32:
      return kernels.decode_nf4(part_at<std::uint8_t>(weight, layout.codes) + span.begin / 2,
                                part_at<float>(weight, layout.scales) + block, span.out_at(span.begin), numel);
    case WeightCodec::int8:
      return kernels.decode_int8(part_at<std::int8_t>(weight, layout.codes) + span.begin,
                                 part_at<std::uint16_t>(weight, layout.scales) + block, span.out_at(span.begin), numel);
    case WeightCodec::int8_rows:
      return decode_rows(weight, layout, span, kernels);
  }
}

std::size_t tasks_of(std::uint64_t numel) {
  return static_cast<std::size_t>((numel + kCodecTaskNumel - 1) / kCodecTaskNumel);
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

std::size_t decode_tasks(const EncodedWeight& weight) { return tasks_of(weight.numel); }

void decode_task(const EncodedWeight& weight, std::size_t task, void* out, DType dtype, Isa isa) {
  const IeeeArithmetic ieee;
  const std::size_t begin = task * kCodecTaskNumel;
  const std::size_t end = begin + std::min<std::size_t>(kCodecTaskNumel, weight.numel - begin);
  const bool past_caches = weight.numel * itemsize(dtype) >= kPastCachesBytes;
  decode_span(weight, {begin, end, static_cast<std::byte*>(out), dtype, past_caches}, kernels_for(isa));
}

void decode_weights(const EncodedWeight& weight, void* out, DType dtype, Isa isa, ThreadPool& pool) {
  pool.parallel_for(
      decode_tasks(weight), [&](std::size_t task) { decode_task(weight, task, out, dtype, isa); }, nullptr,
      Urgency::urgent);
}

}  // namespace infinity
