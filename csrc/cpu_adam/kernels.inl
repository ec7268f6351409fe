// The kernels. kernels_<isa>.cpp defines INFINITY_ISA_NAMESPACE and includes this file, compiled for exactly that
// instruction set.
//
// [Note: a step in blocks]
// A block is 256 elements of one parameter. The block's gradient, master and moments are converted to fp32 in scratch
// memory that stays in the L1 cache; fp32 streams are used in place. The optimizer's rule runs over the block, and the
// results are converted back to their formats. In this way each format and each rule is implemented once, all
// combinations work, and the streams still cross the memory bus only once.
//
// Invariant: there is no contraction, no reassociation and no approximate reciprocal, so the bits do not depend on the
// instruction set.

#include <bit>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "base/bits.hpp"
#include "cpu_adam/kernels.hpp"

namespace infinity::INFINITY_ISA_NAMESPACE {
namespace {

#include "base/simd.inl"
#include "cpu_adam/weights.inl"

// The following files use simd.inl and weights.inl.
#include "cpu_adam/int8.inl"
#include "cpu_adam/philox.inl"
#include "cpu_adam/reductions.inl"
#include "cpu_adam/rules.inl"

template <bool past>
StepFacts apply_rule(float* p, const float* g, const MomentPass& m, const MomentPass& v, std::size_t numel,
                     const Constants& c) {
  switch (c.rule) {
    case Rule::adamw:
      return apply_to_blocks<AdamW, past>(p, g, m, v, numel, c);
    case Rule::adam:
      return apply_to_blocks<Adam, past>(p, g, m, v, numel, c);
    case Rule::lion:
      return apply_to_blocks<Lion, past>(p, g, m, v, numel, c);
    case Rule::adagrad:
      return apply_to_blocks<Adagrad, past>(p, g, m, v, numel, c);
    case Rule::sgd:
      break;
  }
  return c.uses_exp_avg ? apply_to_blocks<Sgd, past>(p, g, m, v, numel, c)
                        : apply_to_blocks<SgdWithoutMomentum, past>(p, g, m, v, numel, c);
}

// Fills the rest of a scratch block with copies of the last element, so that a complete block can be computed and the
// copies do not change the results.
void pad(float* values, std::size_t numel) {
  for (std::size_t i = numel; i < kBlockNumel; ++i) values[i] = values[numel - 1];
}

// Elements [at, at + numel) of the buffers: all elements of block `block`, or some of them, from the block's element
// `offset` on.
struct Block {
  std::size_t at;
  std::size_t numel;
  std::size_t offset;
  std::uint64_t block;

  [[nodiscard]] bool whole() const { return numel == kBlockNumel; }
};

// A block of new values, which are written in place, or collected in the L1 cache and stored past the caches.
template <class Value>
class NewBlock {
 public:
  NewBlock(Value* place, const Block& block, bool past_caches) : place_(place), past_(past_caches && block.whole()) {}

  [[nodiscard]] Value* values() { return past_ ? scratch_ : place_; }
  void store() {
    if (past_) store_past_caches(place_, scratch_, sizeof scratch_);
  }

