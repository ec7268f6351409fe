#include "bindings/common.hpp"
#include "update/update.hpp"

namespace infinity::bindings {
namespace {

// A stream with the buffer that backs it.
struct PyStream {
  StateStream stream;
  Memory memory;
};

PyStream make_stream(const py::object& memory, const PyFile* file, std::uint64_t offset) {
  PyStream result;
  if (!memory.is_none()) result.memory = memory_from(memory, true, "memory");
  result.stream.memory = result.memory.data;
  if (file != nullptr) result.stream.file = file->get();
  result.stream.offset = offset;
  return result;
}

// The pipeline, and the memory its tiles are staged in.
struct PyPipeline {
  Memory staging;  // outlives the pipeline: declared first
  Closable<UpdatePipeline> pipeline;

  ~PyPipeline() { close(); }

  void close() {
    if (pipeline.closed()) return;
    // A device that was given up may still write there.
    if (pipeline.get()->abandoned()) static_cast<void>(new Memory(staging));
    pipeline.close();
  }
};

std::size_t padded(std::uint64_t numel, std::size_t item) { return (numel * item + 4095) / 4096 * 4096; }

void require_room(const PyStream& stream, std::uint64_t numel, std::size_t item, const char* name) {
  if (stream.stream.memory == nullptr) return;
  // With a file, whole pages are written from the memory.
  const std::size_t needed = stream.stream.file != nullptr ? padded(numel, item) : numel * item;
  if (stream.memory.nbytes < needed) {
    throw py::value_error(std::string(name) + " holds " + std::to_string(stream.memory.nbytes) + " bytes; " +
                          std::to_string(needed) + " are needed");
  }
}

std::unique_ptr<PyFuture> submit(const PyPipeline& self, std::uint64_t numel, const std::string& weight_dtype,
                                 const std::string& master, const std::string& grad_dtype,
                                 std::vector<Segment> segments, double grad_scale, bool arithmetic,
                                 const PyStream& weight, const PyStream* residual, const PyStream& exp_avg,
                                 const PyStream& exp_avg_sq, const py::object& grad) {
  UpdateJob job;
  job.format = {dtype_from(weight_dtype), master_from(master), dtype_from(grad_dtype)};
  job.numel = numel;
  job.segments = std::move(segments);
  job.grad_scale = static_cast<float>(grad_scale);
  job.arithmetic = arithmetic;
  std::vector<Memory> kept;
  require_room(weight, numel, itemsize(job.format.weight), "weight");
  job.weight = weight.stream;
  kept.push_back(weight.memory);
  if (job.format.master != Master::weight) {
    if (residual == nullptr) throw py::value_error("a 16-bit weight needs its residual");
    require_room(*residual, numel, job.format.master == Master::split16 ? 2 : 4, "residual");
    job.residual = residual->stream;
    kept.push_back(residual->memory);
  }
  require_room(exp_avg, numel, 4, "exp_avg");
  require_room(exp_avg_sq, numel, 4, "exp_avg_sq");
  job.exp_avg = exp_avg.stream;
  job.exp_avg_sq = exp_avg_sq.stream;
  kept.push_back(exp_avg.memory);
  kept.push_back(exp_avg_sq.memory);
  Memory gradients = memory_from(grad, false, "grad");
  if (gradients.nbytes < numel * itemsize(job.format.grad)) throw py::value_error("grad is shorter than the job");
  job.grad = gradients.data;
  kept.push_back(std::move(gradients));
  return std::make_unique<PyFuture>(self.pipeline.get()->submit(std::move(job)), std::move(kept));
}

py::dict counters_of(const PyPipeline& self) {
  const UpdateCounters counters = self.pipeline.get()->counters();
  py::dict result;
  result["tiles"] = counters.tiles;
  result["adam_ns"] = counters.adam_ns;
  result["read_wait_ns"] = counters.read_wait_ns;
  result["write_wait_ns"] = counters.write_wait_ns;
  return result;
}

}  // namespace

void bind_update(py::module_& module) {
  py::class_<PyStream>(module, "StateStream")
      .def(py::init(&make_stream), py::arg("memory") = py::none(), py::arg("file") = nullptr, py::arg("offset") = 0);

  py::class_<PyPipeline>(module, "UpdatePipeline")
      .def(py::init([](const PyEngine& engine, const PyPool& pool, const py::object& staging, std::size_t tile_numel,
                       const std::optional<std::string>& isa) {
             Memory memory = memory_from(staging, true, "staging");
             auto pipeline = std::make_shared<UpdatePipeline>(engine.get(), pool.get(), memory.data, memory.nbytes,
                                                              tile_numel, isa_from(isa));
             return std::unique_ptr<PyPipeline>(
                 new PyPipeline{std::move(memory), Closable<UpdatePipeline>(std::move(pipeline))});
           }),
           py::arg("engine"), py::arg("pool"), py::arg("staging"), py::arg("tile_numel"), py::arg("isa") = py::none())
      .def_static("staging_tile_bytes", &UpdatePipeline::staging_tile_bytes, py::arg("tile_numel"))
      .def("submit", &submit, py::kw_only(), py::arg("numel"), py::arg("weight_dtype"), py::arg("master"),
           py::arg("grad_dtype"), py::arg("segments"), py::arg("grad_scale"), py::arg("arithmetic") = true,
           py::arg("weight"), py::arg("residual"), py::arg("exp_avg"), py::arg("exp_avg_sq"), py::arg("grad"))
      .def("counters", &counters_of)
      .def("close", &PyPipeline::close);
}

}  // namespace infinity::bindings
