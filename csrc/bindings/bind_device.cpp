#include "bindings/common.hpp"
#include "device/gate.hpp"
#include "device/landings.hpp"
#include "device/uploads.hpp"

namespace infinity::bindings {
namespace {

// Converts the address of a function of the device's runtime to a pointer; 0 becomes null.
template <class Call>
Call* call_at(std::uintptr_t address) {
  return reinterpret_cast<Call*>(address);
}

// Converts the handle of a stream or an event to a pointer.
void* handle_at(std::uintptr_t handle) { return reinterpret_cast<void*>(handle); }

void bind_gate(py::module_& module) {
  py::class_<PyGate>(module, "DeviceGate")
      .def(py::init([](int device, std::uintptr_t copy, std::uintptr_t record, std::uintptr_t wait,
                       std::uintptr_t synchronize, std::uintptr_t enter, py::object keep) {
             DeviceCalls calls;
             calls.enter = call_at<int(int)>(enter);
             calls.copy = call_at<int(void*, const void*, std::size_t, int, void*)>(copy);
             calls.record = call_at<int(void*, void*)>(record);
             calls.wait = call_at<int(void*, void*, unsigned)>(wait);
             calls.synchronize = call_at<int(void*)>(synchronize);
             return std::unique_ptr<PyGate>(
                 new PyGate{std::make_shared<const DeviceGate>(device, calls), std::move(keep)});
           }),
           py::arg("device"), py::kw_only(), py::arg("copy"), py::arg("record"), py::arg("wait"),
           py::arg("synchronize"), py::arg("enter") = 0, py::arg("keep") = py::none());
}

// A piece of a landing, with the Python buffers of the piece's memory.
struct PyPiece {
  LandingPiece piece;
  Memory target;
  Memory source;
};

PyPiece make_piece(const py::object& target, const std::string& dtype, const py::object& source,
                   const std::optional<std::string>& source_dtype, bool add, std::uint64_t first) {
  PyPiece result;
  LandingPiece& piece = result.piece;
  piece.dtype = dtype_from(dtype);
  piece.source_dtype = dtype_from(source_dtype.value_or(dtype));
  piece.add = add;
  piece.first = first;
  if (source.is_none() && (source_dtype || add))
    throw py::value_error("a piece without a source has no source_dtype, and adds nothing");
  result.target = memory_of(target, 0, itemsize(piece.dtype), !source.is_none(), "target");
  if (source.is_none()) {
    piece.numel = numel_of(result.target, itemsize(piece.dtype), "target");
  } else {
    result.source = memory_of(source, 0, itemsize(piece.source_dtype), false, "source");
    piece.numel = numel_of(result.source, itemsize(piece.source_dtype), "source");
    require_fits(result.target, piece.numel * itemsize(piece.dtype), itemsize(piece.dtype), "target");
    require_apart({{"target", &result.target}, {"source", &result.source}});
  }
  piece.target = result.target.data;
  piece.source = result.source.data;
  return result;
}

// The future of a landing, with the sums of squares.
class PyLanding : public PyFuture {
 public:
  PyLanding(LandingFuture future, std::vector<Memory> kept)
      : PyFuture(future, std::move(kept)), landing_(std::move(future)) {}
  [[nodiscard]] const std::vector<std::vector<double>>& sums() const {
    if (failure()) throw std::runtime_error("the landing failed: " + failure()->message);
    return landing_->sums;
  }

