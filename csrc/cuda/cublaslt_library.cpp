#include "cublaslt_library.hpp"

#include <dlfcn.h>

#include <string>

#include "failure.hpp"

namespace te_compile {
namespace {

constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"};

void* open_library() {
  for (const int mode : {RTLD_NOLOAD | RTLD_NOW, RTLD_LAZY | RTLD_LOCAL}) {
    for (const char* name : kNames) {
      if (void* library = dlopen(name, mode)) return library;
    }
  }
  throw Failure(TE_UNSUPPORTED, "libcublasLt.so.13 (or .12) is neither loaded in this process nor on the library path");
}

template <typename Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) throw Failure(TE_UNSUPPORTED, std::string("this libcublasLt has no ") + name);
}

CublasLt load() {
  void* library = open_library();
  CublasLt found{};
  find(library, "cublasLtCreate", found.create);
  find(library, "cublasLtGetVersion", found.version);
  find(library, "cublasLtGetStatusName", found.status_name);
  find(library, "cublasLtGetStatusString", found.status_text);
  find(library, "cublasLtMatmulDescCreate", found.product_create);
  find(library, "cublasLtMatmulDescDestroy", found.product_destroy);
  find(library, "cublasLtMatmulDescSetAttribute", found.product_set);
  find(library, "cublasLtMatrixLayoutCreate", found.layout_create);
  find(library, "cublasLtMatrixLayoutDestroy", found.layout_destroy);
  find(library, "cublasLtMatmulPreferenceCreate", found.preference_create);
  find(library, "cublasLtMatmulPreferenceDestroy", found.preference_destroy);
  find(library, "cublasLtMatmulPreferenceSetAttribute", found.preference_set);
  find(library, "cublasLtMatmulAlgoGetHeuristic", found.heuristic);
  find(library, "cublasLtMatmul", found.matmul);
  return found;
}

}  // namespace

const CublasLt& cublaslt() {
  static const CublasLt library = load();  // tried again by the next call if it throws
  return library;
}

void check_cublas(lt::Status status, const char* what) {
  if (status == lt::kSuccess) return;
  const CublasLt& library = cublaslt();
  const bool unsupported = status == lt::kNotSupported || status == lt::kArchMismatch;
  throw Failure(unsupported ? TE_UNSUPPORTED : TE_CUBLAS_ERROR, std::string(what) + ": " + library.status_name(status) +
                                                                    " (" + library.status_text(status) + ")");
}

}  // namespace te_compile
