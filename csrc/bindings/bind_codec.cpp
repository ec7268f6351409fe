#include "bindings/common.hpp"
#include "codec/codec.hpp"
#include "codec/decoder.hpp"
#include "codec/maps.hpp"

namespace infinity::bindings {
namespace {

py::dict weight_parts(const std::string& codec, std::uint64_t numel, std::uint64_t row_numel) {
  const WeightForm form = weight_form(codec);
  const CodecLayout layout = codec_layout(form, numel, row_numel);
  py::dict result;
  const auto add = [&result](const char* name, const CodecPart& part) {
    result[name] = py::make_tuple(part.begin, part.nbytes);
  };
  add("codes", layout.codes);
  add("scales", layout.scales);
  if (form.codec == WeightCodec::nf4 || form.codec == WeightCodec::nvfp4) add("nested_scales", layout.nested_scales);
  if (form.codec == WeightCodec::nf4) add("offset", layout.offset);
  return result;
}

void encode(const py::object& from, const std::string& dtype, const std::string& codec_name, const py::object& codes,
            const py::object& scales, const PyPool& pool, const std::optional<std::string>& isa_name) {
  const DType type = dtype_from(dtype);
  const WeightCodec codec = weight_form(codec_name).codec;
  const Memory in = memory_of(from, 0, itemsize(type), false, "values");
  const std::size_t numel = numel_of(in, itemsize(type), "values");
  if (codec != WeightCodec::nf4_fp32 && codec != WeightCodec::int8) {
    throw py::value_error("values are encoded to 'nf4_fp32' or 'int8'; nest_scales makes 'nf4' of 'nf4_fp32'");
  }
  const CodecLayout layout = codec_layout(codec, numel, 0);
  const std::size_t scale_item = codec == WeightCodec::int8 ? 2 : 4;
  const Memory code_memory = memory_of(codes, layout.codes.nbytes, 1, true, "codes");
  const Memory scale_memory = memory_of(scales, layout.scales.nbytes, scale_item, true, "scales");
  require_apart({{"values", &in}, {"codes", &code_memory}, {"scales", &scale_memory}});
  const Isa isa = isa_from(isa_name);
  ThreadPool& threads = *pool.get();
  const py::gil_scoped_release unlocked;
  encode_weights(in.data, type, numel, codec, code_memory.data, scale_memory.data, isa, threads);
}

void nest(const py::object& scales, float offset, const py::object& codes, const py::object& nested_scales) {
  const Memory in = memory_of(scales, 0, 4, false, "scales");
  const std::size_t blocks = numel_of(in, 4, "scales");
  const Memory code_memory = memory_of(codes, blocks, 1, true, "codes");
  const std::size_t groups = (blocks + kNestedBlocks - 1) / kNestedBlocks;
  const Memory nested_memory = memory_of(nested_scales, groups * 4, 4, true, "nested_scales");
  require_apart({{"scales", &in}, {"codes", &code_memory}, {"nested_scales", &nested_memory}});
  const py::gil_scoped_release unlocked;
  nest_scales(reinterpret_cast<const float*>(in.data), blocks, offset,
              reinterpret_cast<std::uint8_t*>(code_memory.data), reinterpret_cast<float*>(nested_memory.data));
}

// A part to decode, with the Python buffers of the part's memory.
struct PyDecodePart {
  DecodePart part;
  Memory data;
  Memory out;
};

PyDecodePart make_part(const py::object& data, const std::string& codec, std::uint64_t numel, std::uint64_t row_numel,
                       const py::object& out, const std::string& dtype) {
  PyDecodePart result;
  DecodePart& part = result.part;
  part.weight = {nullptr, weight_form(codec), numel, row_numel};
  part.dtype = dtype_from(dtype);
  const CodecLayout layout = codec_layout(part.weight.form, numel, row_numel);
  const std::size_t item = itemsize(part.dtype);
  result.data = memory_of(data, layout.nbytes, 4, false, "data");
  result.out = memory_of(out, numel * item, item, true, "out");
  require_apart({{"data", &result.data}, {"out", &result.out}});
  part.weight.data = result.data.data;
  part.out = result.out.data;
  return result;
}

void decode(const py::object& data, const std::string& codec, std::uint64_t numel, std::uint64_t row_numel,
            const py::object& out, const std::string& dtype, const PyPool& pool,
            const std::optional<std::string>& isa_name) {
  const PyDecodePart made = make_part(data, codec, numel, row_numel, out, dtype);
  const Isa isa = isa_from(isa_name);
  ThreadPool& threads = *pool.get();
  const py::gil_scoped_release unlocked;
  decode_weights(made.part.weight, made.part.out, made.part.dtype, isa, threads);
}

template <std::size_t count>
py::tuple tuple_of(const FloatMap<count>& map) {
  py::tuple result(count);
  for (std::size_t i = 0; i < count; ++i) result[i] = map.values[i];
  return result;
}

using PyDecoder = Closable<WeightDecoder>;

std::unique_ptr<PyFuture> decode_later(const PyDecoder& self, const std::vector<const PyDecodePart*>& given,
                                       const std::vector<const PyFuture*>& after) {
  std::vector<DecodePart> parts;
  std::vector<Memory> kept;
  for (const PyDecodePart* part : given) {
    if (part == nullptr) throw py::value_error("a part is None");
    parts.push_back(part->part);
    kept.insert(kept.end(), {part->data, part->out});
  }
  Future future = self.get()->decode(std::move(parts), futures_of(after));
  return std::make_unique<PyFuture>(std::move(future), std::move(kept));
}

}  // namespace

void bind_codec(py::module_& module) {
  module.attr("NF4_MAP") = tuple_of(kNf4Map);
  module.attr("NESTED_MAP") = tuple_of(kDynamicMap);
  module.def("weight_parts", &weight_parts, py::arg("codec"), py::arg("numel"), py::arg("row_numel") = 0);
  module.def(
      "encoded_weight_bytes",
      [](const std::string& codec, std::uint64_t numel, std::uint64_t row_numel) {
        return codec_layout(weight_form(codec), numel, row_numel).nbytes;
      },
      py::arg("codec"), py::arg("numel"), py::arg("row_numel") = 0);
  module.def("encode_weights", &encode, py::arg("values"), py::arg("dtype"), py::arg("codec"), py::arg("codes"),
             py::arg("scales"), py::arg("pool"), py::arg("isa") = py::none());
  module.def("nest_scales", &nest, py::arg("scales"), py::arg("offset"), py::arg("codes"), py::arg("nested_scales"));
  module.def("decode_weights", &decode, py::arg("data"), py::arg("codec"), py::arg("numel"), py::arg("row_numel"),
             py::arg("out"), py::arg("dtype"), py::arg("pool"), py::arg("isa") = py::none());
  py::class_<PyDecodePart>(module, "DecodePart")
      .def(py::init(&make_part), py::arg("data"), py::arg("codec"), py::arg("numel"), py::arg("row_numel"),
           py::arg("out"), py::arg("dtype"));
  py::class_<PyDecoder>(module, "WeightDecoder")
      .def(py::init([](const PyPool& pool, const std::optional<std::string>& isa) {
             return std::make_unique<PyDecoder>(std::make_shared<WeightDecoder>(pool.get(), isa_from(isa)));
           }),
           py::arg("pool"), py::arg("isa") = py::none())
      .def("decode", &decode_later, py::arg("parts"), py::arg("after") = py::tuple())
      .def("close", &PyDecoder::close);
}

}  // namespace infinity::bindings