 private:
  LandingFuture landing_;
};

// The landings, and the Python object that keeps the gate's functions alive.
struct PyLandings {
  py::object gate;  // declared first, so that it outlives the landings
  Closable<Landings> landings;
};

std::unique_ptr<PyLanding> land(const PyLandings& self, std::uintptr_t event,
                                const std::vector<const PyPiece*>& given) {
  std::vector<LandingPiece> pieces;
  std::vector<Memory> kept;
  for (const PyPiece* piece : given) {
    if (piece == nullptr) throw py::value_error("a piece is None");
    pieces.push_back(piece->piece);
    kept.insert(kept.end(), {piece->target, piece->source});
  }
  LandingFuture future = self.landings.get()->land(handle_at(event), std::move(pieces));
  return std::make_unique<PyLanding>(std::move(future), std::move(kept));
}

void bind_landings(py::module_& module) {
  py::class_<PyPiece>(module, "LandingPiece")
      .def(py::init(&make_piece), py::arg("target"), py::arg("dtype"), py::kw_only(), py::arg("source") = py::none(),
           py::arg("source_dtype") = py::none(), py::arg("add") = false, py::arg("first") = 0);
  py::class_<PyLanding, PyFuture>(module, "LandingFuture").def_property_readonly("sums", &PyLanding::sums);
  py::class_<PyLandings>(module, "Landings")
      .def(py::init([](const py::object& gate, const PyPool& pool, const std::optional<std::string>& isa) {
             auto landings = std::make_shared<Landings>(gate.cast<const PyGate&>().gate, pool.get(), isa_from(isa));
             return std::unique_ptr<PyLandings>(new PyLandings{gate, Closable<Landings>(std::move(landings))});
           }),
           py::arg("gate"), py::arg("pool"), py::arg("isa") = py::none())
      .def("land", &land, py::arg("event"), py::arg("pieces"))
      .def("close", [](PyLandings& self) { self.landings.close(); });
}

// The uploads, the bounce buffer of the pieces, and the Python object that keeps the gate's functions alive.
struct PyUploads {
  py::object gate;  // declared first, like the memory, to outlive the uploads
  Memory bounce;
  Closable<Uploads> uploads;

  ~PyUploads() { close(); }

  void close() {
    if (uploads.closed()) return;
    const auto abandoned = uploads.get()->abandoned();
    uploads.close();
    if (*abandoned) static_cast<void>(new Memory(bounce));  // never freed, because a device may use it forever
  }
};

std::vector<void*> handles_at(const std::vector<std::uintptr_t>& handles) {
  std::vector<void*> result;
  std::transform(handles.begin(), handles.end(), std::back_inserter(result), handle_at);
  return result;
}

std::unique_ptr<PyUploads> open_uploads(const PyEngine& engine, const py::object& gate, const py::object& bounce,
                                        std::size_t piece_bytes, const std::vector<std::uintptr_t>& events) {
  Memory memory = memory_from(bounce, true, "bounce");
  auto uploads = std::make_shared<Uploads>(engine.get(), gate.cast<const PyGate&>().gate, memory.data, memory.nbytes,
                                           piece_bytes, handles_at(events));
  return std::unique_ptr<PyUploads>(new PyUploads{gate, std::move(memory), Closable<Uploads>(std::move(uploads))});
}

UploadPart make_part(const PyFile& file, std::uint64_t offset, std::uint64_t nbytes, std::uintptr_t address,
                     bool verify, const PyFuture* after) {
  return {file.get(), offset,
          nbytes,     reinterpret_cast<std::byte*>(address),
          verify,     after != nullptr ? after->get() : nullptr};
}

std::unique_ptr<PyFuture> upload(const PyUploads& self, std::vector<UploadPart> parts, std::uintptr_t stream,
                                 const std::vector<std::uintptr_t>& waits, std::uintptr_t ready) {
  Future future =
      self.uploads.get()->upload({std::move(parts), handle_at(stream), handles_at(waits), handle_at(ready)});
  return std::make_unique<PyFuture>(std::move(future), std::vector<Memory>{});
}

py::dict upload_counters(const PyUploads& self) {
  const UploadCounters counters = self.uploads.get()->counters();
  py::dict result;
  result["read_bytes"] = counters.read_bytes;
  result["pieces"] = counters.pieces;
  result["without_a_piece"] = counters.without_a_piece;
  return result;
}

void bind_uploads(py::module_& module) {
  py::class_<UploadPart>(module, "UploadPart")
      .def(py::init(&make_part), py::arg("file"), py::arg("offset"), py::arg("nbytes"), py::arg("address"),
           py::kw_only(), py::arg("verify") = true, py::arg("after") = nullptr);
  py::class_<PyUploads>(module, "Uploads")
      .def(py::init(&open_uploads), py::arg("engine"), py::arg("gate"), py::arg("bounce"), py::arg("piece_bytes"),
           py::arg("events"))
      .def("upload", &upload, py::arg("parts"), py::kw_only(), py::arg("stream"), py::arg("waits") = py::tuple(),
           py::arg("ready"))
      .def(
          "cancel", [](const PyUploads& self, const PyFuture& future) { self.uploads.get()->cancel(future.get()); },
          py::arg("future"))
      .def("counters", &upload_counters)
      .def("close", &PyUploads::close);
}

}  // namespace

void bind_device(py::module_& module) {
  bind_gate(module);
  bind_landings(module);
  bind_uploads(module);
}

}  // namespace infinity::bindings
