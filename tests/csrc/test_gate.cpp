#include <doctest/doctest.h>

#include <stdexcept>

#include "device/gate.hpp"

using namespace infinity;

namespace {

int g_error = 0;
int g_device = -1;
int g_kind = -1;

int enter(int device) {
  g_device = device;
  return g_error;
}
int copy(void*, const void*, std::size_t, int kind, void*) {
  g_kind = kind;
  return g_error;
}
int record(void*, void*) { return g_error; }
int wait(void*, void*, unsigned flags) { return flags == 0 ? g_error : -1; }
int synchronize(void*) { return g_error; }

}  // namespace

TEST_CASE("a gate calls the runtime's functions as they are to be called") {
  const DeviceGate gate(3, {&enter, &copy, &record, &wait, &synchronize});
  g_error = 0;
  CHECK_FALSE(gate.enter());
  CHECK(g_device == 3);
  CHECK_FALSE(gate.copy(nullptr, nullptr, 1, nullptr));
  CHECK(g_kind == 4);
  CHECK_FALSE(gate.record(nullptr, nullptr));
  CHECK_FALSE(gate.wait(nullptr, nullptr));
  CHECK_FALSE(gate.synchronize(nullptr));
}

TEST_CASE("an error of the runtime is a failure that names the device and the error") {
  const DeviceGate gate(3, {&enter, &copy, &record, &wait, &synchronize});
  g_error = 700;
  for (const auto& failure : {gate.enter(), gate.copy(nullptr, nullptr, 1, nullptr), gate.record(nullptr, nullptr),
                              gate.wait(nullptr, nullptr), gate.synchronize(nullptr)}) {
    REQUIRE(failure);
    CHECK(failure->kind == FailureKind::device);
    CHECK(failure->path == "device 3");
    CHECK(failure->cause == "the device's runtime returned error 700");
    CHECK(failure->message == failure->operation + " on device 3: " + failure->cause);
  }
}

TEST_CASE("a gate may lack the function that chooses the device, and no other") {
  CHECK_FALSE(DeviceGate(0, {nullptr, &copy, &record, &wait, &synchronize}).enter());
  CHECK_THROWS_AS(DeviceGate(0, {&enter, nullptr, &record, &wait, &synchronize}), std::invalid_argument);
  CHECK_THROWS_AS(DeviceGate(0, {&enter, &copy, nullptr, &wait, &synchronize}), std::invalid_argument);
  CHECK_THROWS_AS(DeviceGate(0, {&enter, &copy, &record, nullptr, &synchronize}), std::invalid_argument);
  CHECK_THROWS_AS(DeviceGate(0, {&enter, &copy, &record, &wait, nullptr}), std::invalid_argument);
}
