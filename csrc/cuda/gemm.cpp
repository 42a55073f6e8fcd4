// te_cublaslt_gemm: FP8 products through cuBLASLt.
//
// The library is column-major and its FP8 kernels read both operands along the contraction ("TN"). A row-major
// d [m, n] = a [m, k] · b [n, k]ᵀ is, read by columns, dᵀ [n, m] = b · aᵀ: our b is its transposed first operand and our a its
// second, and its rows are our columns, which is what makes its bias, a vector along rows, ours along columns.
//
// A plan (descriptors and algorithm) is made once for each kind of call and kept. The library's first suggestion is up
// to 10% slower than its best for common shapes, so the suggestions are timed once, on the caller's stream and operands.
// What is found is kept in a file, if the caller names one, and other processes take the same. Nothing runs that the
// library did not suggest to this process: of what the file says, only what is among the suggestions counts.
#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cublaslt_library.hpp"
#include "device.hpp"
#include "shared_choices.hpp"
#include "timing.hpp"

namespace te_compile {
namespace {

constexpr size_t kOwnWorkspaceBytes = size_t{32} << 20;  // what NVIDIA advises for Hopper
constexpr int kMostCandidates = 32;
constexpr size_t kMostPlans = 4096;
// Sequence lengths that never repeat must not cost a timing each: after so many lengths of one kind of product, further
// ones take the library's first suggestion.
constexpr int kMostTimedLengths = 64;

// --- what makes two calls share a plan ------------------------------------------------------------------------------

int candidates_of(const te_gemm& gemm) { return std::clamp(gemm.candidates, 1, kMostCandidates); }

/// TMA kernels ask for 16 bytes and vectorised stores gain nothing above 256, so two classes are enough.
int64_t alignment_class(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 256 == 0 ? 256 : 16; }

/// Files hold them in this order but for the device: who changes anything here changes TE_CHOICES_FORMAT.
enum KeyField : int {
  kDevice, kM, kN, kK, kLda, kLdb, kLdd, kLdAux, kADtype, kBDtype, kDDtype, kBiasDtype, kAuxDtype, kEpilogueKind,
  kFast, kLdAddend, kDScale, kAmax, kAlignA, kAlignB, kAlignD, kAlignAddend, kWorkspace, kCandidates, kKeyFields
};
using Key = std::array<int64_t, kKeyFields>;

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 1469598103934665603ull;  // FNV-1a over words
    for (const int64_t word : key) hash = (hash ^ static_cast<uint64_t>(word)) * 1099511628211ull;
    return static_cast<size_t>(hash ^ (hash >> 32));
  }
};

bool uses_bias(te_epilogue epilogue) {
  return epilogue == TE_EPILOGUE_BIAS || epilogue == TE_EPILOGUE_GELU_AUX_BIAS || epilogue == TE_EPILOGUE_DGELU_BGRAD;
}

bool uses_aux(te_epilogue epilogue) { return epilogue >= TE_EPILOGUE_GELU_AUX; }

Key key_of(const te_gemm& gemm, size_t workspace_bytes) {
  Key key{};
  key[kDevice] = gemm.device;
  key[kM] = gemm.m;
  key[kN] = gemm.n;
  key[kK] = gemm.k;
  key[kLda] = gemm.lda;
  key[kLdb] = gemm.ldb;
  key[kLdd] = gemm.ldd;
  key[kLdAux] = uses_aux(gemm.epilogue) ? gemm.ld_aux : 0;
  key[kADtype] = gemm.a_dtype;
  key[kBDtype] = gemm.b_dtype;
  key[kDDtype] = gemm.d_dtype;
  key[kBiasDtype] = uses_bias(gemm.epilogue) ? gemm.bias_dtype : -1;
  key[kAuxDtype] = uses_aux(gemm.epilogue) ? gemm.aux_dtype : -1;
  key[kEpilogueKind] = gemm.epilogue;
  key[kFast] = gemm.fast_accumulation != 0;
  key[kLdAddend] = gemm.addend == nullptr ? 0 : gemm.ld_addend;
  key[kDScale] = gemm.d_scale != nullptr;
  key[kAmax] = gemm.amax_d != nullptr;
  key[kAlignA] = alignment_class(gemm.a);
  key[kAlignB] = alignment_class(gemm.b);
  key[kAlignD] = alignment_class(gemm.d);
  key[kAlignAddend] = alignment_class(gemm.addend == nullptr ? gemm.d : gemm.addend);
  key[kWorkspace] = static_cast<int64_t>(workspace_bytes);
  key[kCandidates] = candidates_of(gemm);
  return key;
}