 private:
  Value* place_;
  bool past_;
  alignas(64) Value scratch_[kBlockNumel];
};

bool past_caches(const StateMemory& memory) { return memory.past_caches && memory.apart(); }

struct Int8Place {
  float* scale;
  std::uint8_t* codes;
};

// See [Note: layout of int8 moments].
Int8Place int8_place(void* data, std::size_t at) {
  auto* chunk = static_cast<std::byte*>(data) + at / kChunkNumel * kChunkBytes;
  const std::size_t inside = at % kChunkNumel;
  return {reinterpret_cast<float*>(chunk) + inside / kBlockNumel,
          reinterpret_cast<std::uint8_t*>(chunk) + kScalesBytes + inside};
}

// A block of a moment in fp32, either in the buffer itself or in scratch memory.
template <bool is_signed>
class Moment {
 public:
  // `fresh`: the moment counts as zero, whatever the memory contains.
  Moment(Moments moments, const StateMemory& memory, const Block& block, bool fresh)
      : moments_(moments), memory_(memory), block_(block) {
    if (moments == Moments::fp32) to_ = static_cast<float*>(memory.to) + block.at;
    if (fresh) {
      std::memset(scratch_, 0, sizeof scratch_);
      return;
    }
    if (moments == Moments::fp32) {
      const float* const from = static_cast<const float*>(memory.from) + block.at;
      if (block.whole()) {
        from_ = from;
        return;
      }
      std::memcpy(scratch_, from, block.numel * sizeof(float));
    } else if (moments == Moments::bf16) {
      widen<Bf16>(memory.from, block.at, block.numel, scratch_);
    } else {
      const Int8Place place = int8_place(const_cast<void*>(memory.from), block.at);
      if (block.whole()) {
        decode_block<is_signed>(place.codes, *place.scale, scratch_);
        return;
      }
      std::uint8_t codes[kBlockNumel] = {};
      std::memcpy(codes, place.codes, block.numel);
      decode_block<is_signed>(codes, *place.scale, scratch_);
    }
    pad(scratch_, block.numel);
  }

  [[nodiscard]] const float* values() const { return from_; }
  [[nodiscard]] MomentPass pass() { return {from_, goes_straight() ? to_ : scratch_}; }

  // Whether the rule itself may store its results past the caches.
  [[nodiscard]] bool past() const {
    return goes_straight() && past_caches(memory_) && reinterpret_cast<std::uintptr_t>(to_) % sizeof(Floats) == 0;
  }

  // Writes the values back in the moment's format. `largest` is the largest magnitude of the values.
  void store(const Constants& c, float largest) {
    const bool past = past_caches(memory_);
    if (moments_ == Moments::fp32) {
      if (!goes_straight()) std::memcpy(to_, scratch_, block_.numel * sizeof(float));
    } else if (moments_ == Moments::bf16) {
      alignas(64) std::uint16_t random[kBlockNumel];
      random_bits(c.seed, c.step, block_.block, is_signed ? Stream::exp_avg : Stream::exp_avg_sq, random);
      NewBlock<std::uint16_t> rounded(static_cast<std::uint16_t*>(memory_.to) + block_.at, block_, past);
      store_stochastically(scratch_, rounded.values(), random + block_.offset, block_.numel);
      rounded.store();
    } else {
      const Int8Place place = int8_place(memory_.to, block_.at);
      *place.scale = largest;
      if (block_.whole()) {
        NewBlock<std::uint8_t> codes(place.codes, block_, past);
        encode_block<is_signed>(scratch_, largest, codes.values());
        codes.store();
        return;
      }
      std::uint8_t codes[kBlockNumel];
      encode_block<is_signed>(scratch_, largest, codes);
      std::memcpy(place.codes, codes, block_.numel);
    }
  }

 private:
  [[nodiscard]] bool goes_straight() const { return moments_ == Moments::fp32 && block_.whole(); }

