// The codecs by name; offsets and sizes of the parts of a stored form.
#include <algorithm>
#include <array>
#include <charconv>
#include <iterator>
#include <string_view>

#include "base/require.hpp"
#include "codec/codec.hpp"

namespace infinity {
namespace {

constexpr std::uint64_t kPartAlignment = 64;
constexpr std::uint64_t kNumelMax = std::uint64_t{1} << 48;      // so that no size overflows
constexpr std::uint64_t kBlockSideMax = std::uint64_t{1} << 20;  // rows or columns of a block
constexpr std::array kScaleTypes = {"fp32", "bf16", "e8m0"};

std::uint64_t divide_up(std::uint64_t value, std::uint64_t by) { return (value + by - 1) / by; }

// A weight whose parts are laid out.
struct Weight {
  const WeightForm& form;
  std::uint64_t numel;
  std::uint64_t row_numel;

  [[nodiscard]] std::uint64_t blocks() const { return divide_up(numel, kCodecBlockNumel); }
  // Whether the weight consists of complete rows, and each row of complete groups.
  [[nodiscard]] bool has_rows_of(std::uint64_t group) const {
    return row_numel > 0 && numel % row_numel == 0 && row_numel % group == 0;
  }
};

// Bytes of the parts, in their order.
struct PartBytes {
  std::uint64_t codes;
  std::uint64_t scales;
  std::uint64_t nested_scales = 0;
  std::uint64_t offset = 0;
};

PartBytes nf4(const Weight& weight) {
  const std::uint64_t blocks = weight.blocks();
  return {divide_up(weight.numel, 2), blocks, divide_up(blocks, kNestedBlocks) * sizeof(float), sizeof(float)};
}

PartBytes nf4_fp32(const Weight& weight) { return {divide_up(weight.numel, 2), weight.blocks() * sizeof(float)}; }

PartBytes int8(const Weight& weight) { return {weight.numel, weight.blocks() * sizeof(std::uint16_t)}; }

PartBytes int8_rows(const Weight& weight) {
  require(weight.has_rows_of(1), "int8_rows needs row_numel, of which numel is a multiple");
  return {weight.numel, weight.numel / weight.row_numel * sizeof(float)};
}

PartBytes fp8_block(const Weight& weight) {
  require(weight.has_rows_of(1), "fp8_block needs row_numel, of which numel is a multiple");
  const WeightForm& form = weight.form;
  const std::uint64_t rows = divide_up(weight.numel / weight.row_numel, form.block_rows);
  return {weight.numel, rows * divide_up(weight.row_numel, form.block_columns) * itemsize(form.scale_type)};
}

PartBytes mxfp4(const Weight& weight) {
  const std::uint64_t rows = weight.form.matrix_rows;
  require(weight.numel == 0 || (rows == 0 ? weight.has_rows_of(kMxfp4Group)
                                          : weight.has_rows_of(1) && rows % kMxfp4Group == 0 &&
                                                weight.numel / weight.row_numel % rows == 0),
          "mxfp4 needs row_numel, of which numel is a multiple, and complete groups of 32 elements");
  return {weight.numel / 2, weight.numel / kMxfp4Group};
}

PartBytes nvfp4(const Weight& weight) {
  require(weight.numel == 0 || weight.has_rows_of(kNvfp4Group),
          "nvfp4 needs row_numel, of which numel is a multiple, and complete groups of 16 elements");
  return {weight.numel / 2, weight.numel / kNvfp4Group, sizeof(float)};
}

PartBytes int4_group(const Weight& weight) {
  const std::uint64_t group = weight.form.block_columns;
  require(weight.numel == 0 || (group % 16 == 0 && weight.has_rows_of(group)),
          "int4_group needs row_numel, of which numel is a multiple, and complete groups of a multiple of 16 elements");
  return {weight.numel / 2, weight.numel / group * itemsize(weight.form.scale_type)};
}

// Parse the parameters that follow a codec's name, or nullptr if there are none. Return whether the codec can have
// them.
bool no_parameters(const std::string* parameters, WeightForm&) { return parameters == nullptr; }

// Takes a number of rows or columns and the character after it from the text.
bool take_side(std::string_view& text, char after, std::uint64_t& side) {
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, side);
  if (error != std::errc{} || rest == end || *rest != after || side == 0 || side > kBlockSideMax) return false;
  text = std::string_view(rest + 1, static_cast<std::size_t>(end - rest - 1));
  return true;
}

bool is_scale_type(std::string_view text, WeightForm& form) {
  const auto* const found = std::find(kScaleTypes.begin(), kScaleTypes.end(), text);
  form.scale_type = static_cast<ScaleType>(found - kScaleTypes.begin());
  return found != kScaleTypes.end();
}

// "128x128:bf16"
bool fp8_block_parameters(const std::string* parameters, WeightForm& form) {
  if (parameters == nullptr) return false;
  std::string_view rest = *parameters;
  return take_side(rest, 'x', form.block_rows) && take_side(rest, ':', form.block_columns) && is_scale_type(rest, form);
}

// "2880"
bool mxfp4_parameters(const std::string* parameters, WeightForm& form) {
  if (parameters == nullptr) return true;
  const char* const end = parameters->data() + parameters->size();
  const auto [rest, error] = std::from_chars(parameters->data(), end, form.matrix_rows);
  return error == std::errc{} && rest == end && form.matrix_rows > 0 && form.matrix_rows <= kBlockSideMax;
}

// "factor" or "divisor"
bool nvfp4_parameters(const std::string* parameters, WeightForm& form) {
  form.divisor = parameters != nullptr && *parameters == "divisor";
  return form.divisor || (parameters != nullptr && *parameters == "factor");
}

// "128:bf16"
bool int4_group_parameters(const std::string* parameters, WeightForm& form) {
  if (parameters == nullptr) return false;
  std::string_view rest = *parameters;
  return take_side(rest, ':', form.block_columns) && is_scale_type(rest, form);
}

struct CodecRow {
  const char* name;
  PartBytes (*parts)(const Weight& weight);
  bool (*parse)(const std::string* parameters, WeightForm& form);
  const char* parameters;  // what the codec needs, for errors
};

// In the order of WeightCodec.
constexpr CodecRow kCodecs[] = {
    {"nf4", nf4, no_parameters, "no parameters"},
    {"nf4_fp32", nf4_fp32, no_parameters, "no parameters"},
    {"int8", int8, no_parameters, "no parameters"},
    {"int8_rows", int8_rows, no_parameters, "no parameters"},
    {"fp8_block", fp8_block, fp8_block_parameters,
     "its block and its type of scales: 'fp8_block:128x128:fp32', or bf16 or e8m0 in place of fp32"},
    {"mxfp4", mxfp4, mxfp4_parameters,
     "no parameters, or the rows of a matrix that is stored transposed: 'mxfp4:2880'"},
    {"nvfp4", nvfp4, nvfp4_parameters, "the kind of its global scale: 'nvfp4:factor' or 'nvfp4:divisor'"},
    {"int4_group", int4_group, int4_group_parameters,
     "its group and its type of scales: 'int4_group:128:fp32', or bf16 or e8m0 in place of fp32"},
};
static_assert(std::size(kCodecs) == kWeightCodecs);

}  // namespace

