// te_compile._native: the C interface for Python, pointers and streams as integers, no tensors.
//
// The interpreter lock is released in every call. A status other than TE_OK becomes an exception: Unsupported where
// another implementation should serve, else NativeError.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "replay.hpp"
#include "te_compile.h"

namespace py = pybind11;
using Address = uintptr_t;

namespace {

struct NativeError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct Unsupported : NativeError {
  using NativeError::NativeError;
};

void check(te_status status) {
  if (status == TE_OK) return;
  if (status == TE_UNSUPPORTED || status == TE_NOT_BUILT) throw Unsupported(te_last_error());
  if (status == TE_INVALID_ARGUMENT) throw py::value_error(te_last_error());
  throw NativeError(te_last_error());
}

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

template <typename T>
std::vector<T*> pointers(const std::vector<Address>& addresses) {
  std::vector<T*> result;
  for (const Address address : addresses) result.push_back(pointer<T>(address));
  return result;
}

te_scale_rule rule_of(float fp8_max, int margin, float epsilon, bool power_2) {
  return {fp8_max, margin, epsilon, power_2};
}

float host_quantize(Address x, int64_t count, float scale, int dtype, Address q) {
  float amax = 0.0f;
  check(te_host_quantize(pointer<const float>(x), count, scale, static_cast<te_dtype>(dtype), pointer<uint8_t>(q),
                         &amax));
  return amax;
}

void host_dequantize(Address q, int64_t count, float scale_inv, int dtype, Address y) {
  check(te_host_dequantize(pointer<const uint8_t>(q), count, scale_inv, static_cast<te_dtype>(dtype),
                           pointer<float>(y)));
}

float host_scale(float amax, float fp8_max, int margin, float epsilon, bool power_2) {
  const te_scale_rule rule = rule_of(fp8_max, margin, epsilon, power_2);
  float scale = 0.0f;
  check(te_host_scale(amax, &rule, &scale));
  return scale;
}

void same_length(const std::vector<Address>& states, const std::vector<Address>& amaxes,
                 const std::vector<int64_t>& rows) {
  if (states.size() != amaxes.size() || states.size() != rows.size()) {
    throw py::value_error("states, amaxes and rows must have one entry per state");
  }
}

void host_update_scales(const std::vector<Address>& states, const std::vector<Address>& amaxes,
                        const std::vector<int64_t>& rows, int64_t history_length, float fp8_max, int margin,
                        float epsilon, bool power_2, bool most_recent) {
  same_length(states, amaxes, rows);
  const te_scale_rule rule = rule_of(fp8_max, margin, epsilon, power_2);
  check(te_host_update_scales(pointers<float>(states).data(), pointers<const float>(amaxes).data(), rows.data(),
                              static_cast<int64_t>(rows.size()), history_length, &rule,
                              most_recent ? TE_AMAX_MOST_RECENT : TE_AMAX_MAX));
}

void cuda_quantize(int device, Address x, int x_dtype, int64_t rows, int64_t columns, Address scale, bool measure,
                   float fp8_max, int margin, float epsilon, bool power_2, int dtype, Address q, Address qt,
                   Address amax, Address scale_inv, Address stream) {
  const te_scale_rule rule = rule_of(fp8_max, margin, epsilon, power_2);
  check(te_cuda_quantize(device, pointer<const void>(x), static_cast<te_dtype>(x_dtype), rows, columns,
                         pointer<const float>(scale), measure, &rule, static_cast<te_dtype>(dtype),
                         pointer<uint8_t>(q), pointer<uint8_t>(qt), pointer<float>(amax), pointer<float>(scale_inv),
                         pointer<void>(stream)));
}

te_norm norm_of(int device, Address x, int x_dtype, int64_t rows, int64_t columns, int64_t stride, Address weight,
                int weight_dtype, float weight_offset, Address bias, int bias_dtype, bool centre, bool round_first,
                float eps, Address scale, bool measure, float fp8_max, int margin, float epsilon, bool power_2,
                Address y, Address q, Address qt, Address amax, Address scale_inv, Address mean, Address rstd,
                Address stream) {
  te_norm norm{};
  norm.device = device;
  norm.x = pointer<const void>(x);
  norm.x_dtype = static_cast<te_dtype>(x_dtype);
  norm.rows = rows;
  norm.columns = columns;
  norm.stride = stride;
  norm.weight = pointer<const void>(weight);
  norm.weight_dtype = static_cast<te_dtype>(weight_dtype);
  norm.weight_offset = weight_offset;
  norm.bias = pointer<const void>(bias);
  norm.bias_dtype = static_cast<te_dtype>(bias_dtype);
  norm.centre = centre;
  norm.round_first = round_first;
  norm.eps = eps;
  norm.scale = pointer<const float>(scale);
  norm.measure = measure;
  norm.rule = rule_of(fp8_max, margin, epsilon, power_2);
  norm.y = pointer<void>(y);
  norm.q = pointer<uint8_t>(q);
  norm.qt = pointer<uint8_t>(qt);
  norm.amax = pointer<float>(amax);
  norm.scale_inv = pointer<float>(scale_inv);
  norm.mean = pointer<float>(mean);
  norm.rstd = pointer<float>(rstd);
  norm.stream = pointer<void>(stream);
  return norm;
}

using Strides = std::array<int64_t, 3>;  // of batch, row and head

te_heads heads_of(Address x, const Strides& strides) {
  return {pointer<const void>(x), strides[0], strides[1], strides[2]};
}

te_attention attention_of(int device, int dtype, int64_t left, int64_t right, const std::array<int64_t, 6>& sizes,
                          float scale, float growth, Address q, const Strides& q_strides, Address k,
                          const Strides& k_strides, Address v, const Strides& v_strides, Address bits,
                          const std::array<int64_t, 2>& bit_sizes, Address mask, Address tiles, int64_t mask_batches,
                          Address bias, const std::array<int64_t, 3>& bias_sizes, Address out, Address logsumexp,
                          Address stream) {
  te_attention task{};
  task.device = device;
  task.dtype = static_cast<te_dtype>(dtype);
  task.left = left;
  task.right = right;
  task.batches = sizes[0];
  task.heads = sizes[1];
  task.key_heads = sizes[2];
  task.queries = sizes[3];
  task.keys = sizes[4];
  task.width = sizes[5];
  task.scale = scale;
  task.growth = growth;
  task.q = heads_of(q, q_strides);
  task.k = heads_of(k, k_strides);
  task.v = heads_of(v, v_strides);
  task.bits = pointer<const uint32_t>(bits);
  task.bit_words = bit_sizes[0];
  task.bit_queries = bit_sizes[1];
  task.mask = pointer<const uint32_t>(mask);
  task.tiles = pointer<const int32_t>(tiles);
  task.mask_batches = mask_batches;
  task.bias = pointer<const void>(bias);
  task.bias_batches = bias_sizes[0];
  task.bias_heads = bias_sizes[1];
  task.bias_row = bias_sizes[2];
  task.out = pointer<void>(out);
  task.logsumexp = pointer<float>(logsumexp);
  task.stream = pointer<void>(stream);
  return task;
}

te_attention attention_backward_of(int device, int dtype, int64_t left, int64_t right, const std::array<int64_t, 6>& sizes,
                                   float scale, float growth, Address q, const Strides& q_strides, Address k,
                                   const Strides& k_strides, Address v, const Strides& v_strides, Address bits,
                                   const std::array<int64_t, 2>& bit_sizes, Address mask, Address tiles,
                                   int64_t mask_batches, Address bias, const std::array<int64_t, 3>& bias_sizes,
                                   Address out, Address logsumexp, Address grad, const Strides& grad_strides,
                                   Address workspace, Address dq, Address dk, Address dv, Address ds, int64_t ds_row,
                                   Address stream) {
  te_attention task = attention_of(device, dtype, left, right, sizes, scale, growth, q, q_strides, k, k_strides, v,
                                   v_strides, bits, bit_sizes, mask, tiles, mask_batches, bias, bias_sizes, out, logsumexp,
                                   stream);
  task.grad = heads_of(grad, grad_strides);
  task.workspace = pointer<float>(workspace);
  task.dq = pointer<void>(dq);
  task.dk = pointer<void>(dk);
  task.dv = pointer<void>(dv);
  task.ds = pointer<void>(ds);
  task.ds_row = ds_row;
  return task;
}

te_grouped_gemm grouped_gemm_of(int device, Address a, int a_dtype, Address b, int b_dtype, int64_t tokens, int64_t features,
                                int64_t depth, int64_t experts, int64_t feature_stride, int64_t expert_stride,
                                Address a_scale_inv, Address b_scale_inv, Address ends, Address y, int y_dtype,
                                bool fast_accumulation, Address stream) {
  te_grouped_gemm task{};
  task.device = device;
  task.a = pointer<const void>(a);
  task.b = pointer<const void>(b);
  task.a_dtype = static_cast<te_dtype>(a_dtype);
  task.b_dtype = static_cast<te_dtype>(b_dtype);
  task.tokens = tokens;
  task.features = features;
  task.depth = depth;
  task.experts = experts;
  task.feature_stride = feature_stride;
  task.expert_stride = expert_stride;
  task.a_scale_inv = pointer<const float>(a_scale_inv);
  task.b_scale_inv = pointer<const float>(b_scale_inv);
  task.ends = pointer<const int32_t>(ends);
  task.y = pointer<void>(y);
  task.y_dtype = static_cast<te_dtype>(y_dtype);
  task.fast_accumulation = fast_accumulation;
  task.stream = pointer<void>(stream);
  return task;
}

te_grouped_wgrad grouped_wgrad_of(int device, Address a, int a_dtype, Address b, int b_dtype, int64_t rows, int64_t columns,
                                  int64_t tokens, int64_t experts, Address a_scale_inv, Address b_scale_inv, Address ends,
                                  Address y, int y_dtype, Address workspace, Address stream) {
  te_grouped_wgrad task{};
  task.device = device;
  task.a = pointer<const void>(a);
  task.b = pointer<const void>(b);
  task.a_dtype = static_cast<te_dtype>(a_dtype);
  task.b_dtype = static_cast<te_dtype>(b_dtype);
  task.rows = rows;
  task.columns = columns;
  task.tokens = tokens;
  task.experts = experts;
  task.a_scale_inv = pointer<const float>(a_scale_inv);
  task.b_scale_inv = pointer<const float>(b_scale_inv);
  task.ends = pointer<const int32_t>(ends);
  task.y = pointer<void>(y);
  task.y_dtype = static_cast<te_dtype>(y_dtype);
  task.workspace = pointer<void>(workspace);
  task.stream = pointer<void>(stream);
  return task;
}

/// Addresses are arguments of their own, for a replay puts its own there; those of products that there are not are 0.
te_skinny_gemm skinny_gemm_of(int device, Address a, Address a_scale_inv, int64_t rows, int64_t depth, int y_dtype,
                              const std::vector<int64_t>& columns, const std::vector<int>& bias_dtypes,
                              Address b0, Address b1, Address b2, Address b3,
                              Address scale0, Address scale1, Address scale2, Address scale3,
                              Address bias0, Address bias1, Address bias2, Address bias3,
                              Address addend0, Address addend1, Address addend2, Address addend3,
                              Address y0, Address y1, Address y2, Address y3, Address stream) {
  static_assert(TE_SKINNY_PARTS == 4);
  if (columns.size() > TE_SKINNY_PARTS) throw py::value_error("more than four products");
  if (columns.size() != bias_dtypes.size()) throw py::value_error("columns and bias_dtypes must have one entry per product");
  const Address b[] = {b0, b1, b2, b3}, scale[] = {scale0, scale1, scale2, scale3};
  const Address bias[] = {bias0, bias1, bias2, bias3}, addend[] = {addend0, addend1, addend2, addend3}, y[] = {y0, y1, y2, y3};
  te_skinny_gemm task{};
  task.device = device;
  task.a = pointer<const void>(a);
  task.a_scale_inv = pointer<const float>(a_scale_inv);
  task.rows = rows;
  task.depth = depth;
  task.y_dtype = static_cast<te_dtype>(y_dtype);
  task.count = static_cast<int32_t>(columns.size());
  task.stream = pointer<void>(stream);
  for (size_t i = 0; i < columns.size(); ++i) {
    te_skinny_part& part = task.parts[i];
    part.b = pointer<const void>(b[i]);
    part.b_scale_inv = pointer<const float>(scale[i]);
    part.columns = columns[i];
    part.bias = pointer<const void>(bias[i]);
    part.bias_dtype = static_cast<te_dtype>(bias_dtypes[i]);
    part.addend = pointer<const void>(addend[i]);
    part.y = pointer<void>(y[i]);
  }
  return task;
}

void cuda_update_scales(int device, const std::vector<Address>& states, const std::vector<Address>& amaxes,
                        const std::vector<int64_t>& rows, int64_t history_length, float fp8_max, int margin,
                        float epsilon, bool power_2, bool most_recent, Address stream) {
  same_length(states, amaxes, rows);
  const te_scale_rule rule = rule_of(fp8_max, margin, epsilon, power_2);
  check(te_cuda_update_scales(device, pointers<float>(states).data(), pointers<const float>(amaxes).data(),
                              rows.data(), static_cast<int64_t>(rows.size()), history_length, &rule,
                              most_recent ? TE_AMAX_MOST_RECENT : TE_AMAX_MAX, pointer<void>(stream)));
}

te_gemm gemm_of(int device, Address a, Address b, Address d, Address a_scale_inv, Address b_scale_inv, Address d_scale,
                Address amax_d, Address bias, Address aux, Address addend, int64_t m, int64_t n, int64_t k, int64_t lda,
                int64_t ldb, int64_t ldd, int64_t ld_aux, int64_t ld_addend, int a_dtype, int b_dtype, int d_dtype,
                int bias_dtype, int aux_dtype, int epilogue, bool fast_accumulation, Address workspace,
                size_t workspace_bytes, int candidates, Address stream) {
  te_gemm gemm{};
  gemm.device = device;
  gemm.a = pointer<const void>(a);
  gemm.b = pointer<const void>(b);
  gemm.d = pointer<void>(d);
  gemm.a_scale_inv = pointer<const float>(a_scale_inv);
  gemm.b_scale_inv = pointer<const float>(b_scale_inv);
  gemm.d_scale = pointer<const float>(d_scale);
  gemm.amax_d = pointer<float>(amax_d);
  gemm.bias = pointer<void>(bias);
  gemm.aux = pointer<void>(aux);
  gemm.addend = pointer<const void>(addend);
  gemm.m = m;
  gemm.n = n;
  gemm.k = k;
  gemm.lda = lda;
  gemm.ldb = ldb;
  gemm.ldd = ldd;
  gemm.ld_aux = ld_aux;
  gemm.ld_addend = ld_addend;
  gemm.a_dtype = static_cast<te_dtype>(a_dtype);
  gemm.b_dtype = static_cast<te_dtype>(b_dtype);
  gemm.d_dtype = static_cast<te_dtype>(d_dtype);
  gemm.bias_dtype = static_cast<te_dtype>(bias_dtype);
  gemm.aux_dtype = static_cast<te_dtype>(aux_dtype);
  gemm.epilogue = static_cast<te_epilogue>(epilogue);
  gemm.fast_accumulation = fast_accumulation;
  gemm.workspace = pointer<void>(workspace);
  gemm.workspace_bytes = workspace_bytes;
  gemm.candidates = candidates;
  gemm.stream = pointer<void>(stream);
  return gemm;
}

/// A function over the arguments that make a request, so that their list stands in one place.
template <auto Call, auto Make>
struct Over;
template <typename Request, typename... Arguments, te_status (*Call)(const Request*), Request (*Make)(Arguments...)>
struct Over<Call, Make> {
  static void run(Arguments... arguments) {
    const Request request = Make(arguments...);
    check(Call(&request));
  }
  /// The request of a Python sequence of these arguments.
  static Request of(const py::sequence& arguments) {
    if (arguments.size() != sizeof...(Arguments)) {
      throw py::value_error("these are not as many arguments as the function takes");
    }
    return of(arguments, std::index_sequence_for<Arguments...>{});
  }

