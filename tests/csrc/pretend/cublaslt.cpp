// A pretended libcublasLt.so.13: the products, column-major as documented, in plain loops on host memory.
//
// It suggests four algorithms, of which the third one refuses to run.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <vector>

#include "cublaslt_abi.hpp"
#include "float8.hpp"
#include "pretend.hpp"

using namespace te_compile;

namespace te_compile::lt {

struct Product {
  std::map<int, std::vector<char>> values;
  template <typename T>
  T get(int attribute, T otherwise) const {
    const auto found = values.find(attribute);
    if (found == values.end()) return otherwise;
    if (found->second.size() != sizeof(T)) std::abort();
    T value;
    std::memcpy(&value, found->second.data(), sizeof value);
    return value;
  }
};

struct Layout {
  cudaDataType type;
  uint64_t rows, columns;
  int64_t ld;
};

}  // namespace te_compile::lt

namespace {

float read(const void* base, cudaDataType type, int64_t at) {
  switch (type) {
    case CUDA_R_32F: return static_cast<const float*>(base)[at];
    case CUDA_R_16BF: return float_of(static_cast<uint32_t>(static_cast<const uint16_t*>(base)[at]) << 16);
    case CUDA_R_8F_E4M3: return E4M3::decode(static_cast<const uint8_t*>(base)[at]);
    case CUDA_R_8F_E5M2: return E5M2::decode(static_cast<const uint8_t*>(base)[at]);
    default: std::abort();
  }
}

void write(void* base, cudaDataType type, int64_t at, float value) {
  const uint32_t bits = bits_of(value);
  switch (type) {
    case CUDA_R_32F: static_cast<float*>(base)[at] = value; return;
    case CUDA_R_16BF:
      static_cast<uint16_t*>(base)[at] = static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
      return;
    case CUDA_R_8F_E4M3: static_cast<uint8_t*>(base)[at] = E4M3::encode(value); return;
    default: std::abort();
  }
}

float gelu(float x) { return 0.5f * x * (1.0f + std::tanh(0.7978845608f * (x + 0.044715f * x * x * x))); }

float gelu_slope(float x) { return (gelu(x + 1e-2f) - gelu(x - 1e-2f)) / 2e-2f; }

}  // namespace

