#include "gemm_plan.hpp"

#include <algorithm>
#include <string>

#include "failure.hpp"

namespace te_compile {

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

namespace {

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

}  // namespace

Plan::Plan(const te_gemm& gemm)
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

void Plan::point_at(const te_gemm& gemm) {
  point(lt::kAScalePointer, gemm.b_scale_inv, pointers.a_scale);
  point(lt::kBScalePointer, gemm.a_scale_inv, pointers.b_scale);
  if (gemm.d_scale != nullptr) point(lt::kDScalePointer, gemm.d_scale, pointers.d_scale);
  if (gemm.amax_d != nullptr) point(lt::kAmaxDPointer, gemm.amax_d, pointers.amax_d);
  if (uses_bias(gemm.epilogue)) point(lt::kBiasPointer, gemm.bias, pointers.bias);
  if (uses_aux(gemm.epilogue)) point(lt::kAuxPointer, gemm.aux, pointers.aux);
}

void Plan::point(int attribute, const void* to, const void*& now) {
  if (to == now) return;  // what a descriptor holds before it was told is null
  set(product.get(), attribute, to);
  now = to;
}

std::vector<lt::HeuristicResult> Plan::ask_library(lt::Context* context, const Key& key, int wanted) const {
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
  const lt::Status status = library.heuristic(context, product.get(), b.get(), a.get(), c.get(), d.get(),
                                              preference.get(), wanted, results.data(), &found);
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

lt::Status Plan::run(lt::Context* context, size_t which, const te_gemm& gemm, void* result, void* workspace,
                     size_t workspace_bytes) const {
  const float one = 1.0f;
  const float zero = 0.0f;
  const void* const addend = is_float8(gemm.d_dtype) ? nullptr : gemm.addend != nullptr ? gemm.addend : result;
  return cublaslt().matmul(context, product.get(), &one, gemm.b, b.get(), gemm.a, a.get(),
                           gemm.addend != nullptr ? &one : &zero, addend, c.get(), result, d.get(),
                           &suggestions[which].algorithm, workspace, workspace_bytes,
                           static_cast<cudaStream_t>(gemm.stream));
}

}  // namespace te_compile
