#include "timing.hpp"

#include <vector>

#include "device.hpp"

namespace te_compile {
namespace {

constexpr int kRounds = 2;  // interleaved, so that a clock still rising favours nobody
// A later way must beat the first by this much: below it is noise, and the first is the same in every process.
constexpr float kWorthwhile = 0.98f;
// One that takes so many times as long as the fastest is not timed a second time.
constexpr float kHopeless = 1.15f;

class Event {
 public:
  Event() { check_cuda(cudaEventCreate(&event_), "cudaEventCreate"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

/// Milliseconds for doing it once; negative if it cannot be done.
float time_of(const std::function<bool()>& enqueue, int launches, cudaStream_t stream, const Event& start,
              const Event& stop) {
  if (!enqueue()) return -1.0f;  // also warms caches up
  check_cuda(cudaEventRecord(start.get(), stream), "cudaEventRecord");
  for (int i = 0; i < launches; ++i) {
    if (!enqueue()) return -1.0f;
  }
  check_cuda(cudaEventRecord(stop.get(), stream), "cudaEventRecord");
  check_cuda(cudaEventSynchronize(stop.get()), "te_cublaslt_gemm: timing algorithms");
  float elapsed = 0.0f;
  check_cuda(cudaEventElapsedTime(&elapsed, start.get(), stop.get()), "cudaEventElapsedTime");
  return elapsed / static_cast<float>(launches);
}

}  // namespace

size_t fastest_of(size_t count, cudaStream_t stream, const std::function<bool(size_t)>& enqueue, int launches) {
  const Event start;
  const Event stop;
  std::vector<float> best(count, -1.0f);
  float fastest = -1.0f;
  for (int round = 0; round < kRounds; ++round) {
    for (size_t which = 0; which < count; ++which) {
      if (round > 0 && (best[which] < 0.0f || best[which] > kHopeless * fastest)) continue;
      const float time = time_of([&] { return enqueue(which); }, launches, stream, start, stop);
      if (time < 0.0f) continue;
      if (best[which] < 0.0f || time < best[which]) best[which] = time;
      if (fastest < 0.0f || time < fastest) fastest = time;
    }
  }
  size_t chosen = 0;
  for (size_t which = 1; which < count; ++which) {
    const float leader = best[chosen];
    if (best[which] >= 0.0f && (leader < 0.0f || best[which] < leader * (chosen == 0 ? kWorthwhile : 1.0f))) {
      chosen = which;
    }
  }
  cudaGetLastError();  // of ways that cannot be done
  return chosen;
}

}  // namespace te_compile
