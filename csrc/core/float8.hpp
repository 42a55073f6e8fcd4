// FP8 in plain arithmetic, bit for bit what the hardware and PyTorch do.
//
//            exponent  mantissa  bias  largest  smallest normal  infinities   NaN
//   E4M3 fn      4         3       7      448        2^-6         none         S.1111.111
//   E5M2         5         2      15    57344        2^-14        S.11111.00   S.11111.01 to .11; written as .11
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace te_compile {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <int ExponentBits, int MantissaBits, int LargestCode>
struct Float8 {
  static constexpr int kBias = (1 << (ExponentBits - 1)) - 1;
  static constexpr uint8_t kNan = 0x7F;
  static constexpr int kShift = 23 - MantissaBits;                                 // fp32 mantissa bits that go
  static constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << MantissaBits;
  static constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(127 + 1 - kBias) << 23;

  /// The code of `value`, saturated, rounded to nearest even; a NaN keeps its sign.
  static uint8_t encode(float value) {
    const uint32_t bits = bits_of(value);
    const uint8_t sign = static_cast<uint8_t>((bits >> 24) & 0x80);
    const uint32_t magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return sign | kNan;
    uint32_t code;
    if (magnitude < kSmallestNormal) {
      // Adding this power of two leaves the sum's last bit worth one FP8 subnormal step, so the adder does the rounding.
      constexpr uint32_t kMagic = static_cast<uint32_t>(127 + 24 - kBias - MantissaBits) << 23;
      code = bits_of(float_of(magnitude) + float_of(kMagic)) - kMagic;
    } else {
      const uint32_t odd = (magnitude >> kShift) & 1;
      code = ((magnitude + (1u << (kShift - 1)) - 1 + odd) >> kShift) - kRebias;
    }
    return sign | static_cast<uint8_t>(code < LargestCode ? code : LargestCode);
  }

  /// The number that `code` stands for.
  static float decode(uint8_t code) {
    const int exponent = (code & 0x7F) >> MantissaBits;
    const int mantissa = code & ((1 << MantissaBits) - 1);
    float magnitude;
    if ((code & 0x7F) > LargestCode) {
      const bool infinite = ExponentBits == 5 && mantissa == 0;
      magnitude = float_of(infinite ? 0x7F800000 : 0x7FC00000);
    } else if (exponent == 0) {
      magnitude = std::ldexp(static_cast<float>(mantissa), 1 - kBias - MantissaBits);
    } else {
      magnitude = std::ldexp(static_cast<float>((1 << MantissaBits) + mantissa), exponent - kBias - MantissaBits);
    }
    return float_of(bits_of(magnitude) | (static_cast<uint32_t>(code & 0x80) << 24));
  }
};

using E4M3 = Float8<4, 3, 0x7E>;
using E5M2 = Float8<5, 2, 0x7B>;

}  // namespace te_compile
