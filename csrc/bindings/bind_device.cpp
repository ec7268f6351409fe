#include "bindings/common.hpp"
#include "device/gate.hpp"

namespace infinity::bindings {
namespace {

// A function of the device's runtime by its address; 0: none.
template <class Call>
Call* call_at(std::uintptr_t address) {
  return reinterpret_cast<Call*>(address);
}

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

}  // namespace

void bind_device(py::module_& module) { bind_gate(module); }

}  // namespace infinity::bindings
