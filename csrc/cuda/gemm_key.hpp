// What makes two FP8 products the same to cuBLASLt, but for their data: sizes, strides, types, epilogue, alignment.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "te_compile.h"

namespace te_compile {

/// Files hold them in this order but for the device: who changes anything here changes TE_CHOICES_FORMAT.
enum KeyField : int {
  kDevice, kM, kN, kK, kLda, kLdb, kLdd, kLdAux, kADtype, kBDtype, kDDtype, kBiasDtype, kAuxDtype, kEpilogueKind,
  kFast, kLdAddend, kDScale, kAmax, kAlignA, kAlignB, kAlignD, kAlignAddend, kWorkspace, kCandidates, kKeyFields
};
using Key = std::array<int64_t, kKeyFields>;

struct KeyHash {
  size_t operator()(const Key& key) const;
};

bool uses_bias(te_epilogue epilogue);
bool uses_aux(te_epilogue epilogue);
bool is_float8(te_dtype dtype);
int64_t bytes_of(te_dtype dtype);

/// How many suggestions of the library's are considered.
int candidates_of(const te_gemm& gemm);

Key key_of(const te_gemm& gemm, size_t workspace_bytes);

/// Is the plan of `key` that of `gemm`, which is what the key was made of in all but its pointers?
bool serves(const Key& key, const te_gemm& gemm);

}  // namespace te_compile
