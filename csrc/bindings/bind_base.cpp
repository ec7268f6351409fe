#include <unistd.h>

#include <array>
#include <chrono>
#include <system_error>

#include "base/arena.hpp"
#include "base/shared_counters.hpp"
#include "bindings/common.hpp"

namespace infinity::bindings {

Memory memory_from(const py::handle& object, bool writable, const char* name) {
  if (!PyObject_CheckBuffer(object.ptr())) {
    throw py::type_error(std::string(name) + " must be a buffer (memoryview or numpy array), not " +
                         std::string(py::str(py::type::of(object).attr("__name__"))));
  }
  const auto buffer = py::reinterpret_borrow<py::buffer>(object);
  auto info = std::make_shared<py::buffer_info>(buffer.request(false));
  if (writable && info->readonly) throw py::value_error(std::string(name) + " is read-only");
  py::ssize_t expected = info->itemsize;
  for (py::ssize_t axis = info->ndim; axis-- > 0;) {
    if (info->shape[static_cast<std::size_t>(axis)] > 1 && info->strides[static_cast<std::size_t>(axis)] != expected) {
      throw py::value_error(std::string(name) + " is not contiguous");
    }
    expected *= info->shape[static_cast<std::size_t>(axis)];
  }
  Memory memory;
  memory.data = static_cast<std::byte*>(info->ptr);
  memory.nbytes = static_cast<std::size_t>(info->size) * static_cast<std::size_t>(info->itemsize);
  memory.owner = std::move(info);
  return memory;
}

void require_fits(const Memory& memory, std::size_t nbytes, std::size_t alignment, const char* name) {
  if (memory.nbytes < nbytes) {
    throw py::value_error(std::string(name) + " holds " + std::to_string(memory.nbytes) + " bytes; " +
                          std::to_string(nbytes) + " are needed");
  }
  if (reinterpret_cast<std::uintptr_t>(memory.data) % alignment != 0) {
    throw py::value_error(std::string(name) + " is not aligned to " + std::to_string(alignment) + " bytes");
  }
}

Memory memory_of(const py::handle& object, std::size_t nbytes, std::size_t alignment, bool writable, const char* name) {
  Memory memory = memory_from(object, writable, name);
  require_fits(memory, nbytes, alignment, name);
  return memory;
}

void require_apart(const std::vector<std::pair<const char*, const Memory*>>& memories) {
  for (auto one = memories.begin(); one != memories.end(); ++one) {
    for (auto other = memories.begin(); other != one; ++other) {
      const Memory& a = *one->second;
      const Memory& b = *other->second;
      if (a.nbytes > 0 && b.nbytes > 0 && a.data < b.data + b.nbytes && b.data < a.data + a.nbytes) {
        throw py::value_error(std::string(one->first) + " and " + other->first + " overlap");
      }
    }
  }
}

void set_os_error(const std::system_error& error, const std::string& path) {
  PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code().value(), error.what(), path).ptr());
}

PyFuture::PyFuture(Future future, std::vector<Memory> kept)
    : future_(std::move(future)), kept_(std::move(kept)), pid_(getpid()) {}

PyFuture::~PyFuture() {
  // In a forked child no thread would ever complete the future, and the request's buffers belong to the parent.
  if (pid_ != getpid() || kept_.empty()) return;
  {
    const py::gil_scoped_release unlocked;
    future_->wait();
  }
  if (future_->failure() && future_->failure()->kind == FailureKind::timeout) {
    static_cast<void>(new std::vector<Memory>(std::move(kept_)));
  }
}

bool PyFuture::wait(std::optional<double> timeout_s) const {
  using Clock = std::chrono::steady_clock;
  constexpr auto kSlice = std::chrono::milliseconds(100);
  // With a timeout beyond the range of a clock, such as infinity, the call waits without a limit.
  constexpr double kForeverS = 1e9;
  if (timeout_s && !(*timeout_s < kForeverS)) timeout_s.reset();
  if (timeout_s && *timeout_s < 0) timeout_s = 0;
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(timeout_s.value_or(0.0)));
  for (;;) {
    auto slice = std::chrono::duration_cast<std::chrono::nanoseconds>(kSlice);
    if (timeout_s)
      slice = std::min(slice, std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now()));
    bool done = false;
    {
      const py::gil_scoped_release unlocked;
      done = future_->wait_for(std::max(slice, std::chrono::nanoseconds(0)));
    }
    if (done) return true;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (timeout_s && Clock::now() >= deadline) return false;
  }
}

std::optional<Failure> PyFuture::failure() const {
  if (!future_->done()) throw std::runtime_error("the request is not done; wait() first");
  return future_->failure();
}

std::vector<Future> futures_of(const std::vector<const PyFuture*>& futures) {
  std::vector<Future> result;
  for (const PyFuture* future : futures) {
    if (future == nullptr) throw py::value_error("a future is None");
    result.push_back(future->get());
  }
  return result;
}

