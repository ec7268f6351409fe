#include <atomic>
#include <map>

#include "base/page.hpp"
#include "bindings/common.hpp"
#include "update/update.hpp"

namespace infinity::bindings {
namespace {

// A stream of states, with the Python buffers of the stream's memory.
struct PyStream {
  StateStream stream;
  Memory memory;
  Memory source;
};

PyStream make_stream(const py::object& memory, const PyFile* file, std::uint64_t offset,
                     std::optional<std::uint64_t> write_offset, const py::object& source) {
  PyStream result;
  if (!memory.is_none()) result.memory = memory_from(memory, true, "memory");
  if (!source.is_none()) result.source = memory_from(source, false, "source");
  result.stream.memory = result.memory.data;
  result.stream.source = result.source.data;
  if (file != nullptr) result.stream.file = file->get();
  result.stream.offset = offset;
  result.stream.write_offset = write_offset.value_or(offset);
  return result;
}

// The pipeline, and the memory in which its tiles are staged.
struct PyPipeline {
  Memory staging;  // declared first, so that it outlives the pipeline
  std::map<std::byte*, Memory> lent;
  Closable<UpdatePipeline> pipeline;

  ~PyPipeline() { close(); }

  void close() {
    if (pipeline.closed()) return;
    const auto abandoned = pipeline.get()->abandoned();
    pipeline.close();
    if (*abandoned) {  // a device that was given up may still write to this memory
      static_cast<void>(new Memory(staging));
      static_cast<void>(new std::map<std::byte*, Memory>(lent));
    }
  }
};

// Runs `call` without the GIL, because `call` waits for the pipeline's driver. Keeps the pipeline alive during the
// call.
template <class Call>
auto without_gil(const PyPipeline& self, const Call& call) {
  const std::shared_ptr<UpdatePipeline> pipeline = self.pipeline.get();
  const py::gil_scoped_release unlocked;
  return call(*pipeline);
}

void require_room(const PyStream& stream, std::uint64_t nbytes, const char* name) {
  if (stream.stream.source != nullptr) require_fits(stream.source, nbytes, 4, name);
  if (stream.stream.memory == nullptr) return;
  // With a file, complete pages of the memory are written; with a source, the last page is filled with zeros.
  const bool whole_pages = stream.stream.file != nullptr || stream.stream.source != nullptr;
  require_fits(stream.memory, whole_pages ? round_up_to_page(nbytes) : nbytes, 4, name);
}

// Gradients as a stream: the given stream, or a stream made from the memory that contains the gradients.
PyStream gradient_stream(const py::object& grad, std::uint64_t nbytes, std::size_t itemsize) {
  PyStream result;
  if (py::isinstance<PyStream>(grad)) {
    result = grad.cast<const PyStream&>();
    if (result.stream.memory != nullptr) require_fits(result.memory, nbytes, itemsize, "grad");
  } else {
    result.memory = memory_of(grad, nbytes, itemsize, false, "grad");
    result.stream.memory = result.memory.data;
  }
  return result;
}

// The future of an update. It also reports when all values are computed, and whether a result was not finite.
class PyUpdate : public PyFuture {
 public:
  PyUpdate(UpdateFuture future, std::vector<Memory> kept, std::shared_ptr<std::atomic<bool>> not_finite)
      : PyFuture(future, std::move(kept)), update_(std::move(future)), not_finite_(std::move(not_finite)) {}
  [[nodiscard]] bool finite() const { return !*not_finite_; }
  [[nodiscard]] std::unique_ptr<PyFuture> computed() const { return part(update_->computed); }
  [[nodiscard]] std::unique_ptr<PyFuture> weights() const { return part(update_->weights); }

 private:
  [[nodiscard]] std::unique_ptr<PyFuture> part(Completion& completion) const {
    return std::make_unique<PyFuture>(Future(update_, &completion), std::vector<Memory>{});
  }

