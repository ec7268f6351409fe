// Arithmetic according to IEEE 754 (round to nearest, denormal numbers kept), whatever the mode of the calling thread.
// A library may have switched denormal numbers off in some threads (torch.set_flush_denormal) and not in others.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace infinity {

class IeeeArithmetic {
 public:
  IeeeArithmetic() : before_(read()) { write(kDefault); }
  ~IeeeArithmetic() { write(before_); }
  IeeeArithmetic(const IeeeArithmetic&) = delete;
  IeeeArithmetic& operator=(const IeeeArithmetic&) = delete;

 private:
#if defined(__SSE2__)
  using Control = std::uint32_t;
  static constexpr Control kDefault = 0x1f80;  // all exceptions masked
  static Control read() { return _mm_getcsr(); }
  static void write(Control control) { _mm_setcsr(control); }
#elif defined(__aarch64__)
  using Control = std::uint64_t;
  static constexpr Control kDefault = 0;
  static Control read() {
    Control control = 0;
    asm volatile("mrs %0, fpcr" : "=r"(control));
    return control;
  }
  static void write(Control control) { asm volatile("msr fpcr, %0" : : "r"(control)); }
#else
  using Control = int;
  static constexpr Control kDefault = 0;
  static Control read() { return 0; }
  static void write(Control) {}
#endif

  Control before_;
};

}  // namespace infinity