WeightForm weight_form(const std::string& text) {
  const std::size_t colon = text.find(':');
  const std::string name = text.substr(0, colon);
  std::string known;
  for (const CodecRow& row : kCodecs) {
    const auto index = static_cast<std::size_t>(&row - kCodecs);
    known += (known.empty() ? "" : index + 1 == kWeightCodecs ? " or " : ", ") + std::string(row.name);
    if (name != row.name) continue;
    WeightForm form(static_cast<WeightCodec>(index));
    const std::string parameters = colon == std::string::npos ? "" : text.substr(colon + 1);
    if (row.parse(colon == std::string::npos ? nullptr : &parameters, form)) return form;
    throw std::invalid_argument("codec '" + text + "' needs " + row.parameters);
  }
  throw std::invalid_argument("unknown codec '" + text + "'; use " + known);
}

CodecLayout codec_layout(const WeightForm& form, std::uint64_t numel, std::uint64_t row_numel) {
  require(numel <= kNumelMax, "a weight cannot have that many elements");
  const PartBytes bytes = kCodecs[static_cast<std::size_t>(form.codec)].parts({form, numel, row_numel});
  CodecLayout layout{};
  const auto append = [&layout](std::uint64_t nbytes) {
    const CodecPart part{layout.nbytes, nbytes};
    layout.nbytes += divide_up(nbytes, kPartAlignment) * kPartAlignment;
    return part;
  };
  layout.codes = append(bytes.codes);
  layout.scales = append(bytes.scales);
  layout.nested_scales = append(bytes.nested_scales);
  layout.offset = append(bytes.offset);
  return layout;
}

}  // namespace infinity
