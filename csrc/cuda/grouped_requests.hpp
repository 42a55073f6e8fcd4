// What the requests of both grouped products have in common is checked alike.
#pragma once

#include <cstdint>
#include <string>

#include "failure.hpp"

namespace te_compile::grouped {

inline bool is_aligned(const void* x, uintptr_t bytes) {
  return x != nullptr && reinterpret_cast<uintptr_t>(x) % bytes == 0;
}

inline bool is_code(te_dtype dtype) { return dtype == TE_FLOAT8_E4M3 || dtype == TE_FLOAT8_E5M2; }

/// Throws Failure, in the name of the function `who`, unless a kernel can read a, b and the rest, and write y.
template <typename Request>
void check_operands(const Request& task, const std::string& who) {
  require(is_aligned(task.a, 16) && is_aligned(task.b, 16) && is_aligned(task.y, 16),
          (who + ": a, b and y must be aligned to 16 bytes").c_str());
  require(task.ends != nullptr && task.a_scale_inv != nullptr && task.b_scale_inv != nullptr,
          (who + ": ends or a scale is null").c_str());
  require(is_code(task.a_dtype) && is_code(task.b_dtype), (who + ": a and b must be FP8").c_str());
  require(task.y_dtype == TE_FLOAT32 || task.y_dtype == TE_FLOAT16 || task.y_dtype == TE_BFLOAT16,
          (who + ": y must be TE_FLOAT32, TE_FLOAT16 or TE_BFLOAT16").c_str());
  supported_if(task.a_dtype == TE_FLOAT8_E4M3 || task.b_dtype == TE_FLOAT8_E4M3,
               (who + ": a and b are both E5M2").c_str());
}

}  // namespace te_compile::grouped
