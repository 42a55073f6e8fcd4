// What a task of te_cuda_attention asks for, and who runs it: a translation unit for each width of heads.
#pragma once

#include "te_compile.h"

namespace te_compile::attention {

constexpr const char* kName = "te_cuda_attention";
constexpr int kNarrow = 64, kWide = 128;  // features; narrower heads end in zeros

/// Which keys a query sees: all, none that come after it, those of a window around it, those that a mask shows, or all with a
/// bias that is added to their scores.
enum class Sight { kAll, kCausal, kWindow, kTiles, kBiased };

inline Sight sight_of(const te_attention& task) {
  if (task.bias != nullptr) return Sight::kBiased;
  if (task.tiles != nullptr) return Sight::kTiles;
  if (task.left >= 0) return Sight::kWindow;
  return task.right > 0 ? Sight::kWindow : task.right == 0 ? Sight::kCausal : Sight::kAll;
}

/// Launches a task that has been checked, whose heads have up to so many features.
template <int Width>
void run_forward(const te_attention& task);
template <int Width>
void run_backward(const te_attention& task);

}  // namespace te_compile::attention
