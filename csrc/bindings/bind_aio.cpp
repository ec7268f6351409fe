#include <array>
#include <system_error>

#include "aio/engine.hpp"
#include "aio/file.hpp"
#include "bindings/common.hpp"

namespace infinity::bindings {
namespace {

constexpr std::array<const char*, kIoClasses> kClassNames = {"weights", "activations", "states"};

IoClass class_from(const std::string& name) {
  for (std::size_t index = 0; index < kIoClasses; ++index) {
    if (name == kClassNames[index]) return static_cast<IoClass>(index);
  }
  throw py::value_error("unknown I/O class '" + name + "'; use weights, activations or states");
}

std::unique_ptr<PyEngine> open_engine(const std::string& engine, std::size_t block_bytes, unsigned queue_depth,
                                      unsigned threads, std::vector<Fault> faults) {
  EngineOptions options;
  options.engine = engine;
  options.block_bytes = block_bytes;
  options.queue_depth = queue_depth;
  options.threads = threads;
  options.faults = std::move(faults);
  try {
    const py::gil_scoped_release unlocked;
    return std::make_unique<PyEngine>(std::make_shared<IoEngine>(std::move(options)));
  } catch (const std::system_error& error) {
    const py::gil_scoped_acquire locked;
    raise_os_error(error, "");
  }
}

std::unique_ptr<PyFuture> submit(const PyEngine& engine, OpKind kind, const PyFile& file, std::uint64_t offset,
                                 const py::handle& buffer, const std::string& io_class) {
  Memory memory = memory_from(buffer, kind == OpKind::read, kind == OpKind::read ? "into" : "data");
  const IoRequest request{kind, class_from(io_class), file.get(), offset, memory.data, memory.nbytes};
  Future future = engine.get()->submit(request);
  return std::make_unique<PyFuture>(std::move(future), std::vector<Memory>{std::move(memory)});
}

py::dict counters_of(const PyEngine& engine) {
  const EngineCounters counters = engine.get()->counters();
  py::dict result;
  for (std::size_t index = 0; index < kIoClasses; ++index) {
    result[py::str(std::string("read_bytes_") + kClassNames[index])] = counters.read_bytes[index];
    result[py::str(std::string("write_bytes_") + kClassNames[index])] = counters.write_bytes[index];
  }
  result["operations"] = counters.operations;
  result["retries"] = counters.retries;
  result["short_transfers"] = counters.short_transfers;
  result["busy_ns"] = counters.busy_ns;
  return result;
}

}  // namespace

void bind_aio(py::module_& module) {
  py::class_<PyFile>(module, "File")
      .def(py::init([](const std::string& path, bool create, bool direct) {
             try {
               return std::make_unique<PyFile>(std::make_shared<File>(path, create, direct));
             } catch (const std::system_error& error) {
               raise_os_error(error, path);
             }
           }),
           py::arg("path"), py::kw_only(), py::arg("create") = false, py::arg("direct") = true)
      .def_property_readonly("path", [](const PyFile& file) { return file.get()->path(); })
      .def_property_readonly("direct", [](const PyFile& file) { return file.get()->direct(); })
      .def(
          "preallocate",
          [](const PyFile& file, std::uint64_t nbytes) {
            const auto held = file.get();  // another thread may close it meanwhile
            try {
              const py::gil_scoped_release unlocked;
              held->preallocate(nbytes);
            } catch (const std::system_error& error) {
              raise_os_error(error, held->path());
            }
          },
          py::arg("nbytes"))
      .def("close", &PyFile::close);

  py::class_<Fault>(module, "Fault")
      .def(py::init([](std::uint64_t index, int error_number, std::uint64_t repeat) {
             return Fault{index, error_number, repeat};
           }),
           py::arg("index"), py::arg("errno"), py::arg("repeat") = 1);

  py::class_<PyEngine>(module, "IOEngine")
      .def(py::init(&open_engine), py::arg("engine") = "auto", py::kw_only(),
           py::arg("block_bytes") = std::size_t{1} << 20, py::arg("queue_depth") = 32, py::arg("threads") = 8,
           py::arg("faults") = std::vector<Fault>{})
      .def_property_readonly("name", [](const PyEngine& engine) { return engine.get()->name(); })
      .def_property_readonly("reason", [](const PyEngine& engine) { return engine.get()->reason(); })
      .def(
          "read",
          [](const PyEngine& engine, const PyFile& file, std::uint64_t offset, const py::object& into,
             const std::string& io_class) { return submit(engine, OpKind::read, file, offset, into, io_class); },
          py::arg("file"), py::arg("offset"), py::arg("into"), py::arg("io_class") = "weights")
      .def(
          "write",
          [](const PyEngine& engine, const PyFile& file, std::uint64_t offset, const py::object& data,
             const std::string& io_class) { return submit(engine, OpKind::write, file, offset, data, io_class); },
          py::arg("file"), py::arg("offset"), py::arg("data"), py::arg("io_class") = "weights")
      .def("counters", &counters_of)
      .def("close", &PyEngine::close);
}

}  // namespace infinity::bindings