 private:
  template <size_t... At>
  static Request of(const py::sequence& arguments, std::index_sequence<At...>) {
    return Make(py::cast<Arguments>(py::object(arguments[At]))...);
  }
};

using Product = Over<&te_cublaslt_gemm, &gemm_of>;
using Norm = Over<&te_cuda_norm_quantize, &norm_of>;
using Attention = Over<&te_cuda_attention, &attention_of>;
using GroupedGemm = Over<&te_cuda_grouped_gemm, &grouped_gemm_of>;
using GroupedWgrad = Over<&te_cuda_grouped_wgrad, &grouped_wgrad_of>;
using SkinnyGemm = Over<&te_cuda_skinny_gemm, &skinny_gemm_of>;
using AttentionBackward = Over<&te_cuda_attention_backward, &attention_backward_of>;

PyObject* native_error = nullptr;
PyObject* unsupported = nullptr;

size_t cublaslt_version() {
  size_t version = 0;
  check(te_cublaslt_version(&version));
  return version;
}

std::pair<int64_t, int64_t> cublaslt_plans() {
  int64_t kept = 0;
  int64_t timed = 0;
  check(te_cublaslt_plans(&kept, &timed));
  return {kept, timed};
}

void cublaslt_keep_choices(int device, const std::optional<std::string>& path) {
  check(te_cublaslt_keep_choices(device, path ? path->c_str() : nullptr));
}

}  // namespace

