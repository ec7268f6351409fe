// Offsets and sizes of the parts of a stored form.
#include "base/require.hpp"
#include "codec/codec.hpp"

namespace infinity {
namespace {

constexpr std::uint64_t kPartAlignment = 64;
constexpr std::uint64_t kNumelMax = std::uint64_t{1} << 48;  // so that no size overflows

std::uint64_t divide_up(std::uint64_t value, std::uint64_t by) { return (value + by - 1) / by; }

}  // namespace

CodecLayout codec_layout(WeightCodec codec, std::uint64_t numel, std::uint64_t row_numel) {
  require(numel <= kNumelMax, "a weight cannot have that many elements");
  CodecLayout layout{};
  const auto append = [&layout](std::uint64_t nbytes) {
    const CodecPart part{layout.nbytes, nbytes};
    layout.nbytes += divide_up(nbytes, kPartAlignment) * kPartAlignment;
    return part;
  };
  const std::uint64_t blocks = divide_up(numel, kCodecBlockNumel);
  switch (codec) {
    case WeightCodec::nf4:
      layout.codes = append(divide_up(numel, 2));
      layout.scales = append(blocks);
      layout.nested_scales = append(divide_up(blocks, kNestedBlocks) * sizeof(float));
      layout.offset = append(sizeof(float));
      break;
    case WeightCodec::nf4_fp32:
      layout.codes = append(divide_up(numel, 2));
      layout.scales = append(blocks * sizeof(float));
      break;
    case WeightCodec::int8:
      layout.codes = append(numel);
      layout.scales = append(blocks * sizeof(std::uint16_t));
      break;
    case WeightCodec::int8_rows:
      require(row_numel > 0 && numel % row_numel == 0, "int8_rows needs row_numel, of which numel is a multiple");
      layout.codes = append(numel);
      layout.scales = append(numel / row_numel * sizeof(float));
      break;
  }
  return layout;
}

}  // namespace infinity
