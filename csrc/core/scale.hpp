// From amax to scale: one text for host and device, so that they cannot differ by a rounding.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "te_compile.h"

#ifdef __CUDACC__
#define TE_HOST_DEVICE __host__ __device__
#else
#define TE_HOST_DEVICE
#endif

namespace te_compile {

/// The rule with 2^-margin folded into the numerator, which is exact.
struct ScaleFormula {
  float numerator;
  float epsilon;
  bool power_2;
};

inline ScaleFormula formula_of(const te_scale_rule& rule) {
  return {static_cast<float>(std::ldexp(static_cast<double>(rule.fp8_max), -rule.margin)), rule.epsilon,
          rule.power_2 != 0};
}

TE_HOST_DEVICE inline bool is_finite(float value) { return value - value == 0.0f; }

/// value * scale, and NaN where value is infinite: a cast would make the largest number of it and hide an overflow. A
/// finite value whose product overflows stays.
TE_HOST_DEVICE inline float scaled(float value, float scale) {
  const float product = value * scale;
  return fmaf(value, 0.0f, product);
}

TE_HOST_DEVICE inline float scale_of(float amax, const ScaleFormula& formula) {
  constexpr float kSmallestNormal = 1.17549435082228750797e-38f;
  constexpr float kLargest = 3.40282346638528859812e+38f;
  const float floored = amax < formula.epsilon ? formula.epsilon : amax;  // a NaN compares false and stays
  if (!is_finite(floored) || !(floored > 0.0f)) return 1.0f;
  float scale = formula.numerator / floored;
  scale = scale < kSmallestNormal ? kSmallestNormal : scale > kLargest ? kLargest : scale;
  if (formula.power_2) {
    uint32_t bits;
    memcpy(&bits, &scale, sizeof bits);
    bits &= 0xFF800000u;
    memcpy(&scale, &bits, sizeof bits);
  }
  return scale;
}

}  // namespace te_compile
