#include "gemm_key.hpp"

#include <algorithm>

namespace te_compile {
namespace {

constexpr int kMostCandidates = 32;

/// TMA kernels ask for 16 bytes and vectorised stores gain nothing above 256, so two classes are enough.
int64_t alignment_class(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 256 == 0 ? 256 : 16; }

}  // namespace

size_t KeyHash::operator()(const Key& key) const {
  uint64_t hash = 1469598103934665603ull;  // FNV-1a over words
  for (const int64_t word : key) hash = (hash ^ static_cast<uint64_t>(word)) * 1099511628211ull;
  return static_cast<size_t>(hash ^ (hash >> 32));
}

bool uses_bias(te_epilogue epilogue) {
  return epilogue == TE_EPILOGUE_BIAS || epilogue == TE_EPILOGUE_GELU_AUX_BIAS || epilogue == TE_EPILOGUE_DGELU_BGRAD;
}

bool uses_aux(te_epilogue epilogue) { return epilogue >= TE_EPILOGUE_GELU_AUX; }

bool is_float8(te_dtype dtype) { return dtype == TE_FLOAT8_E4M3 || dtype == TE_FLOAT8_E5M2; }

int64_t bytes_of(te_dtype dtype) { return dtype == TE_FLOAT32 ? 4 : is_float8(dtype) ? 1 : 2; }

int candidates_of(const te_gemm& gemm) { return std::clamp(gemm.candidates, 1, kMostCandidates); }

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

bool serves(const Key& key, const te_gemm& gemm) {
  return key[kAlignA] == alignment_class(gemm.a) && key[kAlignB] == alignment_class(gemm.b) &&
         key[kAlignD] == alignment_class(gemm.d) &&
         key[kAlignAddend] == alignment_class(gemm.addend == nullptr ? gemm.d : gemm.addend);
}

}  // namespace te_compile
