#include "bindings/common.hpp"

namespace infinity::bindings {

DType dtype_from(const std::string& name) {
  if (name == "fp32") return DType::fp32;
  if (name == "bf16") return DType::bf16;
  if (name == "fp16") return DType::fp16;
  throw py::value_error("unknown dtype '" + name + "'; use fp32, bf16 or fp16");
}

Master master_from(const std::string& name) {
  if (name == "weight") return Master::weight;
  if (name == "split16") return Master::split16;
  if (name == "fp32") return Master::fp32;
  throw py::value_error("unknown master '" + name + "'; use weight, split16 or fp32");
}

Isa isa_from(const std::optional<std::string>& name) { return name ? isa_from_name(*name) : select_isa(); }

namespace {

void require_bytes(const Memory& memory, std::size_t nbytes, const char* name) {
  if (memory.nbytes < nbytes) {
    throw py::value_error(std::string(name) + " holds " + std::to_string(memory.nbytes) + " bytes; " +
                          std::to_string(nbytes) + " are needed");
  }
}

void require_aligned(const Memory& memory, std::size_t alignment, const char* name) {
  if (reinterpret_cast<std::uintptr_t>(memory.data) % alignment != 0) {
    throw py::value_error(std::string(name) + " is not aligned to " + std::to_string(alignment) + " bytes");
  }
}

Memory values(const py::object& buffer, std::size_t numel, std::size_t item, bool writable, const char* name) {
  Memory memory = memory_from(buffer, writable, name);
  require_bytes(memory, numel * item, name);
  require_aligned(memory, item, name);
  return memory;
}

std::size_t numel_of(const py::object& buffer, std::size_t item, const char* name) {
  const std::size_t nbytes = memory_from(buffer, false, name).nbytes;
  if (nbytes % item != 0) throw py::value_error(std::string(name) + " is not a whole number of elements");
  return nbytes / item;
}

Isa supported(const std::optional<std::string>& name) {
  const Isa isa = isa_from(name);
  for (const Isa known : supported_isas()) {
    if (known == isa) return isa;
  }
  throw py::value_error("this processor has no " + isa_name(isa));
}

void adam(const py::object& weight, const py::object& residual, const py::object& exp_avg, const py::object& exp_avg_sq,
          const py::object& grad, const std::string& weight_dtype, const std::string& master,
          const std::string& grad_dtype, const std::vector<Segment>& segments, double grad_scale, const PyPool& pool,
          const std::optional<std::string>& isa_name) {
  const AdamFormat format{dtype_from(weight_dtype), master_from(master), dtype_from(grad_dtype)};
  if ((format.master == Master::weight) != (format.weight == DType::fp32) ||
      (format.master == Master::split16 && format.weight != DType::bf16)) {
    throw py::value_error("master '" + master + "' does not go with " + weight_dtype + " weights");
  }
  const std::size_t numel = numel_of(exp_avg, 4, "exp_avg");
  const Memory w = values(weight, numel, itemsize(format.weight), true, "weight");
  Memory r;
  if (format.master != Master::weight) {
    r = values(residual, numel, format.master == Master::split16 ? 2 : 4, true, "residual");
  }
  const Memory m = values(exp_avg, numel, 4, true, "exp_avg");
  const Memory v = values(exp_avg_sq, numel, 4, true, "exp_avg_sq");
  const Memory g = values(grad, numel, itemsize(format.grad), false, "grad");
  const Isa isa = supported(isa_name);
  std::uint64_t end = 0;
  for (const Segment& segment : segments) {
    if (segment.begin < end || segment.end < segment.begin || segment.end > numel) {
      throw py::value_error("segments must be sorted, disjoint and within the buffers");
    }
    end = segment.end;
  }
  const AdamBuffers buffers{w.data, r.data, reinterpret_cast<float*>(m.data), reinterpret_cast<float*>(v.data), g.data};
  const py::gil_scoped_release unlocked;
  adam_update(format, buffers, 0, numel, segments, static_cast<float>(grad_scale), isa, *pool.get());
}

void bind_segment(py::module_& module) {
  py::class_<Segment>(module, "Segment")
      .def(py::init([](std::uint64_t begin, std::uint64_t end, double lr, double beta1, double beta2, double eps,
                       double weight_decay, std::int64_t step,
                       bool skip) { return Segment{begin, end, lr, beta1, beta2, eps, weight_decay, step, skip}; }),
           py::arg("begin"), py::arg("end"), py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
           py::arg("eps"), py::arg("weight_decay"), py::arg("step"), py::arg("skip") = false)
      .def_readonly("begin", &Segment::begin)
      .def_readonly("end", &Segment::end);
}

void bind_conversions(py::module_& module) {
  module.def(
      "widen_in_place",
      [](const py::object& data, const std::string& dtype, std::size_t numel) {
        if (dtype_from(dtype) == DType::fp32) throw py::value_error("fp32 is as wide as it gets");
        const Memory memory = values(data, numel, 4, true, "data");
        const py::gil_scoped_release unlocked;
        widen_in_place(memory.data, dtype_from(dtype), numel);
      },
      py::arg("data"), py::arg("dtype"), py::arg("numel"));
  module.def(
      "encode_split16",
      [](const py::object& master, const py::object& weight, const py::object& residual) {
        const std::size_t numel = numel_of(master, 4, "master");
        const Memory p = values(master, numel, 4, false, "master");
        const Memory w = values(weight, numel, 2, true, "weight");
        const Memory r = values(residual, numel, 2, true, "residual");
        const py::gil_scoped_release unlocked;
        encode_split16(reinterpret_cast<const float*>(p.data), reinterpret_cast<std::uint16_t*>(w.data),
                       reinterpret_cast<std::int16_t*>(r.data), numel);
      },
      py::arg("master"), py::arg("weight"), py::arg("residual"));
  module.def(
      "decode_split16",
      [](const py::object& weight, const py::object& residual, const py::object& master) {
        const std::size_t numel = numel_of(master, 4, "master");
        const Memory p = values(master, numel, 4, true, "master");
        const Memory w = values(weight, numel, 2, false, "weight");
        const Memory r = values(residual, numel, 2, false, "residual");
        const py::gil_scoped_release unlocked;
        decode_split16(reinterpret_cast<const std::uint16_t*>(w.data), reinterpret_cast<const std::int16_t*>(r.data),
                       reinterpret_cast<float*>(p.data), numel);
      },
      py::arg("weight"), py::arg("residual"), py::arg("master"));
  module.def(
      "round_weights",
      [](const py::object& master, const py::object& weight, const std::string& dtype) {
        const std::size_t numel = numel_of(master, 4, "master");
        const Memory p = values(master, numel, 4, false, "master");
        const Memory w = values(weight, numel, itemsize(dtype_from(dtype)), true, "weight");
        const py::gil_scoped_release unlocked;
        round_weights(reinterpret_cast<const float*>(p.data), w.data, dtype_from(dtype), numel);
      },
      py::arg("master"), py::arg("weight"), py::arg("dtype"));
}

}  // namespace

void bind_adam(py::module_& module) {
  bind_segment(module);
  module.def("supported_isas", [] {
    std::vector<std::string> names;
    for (const Isa isa : supported_isas()) names.push_back(isa_name(isa));
    return names;
  });
  module.def("select_isa", [] { return isa_name(select_isa()); });
  module.def("adam_update", &adam, py::arg("weight"), py::arg("residual"), py::arg("exp_avg"), py::arg("exp_avg_sq"),
             py::arg("grad"), py::kw_only(), py::arg("weight_dtype"), py::arg("master"), py::arg("grad_dtype"),
             py::arg("segments"), py::arg("grad_scale"), py::arg("pool"), py::arg("isa") = py::none());
  module.def(
      "sum_squares",
      [](const py::object& data, const std::string& dtype, const PyPool& pool, const std::optional<std::string>& isa) {
        const DType type = dtype_from(dtype);
        const std::size_t numel = numel_of(data, itemsize(type), "data");
        const Memory memory = values(data, numel, itemsize(type), false, "data");
        const Isa kernels = supported(isa);
        const py::gil_scoped_release unlocked;
        return sum_squares(memory.data, type, numel, kernels, *pool.get());
      },
      py::arg("data"), py::arg("dtype"), py::arg("pool"), py::arg("isa") = py::none());
  module.def(
      "accumulate",
      [](const py::object& dst, const py::object& src, const std::string& src_dtype, const PyPool& pool,
         const std::optional<std::string>& isa) {
        const DType type = dtype_from(src_dtype);
        const std::size_t numel = numel_of(src, itemsize(type), "src");
        const Memory from = values(src, numel, itemsize(type), false, "src");
        const Memory to = values(dst, numel, 4, true, "dst");
        const Isa kernels = supported(isa);
        const py::gil_scoped_release unlocked;
        accumulate(reinterpret_cast<float*>(to.data), from.data, type, numel, kernels, *pool.get());
      },
      py::arg("dst"), py::arg("src"), py::arg("src_dtype"), py::arg("pool"), py::arg("isa") = py::none());
  bind_conversions(module);
}

}  // namespace infinity::bindings
