// Stands in for the CUDA files in a build without nvcc.
#include "failure.hpp"

namespace {

te_status not_built() {
  te_compile::set_last_error("te_compile was built without CUDA: no nvcc of 12.3 or later was found when csrc/ was built");
  return TE_NOT_BUILT;
}

}  // namespace

extern "C" {

int te_cuda_built(void) { return 0; }

te_status te_cuda_quantize(int, const void*, te_dtype, int64_t, int64_t, const float*, int, const te_scale_rule*,
                           te_dtype, uint8_t*, uint8_t*, float*, float*, void*) {
  return not_built();
}

te_status te_cuda_norm_quantize(const te_norm*) { return not_built(); }

te_status te_cuda_attention(const te_attention*) { return not_built(); }

te_status te_cuda_attention_backward(const te_attention*) { return not_built(); }

te_status te_cuda_grouped_gemm(const te_grouped_gemm*) { return not_built(); }

te_status te_cuda_grouped_wgrad(const te_grouped_wgrad*) { return not_built(); }

te_status te_cuda_skinny_gemm(const te_skinny_gemm*) { return not_built(); }

te_status te_cuda_update_scales(int, float* const*, const float* const*, const int64_t*, int64_t, int64_t,
                                const te_scale_rule*, te_amax_algorithm, void*) {
  return not_built();
}

te_status te_cublaslt_gemm(const te_gemm*) { return not_built(); }

te_status te_cublaslt_prepare(const te_gemm*, te_prepared_gemm**) { return not_built(); }

te_status te_cublaslt_run(te_prepared_gemm*, const te_gemm*) { return not_built(); }

void te_cublaslt_release(te_prepared_gemm*) {}

te_status te_cublaslt_check(const te_gemm*) { return not_built(); }

te_status te_cublaslt_version(size_t*) { return not_built(); }

te_status te_cublaslt_keep_choices(int, const char*) { return not_built(); }

te_status te_cublaslt_plans(int64_t*, int64_t*) { return not_built(); }

}  // extern "C"
