// XXH3 over pages, compiled once per instruction set; xxhash selects the vector width by the compiler's flags.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstddef>
#include <cstdint>

#include "base/checksum.hpp"

namespace infinity::INFINITY_ISA_NAMESPACE {

void checksum_pages(const std::byte* data, std::size_t pages, PageChecksum* sums) {
  for (std::size_t page = 0; page < pages; ++page) {
    sums[page] = static_cast<PageChecksum>(XXH3_64bits(data + page * kPageBytes, kPageBytes));
  }
}

}  // namespace infinity::INFINITY_ISA_NAMESPACE
