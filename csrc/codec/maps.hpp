// Values that the codes represent, bit for bit as in bitsandbytes. The tables are static, so that each translation unit
// has its own copy, compiled for its own instruction set (see base/bits.hpp).
#pragma once

#include <cstddef>

namespace infinity {

// An array without member functions, because all translation units would share the member functions of std::array.
template <std::size_t count>
struct FloatMap {
  float values[count];
};

// Values of NF4 (Dettmers et al. 2023, arXiv 2305.14314, appendix E), ascending.
static constexpr FloatMap<16> kNf4Map = {{
    -0x1p+0f,
    -0x1.647362p-1f,
    -0x1.0cd66p-1f,
    -0x1.94654p-2f,
    -0x1.23449ap-2f,
    -0x1.7a6a7ep-3f,
    -0x1.74f0e2p-4f,
    0.0f,
    0x1.45f5fep-4f,
    0x1.4995c6p-3f,
    0x1.f809bap-3f,
    0x1.5a0674p-2f,
    0x1.c3497p-2f,
    0x1.200f56p-1f,
    0x1.722766p-1f,
    0x1p+0f,
}};

// bounds[i] is halfway between values i and i + 1: the index of the value nearest to x is |{i : bounds[i] < x}|. The
// strict comparison gives the smaller value in a tie.
template <std::size_t count>
static constexpr FloatMap<count - 1> bounds_of(const FloatMap<count>& map) {
  FloatMap<count - 1> bounds{};
  for (std::size_t i = 0; i + 1 < count; ++i) bounds.values[i] = (map.values[i] + map.values[i + 1]) * 0.5f;
  return bounds;
}

// The positive values below 1 of the signed dynamic map of 8 bits (Dettmers et al. 2022, arXiv 2110.02861), which
// bitsandbytes calls create_dynamic_map(). bitsandbytes computes these values with torch.linspace, whose last bits
// depend on the processor; the table has the values for AVX2 and AVX-512.
static constexpr FloatMap<127> kDynamicFractions = {{
    0x1.27476ep-21f, 0x1.b43528p-19f, 0x1.040bfep-17f, 0x1.64840cp-16f, 0x1.6f0068p-15f, 0x1.15df66p-14f,
    0x1.743e96p-14f, 0x1.47ae16p-13f, 0x1.19ce0ap-12f, 0x1.8fc506p-12f, 0x1.02de02p-11f, 0x1.3dd982p-11f,
    0x1.78d5p-11f,   0x1.b3d07cp-11f, 0x1.eecbfep-11f, 0x1.4fdf3ap-10f, 0x1.e353f8p-10f, 0x1.3b645ap-9f,
    0x1.851eb8p-9f,  0x1.ced914p-9f,  0x1.0c49bap-8f,  0x1.3126e8p-8f,  0x1.56041ap-8f,  0x1.7ae148p-8f,
    0x1.9fbe76p-8f,  0x1.c49ba6p-8f,  0x1.e978d4p-8f,  0x1.072b02p-7f,  0x1.19999ap-7f,  0x1.2c083p-7f,
    0x1.3e76c8p-7f,  0x1.75c29p-7f,   0x1.d1eb86p-7f,  0x1.170a3ep-6f,  0x1.451ebap-6f,  0x1.733334p-6f,
    0x1.a147aep-6f,  0x1.cf5c2ap-6f,  0x1.fd70a4p-6f,  0x1.15c29p-5f,   0x1.2ccccep-5f,  0x1.43d70ap-5f,
    0x1.5ae146p-5f,  0x1.71eb86p-5f,  0x1.88f5c2p-5f,  0x1.ap-5f,       0x1.b70a3ep-5f,  0x1.ce147ap-5f,
    0x1.e51ebap-5f,  0x1.fc28f6p-5f,  0x1.09999ap-4f,  0x1.151ebap-4f,  0x1.20a3d6p-4f,  0x1.2c28f6p-4f,
    0x1.37ae14p-4f,  0x1.433334p-4f,  0x1.4eb854p-4f,  0x1.5a3d7p-4f,   0x1.65c29p-4f,   0x1.7147aep-4f,
    0x1.7ccccep-4f,  0x1.8851eep-4f,  0x1.93d70ap-4f,  0x1.b66668p-4f,  0x1.fp-4f,       0x1.14ccccp-3f,
    0x1.31999ap-3f,  0x1.4e6666p-3f,  0x1.6b3334p-3f,  0x1.88p-3f,      0x1.a4ccccp-3f,  0x1.c1999ap-3f,
    0x1.de6666p-3f,  0x1.fb3332p-3f,  0x1.0cp-2f,      0x1.1a6668p-2f,  0x1.28ccccp-2f,  0x1.373334p-2f,
    0x1.459998p-2f,  0x1.54p-2f,      0x1.626666p-2f,  0x1.70ccccp-2f,  0x1.7f3334p-2f,  0x1.8d9998p-2f,
    0x1.9cp-2f,      0x1.aa6666p-2f,  0x1.b8ccccp-2f,  0x1.c73334p-2f,  0x1.d59998p-2f,  0x1.e4p-2f,
    0x1.f26664p-2f,  0x1.006666p-1f,  0x1.079998p-1f,  0x1.0eccccp-1f,  0x1.16p-1f,      0x1.1d3334p-1f,
    0x1.246668p-1f,  0x1.2b999ap-1f,  0x1.32ccccp-1f,  0x1.3ap-1f,      0x1.413334p-1f,  0x1.486668p-1f,
    0x1.4f999ap-1f,  0x1.56ccccp-1f,  0x1.5ep-1f,      0x1.653334p-1f,  0x1.6c6668p-1f,  0x1.73999ap-1f,
    0x1.7accccp-1f,  0x1.82p-1f,      0x1.893334p-1f,  0x1.906666p-1f,  0x1.97999ap-1f,  0x1.9eccccp-1f,
    0x1.a6p-1f,      0x1.ad3334p-1f,  0x1.b46666p-1f,  0x1.bb999ap-1f,  0x1.c2ccccp-1f,  0x1.cap-1f,
    0x1.d13334p-1f,  0x1.d86666p-1f,  0x1.df999ap-1f,  0x1.e6ccccp-1f,  0x1.eep-1f,      0x1.f53334p-1f,
    0x1.fc6666p-1f,
}};

// The complete map, ascending: 127 negative values, 0, the same 127 values with a positive sign, 1.
static constexpr FloatMap<256> dynamic_map() {
  FloatMap<256> map{};
  for (std::size_t i = 0; i < 127; ++i) {
    map.values[126 - i] = -kDynamicFractions.values[i];
    map.values[128 + i] = kDynamicFractions.values[i];
  }
  map.values[255] = 1.0f;
  return map;
}
static constexpr FloatMap<256> kDynamicMap = dynamic_map();

// Values of the 256 codes of e4m3 without infinities (OCP FP8, arXiv 2209.05433, table 1), in the order of the codes.
static constexpr FloatMap<256> e4m3_map() {
  FloatMap<256> map{};
  for (int code = 0; code < 128; ++code) {
    const int exponent = code / 8;
    float value = static_cast<float>(exponent == 0 ? code % 8 : 8 + code % 8) * 0x1p-9f;
    for (int i = 1; i < exponent; ++i) value *= 2.0f;
    if (code == 0x7f) value = __builtin_nanf("");
    map.values[code] = value;
    map.values[code + 128] = -value;
  }
  return map;
}
static constexpr FloatMap<256> kE4m3Map = e4m3_map();

}  // namespace infinity