namespace te_compile::python {

te_gemm gemm_of_arguments(const py::sequence& arguments) { return Product::of(arguments); }

te_norm norm_of_arguments(const py::sequence& arguments) { return Norm::of(arguments); }

void set_error_of(te_status status) {
  const bool refused = status == TE_UNSUPPORTED || status == TE_NOT_BUILT;
  PyErr_SetString(refused ? unsupported : status == TE_INVALID_ARGUMENT ? PyExc_ValueError : native_error,
                  te_last_error());
}

}  // namespace te_compile::python

namespace {

/// The interpreter lock is released while a function runs.
constexpr py::call_guard<py::gil_scoped_release> unlocked{};

void add_constants(py::module_& module) {
  module.attr("INTERFACE") = 6;  // te_compile/kernels/native.py has the same: who changes what functions take changes both
  module.attr("CHOICES_FORMAT") = TE_CHOICES_FORMAT;
  module.attr("SKINNY_PARTS") = TE_SKINNY_PARTS;
  module.attr("SKINNY_ROWS") = TE_SKINNY_ROWS;
  module.attr("NORM_FEW_ROWS") = TE_NORM_FEW_ROWS;

  module.attr("FLOAT32") = static_cast<int>(TE_FLOAT32);
  module.attr("FLOAT16") = static_cast<int>(TE_FLOAT16);
  module.attr("BFLOAT16") = static_cast<int>(TE_BFLOAT16);
  module.attr("FLOAT8_E4M3") = static_cast<int>(TE_FLOAT8_E4M3);
  module.attr("FLOAT8_E5M2") = static_cast<int>(TE_FLOAT8_E5M2);

  module.attr("EPILOGUE_NONE") = static_cast<int>(TE_EPILOGUE_NONE);
  module.attr("EPILOGUE_BIAS") = static_cast<int>(TE_EPILOGUE_BIAS);
  module.attr("EPILOGUE_GELU_AUX") = static_cast<int>(TE_EPILOGUE_GELU_AUX);
  module.attr("EPILOGUE_GELU_AUX_BIAS") = static_cast<int>(TE_EPILOGUE_GELU_AUX_BIAS);
  module.attr("EPILOGUE_DGELU") = static_cast<int>(TE_EPILOGUE_DGELU);
  module.attr("EPILOGUE_DGELU_BGRAD") = static_cast<int>(TE_EPILOGUE_DGELU_BGRAD);
}

void add_quantizers(py::module_& module) {
  module.def("host_quantize", &host_quantize, unlocked, "(x, count, scale, dtype, q) -> amax");
  module.def("host_dequantize", &host_dequantize, unlocked, "(q, count, scale_inv, dtype, y)");
  module.def("host_scale", &host_scale, unlocked, "(amax, fp8_max, margin, epsilon, power_2) -> scale");
  module.def("host_update_scales", &host_update_scales, unlocked,
             "(states, amaxes, rows, history_length, fp8_max, margin, epsilon, power_2, most_recent)");
  module.def("cuda_quantize", &cuda_quantize, unlocked,
             "(device, x, x_dtype, rows, columns, scale, measure, fp8_max, margin, epsilon, power_2, dtype, q, qt, "
             "amax, scale_inv, stream)");
  module.def("cuda_norm_quantize", &Norm::run, unlocked,
             "(device, x, x_dtype, rows, columns, stride, weight, weight_dtype, weight_offset, bias, bias_dtype, "
             "centre, round_first, eps, scale, measure, fp8_max, margin, epsilon, power_2, y, q, qt, amax, scale_inv, "
             "mean, rstd, stream)");
  module.def("cuda_update_scales", &cuda_update_scales, unlocked,
             "(device, states, amaxes, rows, history_length, fp8_max, margin, epsilon, power_2, most_recent, stream)");
}

void add_attention(py::module_& module) {
  module.def("cuda_attention", &Attention::run, unlocked,
             "(device, dtype, left, right, (batches, heads, key_heads, queries, keys, width), scale, growth, q, strides, k, "
             "strides, v, strides, bits, (bit_words, bit_queries), mask, tiles, mask_batches, bias, (bias_batches, bias_heads, "
             "bias_row), out, logsumexp, stream); strides: of batch, row and head");
  module.def("cuda_attention_backward", &AttentionBackward::run, unlocked,
             "(the arguments of cuda_attention up to logsumexp, grad, strides, workspace, dq, dk, dv, ds, ds_row, "
             "stream)");
}

void add_products(py::module_& module) {
  module.def("cuda_grouped_gemm", &GroupedGemm::run, unlocked,
             "(device, a, a_dtype, b, b_dtype, tokens, features, depth, experts, feature_stride, expert_stride, a_scale_inv, "
             "b_scale_inv, ends, y, y_dtype, fast_accumulation, stream)");
  module.def("cuda_grouped_wgrad", &GroupedWgrad::run, unlocked,
             "(device, a, a_dtype, b, b_dtype, rows, columns, tokens, experts, a_scale_inv, b_scale_inv, ends, y, y_dtype, "
             "workspace, stream)");
  module.def("cuda_skinny_gemm", &SkinnyGemm::run, unlocked,
             "(device, a, a_scale_inv, rows, depth, y_dtype, columns, bias_dtypes, four b, four b_scale_inv, four bias, four "
             "addend, four y, stream)");
  const char* const gemm_arguments =
      "(device, a, b, d, a_scale_inv, b_scale_inv, d_scale, amax_d, bias, aux, addend, m, n, k, lda, ldb, ldd, ld_aux, "
      "ld_addend, a_dtype, b_dtype, d_dtype, bias_dtype, aux_dtype, epilogue, fast_accumulation, workspace, "
      "workspace_bytes, candidates, stream)";
  module.def("cublaslt_gemm", &Product::run, unlocked, gemm_arguments);
  module.def("cublaslt_check", &Over<&te_cublaslt_check, &gemm_of>::run, unlocked, gemm_arguments);
  module.def("cublaslt_version", &cublaslt_version, unlocked, "() -> e.g. 130100");
  module.def("cublaslt_keep_choices", &cublaslt_keep_choices, unlocked, "(device, path or None)");
  module.def("cublaslt_plans", &cublaslt_plans, unlocked, "() -> (kept, timed)");
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "te_compile's C++ core over raw pointers; csrc/include/te_compile.h describes every function.";
  // The last one registered is tried first: the special case.
  auto& error = py::register_exception<NativeError>(module, "NativeError", PyExc_RuntimeError);
  auto& refused = py::register_exception<Unsupported>(module, "Unsupported", error.ptr());
  native_error = error.ptr();
  unsupported = refused.ptr();

  module.attr("cuda_built") = te_cuda_built() != 0;
  add_constants(module);
  add_quantizers(module);
  add_attention(module);
  add_products(module);
  te_compile::python::add_replay(module);
}
