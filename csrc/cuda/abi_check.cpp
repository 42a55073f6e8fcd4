// Compiled only where cuBLASLt's own headers are found: proves that cublaslt_abi.hpp and driver.hpp say the same.
#include <cublasLt.h>
#include <cuda.h>

#include <type_traits>

#include "cublaslt_abi.hpp"
#include "driver.hpp"

namespace te_compile::lt {
namespace {

#define TE_SAME(ours, theirs) static_assert(static_cast<long>(ours) == static_cast<long>(theirs), #theirs " has changed")

TE_SAME(kSuccess, CUBLAS_STATUS_SUCCESS);
TE_SAME(kInvalidValue, CUBLAS_STATUS_INVALID_VALUE);
TE_SAME(kArchMismatch, CUBLAS_STATUS_ARCH_MISMATCH);
TE_SAME(kNotSupported, CUBLAS_STATUS_NOT_SUPPORTED);
TE_SAME(kCompute32F, CUBLAS_COMPUTE_32F);
TE_SAME(kOpN, CUBLAS_OP_N);
TE_SAME(kOpT, CUBLAS_OP_T);
TE_SAME(kTransA, CUBLASLT_MATMUL_DESC_TRANSA);
TE_SAME(kTransB, CUBLASLT_MATMUL_DESC_TRANSB);
TE_SAME(kEpilogue, CUBLASLT_MATMUL_DESC_EPILOGUE);
TE_SAME(kBiasPointer, CUBLASLT_MATMUL_DESC_BIAS_POINTER);
TE_SAME(kAuxPointer, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER);
TE_SAME(kAuxLd, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD);
TE_SAME(kAScalePointer, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER);
TE_SAME(kBScalePointer, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER);
TE_SAME(kDScalePointer, CUBLASLT_MATMUL_DESC_D_SCALE_POINTER);
TE_SAME(kAmaxDPointer, CUBLASLT_MATMUL_DESC_AMAX_D_POINTER);
TE_SAME(kAuxDataType, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE);
TE_SAME(kFastAccumulation, CUBLASLT_MATMUL_DESC_FAST_ACCUM);
TE_SAME(kBiasDataType, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE);
TE_SAME(kEpilogueDefault, CUBLASLT_EPILOGUE_DEFAULT);
TE_SAME(kEpilogueBias, CUBLASLT_EPILOGUE_BIAS);
TE_SAME(kEpilogueGeluAux, CUBLASLT_EPILOGUE_GELU_AUX);
TE_SAME(kEpilogueGeluAuxBias, CUBLASLT_EPILOGUE_GELU_AUX_BIAS);
TE_SAME(kEpilogueDgelu, CUBLASLT_EPILOGUE_DGELU);
TE_SAME(kEpilogueDgeluBgrad, CUBLASLT_EPILOGUE_DGELU_BGRAD);
TE_SAME(kMaxWorkspaceBytes, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
TE_SAME(kMinAlignmentA, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
TE_SAME(kMinAlignmentB, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
TE_SAME(kMinAlignmentC, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
TE_SAME(kMinAlignmentD, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);

TE_SAME(sizeof(Algorithm), sizeof(cublasLtMatmulAlgo_t));
TE_SAME(sizeof(HeuristicResult), sizeof(cublasLtMatmulHeuristicResult_t));
TE_SAME(offsetof(HeuristicResult, workspace_bytes), offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize));
TE_SAME(offsetof(HeuristicResult, state), offsetof(cublasLtMatmulHeuristicResult_t, state));

/// Equal numbers of parameters of equal sizes, which is what the calling convention sees of pointers and enums.
template <typename Ours, typename Theirs>
struct SameCall : std::false_type {};
template <typename A, typename B, typename... As, typename... Bs>
struct SameCall<A (*)(As...), B (*)(Bs...)> {
  static constexpr bool same() {
    if constexpr (sizeof...(As) != sizeof...(Bs)) {
      return false;
    } else {
      return sizeof(A) == sizeof(B) && ((sizeof(As) == sizeof(Bs)) && ...) &&
             ((std::is_pointer_v<As> == std::is_pointer_v<Bs>)&&...);
    }
  }
};
#define TE_SAME_CALL(ours, theirs) static_assert(SameCall<ours, decltype(&theirs)>::same(), #theirs " has changed")

TE_SAME_CALL(Create, cublasLtCreate);
TE_SAME_CALL(GetVersion, cublasLtGetVersion);
TE_SAME_CALL(GetStatusText, cublasLtGetStatusString);
TE_SAME_CALL(GetStatusText, cublasLtGetStatusName);
TE_SAME_CALL(ProductCreate, cublasLtMatmulDescCreate);
TE_SAME_CALL(ProductDestroy, cublasLtMatmulDescDestroy);
TE_SAME_CALL(ProductSet, cublasLtMatmulDescSetAttribute);
TE_SAME_CALL(LayoutCreate, cublasLtMatrixLayoutCreate);
TE_SAME_CALL(LayoutDestroy, cublasLtMatrixLayoutDestroy);
TE_SAME_CALL(PreferenceCreate, cublasLtMatmulPreferenceCreate);
TE_SAME_CALL(PreferenceDestroy, cublasLtMatmulPreferenceDestroy);
TE_SAME_CALL(PreferenceSet, cublasLtMatmulPreferenceSetAttribute);
TE_SAME_CALL(GetHeuristic, cublasLtMatmulAlgoGetHeuristic);
TE_SAME_CALL(Matmul, cublasLtMatmul);

TE_SAME(driver::kSuccess, CUDA_SUCCESS);
TE_SAME_CALL(driver::LaunchKernel, cuLaunchKernel);
TE_SAME_CALL(driver::GetCurrentContext, cuCtxGetCurrent);
TE_SAME_CALL(driver::GetErrorString, cuGetErrorString);

}  // namespace
}  // namespace te_compile::lt
