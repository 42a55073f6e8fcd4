// A plan: what cuBLASLt wants to know of a product, made once for each kind, and the algorithms that it suggests.
//
// The library is column-major and its FP8 kernels read both operands along the contraction ("TN"). A row-major
// d [m, n] = a [m, k] · b [n, k]ᵀ is, read by columns, dᵀ [n, m] = b · aᵀ: our b is its transposed first operand and our a its
// second, and its rows are our columns, which is what makes its bias, a vector along rows, ours along columns.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "cublaslt_library.hpp"
#include "gemm_key.hpp"

namespace te_compile {

template <typename T>
using Owned = std::unique_ptr<T, lt::Status (*)(T*)>;

struct Plan {
  explicit Plan(const te_gemm& gemm);

  /// The pointers that live in the descriptor; they may change with every call.
  void point_at(const te_gemm& gemm);

  /// The library's suggestions, so many at most; throws Failure(TE_UNSUPPORTED) if there is none.
  std::vector<lt::HeuristicResult> ask_library(lt::Context* context, const Key& key, int wanted) const;

  /// Enqueue the product by one of the suggestions, its result to `result`.
  lt::Status run(lt::Context* context, size_t which, const te_gemm& gemm, void* result, void* workspace,
                 size_t workspace_bytes) const;

  std::vector<lt::HeuristicResult> suggestions;
  size_t chosen = 0;

 private:
  void point(int attribute, const void* to, const void*& now);

  /// What the descriptor holds.
  struct {
    const void *a_scale = nullptr, *b_scale = nullptr, *d_scale = nullptr, *amax_d = nullptr, *bias = nullptr,
               *aux = nullptr;
  } pointers;
  Owned<lt::Product> product;
  Owned<lt::Layout> a, b, c, d;
};

/// Throws Failure(TE_INVALID_ARGUMENT) for what is no dtype.
cudaDataType cuda_type_of(te_dtype dtype);

}  // namespace te_compile
