// te_cublaslt_gemm: FP8 products through cuBLASLt.
//
// A plan (descriptors and algorithm) is made once for each kind of call and kept. The library's first suggestion is up
// to 10% slower than its best for common shapes, so the suggestions are timed once, on the caller's stream and operands.
// What is found is kept in a file, if the caller names one, and other processes take the same. Nothing runs that the
// library did not suggest to this process: of what the file says, only what is among the suggestions counts.
#include <algorithm>
#include <iterator>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "device.hpp"
#include "gemm_tables.hpp"
#include "timing.hpp"

namespace te_compile {
namespace {

// --- what can be said without the library ---------------------------------------------------------------------------

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

// --- what other processes chose -------------------------------------------------------------------------------------

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

size_t bytes_of_l2() {
  int device = 0;
  int bytes = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device), "cudaDeviceGetAttribute");
  return static_cast<size_t>(bytes);
}

/// b for repetitions. A model has read all its other weights since it read this one, which therefore comes from memory,
/// where repetitions of a small product would find it in the L2: of few rows the fastest algorithm is then another one.
/// So repetitions take copies in turn, more than the L2 holds. Nor does a product begin while another one ends, as
/// products in a row may: something else runs in between, as in a model. Without memory for copies, and for products
/// that do not fit into the L2, b itself serves all.
class SecondFactors {
 public:
  explicit SecondFactors(const te_gemm& gemm)
      : b_(gemm.b),
        stride_((extent(gemm.n, gemm.k, gemm.ldb, gemm.b_dtype) + kAligned - 1) / kAligned * kAligned),
        copies_(copies_for(gemm, stride_)),
        memory_(copies_ == 0 ? 0 : copies_ * stride_ + kAligned) {
    const size_t bytes = extent(gemm.n, gemm.k, gemm.ldb, gemm.b_dtype);
    for (size_t copy = 0; memory_.get() != nullptr && copy < copies_; ++copy) {
      check_cuda(cudaMemcpyAsync(at(copy), b_, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(gemm.stream)),
                 "te_cublaslt_gemm: copying b");
    }
  }

  const void* next() { return memory_.get() == nullptr ? b_ : at(turn_++ % copies_); }

  /// Something that is no product, which comes between two.
  void separate(void* stream) const {
    if (memory_.get() == nullptr) return;
    check_cuda(cudaMemsetAsync(at(copies_), 0, kAligned, static_cast<cudaStream_t>(stream)),
               "te_cublaslt_gemm: separating products");
  }

  /// How many repetitions tell the time.
  int launches() const { return memory_.get() == nullptr ? kLaunches : static_cast<int>(copies_); }

 private:
  static constexpr size_t kAligned = 256;
  static constexpr int kLaunches = 3;
  static constexpr size_t kMostCopies = 32;

  static size_t extent(int64_t rows, int64_t columns, int64_t ld, te_dtype dtype) {
    return static_cast<size_t>(((rows - 1) * ld + columns) * bytes_of(dtype));
  }

  static size_t copies_for(const te_gemm& gemm, size_t stride) {
    const size_t l2 = bytes_of_l2();
    const size_t a = extent(gemm.m, gemm.k, gemm.lda, gemm.a_dtype);
    const size_t d = extent(gemm.m, gemm.n, gemm.ldd, gemm.d_dtype);
    if (a + stride + d >= l2) return 0;
    return std::clamp((l2 + l2 / 2) / stride, static_cast<size_t>(kLaunches), kMostCopies);
  }

  void* at(size_t copy) const { return static_cast<char*>(memory_.get()) + copy * stride_; }

  const void* const b_;
  const size_t stride_;
  const size_t copies_;
  const Scratch memory_;
  size_t turn_ = 0;
};

/// Choose the fastest suggestion. Where the product adds to d, or d is also what the epilogue reads, repeating it would
/// change the answer, so the repetitions write elsewhere; without memory for that the first suggestion stands.
bool time_suggestions(lt::Context* context, Plan& plan, const te_gemm& gemm, const Workspace& workspace) {
  const bool elsewhere = gemm.d == gemm.addend || gemm.d == gemm.aux;
  const Scratch scratch(elsewhere ? static_cast<size_t>(gemm.m * gemm.ldd * bytes_of(gemm.d_dtype)) : 0);
  if (elsewhere && scratch.get() == nullptr) return false;
  void* const d = elsewhere ? scratch.get() : gemm.d;
  SecondFactors factors(gemm);
  te_gemm repeated = gemm;
  const auto run = [&](size_t which) {
    repeated.b = factors.next();
    factors.separate(gemm.stream);
    return plan.run(context, which, repeated, d, workspace.memory, workspace.bytes) == lt::kSuccess;
  };
  plan.chosen =
      fastest_of(plan.suggestions.size(), static_cast<cudaStream_t>(gemm.stream), run, factors.launches());
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
    plan->suggestions = plan->ask_library(context, key, candidates_of(gemm));
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
  check_cublas(plan.run(context, plan.chosen, gemm, gemm.d, workspace.memory, workspace.bytes), "cublasLtMatmul");
}

// --- products that are made again and again ---------------------------------------------------------------------------

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

/// Run the product if its plan is settled and nothing more is needed than to run it.
bool multiply_at_once(lt::Context* context, Slot& slot, const te_gemm& gemm) {
  const std::lock_guard<std::mutex> lock(slot.mutex);
  if (slot.plan == nullptr || !slot.settled) return false;
  Plan& plan = *slot.plan;
  plan.point_at(gemm);
  const Workspace workspace{gemm.workspace, gemm.workspace_bytes};
  check_cublas(plan.run(context, plan.chosen, gemm, gemm.d, workspace.memory, workspace.bytes), "cublasLtMatmul");
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
    plan.ask_library(context, key_of(*gemm, gemm->workspace ? gemm->workspace_bytes : kOwnWorkspaceBytes), 1);
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
