// Helpers of all binding files: conversion of buffers and futures.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "aio/engine.hpp"
#include "base/future.hpp"
#include "base/thread_pool.hpp"
#include "cpu_adam/optimizer.hpp"
#include "device/gate.hpp"

namespace infinity::bindings {

namespace py = pybind11;

// The buffer of a Python object. The object stays alive, and its buffer exported, as long as a copy of this struct
// exists.
struct Memory {
  std::byte* data = nullptr;
  std::size_t nbytes = 0;
  std::shared_ptr<py::buffer_info> owner;
};

// Returns the bytes of a contiguous buffer. Raises TypeError if `object` has no buffer, and ValueError if the buffer is
// not contiguous, or is read-only and `writable` is set.
Memory memory_from(const py::handle& object, bool writable, const char* name);

// Raises ValueError unless `memory` has `nbytes` bytes and begins at a multiple of `alignment`.
void require_fits(const Memory& memory, std::size_t nbytes, std::size_t alignment, const char* name);

// Calls memory_from, then require_fits: the buffer must have at least `nbytes` bytes and be aligned to `alignment`.
Memory memory_of(const py::handle& object, std::size_t nbytes, std::size_t alignment, bool writable, const char* name);

// Returns the number of elements of `item` bytes. Raises ValueError if the last element is incomplete.
std::size_t numel_of(const Memory& memory, std::size_t item, const char* name);

// Raises ValueError if two of the memories overlap.
void require_apart(const std::vector<std::pair<const char*, const Memory*>>& memories);

// Returns the enumerator of `name`; `names` contains the names of all enumerators, in the order of the enum. Raises
// ValueError for another name; the message says that `what` must be one of these names.
template <class Enum>
Enum chosen(const char* what, const std::string& name, const std::initializer_list<const char*> names) {
  const auto found = std::find(names.begin(), names.end(), name);
  if (found != names.end()) return static_cast<Enum>(found - names.begin());
  std::string message = std::string("unknown ") + what + " '" + name + "'; use ";
  for (const auto* known = names.begin(); known != names.end(); ++known) {
    message += (known == names.begin() ? "" : known + 1 == names.end() ? " or " : ", ") + std::string(*known);
  }
  throw py::value_error(message);
}

DType dtype_from(const std::string& name);
Master master_from(const std::string& name);
Moments moments_from(const std::string& name);
Isa isa_from(const std::optional<std::string>& name);

// A future for Python, with the buffers that its request uses.
//
// Invariant: the buffers outlive the request. If the future has buffers, its destructor waits for the request. If a
// device that may still use the buffers was given up, the buffers are never freed.
class PyFuture {
 public:
  PyFuture(Future future, std::vector<Memory> kept);
  ~PyFuture();
  PyFuture(const PyFuture&) = delete;
  PyFuture& operator=(const PyFuture&) = delete;

  [[nodiscard]] const Future& get() const { return future_; }
  [[nodiscard]] bool done() const { return future_->done(); }
  // Waits without the GIL in short slices, so that Ctrl-C is handled between the slices.
  [[nodiscard]] bool wait(std::optional<double> timeout_s) const;
  [[nodiscard]] std::optional<Failure> failure() const;

 private:
  Future future_;
  std::vector<Memory> kept_;
  int pid_;
};

// Returns the native futures. Raises ValueError if a future is None.
std::vector<Future> futures_of(const std::vector<const PyFuture*>& futures);

// An object that Python may close before it is collected. Using the object after it was closed raises ValueError.
template <class T>
class Closable {
 public:
  explicit Closable(std::shared_ptr<T> value) : value_(std::move(value)) {}
  ~Closable() { close(); }
  Closable(const Closable&) = delete;
  Closable& operator=(const Closable&) = delete;

  [[nodiscard]] const std::shared_ptr<T>& get() const {
    if (value_ == nullptr) throw py::value_error("used after close()");
    return value_;
  }
  [[nodiscard]] bool closed() const { return value_ == nullptr; }
  // Releases the GIL, because closing may wait for work in flight.
  void close() {
    auto value = std::move(value_);
    value_ = nullptr;
    const py::gil_scoped_release unlocked;
    value.reset();
  }

 private:
  std::shared_ptr<T> value_;
};

inline constexpr std::size_t kTraceEventsMax = std::size_t{1} << 21;  // about 100 MB

// Returns the events of a log to Python: the bytes of the structs, and the number of dropped events.
template <class Taken>
py::tuple packed(const Taken& taken) {
  using Event = typename decltype(taken.events)::value_type;
  const auto nbytes = static_cast<py::ssize_t>(taken.events.size() * sizeof(Event));
  auto bytes = py::reinterpret_steal<py::bytes>(PyBytes_FromStringAndSize(nullptr, nbytes));
  if (!bytes) throw py::error_already_set();
  std::byte* to = reinterpret_cast<std::byte*>(PyBytes_AS_STRING(bytes.ptr()));
  for (const Event& event : taken.events) {
    std::memcpy(to, &event, sizeof(Event));
    to += sizeof(Event);
  }
  return py::make_tuple(bytes, taken.dropped);
}

using PyEngine = Closable<IoEngine>;
using PyFile = Closable<SwapFile>;
using PyPool = Closable<ThreadPool>;

// A gate, and a Python object that the gate's functions need. Users of the gate keep a reference to this object.
struct PyGate {
  std::shared_ptr<const DeviceGate> gate;
  py::object keep;
};

// Sets OSError(errno, message, path). A std::system_error that reaches Python without this function becomes an OSError
// with an empty path.
void set_os_error(const std::system_error& error, const std::string& path);

void bind_base(py::module_& module);
void bind_aio(py::module_& module);
void bind_optimizer(py::module_& module);
void bind_update(py::module_& module);
void bind_device(py::module_& module);
void bind_codec(py::module_& module);

}  // namespace infinity::bindings