// --- what can be said without the library ---------------------------------------------------------------------------

bool is_float8(te_dtype dtype) { return dtype == TE_FLOAT8_E4M3 || dtype == TE_FLOAT8_E5M2; }

int64_t bytes_of(te_dtype dtype) { return dtype == TE_FLOAT32 ? 4 : is_float8(dtype) ? 1 : 2; }

cudaDataType cuda_type_of(te_dtype dtype) {
  switch (dtype) {
    case TE_FLOAT32: return CUDA_R_32F;
    case TE_FLOAT16: return CUDA_R_16F;
    case TE_BFLOAT16: return CUDA_R_16BF;
    case TE_FLOAT8_E4M3: return CUDA_R_8F_E4M3;
    case TE_FLOAT8_E5M2: return CUDA_R_8F_E5M2;
  }
  throw Failure(TE_INVALID_ARGUMENT, "te_cublaslt_gemm: unknown dtype " + std::to_string(dtype));
}

void supported_if(bool condition, const char* what) {
  if (!condition) throw Failure(TE_UNSUPPORTED, what);
}

void validate(const te_gemm& gemm) {
  require(gemm.m >= 0 && gemm.n >= 0 && gemm.k >= 0, "te_cublaslt_gemm: a size is negative");
  require(gemm.epilogue >= TE_EPILOGUE_NONE && gemm.epilogue <= TE_EPILOGUE_DGELU_BGRAD,
          "te_cublaslt_gemm: unknown epilogue");
  require(is_float8(gemm.a_dtype) && is_float8(gemm.b_dtype), "te_cublaslt_gemm: a and b must be FP8");
  for (const te_dtype dtype : {gemm.d_dtype, gemm.bias_dtype, gemm.aux_dtype}) cuda_type_of(dtype);
  require(uses_bias(gemm.epilogue) == (gemm.bias != nullptr), "te_cublaslt_gemm: bias and epilogue disagree");
  require(uses_aux(gemm.epilogue) == (gemm.aux != nullptr), "te_cublaslt_gemm: aux and epilogue disagree");
  require(is_float8(gemm.d_dtype) || (!gemm.d_scale && !gemm.amax_d),
          "te_cublaslt_gemm: d_scale and amax_d are for an FP8 d");
  require(!is_float8(gemm.d_dtype) || gemm.addend == nullptr, "te_cublaslt_gemm: nothing can be added to an FP8 d");
  require(gemm.addend == nullptr || gemm.ld_addend >= gemm.n, "te_cublaslt_gemm: ld_addend is smaller than its row");
  require(gemm.lda >= gemm.k && gemm.ldb >= gemm.k && gemm.ldd >= gemm.n,
          "te_cublaslt_gemm: a leading dimension is smaller than its row");
  require(!uses_aux(gemm.epilogue) || gemm.ld_aux >= gemm.n, "te_cublaslt_gemm: ld_aux is smaller than its row");
  supported_if(!(gemm.a_dtype == TE_FLOAT8_E5M2 && gemm.b_dtype == TE_FLOAT8_E5M2),
               "cuBLASLt multiplies no E5M2 by E5M2");
  supported_if(gemm.k > 0 && gemm.k % 16 == 0, "cuBLASLt needs the contraction length to be a multiple of 16");
  supported_if(gemm.lda % 16 == 0 && gemm.ldb % 16 == 0 && gemm.ldd * bytes_of(gemm.d_dtype) % 16 == 0,
               "cuBLASLt needs rows that start on multiples of 16 bytes");
  supported_if(gemm.ld_addend * bytes_of(gemm.d_dtype) % 16 == 0,
               "cuBLASLt needs rows that start on multiples of 16 bytes");
  for (const void* pointer : {gemm.a, gemm.b, static_cast<const void*>(gemm.d), gemm.addend}) {
    supported_if(reinterpret_cast<uintptr_t>(pointer) % 16 == 0, "cuBLASLt needs matrices aligned to 16 bytes");
  }
  for (const float* scale : {gemm.a_scale_inv, gemm.b_scale_inv, gemm.d_scale}) {
    supported_if(reinterpret_cast<uintptr_t>(scale) % 16 == 0, "cuBLASLt needs scales aligned to 16 bytes");
  }
}