  UpdateFuture update_;
  std::shared_ptr<std::atomic<bool>> not_finite_;
};

void require_countable(std::uint64_t numel) {
  constexpr std::uint64_t kNumelMax = std::uint64_t{1} << 48;  // so that the number of bytes does not overflow
  if (numel > kNumelMax) throw py::value_error("a job cannot have that many elements");
}

std::unique_ptr<PyUpdate> read_ahead(const PyPipeline& self, std::uint64_t numel, const std::string& weight_dtype,
                                     const std::string& master, const std::string& moments, const PyStream* weight,
                                     const PyStream* residual, const PyStream* exp_avg, const PyStream* exp_avg_sq,
                                     std::uint64_t tag) {
  require_countable(numel);
  const auto of = [](const PyStream* stream) { return stream != nullptr ? stream->stream : StateStream{}; };
  UpdateJob job;
  job.format = {dtype_from(weight_dtype), master_from(master), DType::fp32, moments_from(moments)};
  job.numel = numel;
  job.weight = of(weight);
  job.residual = of(residual);
  job.exp_avg = of(exp_avg);
  job.exp_avg_sq = of(exp_avg_sq);
  job.tag = tag;
  auto future = without_gil(self, [&](UpdatePipeline& pipeline) { return pipeline.read_ahead(std::move(job)); });
  return std::make_unique<PyUpdate>(std::move(future), std::vector<Memory>{},
                                    std::make_shared<std::atomic<bool>>(false));
}

std::unique_ptr<PyUpdate> submit(const PyPipeline& self, std::uint64_t numel, const std::string& weight_dtype,
                                 const std::string& master, const std::string& moments, const std::string& grad_dtype,
                                 std::vector<Segment> segments, bool whole, bool arithmetic, const PyStream& weight,
                                 const PyStream* residual, const PyStream* exp_avg, const PyStream* exp_avg_sq,
                                 const py::object& grad, std::uint64_t tag, std::optional<std::uint64_t> unit,
                                 bool speculative, const PyUpdate* ahead, const std::vector<const PyFuture*>& after) {
  require_countable(numel);
  UpdateJob job;
  job.format = {dtype_from(weight_dtype), master_from(master), dtype_from(grad_dtype), moments_from(moments)};
  job.numel = numel;
  job.segments = std::move(segments);
  job.whole = whole;
  job.arithmetic = arithmetic;
  job.tag = tag;
  job.unit = unit;
  job.not_finite = std::make_shared<std::atomic<bool>>(false);
  std::vector<Memory> kept;
  const auto take = [&](const PyStream* stream, std::uint64_t nbytes, const char* name) {
    if (stream == nullptr) return StateStream{};
    require_room(*stream, nbytes, name);
    kept.push_back(stream->memory);
    kept.push_back(stream->source);
    return stream->stream;
  };
  job.weight = take(&weight, numel * itemsize(job.format.weight), "weight");
  const std::size_t rest = residual_itemsize(job.format.master);
  if (rest > 0 && residual == nullptr) throw py::value_error("master '" + master + "' needs its residual");
  if (rest > 0) job.residual = take(residual, numel * rest, "residual");
  job.exp_avg = take(exp_avg, moment_bytes(job.format.moments, numel), "exp_avg");
  job.exp_avg_sq = take(exp_avg_sq, moment_bytes(job.format.moments, numel), "exp_avg_sq");
  const PyStream gradients = gradient_stream(grad, numel * itemsize(job.format.grad), itemsize(job.format.grad));
  kept.push_back(gradients.memory);
  job.grad = gradients.stream;
  std::vector<std::pair<const char*, const Memory*>> used = {{"grad", &gradients.memory}, {"staging", &self.staging}};
  const auto use = [&](const PyStream* stream, const char* name, const char* source) {
    if (stream == nullptr) return;
    used.emplace_back(name, &stream->memory);
    used.emplace_back(source, &stream->source);
  };
  use(&weight, "weight", "the weight's source");
  use(rest > 0 ? residual : nullptr, "residual", "the residual's source");
  use(exp_avg, "exp_avg", "exp_avg's source");
  use(exp_avg_sq, "exp_avg_sq", "exp_avg_sq's source");
  for (const auto& [at, memory] : self.lent) used.emplace_back("lent staging", &memory);
  require_apart(used);
  auto not_finite = job.not_finite;
  const Future taken = ahead != nullptr ? ahead->get() : nullptr;
  const std::vector<Future> awaited = futures_of(after);
  auto future = without_gil(
      self, [&](UpdatePipeline& pipeline) { return pipeline.submit(std::move(job), speculative, taken, awaited); });
  return std::make_unique<PyUpdate>(std::move(future), std::move(kept), std::move(not_finite));
}

void lend(PyPipeline& self, const py::object& memory) {
  Memory taken = memory_from(memory, true, "memory");
  std::byte* const at = taken.data;
  const std::size_t nbytes = taken.nbytes;
  if (!self.lent.emplace(at, std::move(taken)).second) throw py::value_error("the memory was lent before");
  try {
    without_gil(self, [&](UpdatePipeline& pipeline) { pipeline.lend(at, nbytes); });
  } catch (...) {
    self.lent.erase(at);
    throw;
  }
}

bool reclaim(PyPipeline& self, const py::object& memory) {
  std::byte* const at = memory_from(memory, true, "memory").data;
  const bool free = without_gil(self, [&](UpdatePipeline& pipeline) { return pipeline.reclaim(at); });
  if (free) self.lent.erase(at);
  return free;
}

py::dict counters_of(const PyPipeline& self) {
  const UpdateCounters counters = without_gil(self, [](UpdatePipeline& pipeline) { return pipeline.counters(); });
  py::dict result;
  result["tiles"] = counters.tiles;
  result["ahead"] = counters.ahead;
  result["adam_ns"] = counters.adam_ns;
  result["read_wait_ns"] = counters.read_wait_ns;
  result["write_wait_ns"] = counters.write_wait_ns;
  return result;
}

}  // namespace

void bind_update(py::module_& module) {
  py::class_<PyStream>(module, "StateStream")
      .def(py::init(&make_stream), py::arg("memory") = py::none(), py::arg("file") = nullptr, py::arg("offset") = 0,
           py::arg("write_offset") = py::none(), py::kw_only(), py::arg("source") = py::none());

  py::class_<PyUpdate, PyFuture>(module, "UpdateFuture")
      .def_property_readonly("finite", &PyUpdate::finite)
      .def_property_readonly("computed", &PyUpdate::computed)
      .def_property_readonly("weights", &PyUpdate::weights);

  py::class_<PyPipeline>(module, "UpdatePipeline")
      .def(py::init([](const PyEngine& engine, const PyPool& pool, const py::object& staging, std::size_t tile_numel,
                       std::size_t tile_bytes, std::size_t ahead_tiles_max, const std::optional<std::string>& isa) {
             Memory memory = memory_from(staging, true, "staging");
             auto pipeline = std::make_shared<UpdatePipeline>(engine.get(), pool.get(), memory.data, memory.nbytes,
                                                              tile_numel, tile_bytes, ahead_tiles_max, isa_from(isa));
             return std::unique_ptr<PyPipeline>(
                 new PyPipeline{std::move(memory), {}, Closable<UpdatePipeline>(std::move(pipeline))});
           }),
           py::arg("engine"), py::arg("pool"), py::arg("staging"), py::arg("tile_numel"), py::arg("tile_bytes"),
           py::arg("ahead_tiles_max") = 0, py::arg("isa") = py::none())
      .def_static(
          "staging_tile_bytes",
          [](std::size_t numel, const std::string& weight_dtype, const std::string& master, const std::string& moments,
             bool gradients) {
            const StateFormat format{dtype_from(weight_dtype), master_from(master), DType::fp32, moments_from(moments)};
            return UpdatePipeline::staging_tile_bytes(format, numel, gradients);
          },
          py::arg("numel"), py::kw_only(), py::arg("weight_dtype"), py::arg("master"), py::arg("moments"),
          py::arg("gradients") = false)
      .def("submit", &submit, py::kw_only(), py::arg("numel"), py::arg("weight_dtype"), py::arg("master"),
           py::arg("moments") = "fp32", py::arg("grad_dtype"), py::arg("segments"), py::arg("whole") = false,
           py::arg("arithmetic") = true, py::arg("weight"), py::arg("residual") = nullptr, py::arg("exp_avg") = nullptr,
           py::arg("exp_avg_sq") = nullptr, py::arg("grad"), py::arg("tag") = 0, py::arg("unit") = py::none(),
           py::arg("speculative") = false, py::arg("ahead") = nullptr,
           py::arg("after") = std::vector<const PyFuture*>{})
      .def("read_ahead", &read_ahead, py::kw_only(), py::arg("numel"), py::arg("weight_dtype"), py::arg("master"),
           py::arg("moments") = "fp32", py::arg("weight") = nullptr, py::arg("residual") = nullptr,
           py::arg("exp_avg") = nullptr, py::arg("exp_avg_sq") = nullptr, py::arg("tag") = 0)
      .def_property_readonly("ahead_tiles_max",
                             [](const PyPipeline& self) {
                               return without_gil(self, [](UpdatePipeline& each) { return each.ahead_tiles_max(); });
                             })
      .def("lend", &lend, py::arg("memory"))
      .def("reclaim", &reclaim, py::arg("memory"))
      .def(
          "withdraw",
          [](const PyPipeline& self, const std::vector<std::vector<const PyUpdate*>>& lists) {
            std::vector<std::vector<Future>> jobs;
            for (const auto& updates : lists) jobs.push_back(futures_of({updates.begin(), updates.end()}));
            return without_gil(self, [&](UpdatePipeline& pipeline) { return pipeline.withdraw(jobs); });
          },
          py::arg("lists"))
      .def(
          "cancel",
          [](const PyPipeline& self, const PyUpdate& update) {
            without_gil(self, [&](UpdatePipeline& pipeline) { pipeline.cancel(update.get()); });
          },
          py::arg("update"))
      .def("counters", &counters_of)
      .def(
          "trace",
          [](const PyPipeline& self, bool on, std::size_t events_max) { self.pipeline.get()->trace(on, events_max); },
          py::arg("on"), py::kw_only(), py::arg("events_max") = kTraceEventsMax)
      .def("take_trace", [](const PyPipeline& self) { return packed(self.pipeline.get()->take_trace()); })
      .def("close", &PyPipeline::close);
}

}  // namespace infinity::bindings
