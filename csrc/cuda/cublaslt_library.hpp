// cuBLASLt, opened at run time.
#pragma once

#include "cublaslt_abi.hpp"

namespace te_compile {

/// The library's entry points.
struct CublasLt {
  lt::Create create;
  lt::GetVersion version;
  lt::GetStatusText status_name;
  lt::GetStatusText status_text;
  lt::ProductCreate product_create;
  lt::ProductDestroy product_destroy;
  lt::ProductSet product_set;
  lt::LayoutCreate layout_create;
  lt::LayoutDestroy layout_destroy;
  lt::PreferenceCreate preference_create;
  lt::PreferenceDestroy preference_destroy;
  lt::PreferenceSet preference_set;
  lt::GetHeuristic heuristic;
  lt::Matmul matmul;
};

/// The library, the copy that the process has loaded already if there is one: a framework's heuristics, kernels and
/// memory are then loaded once. Throws Failure(TE_UNSUPPORTED) if there is none to be found.
const CublasLt& cublaslt();

/// Throws for a status other than success; "not supported" becomes TE_UNSUPPORTED.
void check_cublas(lt::Status status, const char* what);

}  // namespace te_compile