// --- a plan -----------------------------------------------------------------------------------------------------------

template <typename T>
using Owned = std::unique_ptr<T, lt::Status (*)(T*)>;

Owned<lt::Layout> make_layout(te_dtype dtype, int64_t rows, int64_t columns, int64_t ld) {
  lt::Layout* made = nullptr;
  // Our rows are the library's columns.
  check_cublas(cublaslt().layout_create(&made, cuda_type_of(dtype), static_cast<uint64_t>(columns),
                                        static_cast<uint64_t>(rows), ld),
               "cublasLtMatrixLayoutCreate");
  return {made, cublaslt().layout_destroy};
}

Owned<lt::Product> make_product() {
  lt::Product* made = nullptr;
  check_cublas(cublaslt().product_create(&made, lt::kCompute32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
  return {made, cublaslt().product_destroy};
}

template <typename T>
void set(lt::Product* product, int attribute, const T& value) {
  check_cublas(cublaslt().product_set(product, attribute, &value, sizeof value), "cublasLtMatmulDescSetAttribute");
}

uint32_t library_epilogue(te_epilogue epilogue) {
  switch (epilogue) {
    case TE_EPILOGUE_BIAS: return lt::kEpilogueBias;
    case TE_EPILOGUE_GELU_AUX: return lt::kEpilogueGeluAux;
    case TE_EPILOGUE_GELU_AUX_BIAS: return lt::kEpilogueGeluAuxBias;
    case TE_EPILOGUE_DGELU: return lt::kEpilogueDgelu;
    case TE_EPILOGUE_DGELU_BGRAD: return lt::kEpilogueDgeluBgrad;
    default: return lt::kEpilogueDefault;
  }
}

/// Nothing is added to an FP8 d, but its bias type follows that of the absent addend.
te_dtype addend_dtype(const te_gemm& gemm) {
  if (!is_float8(gemm.d_dtype)) return gemm.d_dtype;
  return uses_bias(gemm.epilogue) && gemm.bias_dtype == TE_FLOAT16 ? TE_FLOAT16 : TE_BFLOAT16;
}

struct Plan {
  explicit Plan(const te_gemm& gemm)
      : product(make_product()),
        a(make_layout(gemm.a_dtype, gemm.m, gemm.k, gemm.lda)),
        b(make_layout(gemm.b_dtype, gemm.n, gemm.k, gemm.ldb)),
        c(make_layout(addend_dtype(gemm), gemm.m, gemm.n, gemm.addend == nullptr ? gemm.ldd : gemm.ld_addend)),
        d(make_layout(gemm.d_dtype, gemm.m, gemm.n, gemm.ldd)) {
    set(product.get(), lt::kTransA, lt::kOpT);
    set(product.get(), lt::kTransB, lt::kOpN);
    set(product.get(), lt::kFastAccumulation, static_cast<int8_t>(gemm.fast_accumulation != 0));
    set(product.get(), lt::kEpilogue, library_epilogue(gemm.epilogue));
    if (uses_bias(gemm.epilogue)) {
      set(product.get(), lt::kBiasDataType, static_cast<int32_t>(cuda_type_of(gemm.bias_dtype)));
    }
    if (uses_aux(gemm.epilogue)) {
      set(product.get(), lt::kAuxLd, gemm.ld_aux);
      if (gemm.aux_dtype != gemm.d_dtype) {  // the library's default is the type of d
        set(product.get(), lt::kAuxDataType, static_cast<int32_t>(cuda_type_of(gemm.aux_dtype)));
      }
    }
    point_at(gemm);
  }

  /// The pointers that live in the descriptor; they may change with every call.
  void point_at(const te_gemm& gemm) {
    point(lt::kAScalePointer, gemm.b_scale_inv, pointers.a_scale);
    point(lt::kBScalePointer, gemm.a_scale_inv, pointers.b_scale);
    if (gemm.d_scale != nullptr) point(lt::kDScalePointer, gemm.d_scale, pointers.d_scale);
    if (gemm.amax_d != nullptr) point(lt::kAmaxDPointer, gemm.amax_d, pointers.amax_d);
    if (uses_bias(gemm.epilogue)) point(lt::kBiasPointer, gemm.bias, pointers.bias);
    if (uses_aux(gemm.epilogue)) point(lt::kAuxPointer, gemm.aux, pointers.aux);
  }

  void point(int attribute, const void* to, const void*& now) {
    if (to == now) return;  // what a descriptor holds before it was told is null
    set(product.get(), attribute, to);
    now = to;
  }

  /// What the descriptor holds.
  struct {
    const void *a_scale = nullptr, *b_scale = nullptr, *d_scale = nullptr, *amax_d = nullptr, *bias = nullptr,
               *aux = nullptr;
  } pointers;
  Owned<lt::Product> product;
  Owned<lt::Layout> a, b, c, d;
  std::vector<lt::HeuristicResult> suggestions;
  size_t chosen = 0;
};

/// A place in the table; its mutex guards the plan, whose descriptor each call changes.
struct Slot {
  std::mutex mutex;
  std::unique_ptr<Plan> plan;
  bool settled = false;  // nothing more to time
  bool timed = false;
};

std::vector<lt::HeuristicResult> ask_library(lt::Context* context, const Plan& plan, const Key& key, int wanted) {
  const CublasLt& library = cublaslt();
  lt::Preference* made = nullptr;
  check_cublas(library.preference_create(&made), "cublasLtMatmulPreferenceCreate");
  const Owned<lt::Preference> preference(made, library.preference_destroy);
  const auto prefer = [&](int attribute, auto value) {
    check_cublas(library.preference_set(preference.get(), attribute, &value, sizeof value),
                 "cublasLtMatmulPreferenceSetAttribute");
  };
  prefer(lt::kMaxWorkspaceBytes, static_cast<uint64_t>(key[kWorkspace]));
  prefer(lt::kMinAlignmentA, static_cast<uint32_t>(key[kAlignB]));
  prefer(lt::kMinAlignmentB, static_cast<uint32_t>(key[kAlignA]));
  prefer(lt::kMinAlignmentC, static_cast<uint32_t>(key[kAlignAddend]));
  prefer(lt::kMinAlignmentD, static_cast<uint32_t>(key[kAlignD]));

  std::vector<lt::HeuristicResult> results(static_cast<size_t>(wanted));
  int found = 0;
  const lt::Status status = library.heuristic(context, plan.product.get(), plan.b.get(), plan.a.get(), plan.c.get(),
                                              plan.d.get(), preference.get(), wanted, results.data(), &found);
  // Combinations of types and epilogues that no kernel covers come back as either.
  supported_if(status != lt::kNotSupported && status != lt::kInvalidValue,
               "cuBLASLt has no algorithm for these types, sizes and epilogue");
  check_cublas(status, "cublasLtMatmulAlgoGetHeuristic");
  results.resize(static_cast<size_t>(found));
  results.erase(std::remove_if(results.begin(), results.end(),
                               [&](const lt::HeuristicResult& result) {
                                 return result.state != lt::kSuccess ||
                                        result.workspace_bytes > static_cast<size_t>(key[kWorkspace]);
                               }),
                results.end());
  supported_if(!results.empty(), "cuBLASLt has no algorithm for these types, sizes and epilogue");
  return results;
}

// --- the tables, one lock for all of them ---------------------------------------------------------------------------

struct Tables {
  std::mutex mutex;
  std::unordered_map<Key, std::shared_ptr<Slot>, KeyHash> slots;
  std::unordered_map<Key, int, KeyHash> timed_lengths;
  std::map<int, lt::Context*> contexts;
  std::map<std::pair<int, void*>, void*> workspaces;
  std::map<int, std::shared_ptr<SharedChoices>> choices;
};

/// Never destroyed: at exit the driver may be gone before us.
Tables& tables() {
  static Tables* const kept = new Tables;
  return *kept;
}

lt::Context* context_of(int device) {
  const std::lock_guard<std::mutex> lock(tables().mutex);
  lt::Context*& context = tables().contexts[device];
  if (context == nullptr) {
    int major = 0;
    int minor = 0;
    check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
    supported_if(major * 10 + minor >= 89, "FP8 products need compute capability 8.9 or later");
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

/// Is this length, of the sizes that follow the number of tokens, still among those worth a timing?
bool worth_timing(Key key) {
  for (const KeyField field : {kM, kK, kLda, kLdb, kAlignA, kAlignB, kAlignD, kAlignAddend}) key[field] = 0;
  const std::lock_guard<std::mutex> lock(tables().mutex);
  return tables().timed_lengths[key]++ < kMostTimedLengths;
}

// --- what other processes chose -------------------------------------------------------------------------------------

/// Null if nobody asked to keep them.
std::shared_ptr<SharedChoices> choices_for(const Key& key) {
  const std::lock_guard<std::mutex> lock(tables().mutex);
  const auto found = tables().choices.find(static_cast<int>(key[kDevice]));
  return found == tables().choices.end() ? nullptr : found->second;
}

Question question_of(const Key& key) {
  static_assert(kDevice == 0, "a file is for all devices of a kind");
  return {key.begin() + 1, key.end()};
}

Answer answer_of(const lt::Algorithm& algorithm) {
  Answer answer;
  std::copy(std::begin(algorithm.data), std::end(algorithm.data), answer.begin());
  return answer;
}

/// Take the first of the answers that is a suggestion, if one is.
bool take(Plan& plan, const std::vector<Answer>& answers) {
  for (const Answer& answer : answers) {
    for (size_t which = 0; which < plan.suggestions.size(); ++which) {
      if (answer_of(plan.suggestions[which].algorithm) != answer) continue;
      plan.chosen = which;
      return true;
    }
  }
  return false;
}

bool take_known(Plan& plan, const Key& key) {
  const auto choices = choices_for(key);
  return choices != nullptr && take(plan, choices->find(question_of(key)));
}

/// Make known what was chosen; another process may have been faster, and then its choice is taken.
void agree(Plan& plan, const Key& key) {
  const auto choices = choices_for(key);
  if (choices == nullptr) return;
  take(plan, choices->add(question_of(key), answer_of(plan.suggestions[plan.chosen].algorithm)));
}

// --- running and timing ---------------------------------------------------------------------------------------------

struct Workspace {
  void* memory;
  size_t bytes;
};

lt::Status run(lt::Context* context, const Plan& plan, size_t which, const te_gemm& gemm, void* d,
               const Workspace& workspace) {
  const float one = 1.0f;
  const float zero = 0.0f;
  const void* const addend = is_float8(gemm.d_dtype) ? nullptr : gemm.addend != nullptr ? gemm.addend : d;
  return cublaslt().matmul(context, plan.product.get(), &one, gemm.b, plan.b.get(), gemm.a, plan.a.get(),
                           gemm.addend != nullptr ? &one : &zero, addend, plan.c.get(), d, plan.d.get(),
                           &plan.suggestions[which].algorithm, workspace.memory, workspace.bytes,
                           static_cast<cudaStream_t>(gemm.stream));
}

/// Device memory for a scope; null if there is none to be had.
class Scratch {
 public:
  explicit Scratch(size_t bytes) {
    if (bytes != 0 && cudaMalloc(&memory_, bytes) != cudaSuccess) {
      cudaGetLastError();
      memory_ = nullptr;
    }
  }
  ~Scratch() {
    if (memory_ != nullptr) cudaFree(memory_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* get() const { return memory_; }

 private:
  void* memory_ = nullptr;
};

/// Choose the fastest suggestion. Where the product adds to d, or d is also what the epilogue reads, repeating it would
/// change the answer, so the repetitions write elsewhere; without memory for that the first suggestion stands.
bool time_suggestions(lt::Context* context, Plan& plan, const te_gemm& gemm, const Workspace& workspace) {
  const bool elsewhere = gemm.d == gemm.addend || gemm.d == gemm.aux;
  const Scratch scratch(elsewhere ? static_cast<size_t>(gemm.m * gemm.ldd * bytes_of(gemm.d_dtype)) : 0);
  if (elsewhere && scratch.get() == nullptr) return false;
  void* const d = elsewhere ? scratch.get() : gemm.d;
  plan.chosen = fastest_of(plan.suggestions.size(), static_cast<cudaStream_t>(gemm.stream), [&](size_t which) {
    return run(context, plan, which, gemm, d, workspace) == lt::kSuccess;
  });
  return true;
}

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  if (error == cudaErrorStreamCaptureImplicit) {  // the default stream, while another one is captured: hands off, too
    cudaGetLastError();
    return true;
  }
  check_cuda(error, "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

/// What a product of no rows leaves: nothing, but for the sums over its rows.
void run_empty(const te_gemm& gemm) {
  if (gemm.epilogue != TE_EPILOGUE_DGELU_BGRAD || gemm.n == 0) return;
  check_cuda(cudaMemsetAsync(gemm.bias, 0, static_cast<size_t>(gemm.n * bytes_of(gemm.bias_dtype)),
                             static_cast<cudaStream_t>(gemm.stream)),
             "te_cublaslt_gemm: clearing the bias gradient");
}

void multiply(const te_gemm& gemm) {
  const DeviceGuard guard(gemm.device);
  const auto stream = static_cast<cudaStream_t>(gemm.stream);
  if (gemm.amax_d != nullptr) {
    check_cuda(cudaMemsetAsync(gemm.amax_d, 0, sizeof(float), stream), "te_cublaslt_gemm: clearing amax_d");
  }
  if (gemm.m == 0 || gemm.n == 0) return run_empty(gemm);
  require(gemm.a && gemm.b && gemm.d, "te_cublaslt_gemm: a matrix is null");

  lt::Context* const context = context_of(gemm.device);
  const Workspace workspace = gemm.workspace != nullptr
                                  ? Workspace{gemm.workspace, gemm.workspace_bytes}
                                  : Workspace{own_workspace(gemm.device, gemm.stream), kOwnWorkspaceBytes};
  const Key key = key_of(gemm, workspace.bytes);
  const std::shared_ptr<Slot> slot = slot_of(key);
  const std::lock_guard<std::mutex> lock(slot->mutex);
  if (slot->plan == nullptr) {
    auto plan = std::make_unique<Plan>(gemm);
    const RelaxedCapture relaxed;
    plan->suggestions = ask_library(context, *plan, key, candidates_of(gemm));
    slot->settled = plan->suggestions.size() == 1 || take_known(*plan, key);
    slot->plan = std::move(plan);
  } else {
    slot->plan->point_at(gemm);
  }
  Plan& plan = *slot->plan;
  if (!slot->settled && !is_capturing(gemm.stream)) {
    const RelaxedCapture relaxed;
    slot->settled = true;
    slot->timed = worth_timing(key) && time_suggestions(context, plan, gemm, workspace);
    if (slot->timed) agree(plan, key);
    if (gemm.amax_d != nullptr) {
      check_cuda(cudaMemsetAsync(gemm.amax_d, 0, sizeof(float), stream), "te_cublaslt_gemm: clearing amax_d");
    }
  }
  check_cublas(run(context, plan, plan.chosen, gemm, gemm.d, workspace), "cublasLtMatmul");
}

// --- products that are made again and again ---------------------------------------------------------------------------

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

/// Is the plan of `key` that of `gemm`, which is what the key was made of in all but its pointers?
bool serves(const Key& key, const te_gemm& gemm) {
  return key[kAlignA] == alignment_class(gemm.a) && key[kAlignB] == alignment_class(gemm.b) &&
         key[kAlignD] == alignment_class(gemm.d) &&
         key[kAlignAddend] == alignment_class(gemm.addend == nullptr ? gemm.d : gemm.addend);
}

/// Run the product if its plan is settled and nothing more is needed than to run it.
bool multiply_at_once(lt::Context* context, Slot& slot, const te_gemm& gemm) {
  const std::lock_guard<std::mutex> lock(slot.mutex);
  if (slot.plan == nullptr || !slot.settled) return false;
  Plan& plan = *slot.plan;
  plan.point_at(gemm);
  const Workspace workspace{gemm.workspace, gemm.workspace_bytes};
  check_cublas(run(context, plan, plan.chosen, gemm, gemm.d, workspace), "cublasLtMatmul");
  return true;
}

}  // namespace
}  // namespace te_compile

using namespace te_compile;

struct te_prepared_gemm {
  explicit te_prepared_gemm(const te_gemm& gemm)
      : simple(gemm.workspace != nullptr && gemm.amax_d == nullptr && gemm.m != 0 && gemm.n != 0),
        context(context_of(gemm.device)) {
    look_up(gemm);
  }

  /// The plan for these pointers.
  std::shared_ptr<Slot> slot_for(const te_gemm& gemm) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!serves(key, gemm)) look_up(gemm);
    return slot;
  }

  void run(const te_gemm& gemm) {
    const bool readable = is_aligned(gemm.a) && is_aligned(gemm.b) && is_aligned(gemm.d) && is_aligned(gemm.addend) &&
                          is_aligned(gemm.a_scale_inv) && is_aligned(gemm.b_scale_inv) && is_aligned(gemm.d_scale);
    if (simple && readable && gemm.a && gemm.b && gemm.d && gemm.workspace) {
      const DeviceGuard guard(gemm.device);
      if (multiply_at_once(context, *slot_for(gemm), gemm)) return;
    }
    validate(gemm);
    multiply(gemm);
  }

 private:
  void look_up(const te_gemm& gemm) {
    key = key_of(gemm, gemm.workspace_bytes);
    slot = slot_of(key);
  }

  const bool simple;  // nothing to be cleared, and workspace of the caller's
  lt::Context* const context;
  std::mutex mutex;  // guards what follows
  Key key{};
  std::shared_ptr<Slot> slot;
};

extern "C" te_status te_cublaslt_prepare(const te_gemm* gemm, te_prepared_gemm** prepared) {
  return guarded([&] {
    require(gemm != nullptr && prepared != nullptr, "te_cublaslt_prepare: gemm or prepared is null");
    validate(*gemm);
    const DeviceGuard guard(gemm->device);
    *prepared = new te_prepared_gemm(*gemm);
  });
}

extern "C" te_status te_cublaslt_run(te_prepared_gemm* prepared, const te_gemm* gemm) {
  return guarded([&] {
    require(prepared != nullptr && gemm != nullptr, "te_cublaslt_run: prepared or gemm is null");
    prepared->run(*gemm);
  });
}

extern "C" void te_cublaslt_release(te_prepared_gemm* prepared) { delete prepared; }

extern "C" int te_cuda_built(void) { return 1; }

extern "C" te_status te_cublaslt_gemm(const te_gemm* gemm) {
  return guarded([&] {
    require(gemm != nullptr, "te_cublaslt_gemm: gemm is null");
    validate(*gemm);
    multiply(*gemm);
  });
}

extern "C" te_status te_cublaslt_check(const te_gemm* gemm) {
  return guarded([&] {
    require(gemm != nullptr, "te_cublaslt_check: gemm is null");
    validate(*gemm);
    const DeviceGuard guard(gemm->device);
    lt::Context* const context = context_of(gemm->device);
    if (gemm->m == 0 || gemm->n == 0) return;
    const Plan plan(*gemm);
    ask_library(context, plan, key_of(*gemm, gemm->workspace ? gemm->workspace_bytes : kOwnWorkspaceBytes), 1);
  });
}

extern "C" te_status te_cublaslt_version(size_t* version) {
  return guarded([&] {
    require(version != nullptr, "te_cublaslt_version: version is null");
    *version = cublaslt().version();
  });
}

extern "C" te_status te_cublaslt_keep_choices(int device, const char* path) {
  return guarded([&] {
    auto choices = path == nullptr ? nullptr : std::make_shared<SharedChoices>(path);
    const std::lock_guard<std::mutex> lock(tables().mutex);
    tables().choices[device] = std::move(choices);
  });
}

extern "C" te_status te_cublaslt_plans(int64_t* kept, int64_t* timed) {
  return guarded([&] {
    require(kept != nullptr && timed != nullptr, "te_cublaslt_plans: kept or timed is null");
    std::vector<std::shared_ptr<Slot>> slots;
    {
      const std::lock_guard<std::mutex> lock(tables().mutex);
      for (const auto& entry : tables().slots) slots.push_back(entry.second);
    }
    *kept = *timed = 0;
    for (const auto& slot : slots) {
      const std::lock_guard<std::mutex> lock(slot->mutex);
      *kept += slot->plan != nullptr;
      *timed += slot->timed;
    }
  });
}
