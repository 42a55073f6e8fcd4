// The host side of the C interface.
#include <algorithm>
#include <array>
#include <limits>

#include "failure.hpp"
#include "float8.hpp"
#include "scale.hpp"

namespace te_compile {
namespace {

template <typename Format>
void quantize(const float* x, int64_t count, float scale, uint8_t* q) {
  for (int64_t i = 0; i < count; ++i) q[i] = Format::encode(scaled(x[i], scale));
}

template <typename Format>
void dequantize(const uint8_t* q, int64_t count, float scale_inv, float* y) {
  static const std::array<float, 256> values = [] {
    std::array<float, 256> table{};
    for (int code = 0; code < 256; ++code) table[code] = Format::decode(static_cast<uint8_t>(code));
    return table;
  }();
  for (int64_t i = 0; i < count; ++i) y[i] = values[q[i]] * scale_inv;
}

float amax_of(const float* x, int64_t count) {
  uint32_t largest = 0;  // magnitudes order as their bits do, with every NaN above infinity
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, bits_of(x[i]) & 0x7FFFFFFF);
  return largest >= 0x7F800000 ? std::numeric_limits<float>::infinity() : float_of(largest);
}

/// One row of a state: scale | skipped | history.
void update_row(float* row, float amax, int64_t length, const ScaleFormula& formula, te_amax_algorithm algorithm) {
  if (!is_finite(amax)) {
    row[1] += 1.0f;
    return;
  }
  if (!(amax > 0.0f)) return;
  float* history = row + 2;
  std::copy_backward(history, history + length - 1, history + length);
  history[0] = amax;
  float chosen = amax;
  if (algorithm == TE_AMAX_MAX) {
    for (int64_t i = 1; i < length; ++i) {
      if (!is_finite(history[i])) return;  // a history that was loaded broken: keep the scale until it has rolled out
      chosen = std::max(chosen, history[i]);
    }
  }
  row[0] = scale_of(chosen, formula);
}

bool is_float8(te_dtype dtype) { return dtype == TE_FLOAT8_E4M3 || dtype == TE_FLOAT8_E5M2; }

}  // namespace
}  // namespace te_compile

using namespace te_compile;

extern "C" te_status te_host_quantize(const float* x, int64_t count, float scale, te_dtype dtype, uint8_t* q,
                                      float* amax) {
  return guarded([&] {
    require(count >= 0, "te_host_quantize: count is negative");
    require(count == 0 || (x != nullptr && q != nullptr), "te_host_quantize: x or q is null");
    require(is_float8(dtype), "te_host_quantize: dtype must be TE_FLOAT8_E4M3 or TE_FLOAT8_E5M2");
    if (dtype == TE_FLOAT8_E4M3) {
      quantize<E4M3>(x, count, scale, q);
    } else {
      quantize<E5M2>(x, count, scale, q);
    }
    if (amax != nullptr) *amax = amax_of(x, count);
  });
}

extern "C" te_status te_host_dequantize(const uint8_t* q, int64_t count, float scale_inv, te_dtype dtype, float* y) {
  return guarded([&] {
    require(count >= 0, "te_host_dequantize: count is negative");
    require(count == 0 || (q != nullptr && y != nullptr), "te_host_dequantize: q or y is null");
    require(is_float8(dtype), "te_host_dequantize: dtype must be TE_FLOAT8_E4M3 or TE_FLOAT8_E5M2");
    if (dtype == TE_FLOAT8_E4M3) {
      dequantize<E4M3>(q, count, scale_inv, y);
    } else {
      dequantize<E5M2>(q, count, scale_inv, y);
    }
  });
}

extern "C" te_status te_host_scale(float amax, const te_scale_rule* rule, float* scale) {
  return guarded([&] {
    require(rule != nullptr && scale != nullptr, "te_host_scale: rule or scale is null");
    *scale = scale_of(amax, formula_of(*rule));
  });
}

extern "C" te_status te_host_update_scales(float* const* states, const float* const* amaxes, const int64_t* rows,
                                           int64_t count, int64_t history_length, const te_scale_rule* rule,
                                           te_amax_algorithm algorithm) {
  return guarded([&] {
    require(count >= 0 && history_length >= 1, "te_host_update_scales: count or history_length is too small");
    require(rule != nullptr, "te_host_update_scales: rule is null");
    require(count == 0 || (states && amaxes && rows), "te_host_update_scales: a list is null");
    const ScaleFormula formula = formula_of(*rule);
    for (int64_t i = 0; i < count; ++i) {
      require(rows[i] == 0 || (states[i] && amaxes[i]), "te_host_update_scales: a state or amax is null");
      for (int64_t row = 0; row < rows[i]; ++row) {
        update_row(states[i] + row * (2 + history_length), amaxes[i][row], history_length, formula, algorithm);
      }
    }
  });
}
