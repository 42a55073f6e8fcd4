// The few declarations of cuBLASLt's stable binary interface that we use.
//
// The library is opened at run time (see cublaslt_library.hpp), so its headers, which come with neither the compiler nor
// every framework, are not needed to build. Where they are found, abi_check.cpp proves these declarations equal.
#pragma once

#include <cstddef>
#include <cstdint>

#include <library_types.h>

struct CUstream_st;

namespace te_compile::lt {

using Status = int;
constexpr Status kSuccess = 0;
constexpr Status kInvalidValue = 7;
constexpr Status kArchMismatch = 8;
constexpr Status kNotSupported = 15;

constexpr int kCompute32F = 68;
constexpr int32_t kOpN = 0;
constexpr int32_t kOpT = 1;

// Attributes of a product. Types: int32_t unless said otherwise.
constexpr int kTransA = 3;
constexpr int kTransB = 4;
constexpr int kEpilogue = 7;         // uint32_t
constexpr int kBiasPointer = 8;      // void*
constexpr int kAuxPointer = 11;      // void*
constexpr int kAuxLd = 12;           // int64_t
constexpr int kAScalePointer = 17;   // void*
constexpr int kBScalePointer = 18;   // void*
constexpr int kDScalePointer = 20;   // void*
constexpr int kAmaxDPointer = 21;    // void*
constexpr int kAuxDataType = 22;
constexpr int kFastAccumulation = 25;  // int8_t
constexpr int kBiasDataType = 26;

constexpr uint32_t kEpilogueDefault = 1;
constexpr uint32_t kEpilogueBias = 4;
constexpr uint32_t kEpilogueGeluAux = 32 | 128;
constexpr uint32_t kEpilogueGeluAuxBias = 32 | 128 | 4;
constexpr uint32_t kEpilogueDgelu = 64 | 128;
constexpr uint32_t kEpilogueDgeluBgrad = 64 | 128 | 16;

// Attributes of a preference.
constexpr int kMaxWorkspaceBytes = 1;  // uint64_t
constexpr int kMinAlignmentA = 5;      // uint32_t, as are B, C and D
constexpr int kMinAlignmentB = 6;
constexpr int kMinAlignmentC = 7;
constexpr int kMinAlignmentD = 8;

struct Algorithm {
  uint64_t data[8];
};

struct HeuristicResult {
  Algorithm algorithm;
  size_t workspace_bytes;
  Status state;
  float waves;
  int reserved[4];
};

// Opaque objects, only ever pointed to.
struct Context;
struct Product;
struct Layout;
struct Preference;

using Create = Status (*)(Context**);
using GetVersion = size_t (*)();
using GetStatusText = const char* (*)(Status);
using ProductCreate = Status (*)(Product**, int compute_type, cudaDataType scale_type);
using ProductDestroy = Status (*)(Product*);
using ProductSet = Status (*)(Product*, int attribute, const void* value, size_t bytes);
using LayoutCreate = Status (*)(Layout**, cudaDataType type, uint64_t rows, uint64_t columns, int64_t ld);
using LayoutDestroy = Status (*)(Layout*);
using PreferenceCreate = Status (*)(Preference**);
using PreferenceDestroy = Status (*)(Preference*);
using PreferenceSet = Status (*)(Preference*, int attribute, const void* value, size_t bytes);
using GetHeuristic = Status (*)(Context*, Product*, Layout* a, Layout* b, Layout* c, Layout* d, Preference*,
                                int requested, HeuristicResult*, int* found);
using Matmul = Status (*)(Context*, Product*, const void* alpha, const void* a, Layout* a_layout, const void* b,
                          Layout* b_layout, const void* beta, const void* c, Layout* c_layout, void* d,
                          Layout* d_layout, const Algorithm*, void* workspace, size_t workspace_bytes, CUstream_st*);

}  // namespace te_compile::lt
