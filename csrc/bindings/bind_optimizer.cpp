#include "bindings/common.hpp"
#include "cpu_adam/kernels.hpp"

namespace infinity::bindings {

DType dtype_from(const std::string& name) { return chosen<DType>("dtype", name, {"fp32", "bf16", "fp16"}); }

Master master_from(const std::string& name) {
  return chosen<Master>("master", name, {"weight", "split16", "fp32", "none"});
}

Moments moments_from(const std::string& name) { return chosen<Moments>("moments", name, {"fp32", "bf16", "int8"}); }

Isa isa_from(const std::optional<std::string>& name) {
  const Isa isa = name ? isa_from_name(*name) : select_isa();
  for (const Isa known : supported_isas()) {
    if (known == isa) return isa;
  }
  throw py::value_error("this processor has no " + isa_name(isa));
}

std::size_t numel_of(const Memory& memory, std::size_t item, const char* name) {
  if (memory.nbytes % item != 0) throw py::value_error(std::string(name) + " is not a whole number of elements");
  return memory.nbytes / item;
}

namespace {

Memory values(const py::object& buffer, std::size_t numel, std::size_t item, bool writable, const char* name) {
  if (numel > SIZE_MAX / item) throw py::value_error(std::string(name) + " cannot have so many elements");
  return memory_of(buffer, numel * item, item, writable, name);
}

std::size_t numel_of(const py::object& buffer, std::size_t item, const char* name) {
  return numel_of(memory_from(buffer, false, name), item, name);
}

Memory moment(const py::object& buffer, Moments moments, std::size_t numel, bool writable, const char* name) {
  const std::size_t alignment = moments == Moments::bf16 ? 2 : 4;
  return memory_of(buffer, moment_bytes(moments, numel), alignment, writable, name);
}

bool update(const py::object& weight, const py::object& residual, const py::object& exp_avg,
            const py::object& exp_avg_sq, const py::object& grad, const std::string& weight_dtype,
            const std::string& master, const std::string& moments, const std::string& grad_dtype,
            const std::vector<Segment>& segments, const PyPool& pool, const std::optional<std::string>& isa_name) {
  const StateFormat format{dtype_from(weight_dtype), master_from(master), dtype_from(grad_dtype),
                           moments_from(moments)};
  check_format(format);
  const std::size_t numel = numel_of(weight, itemsize(format.weight), "weight");
  check_segments(segments, numel, format);
  bool uses_m = !exp_avg.is_none();
  bool uses_v = !exp_avg_sq.is_none();
  for (const Segment& segment : segments) {
    uses_m = uses_m || (!segment.skip && segment.hyper.uses_exp_avg());
    uses_v = uses_v || (!segment.skip && segment.hyper.uses_exp_avg_sq());
  }
  const Memory w = values(weight, numel, itemsize(format.weight), true, "weight");
  const Memory g = values(grad, numel, itemsize(format.grad), false, "grad");
  Memory r;
  Memory m;
  Memory v;
  const std::size_t rest = residual_itemsize(format.master);
  if (rest > 0) r = values(residual, numel, rest, true, "residual");
  if (uses_m) m = moment(exp_avg, format.moments, numel, true, "exp_avg");
  if (uses_v) v = moment(exp_avg_sq, format.moments, numel, true, "exp_avg_sq");
  require_apart({{"weight", &w}, {"residual", &r}, {"exp_avg", &m}, {"exp_avg_sq", &v}, {"grad", &g}});
  const Isa isa = isa_from(isa_name);
  ThreadPool& threads = *pool.get();
  const py::gil_scoped_release unlocked;
  StateBuffers buffers{w.data, r.data, m.data, v.data, g.data};
  buffers.weight.past_caches = true;
  return optimizer_update(format, buffers, 0, numel, segments, isa, threads);
}

std::vector<double> land(const py::object& dst, const std::string& dst_dtype, const py::object& src,
                         const std::string& src_dtype, bool add, const PyPool& pool,
                         const std::optional<std::string>& isa_name, std::uint64_t first) {
  const DType from = dtype_from(src_dtype);
  const DType to = dtype_from(dst_dtype);
  const std::size_t numel = numel_of(src, itemsize(from), "src");
  const Memory source = values(src, numel, itemsize(from), false, "src");
  const Memory target = values(dst, numel, itemsize(to), true, "dst");
  require_apart({{"dst", &target}, {"src", &source}});
  const Isa isa = isa_from(isa_name);
  ThreadPool& threads = *pool.get();
  const py::gil_scoped_release unlocked;
  return land_gradient(target.data, to, source.data, from, first, numel, add, isa, threads);
}

void traffic(const py::object& a, const py::object& b, const py::object& c, const py::object& d, const PyPool& pool,
             const std::optional<std::string>& isa_name) {
  const std::size_t numel = numel_of(d, 4, "d");
  const Memory first = values(a, numel, 4, true, "a");
  const Memory second = values(b, numel, 4, true, "b");
  const Memory third = values(c, numel, 4, true, "c");
  const Memory added = values(d, numel, 4, false, "d");
  require_apart({{"a", &first}, {"b", &second}, {"c", &third}, {"d", &added}});
  const Isa isa = isa_from(isa_name);
  ThreadPool& threads = *pool.get();
  const py::gil_scoped_release unlocked;
  const auto floats = [](const Memory& memory) { return reinterpret_cast<float*>(memory.data); };
  read_modify_write(floats(first), floats(second), floats(third), floats(added), numel, isa, threads);
}

void decode(const py::object& data, const std::string& moments, bool is_signed, const py::object& to,
            const std::optional<std::string>& isa_name) {
  const Moments format = moments_from(moments);
  const std::size_t numel = numel_of(to, 4, "values");
  const Memory out = values(to, numel, 4, true, "values");
  const Memory in = moment(data, format, numel, false, "data");
  require_apart({{"data", &in}, {"values", &out}});
  const Isa isa = isa_from(isa_name);
  const py::gil_scoped_release unlocked;
  decode_moments(format, is_signed, in.data, reinterpret_cast<float*>(out.data), numel, isa);
}

void encode(const py::object& from, const std::string& moments, bool is_signed, const py::object& data,
            const std::optional<std::string>& isa_name) {
  const Moments format = moments_from(moments);
  const std::size_t numel = numel_of(from, 4, "values");
  const Memory in = values(from, numel, 4, false, "values");
  const Memory out = moment(data, format, numel, true, "data");
  require_apart({{"values", &in}, {"data", &out}});
  const Isa isa = isa_from(isa_name);
  const py::gil_scoped_release unlocked;
  encode_moments(format, is_signed, reinterpret_cast<const float*>(in.data), out.data, numel, isa);
}

constexpr std::initializer_list<const char*> kRules = {"adamw", "adam", "lion", "adagrad", "sgd"};

Segment make_segment(std::uint64_t begin, std::uint64_t end, const std::string& rule, double lr, double beta1,
                     double beta2, double eps, double weight_decay, double dampening, double lr_decay,
                     double initial_accumulator, bool nesterov, bool maximize, std::int64_t step, std::uint64_t index,
                     std::uint64_t seed, bool skip, std::optional<bool> fresh, double grad_scale) {
  return {begin,
          end,
          index,
          seed,
          step,
          skip,
          fresh.value_or(step == 1),
          static_cast<float>(grad_scale),
          {chosen<Rule>("rule", rule, kRules), lr, beta1, beta2, eps, weight_decay, dampening, lr_decay,
           initial_accumulator, nesterov, maximize}};
}

void bind_segment(py::module_& module) {
  py::class_<Segment>(module, "Segment")
      .def(py::init(&make_segment), py::arg("begin"), py::arg("end"), py::kw_only(), py::arg("rule") = "adamw",
           py::arg("lr"), py::arg("beta1") = 0.0, py::arg("beta2") = 0.0, py::arg("eps") = 0.0,
           py::arg("weight_decay") = 0.0, py::arg("dampening") = 0.0, py::arg("lr_decay") = 0.0,
           py::arg("initial_accumulator") = 0.0, py::arg("nesterov") = false, py::arg("maximize") = false,
           py::arg("step"), py::arg("index") = 0, py::arg("seed") = 0, py::arg("skip") = false,
           py::arg("fresh") = py::none(), py::arg("grad_scale") = 1.0)
      .def(
          "at",
          [](Segment self, std::uint64_t begin, std::uint64_t end, std::int64_t step, std::uint64_t index, bool fresh,
             double grad_scale) {
            self.begin = begin;
            self.end = end;
            self.step = step;
            self.index = index;
            self.fresh = fresh;
            self.grad_scale = static_cast<float>(grad_scale);
            return self;
          },
          py::arg("begin"), py::arg("end"), py::kw_only(), py::arg("step"), py::arg("index"), py::arg("fresh"),
          py::arg("grad_scale"))
      .def_readonly("begin", &Segment::begin)
      .def_readonly("end", &Segment::end)
      .def_readonly("skip", &Segment::skip)
      .def_property_readonly("constants", &constants_of);
}

void bind_constants(py::module_& module) {
  py::class_<Constants>(module, "Constants")
      .def_property_readonly("rule",
                             [](const Constants& c) { return kRules.begin()[static_cast<std::size_t>(c.rule)]; })
      .def_readonly("uses_exp_avg", &Constants::uses_exp_avg)
      .def_readonly("uses_exp_avg_sq", &Constants::uses_exp_avg_sq)
      .def_readonly("fresh", &Constants::fresh)
      .def_readonly("nesterov", &Constants::nesterov)
      .def_readonly("grad_scale", &Constants::grad_scale)
      .def_readonly("beta1", &Constants::beta1)
      .def_readonly("one_minus_beta1", &Constants::one_minus_beta1)
      .def_readonly("beta2", &Constants::beta2)
      .def_readonly("one_minus_beta2", &Constants::one_minus_beta2)
      .def_readonly("decay", &Constants::decay)
      .def_readonly("l2", &Constants::l2)
      .def_readonly("step_size", &Constants::step_size)
      .def_readonly("inverse_bc2_sqrt", &Constants::inverse_bc2_sqrt)
      .def_readonly("eps", &Constants::eps)
      .def_readonly("initial", &Constants::initial);
}

void bind_conversions(py::module_& module) {
  module.def(
      "widen_in_place",
      [](const py::object& data, const std::string& dtype, std::size_t numel) {
        if (dtype_from(dtype) == DType::fp32) throw py::value_error("fp32 values cannot be widened");
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
        require_apart({{"master", &p}, {"weight", &w}, {"residual", &r}});
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
        require_apart({{"master", &p}, {"weight", &w}, {"residual", &r}});
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
        require_apart({{"master", &p}, {"weight", &w}});
        const py::gil_scoped_release unlocked;
        round_weights(reinterpret_cast<const float*>(p.data), w.data, dtype_from(dtype), numel);
      },
      py::arg("master"), py::arg("weight"), py::arg("dtype"));
  module.def("decode_moments", &decode, py::arg("data"), py::arg("moments"), py::kw_only(), py::arg("is_signed"),
             py::arg("values"), py::arg("isa") = py::none());
  module.def("encode_moments", &encode, py::arg("values"), py::arg("moments"), py::kw_only(), py::arg("is_signed"),
             py::arg("data"), py::arg("isa") = py::none());
}

}  // namespace

void bind_optimizer(py::module_& module) {
  module.attr("BLOCK_NUMEL") = kBlockNumel;
  module.attr("CUT_NUMEL") = kCutNumel;
  module.attr("CHUNK_NUMEL") = kChunkNumel;
  module.def("task_numel", &task_numel);
  module.def(
      "moment_bytes",
      [](const std::string& moments, std::uint64_t numel) { return moment_bytes(moments_from(moments), numel); },
      py::arg("moments"), py::arg("numel"));
  bind_constants(module);
  bind_segment(module);
  module.def("supported_isas", [] {
    std::vector<std::string> names;
    for (const Isa isa : supported_isas()) names.push_back(isa_name(isa));
    return names;
  });
  module.def("select_isa", [] { return isa_name(select_isa()); });
  module.def("optimizer_update", &update, py::arg("weight"), py::arg("residual"), py::arg("exp_avg"),
             py::arg("exp_avg_sq"), py::arg("grad"), py::kw_only(), py::arg("weight_dtype"), py::arg("master"),
             py::arg("moments") = "fp32", py::arg("grad_dtype"), py::arg("segments"), py::arg("pool"),
             py::arg("isa") = py::none());
  module.def(
      "sums_of_squares",
      [](const py::object& data, const std::string& dtype, const PyPool& pool, const std::optional<std::string>& isa,
         std::uint64_t first) {
        const DType type = dtype_from(dtype);
        const std::size_t numel = numel_of(data, itemsize(type), "data");
        const Memory memory = values(data, numel, itemsize(type), false, "data");
        const Isa kernels = isa_from(isa);
        ThreadPool& threads = *pool.get();
        const py::gil_scoped_release unlocked;
        return sums_of_squares(memory.data, type, first, numel, kernels, threads);
      },
      py::arg("data"), py::arg("dtype"), py::arg("pool"), py::arg("isa") = py::none(), py::kw_only(),
      py::arg("first") = 0);
  module.def("land_gradient", &land, py::arg("dst"), py::arg("dst_dtype"), py::arg("src"), py::arg("src_dtype"),
             py::kw_only(), py::arg("add"), py::arg("pool"), py::arg("isa") = py::none(), py::arg("first") = 0);
  module.def("read_modify_write", &traffic, py::arg("a"), py::arg("b"), py::arg("c"), py::arg("d"), py::arg("pool"),
             py::arg("isa") = py::none());
  bind_conversions(module);
}

}  // namespace infinity::bindings
