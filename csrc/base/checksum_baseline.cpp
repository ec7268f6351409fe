// Compiled for baseline only; see CMakeLists.txt for the flags.
#define INFINITY_ISA_NAMESPACE baseline
#include "base/checksum_kernel.inl"

namespace infinity {

std::uint64_t checksum_bytes(const void* data, std::size_t nbytes) { return XXH3_64bits(data, nbytes); }

}  // namespace infinity