  Moments moments_;
  StateMemory memory_;
  Block block_;
  alignas(64) float scratch_[kBlockNumel];
  const float* from_ = scratch_;
  float* to_ = nullptr;
};

// The memory of the master if the master is fp32, else null.
const StateMemory* wide_master(const StateFormat& format, const StateBuffers& buffers) {
  if (format.master == Master::weight) return &buffers.weight;
  return format.master == Master::fp32 ? &buffers.residual : nullptr;
}

// `finite`: whether all values are finite.
void store_weights(const StateFormat& format, const StateBuffers& buffers, const Block& block, const float* master,
                   bool finite, const Constants& c) {
  const std::size_t at = block.at;
  if (const StateMemory* const wide = wide_master(format, buffers)) {
    float* const place = static_cast<float*>(wide->to) + at;
    if (past_caches(*wide) && block.whole()) {
      store_past_caches(place, master, kBlockNumel * sizeof(float));
    } else if (place != master) {
      std::memcpy(place, master, block.numel * sizeof(float));
    }
  }
  if (format.master == Master::weight) return;
  // With an fp32 master, the new weights are written and never read. They may be stored past the caches even if the
  // weights are updated in place.
  const bool past = format.master == Master::fp32 ? buffers.weight.past_caches : past_caches(buffers.weight);
  if (format.weight == DType::fp16) {
    NewBlock<Half> narrow(static_cast<Half*>(buffers.weight.to) + at, block, past);
    store_fp16(master, narrow.values(), block.numel);
    return narrow.store();
  }
  NewBlock<std::uint16_t> narrow(static_cast<std::uint16_t*>(buffers.weight.to) + at, block, past);
  if (format.master == Master::split16) {
    NewBlock<std::int16_t> rest(static_cast<std::int16_t*>(buffers.residual.to) + at, block,
                                past_caches(buffers.residual));
    store_split16(master, narrow.values(), rest.values(), block.numel, finite);
    rest.store();
  } else if (format.master == Master::none) {
    alignas(64) std::uint16_t random[kBlockNumel];
    random_bits(c.seed, c.step, block.block, Stream::weight, random);
    store_stochastically(master, narrow.values(), random + block.offset, block.numel);
  } else {
    store_bf16(master, narrow.values(), block.numel, finite);
  }
  narrow.store();
}

bool update_block(const StateFormat& format, const StateBuffers& buffers, const Block& block, const Constants& c) {
  alignas(64) float gradient[kBlockNumel];
  alignas(64) float master[kBlockNumel];
  const auto* g = static_cast<const float*>(buffers.grad) + block.at;
  if (format.grad != DType::fp32 || !block.whole()) {
    widen(format.grad, buffers.grad, block.at, block.numel, gradient);
    pad(gradient, block.numel);
    g = gradient;
  }
  float* p = master;
  const StateMemory* const wide = wide_master(format, buffers);
  if (wide != nullptr && !wide->apart() && block.whole()) {
    p = static_cast<float*>(wide->to) + block.at;
  } else {
    load_master(format, buffers, block.at, block.numel, master);
    pad(master, block.numel);
  }
  StepFacts facts;
  if (c.uses_exp_avg && c.uses_exp_avg_sq) {
    Moment<true> m(format.moments, buffers.exp_avg, block, c.fresh);
    Moment<false> v(format.moments, buffers.exp_avg_sq, block, c.fresh);
    facts = m.past() && v.past() ? apply_rule<true>(p, g, m.pass(), v.pass(), kBlockNumel, c)
                                 : apply_rule<false>(p, g, m.pass(), v.pass(), kBlockNumel, c);
    m.store(c, facts.largest_m);
    v.store(c, facts.largest_v);
  } else if (c.uses_exp_avg) {
    Moment<true> m(format.moments, buffers.exp_avg, block, c.fresh);
    facts = m.past() ? apply_rule<true>(p, g, m.pass(), {}, kBlockNumel, c)
                     : apply_rule<false>(p, g, m.pass(), {}, kBlockNumel, c);
    m.store(c, facts.largest_m);
  } else if (c.uses_exp_avg_sq) {
    Moment<false> v(format.moments, buffers.exp_avg_sq, block, c.fresh);
    facts = v.past() ? apply_rule<true>(p, g, {}, v.pass(), kBlockNumel, c)
                     : apply_rule<false>(p, g, {}, v.pass(), kBlockNumel, c);
    v.store(c, facts.largest_v);
  } else {
    facts = apply_rule<false>(p, g, {}, {}, kBlockNumel, c);
  }
  store_weights(format, buffers, block, p, facts.finite, c);
  return facts.finite;
}

// Whether all states are fp32 and are used in place. If so, many blocks are updated in one pass.
bool all_in_place(const StateFormat& format, const StateBuffers& buffers, const Constants& c) {
  return format.master == Master::weight && format.moments == Moments::fp32 && format.grad == DType::fp32 && !c.fresh &&
         !buffers.weight.apart() && !buffers.exp_avg.apart() && !buffers.exp_avg_sq.apart();
}

bool update_in_place(const StateBuffers& buffers, std::size_t at, std::size_t numel, const Constants& c) {
  const auto in = [at](const StateMemory& memory) { return static_cast<float*>(memory.to) + at; };
  const auto pass = [&](const StateMemory& memory, bool used) {
    return used ? MomentPass{in(memory), in(memory)} : MomentPass{};
  };
  const MomentPass m = pass(buffers.exp_avg, c.uses_exp_avg);
  const MomentPass v = pass(buffers.exp_avg_sq, c.uses_exp_avg_sq);
  return apply_rule<false>(in(buffers.weight), static_cast<const float*>(buffers.grad) + at, m, v, numel, c).finite;
}

bool update(const StateFormat& format, const StateBuffers& buffers, std::size_t begin, std::size_t end,
            std::uint64_t index, const Constants& c) {
  bool finite = true;
  for (std::size_t at = begin; at < end;) {
    const std::size_t offset = index % kBlockNumel;
    std::size_t numel = kBlockNumel - offset < end - at ? kBlockNumel - offset : end - at;
    if (all_in_place(format, buffers, c) && end - at >= kBlockNumel) {
      numel = (end - at) / kBlockNumel * kBlockNumel;
      finite &= update_in_place(buffers, at, numel, c);
    } else {
      finite &= update_block(format, buffers, {at, numel, offset, index / kBlockNumel}, c);
    }
    at += numel;
    index += numel;
  }
  if (buffers.weight.past_caches || buffers.residual.past_caches || buffers.exp_avg.past_caches ||
      buffers.exp_avg_sq.past_caches) {
    finish_stores();
  }
  return finite;
}

template <bool is_signed>
void decode_moments(Moments moments, const void* data, float* values, std::size_t numel) {
  for (std::size_t at = 0; at < numel; at += kBlockNumel) {
    const std::size_t count = numel - at < kBlockNumel ? numel - at : kBlockNumel;
    Moment<is_signed> moment(moments, StateMemory(const_cast<void*>(data)), {at, count, 0, 0}, false);
    std::memcpy(values + at, moment.values(), count * sizeof(float));
  }
}

template <bool is_signed>
void encode_moments(Moments moments, const float* values, void* data, std::size_t numel) {
  if (moments == Moments::fp32) {
    std::memcpy(data, values, numel * sizeof(float));
    return;
  }
  if (moments == Moments::bf16) return store_bf16(values, static_cast<std::uint16_t*>(data), numel, false);
  for (std::size_t at = 0; at < numel; at += kBlockNumel) {
    const std::size_t count = numel - at < kBlockNumel ? numel - at : kBlockNumel;
    alignas(64) float block[kBlockNumel];
    std::uint8_t codes[kBlockNumel];
    std::memcpy(block, values + at, count * sizeof(float));
    pad(block, count);
    const Int8Place place = int8_place(data, at);
    *place.scale = largest_magnitude(block);
    encode_block<is_signed>(block, *place.scale, codes);
    std::memcpy(place.codes, codes, count);
  }
}

void decode_moments(Moments moments, bool is_signed, const void* data, float* values, std::size_t numel) {
  return is_signed ? decode_moments<true>(moments, data, values, numel)
                   : decode_moments<false>(moments, data, values, numel);
}

void encode_moments(Moments moments, bool is_signed, const float* values, void* data, std::size_t numel) {
  return is_signed ? encode_moments<true>(moments, values, data, numel)
                   : encode_moments<false>(moments, values, data, numel);
}

}  // namespace

extern const Kernels kKernels = {update, sum_squares, land, read_modify_write, decode_moments, encode_moments};

}  // namespace infinity::INFINITY_ISA_NAMESPACE