extern "C" {

lt::Status cublasLtCreate(lt::Context** made) {
  *made = reinterpret_cast<lt::Context*>(made);
  return lt::kSuccess;
}
size_t cublasLtGetVersion() { return 130000; }
const char* cublasLtGetStatusName(lt::Status) { return "PRETENDED"; }
const char* cublasLtGetStatusString(lt::Status) { return "a pretended failure"; }

lt::Status cublasLtMatmulDescCreate(lt::Product** made, int, cudaDataType) {
  *made = new lt::Product;
  return lt::kSuccess;
}
lt::Status cublasLtMatmulDescDestroy(lt::Product* product) {
  delete product;
  return lt::kSuccess;
}
lt::Status cublasLtMatmulDescSetAttribute(lt::Product* product, int attribute, const void* value, size_t bytes) {
  ++pretend.sets;
  const char* first = static_cast<const char*>(value);
  product->values[attribute] = std::vector<char>(first, first + bytes);
  return lt::kSuccess;
}
lt::Status cublasLtMatrixLayoutCreate(lt::Layout** made, cudaDataType type, uint64_t rows, uint64_t columns,
                                      int64_t ld) {
  *made = new lt::Layout{type, rows, columns, ld};
  return lt::kSuccess;
}
lt::Status cublasLtMatrixLayoutDestroy(lt::Layout* layout) {
  delete layout;
  return lt::kSuccess;
}
lt::Status cublasLtMatmulPreferenceCreate(lt::Preference** made) {
  *made = reinterpret_cast<lt::Preference*>(made);
  return lt::kSuccess;
}
lt::Status cublasLtMatmulPreferenceDestroy(lt::Preference*) { return lt::kSuccess; }
lt::Status cublasLtMatmulPreferenceSetAttribute(lt::Preference*, int, const void*, size_t) { return lt::kSuccess; }

lt::Status cublasLtMatmulAlgoGetHeuristic(lt::Context*, lt::Product*, lt::Layout*, lt::Layout*, lt::Layout*,
                                          lt::Layout* d, lt::Preference*, int requested, lt::HeuristicResult* results,
                                          int* found) {
  ++pretend.queries;
  *found = 0;
  if (d->type == CUDA_R_16F) return lt::kNotSupported;
  for (; *found < std::min(requested, 4); ++*found) {
    results[*found] = {};
    results[*found].algorithm.data[0] = static_cast<uint64_t>(*found);
  }
  return lt::kSuccess;
}

lt::Status cublasLtMatmul(lt::Context*, lt::Product* product, const void* alpha, const void* a, lt::Layout* la,
                          const void* b, lt::Layout* lb, const void* beta, const void* c, lt::Layout* lc, void* d,
                          lt::Layout* ld, const lt::Algorithm* algorithm, void*, size_t, CUstream_st*) {
  const auto which = static_cast<int>(algorithm->data[0]);
  if (which == 2) return lt::kNotSupported;
  ++pretend.products;
  pretend.last_algorithm = which;
  pretend.factors.insert(a);  // our second factor is the library's first
  pretend.clock += pretend.times[which];

  // op(A) is [m, k] with A [k, m] transposed, op(B) is B [k, n].
  if (product->get<int32_t>(lt::kTransA, -1) != lt::kOpT || product->get<int32_t>(lt::kTransB, -1) != lt::kOpN) abort();
  const auto m = static_cast<int64_t>(la->columns);
  const auto n = static_cast<int64_t>(lb->columns);
  if (la->rows != lb->rows || ld->rows != la->columns || ld->columns != lb->columns) abort();
  const auto scale_a = product->get<const float*>(lt::kAScalePointer, nullptr);
  const auto scale_b = product->get<const float*>(lt::kBScalePointer, nullptr);
  const auto scale_d = product->get<const float*>(lt::kDScalePointer, nullptr);
  const auto amax_d = product->get<float*>(lt::kAmaxDPointer, nullptr);
  const auto epilogue = product->get<uint32_t>(lt::kEpilogue, lt::kEpilogueDefault);
  const auto bias = product->get<void*>(lt::kBiasPointer, nullptr);
  const auto bias_type = static_cast<cudaDataType>(product->get<int32_t>(lt::kBiasDataType, ld->type));
  const auto aux = product->get<void*>(lt::kAuxPointer, nullptr);
  const auto aux_type = static_cast<cudaDataType>(product->get<int32_t>(lt::kAuxDataType, ld->type));
  const auto ld_aux = product->get<int64_t>(lt::kAuxLd, 0);
  for (int64_t i = 0; i < m; ++i) {
    float sum_of_row = 0.0f;
    for (int64_t j = 0; j < n; ++j) {
      float value = 0.0f;
      for (int64_t k = 0; k < static_cast<int64_t>(la->rows); ++k) {
        value += read(a, la->type, i * la->ld + k) * read(b, lb->type, j * lb->ld + k);
      }
      value *= *static_cast<const float*>(alpha) * *scale_a * *scale_b;
      const float factor = *static_cast<const float*>(beta);
      if (factor != 0.0f) value += factor * read(c, lc->type, j * lc->ld + i);
      if (epilogue == lt::kEpilogueBias || epilogue == lt::kEpilogueGeluAuxBias) value += read(bias, bias_type, i);
      if (epilogue == lt::kEpilogueGeluAux || epilogue == lt::kEpilogueGeluAuxBias) {
        write(aux, aux_type, j * ld_aux + i, value);
        value = gelu(value);
      }
      if (epilogue == lt::kEpilogueDgelu || epilogue == lt::kEpilogueDgeluBgrad) {
        value *= gelu_slope(read(aux, aux_type, j * ld_aux + i));
      }
      sum_of_row += value;
      if (amax_d != nullptr) *amax_d = std::max(*amax_d, std::fabs(value));
      write(d, ld->type, j * ld->ld + i, scale_d == nullptr ? value : value * *scale_d);
    }
    if (epilogue == lt::kEpilogueDgeluBgrad) write(bias, bias_type, i, sum_of_row);
  }
  return lt::kSuccess;
}

}  // extern "C"
