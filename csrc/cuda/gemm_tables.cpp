#include "gemm_tables.hpp"

#include "device.hpp"

namespace te_compile {
namespace {

constexpr size_t kMostPlans = 4096;
// Sequence lengths that never repeat must not cost a timing each: after so many lengths of one kind of product, further
// ones take the library's first suggestion.
constexpr int kMostTimedLengths = 64;

}  // namespace

/// Never destroyed: at exit the driver may be gone before us.
Tables& tables() {
  static Tables* const kept = new Tables;
  return *kept;
}

lt::Context* context_of(int device) {
  const std::lock_guard<std::mutex> lock(tables().mutex);
  lt::Context*& context = tables().contexts[device];
  if (context == nullptr) {
    supported_if(compute_capability(device) >= 89, "FP8 products need compute capability 8.9 or later");
    const RelaxedCapture relaxed;
    check_cublas(cublaslt().create(&context), "cublasLtCreate");
  }
  return context;
}

void* own_workspace(int device, void* stream) {
  const std::lock_guard<std::mutex> lock(tables().mutex);
  void*& workspace = tables().workspaces[{device, stream}];
  if (workspace == nullptr) {
    const RelaxedCapture relaxed;
    check_cuda(cudaMalloc(&workspace, kOwnWorkspaceBytes), "te_cublaslt_gemm: allocating a workspace");
  }
  return workspace;
}

std::shared_ptr<Slot> slot_of(const Key& key) {
  const std::lock_guard<std::mutex> lock(tables().mutex);
  auto& slots = tables().slots;
  const auto found = slots.find(key);
  if (found != slots.end()) return found->second;
  if (slots.size() >= kMostPlans) slots.clear();  // whoever still uses one holds it
  return slots.emplace(key, std::make_shared<Slot>()).first->second;
}

bool worth_timing(Key key) {
  for (const KeyField field : {kM, kK, kLda, kLdb, kAlignA, kAlignB, kAlignD, kAlignAddend}) key[field] = 0;
  const std::lock_guard<std::mutex> lock(tables().mutex);
  return tables().timed_lengths[key]++ < kMostTimedLengths;
}

std::shared_ptr<SharedChoices> choices_for(const Key& key) {
  const std::lock_guard<std::mutex> lock(tables().mutex);
  const auto found = tables().choices.find(static_cast<int>(key[kDevice]));
  return found == tables().choices.end() ? nullptr : found->second;
}

}  // namespace te_compile
