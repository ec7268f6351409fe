#include <system_error>

#include "aio/engine.hpp"
#include "aio/swap_file.hpp"
#include "bindings/common.hpp"

namespace infinity::bindings {
namespace {

constexpr std::initializer_list<const char*> kClassNames = {"weights", "activations", "states", "writeback"};
constexpr std::initializer_list<const char*> kFaultNames = {"error", "cut",     "flip", "stale", "misdirect",
                                                            "delay", "shuffle", "lose", "kill",  "kill_after"};

std::optional<OpKind> operation_from(const std::string& name) {
  if (name.empty()) return std::nullopt;
  return chosen<OpKind>("operation", name, {"read", "write", "sync"});
}

Fault make_fault(std::uint64_t index, const std::string& kind, int error_number, std::uint64_t repeat,
                 const std::string& operation, std::uint64_t begin, std::uint64_t end, std::uint64_t seed) {
  const auto chosen_kind = chosen<FaultKind>("fault", kind, kFaultNames);
  if ((kind == "error") != (error_number > 0))
    throw py::value_error("a fault of kind 'error' needs an errno, and no other kind has one");
  return {index, chosen_kind, error_number, repeat, operation_from(operation), begin, end, seed};
}

std::unique_ptr<PyEngine> open_engine(const std::string& engine, std::size_t block_bytes, unsigned queue_depth,
                                      std::size_t in_flight_bytes, unsigned threads, double deadline_s,
                                      std::vector<Fault> faults, std::string journal) {
  EngineOptions options;
  options.engine = engine;
  options.block_bytes = block_bytes;
  options.queue_depth = queue_depth;
  options.in_flight_bytes = in_flight_bytes;
  options.threads = threads;
  constexpr double kLongestS = 1e9;
  if (!(deadline_s > 0 && deadline_s < kLongestS)) throw py::value_error("deadline_s must be positive, in seconds");
  options.deadline = std::chrono::nanoseconds(static_cast<std::int64_t>(deadline_s * 1e9));
  options.faults = std::move(faults);
  options.journal = std::move(journal);
  const py::gil_scoped_release unlocked;
  return std::make_unique<PyEngine>(std::make_shared<IoEngine>(std::move(options)));
}

std::unique_ptr<PyFuture> submit(const PyEngine& engine, OpKind kind, const PyFile& file, std::uint64_t offset,
                                 const py::handle& buffer, const std::string& io_class, bool verify = true,
                                 const PyFuture* after = nullptr) {
  Memory memory = memory_from(buffer, kind == OpKind::read, kind == OpKind::read ? "into" : "data");
  const IoRequest request{
      kind,   chosen<IoClass>("I/O class", io_class, kClassNames), file.get(), offset, memory.data, memory.nbytes,
      !verify};
  Future future =
      after == nullptr ? engine.get()->submit(request) : IoEngine::submit_after(engine.get(), after->get(), request);
  return std::make_unique<PyFuture>(std::move(future), std::vector<Memory>{std::move(memory)});
}

std::string register_memory(const PyEngine& engine, const py::object& buffer) {
  const Memory memory = memory_from(buffer, true, "memory");
  const auto held = engine.get();
  const py::gil_scoped_release unlocked;
  return held->register_memory(memory.data, memory.nbytes);
}

py::dict counters_of(const PyEngine& engine) {
  const LaneCounters counters = engine.get()->counters();
  py::dict result;
  for (std::size_t index = 0; index < kIoClasses; ++index) {
    const std::string name = kClassNames.begin()[index];
    result[py::str("read_bytes_" + name)] = counters.read_bytes[index];
    result[py::str("write_bytes_" + name)] = counters.write_bytes[index];
  }
  result["operations"] = counters.operations;
  result["retries"] = counters.retries;
  result["short_transfers"] = counters.short_transfers;
  result["busy_ns"] = counters.busy_ns;
  result["in_flight"] = counters.in_flight;
  return result;
}

std::unique_ptr<PyFile> stripe(const std::vector<const PyFile*>& files, std::vector<unsigned> shares,
                               std::uint64_t stripe_bytes) {
  std::vector<std::shared_ptr<File>> members;
  for (const PyFile* file : files) {
    const auto& given = file->get()->members();
    members.insert(members.end(), given.begin(), given.end());
  }
  return std::make_unique<PyFile>(std::make_shared<SwapFile>(std::move(members), std::move(shares), stripe_bytes));
}

// Runs `call`; if it raises an OSError, adds `path` to the error.
template <class Call>
auto naming(const std::string& path, const Call& call) {
  try {
    return call();
  } catch (const std::system_error& error) {
    set_os_error(error, path);
    throw py::error_already_set();
  }
}

// Raises ValueError unless the range consists of complete pages. If the file has checksums, each page must have a
// checksum.
void require_pages(const SwapFile& file, std::uint64_t offset, std::uint64_t nbytes) {
  const ChecksumTable* sums = file.checksums();
  const std::uint64_t end = sums == nullptr ? ~std::uint64_t{0} : sums->pages() * kPageBytes;
  if (offset % kPageBytes != 0 || nbytes % kPageBytes != 0 || offset > end || nbytes > end - offset) {
    throw py::value_error("offset and length must be whole pages of 4 KiB within the file");
  }
}

void bind_file(py::module_& module) {
  py::class_<PyFile>(module, "File")
      .def(py::init([](const std::string& path, bool create, bool direct, int numa_node) {
             return naming(path, [&] {
               auto file = std::make_shared<File>(path, create, direct, numa_node);
               return std::make_unique<PyFile>(std::make_shared<SwapFile>(std::move(file)));
             });
           }),
           py::arg("path"), py::kw_only(), py::arg("create") = false, py::arg("direct") = true,
           py::arg("numa_node") = -1)
      .def_static("striped", &stripe, py::arg("files"), py::arg("shares"), py::arg("stripe_bytes"))
      .def_property_readonly("path", [](const PyFile& file) { return file.get()->members()[0]->path(); })
      .def_property_readonly("direct", [](const PyFile& file) { return file.get()->direct(); })
      .def_property_readonly("alignment",
                             [](const PyFile& file) {
                               const File& member = *file.get()->members()[0];
                               return py::make_tuple(member.memory_alignment(), member.offset_alignment());
                             })
      .def("member_bytes",
           [](const PyFile& file, std::size_t member, std::uint64_t nbytes) {
             if (member >= file.get()->members().size()) throw py::index_error("no such member");
             return file.get()->member_bytes(member, nbytes);
           })
      .def(
          "preallocate",
          [](const PyFile& file, std::uint64_t nbytes) {
            const auto held = file.get();  // a reference, because another thread may close the file during the call
            naming(held->members()[0]->path(), [&] {
              const py::gil_scoped_release unlocked;
              held->preallocate(nbytes);
            });
          },
          py::arg("nbytes"))
      .def(
          "keep_checksums", [](const PyFile& file, std::uint64_t nbytes) { file.get()->keep_checksums(nbytes); },
          py::arg("nbytes"))
      .def(
          "locate",
          [](const PyFile& file, std::uint64_t offset) {
            const Place place = file.get()->locate(offset);
            return py::make_tuple(file.get()->members()[place.member]->path(), place.offset);
          },
          py::arg("offset"))
      .def(
          "remember",
          [](const PyFile& file, std::uint64_t offset, const py::object& data) {
            const Memory memory = memory_from(data, false, "data");
            const auto held = file.get();
            require_pages(*held, offset, memory.nbytes);
            const py::gil_scoped_release unlocked;
            held->take(offset, memory.data, memory.nbytes);
          },
          py::arg("offset"), py::arg("data"))
      .def(
          "block_sums",
          [](const PyFile& file, std::uint64_t offset, std::uint64_t nbytes) {
            const auto held = file.get();
            require_pages(*held, offset, nbytes);
            const std::vector<BlockSum> result = [&] {
              const py::gil_scoped_release unlocked;
              return held->block_sums(offset, nbytes);
            }();
            return py::bytes(reinterpret_cast<const char*>(result.data()), result.size() * sizeof(BlockSum));
          },
          py::arg("offset"), py::arg("nbytes"))
      .def("close", &PyFile::close);
}

}  // namespace

void bind_aio(py::module_& module) {
  bind_file(module);

  py::class_<Fault>(module, "Fault")
      .def(py::init(&make_fault), py::arg("index"), py::arg("kind"), py::arg("errno") = 0, py::arg("repeat") = 1,
           py::kw_only(), py::arg("operation") = "", py::arg("begin") = 0, py::arg("end") = ~std::uint64_t{0},
           py::arg("seed") = 0);

  py::class_<PyEngine>(module, "IOEngine")
      .def(py::init(&open_engine), py::arg("engine") = "auto", py::kw_only(),
           py::arg("block_bytes") = std::size_t{1} << 20, py::arg("queue_depth") = 128,
           py::arg("in_flight_bytes") = std::size_t{32} << 20, py::arg("threads") = 8, py::arg("deadline_s") = 300.0,
           py::arg("faults") = std::vector<Fault>{}, py::arg("journal") = "")
      .def_property_readonly("name", [](const PyEngine& engine) { return engine.get()->name(); })
      .def_property_readonly("reason", [](const PyEngine& engine) { return engine.get()->reason(); })
      .def(
          "read",
          [](const PyEngine& engine, const PyFile& file, std::uint64_t offset, const py::object& into,
             const std::string& io_class, bool verify, const PyFuture* after) {
            return submit(engine, OpKind::read, file, offset, into, io_class, verify, after);
          },
          py::arg("file"), py::arg("offset"), py::arg("into"), py::arg("io_class") = "weights", py::kw_only(),
          py::arg("verify") = true, py::arg("after") = nullptr)
      .def(
          "write",
          [](const PyEngine& engine, const PyFile& file, std::uint64_t offset, const py::object& data,
             const std::string& io_class, const PyFuture* after) {
            return submit(engine, OpKind::write, file, offset, data, io_class, true, after);
          },
          py::arg("file"), py::arg("offset"), py::arg("data"), py::arg("io_class") = "weights", py::kw_only(),
          py::arg("after") = nullptr)
      .def(
          "sync",
          [](const PyEngine& engine, const PyFile& file) {
            return std::make_unique<PyFuture>(engine.get()->sync(file.get()), std::vector<Memory>{});
          },
          py::arg("file"))
      .def("register_memory", &register_memory, py::arg("memory"))
      .def("counters", &counters_of)
      .def(
          "trace", [](const PyEngine& engine, bool on, std::size_t events_max) { engine.get()->trace(on, events_max); },
          py::arg("on"), py::kw_only(), py::arg("events_max") = kTraceEventsMax)
      .def("take_trace", [](const PyEngine& engine) { return packed(engine.get()->take_trace()); })
      .def("close", &PyEngine::close);
}

}  // namespace infinity::bindings
