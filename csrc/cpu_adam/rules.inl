// The optimizer rules for one element, in vectors. `m` is exp_avg; `v` is exp_avg_sq. infinity/device_update/rules.py
// has the same operations in the same order.
struct AdamW {
  static constexpr bool kUsesM = true;
  static constexpr bool kUsesV = true;
  static inline void apply(Floats& p, Floats g, Floats& m, Floats& v, const Constants& c) {
    m = m * c.beta1 + g * c.one_minus_beta1;
    g = zero_below(g, c.vanishing);
    v = v * c.beta2 + (g * c.one_minus_beta2) * g;
    p = p * c.decay - (m * c.step_size) / (square_root(v) * c.inverse_bc2_sqrt + c.eps);
  }
};

struct Adam : AdamW {
  static inline void apply(Floats& p, Floats g, Floats& m, Floats& v, const Constants& c) {
    AdamW::apply(p, g + p * c.l2, m, v, c);  // decay is 1
  }
};

struct Lion {
  static constexpr bool kUsesM = true;
  static constexpr bool kUsesV = false;
  static inline void apply(Floats& p, Floats g, Floats& m, Floats&, const Constants& c) {
    const Floats update = m * c.beta1 + g * c.one_minus_beta1;
    const Floats step = splat(c.step_size);
    // 0 if the update is 0, NaN if the update is NaN.
    const Floats sign = update > 0.0f ? step : update < 0.0f ? -step : update;
    p = p * c.decay - sign;
    m = m * c.beta2 + g * c.one_minus_beta2;
  }
};

struct Adagrad {
  static constexpr bool kUsesM = false;
  static constexpr bool kUsesV = true;
  static inline void apply(Floats& p, Floats g, Floats&, Floats& v, const Constants& c) {
    g = g + p * c.l2;
    const Floats counted = zero_below(g, c.vanishing);
    v = (v + c.initial) + counted * counted;
    p = p - (g * c.step_size) / (square_root(v) + c.eps);
  }
};

struct Sgd {
  static constexpr bool kUsesM = true;
  static constexpr bool kUsesV = false;
  static inline void apply(Floats& p, Floats g, Floats& m, Floats&, const Constants& c) {
    g = g + p * c.l2;
    m = m * c.beta1 + g * c.one_minus_beta1;
    p = p - (c.nesterov ? g + m * c.beta1 : m) * c.step_size;
  }
};

struct SgdWithoutMomentum {
  static constexpr bool kUsesM = false;
  static constexpr bool kUsesV = false;
  static inline void apply(Floats& p, Floats g, Floats&, Floats&, const Constants& c) {
    p = p - (g + p * c.l2) * c.step_size;
  }
};

// Facts about elements after their step. If a gradient is not finite, the element's results are not finite, either.
struct StepFacts {
  bool finite;
  float largest_m;  // magnitudes
  float largest_v;
};

// A moment in fp32: its current values, and the destination of the new values, which may be the same memory.
struct MomentPass {
  const float* from = nullptr;
  float* to = nullptr;
};

// `numel` is a multiple of kBlockNumel. `past`: new moments are stored past the caches, to aligned addresses.
template <class Rule, bool past>
StepFacts apply_to_blocks(float* p, const float* g, const MomentPass& m, const MomentPass& v, std::size_t numel,
                          const Constants& given) {
  const auto store_moment = [](float* to, Floats value) {
    if constexpr (past) {
      store_vector_past_caches(to, value);
    } else {
      store(to, value);
    }
  };
  const Constants c = given;
  Ints bad{};
  Ints most_m{};
  Ints most_v{};
  for (std::size_t i = 0; i < numel; i += kLanes) {
    auto weight = load<Floats>(p + i);
    Floats first{};
    Floats second{};
    if constexpr (Rule::kUsesM) first = load<Floats>(m.from + i);
    if constexpr (Rule::kUsesV) second = load<Floats>(v.from + i);
    Rule::apply(weight, load<Floats>(g + i) * c.grad_scale, first, second, c);
    store(p + i, weight);
    bad |= not_finite(weight);
    if constexpr (Rule::kUsesM) {
      store_moment(m.to + i, first);
      most_m = maximum(most_m, magnitude_bits(first));
    }
    if constexpr (Rule::kUsesV) {
      store_moment(v.to + i, second);
      most_v = maximum(most_v, magnitude_bits(second));  // a NaN may have a sign
    }
  }
  const float largest_m = largest_float(most_m);
  const float largest_v = largest_float(most_v);
  return {!any_negative(bad) && largest_m <= kLargestFloat && largest_v <= kLargestFloat, largest_m, largest_v};
}
