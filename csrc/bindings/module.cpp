// infinity._native: the Python interface of the C++ core. The module's contract, with shapes and errors, is
// infinity/_native.pyi.
#include "bindings/common.hpp"

PYBIND11_MODULE(_native, module) {
  module.doc() = "The C++ core of infinity: bytes, files and arithmetic.";
  infinity::bindings::bind_base(module);
  infinity::bindings::bind_aio(module);
  infinity::bindings::bind_optimizer(module);
  infinity::bindings::bind_update(module);
  infinity::bindings::bind_device(module);
  infinity::bindings::bind_codec(module);
}