namespace {

// Exports a range of the arena through the buffer protocol, and keeps the arena alive.
struct ArenaView {
  std::shared_ptr<Arena> arena;
  std::size_t offset;
  std::size_t nbytes;
};

// Counters, and the memory that they are in.
struct PyCounters {
  Memory memory;
  SharedCounters counters;
};

py::memoryview view_of(const std::shared_ptr<Arena>& arena, std::size_t offset, std::size_t nbytes) {
  if (offset > arena->nbytes() || nbytes > arena->nbytes() - offset) {
    throw py::value_error("bytes [" + std::to_string(offset) + ", " + std::to_string(offset + nbytes) +
                          ") are outside the arena of " + std::to_string(arena->nbytes()));
  }
  return py::memoryview(py::cast(ArenaView{arena, offset, nbytes}));
}

}  // namespace

void bind_base(py::module_& module) {
  py::register_local_exception_translator([](std::exception_ptr raised) {
    try {
      std::rethrow_exception(std::move(raised));
    } catch (const std::system_error& error) {
      set_os_error(error, "");
    }
  });

  py::class_<ArenaView>(module, "_ArenaView", py::buffer_protocol()).def_buffer([](ArenaView& view) {
    return py::buffer_info(reinterpret_cast<std::uint8_t*>(view.arena->address() + view.offset),
                           static_cast<py::ssize_t>(view.nbytes));
  });

  py::class_<Arena, std::shared_ptr<Arena>>(module, "Arena")
      .def(py::init<std::size_t, bool, int>(), py::arg("nbytes"), py::kw_only(), py::arg("huge_pages") = true,
           py::arg("numa_node") = -1)
      .def_static(
          "shared", [](int fd, std::size_t nbytes) { return std::make_shared<Arena>(fd, nbytes); }, py::arg("fd"),
          py::arg("nbytes"))
      .def_property_readonly("address",
                             [](const Arena& arena) { return reinterpret_cast<std::uintptr_t>(arena.address()); })
      .def_property_readonly("nbytes", &Arena::nbytes)
      .def_property_readonly("huge_pages", &Arena::huge_pages)
      .def(
          "touch",
          [](Arena& arena, const PyPool& pool) {
            ThreadPool& threads = *pool.get();
            const py::gil_scoped_release release;
            arena.touch(threads);
          },
          py::arg("pool"))
      .def("populate", &Arena::populate, py::arg("offset"), py::arg("nbytes"), py::call_guard<py::gil_scoped_release>())
      .def("give_back", &Arena::give_back, py::call_guard<py::gil_scoped_release>())
      .def("view", &view_of, py::arg("offset"), py::arg("nbytes"));

  py::class_<PyCounters>(module, "SharedCounters")
      .def(py::init([](const py::object& memory) {
             Memory held = memory_from(memory, true, "memory");
             return std::make_unique<PyCounters>(PyCounters{held, SharedCounters(held.data, held.nbytes)});
           }),
           py::arg("memory"))
      .def_property_readonly("count", [](const PyCounters& self) { return self.counters.count(); })
      .def(
          "load", [](const PyCounters& self, std::size_t index) { return self.counters.load(index); }, py::arg("index"))
      .def(
          "advance",
          [](PyCounters& self, std::size_t index, std::uint32_t value) { self.counters.advance(index, value); },
          py::arg("index"), py::arg("value"))
      .def(
          "add", [](PyCounters& self, std::size_t index) { return self.counters.add(index); }, py::arg("index"))
      .def(
          "wait",
          [](const PyCounters& self, std::size_t index, std::uint32_t value, double timeout_s) {
            const auto timeout =
                std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(timeout_s));
            const py::gil_scoped_release unlocked;
            return self.counters.wait(index, value, timeout);
          },
          py::arg("index"), py::arg("value"), py::arg("timeout_s"));

  py::class_<Failure>(module, "Failure")
      .def_property_readonly("kind",
                             [](const Failure& failure) {
                               constexpr std::array kNames = {"io", "corruption", "timeout", "canceled", "device"};
                               return kNames[static_cast<std::size_t>(failure.kind)];
                             })
      .def_readonly("operation", &Failure::operation)
      .def_readonly("path", &Failure::path)
      .def_readonly("offset", &Failure::offset)
      .def_readonly("nbytes", &Failure::nbytes)
      .def_readonly("errno", &Failure::error_number)
      .def_readonly("cause", &Failure::cause)
      .def_readonly("message", &Failure::message);

  py::class_<PyFuture>(module, "IOFuture")
      .def("done", &PyFuture::done)
      .def("wait", &PyFuture::wait, py::arg("timeout_s") = py::none())
      .def("failure", &PyFuture::failure);

  py::class_<PyPool>(module, "ThreadPool")
      .def(py::init([](unsigned threads, int numa_node, int nice) {
             return std::make_unique<PyPool>(std::make_shared<ThreadPool>(threads, numa_node, nice));
           }),
           py::arg("threads"), py::kw_only(), py::arg("numa_node") = -1, py::arg("nice") = 0)
      .def_property_readonly("threads", [](const PyPool& pool) { return pool.get()->threads(); })
      .def("close", &PyPool::close);
}

}  // namespace infinity::bindings
