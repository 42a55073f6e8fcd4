// Drives te_cublaslt_gemm on the pretended GPU: numbers, plans and timing. Each argument names a check; or it is the number
// of a product's rows, and what that took is printed: the algorithm, and how many products were run to find it.
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "float8.hpp"
#include "pretend.hpp"
#include "shared_choices.hpp"
#include "te_compile.h"

using namespace te_compile;

Pretend pretend;
std::function<void()> while_timing = [] {};

// --- the CUDA runtime -------------------------------------------------------------------------------------------------

extern "C" {
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "a pretended error"; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : attribute == cudaDevAttrL2CacheSize ? pretend.l2 : 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = pretend.capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** memory, size_t bytes) {
  if (pretend.out_of_memory || pretend.capturing) return cudaErrorMemoryAllocation;
  ++pretend.allocated;
  *memory = std::calloc(bytes, 1);
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  --pretend.allocated;
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = reinterpret_cast<cudaEvent_t>(new double(0.0));
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<double*>(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  *reinterpret_cast<double*>(event) = pretend.clock;
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return while_timing(), cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* elapsed, cudaEvent_t start, cudaEvent_t stop) {
  *elapsed = static_cast<float>(*reinterpret_cast<double*>(stop) - *reinterpret_cast<double*>(start));
  return cudaSuccess;
}
}

// --- the checks -------------------------------------------------------------------------------------------------------

namespace {

void expect(bool condition, const char* what) {
  if (condition) return;
  std::printf("failed: %s (%s)\n", what, te_last_error());
  std::exit(1);
}

float from_bf16(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }

constexpr int64_t kN = 32, kK = 48, kLda = 64, kLdb = 80, kLdd = 40;
constexpr float kNan = __builtin_nanf("");

/// Memory that is aligned as device memory is: products tell operands apart by it.
template <typename T>
struct Aligned {
  using value_type = T;
  Aligned() = default;
  template <typename U>
  Aligned(const Aligned<U>&) {}
  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{256})); }
  void deallocate(T* memory, size_t) { ::operator delete(memory, std::align_val_t{256}); }
  friend bool operator==(Aligned, Aligned) { return true; }
  friend bool operator!=(Aligned, Aligned) { return false; }
};
template <typename T>
using Operand = std::vector<T, Aligned<T>>;

/// A product of random codes whose rows lie apart, with all that an epilogue may touch.
struct Case {
  explicit Case(int64_t m) : a(m * kLda), b(kN * kLdb), d(m * kLdd, kNan), d16(m * kLdd, 0x7FC0), bias(kN), aux(m * kN) {
    std::uniform_int_distribution<int> code(0, 0x7E);
    for (auto& value : a) value = static_cast<uint8_t>(code(random) | (random() % 2 << 7));
    for (auto& value : b) value = static_cast<uint8_t>(code(random) | (random() % 2 << 7));
    for (auto& value : bias) value = static_cast<uint16_t>(0x3F80 + random() % 64);
    for (auto& value : aux) value = static_cast<uint16_t>(0x3F00 + random() % 128);
    gemm.a = a.data();
    gemm.b = b.data();
    gemm.d = d.data();
    gemm.a_scale_inv = &a_scale_inv;
    gemm.b_scale_inv = &b_scale_inv;
    gemm.m = m;
    gemm.n = kN;
    gemm.k = kK;
    gemm.lda = kLda;
    gemm.ldb = kLdb;
    gemm.ldd = kLdd;
    gemm.ld_aux = kN;
    gemm.a_dtype = TE_FLOAT8_E4M3;
    gemm.b_dtype = TE_FLOAT8_E4M3;
    gemm.d_dtype = TE_FLOAT32;
    gemm.bias_dtype = TE_BFLOAT16;
    gemm.aux_dtype = TE_BFLOAT16;
    gemm.candidates = 8;
  }

  void write_bf16(te_epilogue epilogue, bool with_bias, bool with_aux) {
    gemm.d = d16.data();
    gemm.d_dtype = TE_BFLOAT16;
    gemm.epilogue = epilogue;
    gemm.bias = with_bias ? bias.data() : nullptr;
    gemm.aux = with_aux ? aux.data() : nullptr;
  }

  void add_to_d() {
    gemm.addend = gemm.d;
    gemm.ld_addend = gemm.ldd;
  }

  float product(int64_t row, int64_t column) const {
    float sum = 0.0f;
    for (int64_t k = 0; k < kK; ++k) sum += E4M3::decode(a[row * kLda + k]) * E4M3::decode(b[column * kLdb + k]);
    return sum * a_scale_inv * b_scale_inv;
  }

  void run() { expect(te_cublaslt_gemm(&gemm) == TE_OK, "the product runs"); }

  /// d holds `want(row, column)`, and nothing was written between its rows.
  void expect_result(const std::function<float(int64_t, int64_t)>& want, const char* what, float tolerance = 1e-4f) {
    for (int64_t row = 0; row < gemm.m; ++row) {
      for (int64_t column = 0; column < kLdd; ++column) {
        const int64_t at = row * kLdd + column;
        const float got = gemm.d_dtype == TE_FLOAT32 ? d[at] : from_bf16(d16[at]);
        if (column >= kN) {
          expect(std::isnan(got), "the gap between rows is left alone");
        } else {
          const float wanted = want(row, column);
          expect(std::fabs(got - wanted) <= tolerance * (1.0f + std::fabs(wanted)), what);
        }
      }
    }
  }

  std::mt19937 random{std::random_device{}()};
  Operand<uint8_t> a, b;
  Operand<float> d;
  Operand<uint16_t> d16, bias, aux;
  alignas(16) float a_scale_inv = 0.01f;
  alignas(16) float b_scale_inv = 0.003f;
  te_gemm gemm{};
};

void numbers() {
  Case one(5);
  one.run();
  one.expect_result([&](int64_t i, int64_t j) { return one.product(i, j); }, "d = a b^T");
  Case other(5);  // the same plan, other pointers
  other.a_scale_inv = 0.05f;
  other.run();
  other.expect_result([&](int64_t i, int64_t j) { return other.product(i, j); }, "pointers are those of the call");
}

void bias() {
  Case one(7);
  one.write_bf16(TE_EPILOGUE_BIAS, true, false);
  one.run();
  one.expect_result([&](int64_t i, int64_t j) { return one.product(i, j) + from_bf16(one.bias[j]); }, "d = p + bias",
                    1e-2f);
}

void gelu() {
  Case one(3);
  one.write_bf16(TE_EPILOGUE_GELU_AUX_BIAS, true, true);
  one.run();
  for (int64_t i = 0; i < 3; ++i) {
    for (int64_t j = 0; j < kN; ++j) {
      const float want = one.product(i, j) + from_bf16(one.bias[j]);
      expect(std::fabs(from_bf16(one.aux[i * kN + j]) - want) <= 1e-2f * (1.0f + std::fabs(want)), "aux = p + bias");
    }
  }
}

void bias_gradient() {
  Case one(6);
  one.write_bf16(TE_EPILOGUE_DGELU_BGRAD, true, true);
  one.run();
  for (int64_t j = 0; j < kN; ++j) {
    float sum = 0.0f;
    float size = 1.0f;
    for (int64_t i = 0; i < 6; ++i) {
      sum += from_bf16(one.d16[i * kLdd + j]);
      size += std::fabs(from_bf16(one.d16[i * kLdd + j]));
    }
    expect(std::fabs(from_bf16(one.bias[j]) - sum) <= 2e-2f * size, "bias = sums of the columns of d");
  }
}

void accumulation() {
  Case one(9);
  std::vector<float> before(one.d.size());
  for (size_t at = 0; at < before.size(); ++at) {
    before[at] = static_cast<float>(at % 11);
    if (static_cast<int64_t>(at) % kLdd < kN) one.d[at] = before[at];
  }
  one.add_to_d();
  const int blocks = pretend.allocated;
  one.run();
  expect(pretend.products > 2, "algorithms are timed");
  expect(pretend.allocated <= blocks + 1, "nothing but the workspace stays allocated");
  one.expect_result([&](int64_t i, int64_t j) { return before[i * kLdd + j] + one.product(i, j); }, "d is added to once");
  pretend.out_of_memory = true;
  Case poor(10);
  for (int64_t i = 0; i < 10; ++i) std::fill_n(poor.d.begin() + i * kLdd, kN, 1.0f);
  poor.add_to_d();
  poor.run();
  expect(pretend.last_algorithm == 0, "without memory for timing the first suggestion stands");
  poor.expect_result([&](int64_t i, int64_t j) { return 1.0f + poor.product(i, j); }, "d is added to once");
}

void addend() {
  Case one(13);
  std::vector<float> added(13 * kN);
  for (size_t at = 0; at < added.size(); ++at) added[at] = static_cast<float>(at % 7);
  one.gemm.addend = added.data();
  one.gemm.ld_addend = kN;
  const int blocks = pretend.allocated;
  one.run();
  expect(pretend.products > 2, "algorithms are timed");
  expect(pretend.allocated <= blocks + 1, "and need no copy of d");
  one.expect_result([&](int64_t i, int64_t j) { return added[i * kN + j] + one.product(i, j); }, "the addend is added");
  expect(added[9] == 2.0f, "and not written");
}

void timing() {
  Case one(11);
  one.run();
  expect(pretend.last_algorithm == 1, "the fastest suggestion is taken");
  const int products = pretend.products;
  const int queries = pretend.queries;
  for (int again = 0; again < 3; ++again) one.run();
  expect(pretend.products == products + 3, "a shape is timed once");
  expect(pretend.queries == queries, "the library is asked once");
  int64_t kept = 0;
  int64_t timed = 0;
  expect(te_cublaslt_plans(&kept, &timed) == TE_OK && kept == 1 && timed == 1, "one plan, timed");
  one.gemm.candidates = 1;
  one.run();
  expect(pretend.last_algorithm == 0 && pretend.products == products + 4, "one candidate: the first, untimed");
}

/// The second factors that a product of so many rows was run with, its own left out, in a time of its own.
std::set<const void*> others_than_its_own(int64_t m, const char* what) {
  Case one(m);
  pretend.factors.clear();
  const int blocks = pretend.allocated;
  one.run();
  one.expect_result([&](int64_t i, int64_t j) { return one.product(i, j); }, what);
  expect(pretend.allocated <= blocks + 1, "nothing but the workspace stays allocated");
  expect(pretend.factors.erase(one.b.data()) == 1, "the product itself is run with its own");
  return pretend.factors;
}

void cold() {
  constexpr int kBytes = kN * kLdb;  // of the second factor, and some for its padding
  pretend.l2 = 1 << 16;
  const auto copies = others_than_its_own(5, "a product that fits into the L2");
  expect(copies.size() * kBytes > static_cast<size_t>(pretend.l2), "is timed with more copies than that holds");
  expect(pretend.last_algorithm == 1, "and the fastest suggestion is taken");
  expect(others_than_its_own(5, "it is timed once").empty(), "and then run as it is");
  pretend.l2 = kBytes + 6 * kLda;
  expect(others_than_its_own(6, "a product that does not fit").empty(), "comes out of memory as it is");
  pretend.l2 = 1 << 30;
  expect(others_than_its_own(7, "a large L2").size() == 32, "is not filled without end");
  pretend.out_of_memory = true;
  expect(others_than_its_own(8, "a product without memory for copies").empty(), "is timed as it is");
  expect(pretend.last_algorithm == 1, "all the same");
}

void capture() {
  Case warm(12);
  warm.run();  // a workspace exists
  Case one(13);
  pretend.capturing = true;
  const int products = pretend.products;
  one.run();
  expect(pretend.products == products + 1 && pretend.last_algorithm == 0, "a captured product is not timed");
  pretend.capturing = false;
  one.run();
  expect(pretend.last_algorithm == 1, "it is timed later");
  one.expect_result([&](int64_t i, int64_t j) { return one.product(i, j); }, "d = a b^T");
}

void lengths() {
  for (int64_t m = 1; m <= 64; ++m) Case(m).run();
  expect(pretend.last_algorithm == 1, "the first lengths are timed");
  const int products = pretend.products;
  Case(65).run();
  expect(pretend.products == products + 1, "lengths that never end are not");
}

void refusals() {
  Case one(4);
  one.gemm.d_dtype = TE_FLOAT16;
  expect(te_cublaslt_gemm(&one.gemm) == TE_UNSUPPORTED, "what the library refuses is unsupported");
  expect(te_cublaslt_check(&one.gemm) == TE_UNSUPPORTED, "and the check says so before");
  one.gemm.d_dtype = TE_FLOAT32;
  expect(te_cublaslt_check(&one.gemm) == TE_OK && pretend.products == 0, "a check runs nothing");
  one.gemm.lda = kLda + 8;
  expect(te_cublaslt_gemm(&one.gemm) == TE_UNSUPPORTED, "rows off 16 bytes are unsupported");
  one.gemm.lda = kLda;
  ++one.gemm.a_scale_inv;
  expect(te_cublaslt_gemm(&one.gemm) == TE_UNSUPPORTED, "so are scales");
  --one.gemm.a_scale_inv;
  one.gemm.epilogue = TE_EPILOGUE_BIAS;
  expect(te_cublaslt_gemm(&one.gemm) == TE_INVALID_ARGUMENT, "a bias epilogue needs a bias");
}

/// A product that is made again and again.
struct Prepared {
  explicit Prepared(const te_gemm& gemm) { expect(te_cublaslt_prepare(&gemm, &made) == TE_OK, "a product is prepared"); }
  ~Prepared() { te_cublaslt_release(made); }
  void run(const te_gemm& gemm) const { expect(te_cublaslt_run(made, &gemm) == TE_OK, "it runs"); }
  te_prepared_gemm* made = nullptr;
};

constexpr size_t kWorkspaceBytes = 1024;
alignas(256) char workspace[kWorkspaceBytes];

struct BiasedCase : Case {
  explicit BiasedCase(int64_t m) : Case(m) {
    write_bf16(TE_EPILOGUE_BIAS, true, false);
    gemm.workspace = workspace;
    gemm.workspace_bytes = kWorkspaceBytes;
  }
  void expect_biased(const char* what) {
    expect_result([&](int64_t i, int64_t j) { return product(i, j) + from_bf16(bias[j]); }, what, 1e-2f);
  }
};

void prepared() {
  BiasedCase one(5);
  BiasedCase other(5);
  other.a_scale_inv = 0.07f;
  const Prepared product(one.gemm);
  expect(pretend.products == 0, "to prepare runs nothing");
  product.run(one.gemm);
  one.expect_biased("the first run");
  expect(pretend.products > 2, "is timed as any first product is");
  for (const int round : {0, 1}) {
    const int products = pretend.products;
    product.run(other.gemm);
    other.expect_biased(round == 0 ? "scales and bias are those of the call" : "each time");
    std::fill(one.d16.begin(), one.d16.end(), 0x7FC0);
    product.run(one.gemm);
    one.expect_biased("and may be again what they were");
    expect(pretend.products == products + 2, "with nothing timed again");
    std::fill(other.d16.begin(), other.d16.end(), 0x7FC0);
  }
  const int sets = pretend.sets;
  product.run(one.gemm);
  expect(pretend.sets == sets, "pointers that stay are not set again");
  other.run();  // by the plan that both share
  other.expect_biased("beside products that nobody prepared");
  std::fill(one.d16.begin(), one.d16.end(), 0x7FC0);
  product.run(one.gemm);
  one.expect_biased("whose pointers are not taken for one's own");
}

void prepared_alignment() {
  BiasedCase one(5);
  const Prepared product(one.gemm);
  product.run(one.gemm);
  std::vector<uint8_t> elsewhere(one.a.size() + 512);
  auto start = reinterpret_cast<uintptr_t>(elsewhere.data());
  const int before = pretend.queries;
  for (const uintptr_t offset : {0, 16, 0}) {  // of which the second is not as the prepared one's
    auto* const a = reinterpret_cast<uint8_t*>((start + 255) / 256 * 256 + offset);
    std::copy(one.a.begin(), one.a.end(), a);
    one.gemm.a = a;
    std::fill(one.d16.begin(), one.d16.end(), 0x7FC0);
    product.run(one.gemm);
    one.expect_biased("another alignment takes another plan");
  }
  expect(pretend.queries == before + 1, "which is then known");
  one.gemm.a = static_cast<const uint8_t*>(one.gemm.a) + 1;
  expect(te_cublaslt_run(product.made, &one.gemm) == TE_UNSUPPORTED, "what is off 16 bytes is unsupported");
  one.gemm.a = nullptr;
  expect(te_cublaslt_run(product.made, &one.gemm) == TE_INVALID_ARGUMENT, "and null an error");
  one.gemm.d_dtype = TE_FLOAT16;
  te_prepared_gemm* made = nullptr;
  one.gemm.lda = 8;
  expect(te_cublaslt_prepare(&one.gemm, &made) != TE_OK && made == nullptr, "so is what cannot be prepared");
  expect(te_cublaslt_run(nullptr, &one.gemm) == TE_INVALID_ARGUMENT, "and what was not");
}

void prepared_otherwise() {
  Case one(6);  // an FP8 result with an amax, that is cleared first, and no workspace of the caller's
  std::vector<uint8_t> q(6 * kLdd);
  alignas(16) float scale = 0.5f;
  float amax = 1e30f;
  one.gemm.d = q.data();
  one.gemm.ldd = 48;
  q.resize(6 * 48);
  one.gemm.d = q.data();
  one.gemm.d_dtype = TE_FLOAT8_E4M3;
  one.gemm.d_scale = &scale;
  one.gemm.amax_d = &amax;
  const Prepared product(one.gemm);
  for (int round = 0; round < 3; ++round) {
    amax = 1e30f;
    product.run(one.gemm);
    float want = 0.0f;
    for (int64_t i = 0; i < 6; ++i) {
      for (int64_t j = 0; j < kN; ++j) want = std::max(want, std::fabs(one.product(i, j)));
    }
    expect(std::fabs(amax - want) <= 1e-4f * want, "amax is cleared before each run");
  }
  one.gemm.m = 0;
  const Prepared nothing(one.gemm);
  nothing.run(one.gemm);
}

void prepared_threads() {
  BiasedCase first(5);
  const Prepared product(first.gemm);
  product.run(first.gemm);
  std::vector<std::unique_ptr<BiasedCase>> cases;
  std::vector<std::thread> threads;
  for (int at = 0; at < 3; ++at) {
    cases.push_back(std::make_unique<BiasedCase>(5));
    cases.back()->a_scale_inv = 0.01f * static_cast<float>(at + 1);
  }
  for (auto& each : cases) {
    threads.emplace_back([&product, &each] {
      for (int round = 0; round < 50; ++round) {
        std::fill(each->d16.begin(), each->d16.end(), 0x7FC0);
        product.run(each->gemm);
        each->expect_biased("threads do not mix");
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

// --- choices that are kept --------------------------------------------------------------------------------------------

/// The value of an environment variable, or null.
const char* setting(const char* name) { return std::getenv(name); }

/// A product of so many rows: CHOICES is the file that choices are kept in, FASTEST the suggestion that takes no time,
/// CANDIDATES how many are wanted; CAPTURING if set pretends that, and MEANWHILE is the file of another process, whose
/// choices come into ours during the first timing.
void report(int64_t rows) {
  Case one(rows);
  one.gemm.workspace = workspace;
  one.gemm.workspace_bytes = kWorkspaceBytes;
  if (const char* const candidates = setting("CANDIDATES")) one.gemm.candidates = std::atoi(candidates);
  const int before = pretend.products;
  one.run();
  std::printf("%d %d\n", pretend.last_algorithm, pretend.products - before);
  one.expect_result([&](int64_t i, int64_t j) { return one.product(i, j); }, "d = a b^T");
}

void prepare_reports() {
  if (const char* const path = setting("CHOICES")) expect(te_cublaslt_keep_choices(0, path) == TE_OK, "choices are kept");
  if (const char* const fastest = setting("FASTEST")) pretend.times[std::atoi(fastest)] = 0.1;
  pretend.capturing = setting("CAPTURING") != nullptr;
  if (setting("MEANWHILE") == nullptr) return;
  while_timing = [] {
    std::ofstream(setting("CHOICES"), std::ios::app) << std::ifstream(setting("MEANWHILE")).rdbuf();
    while_timing = [] {};
  };
}

using Answers = std::vector<Answer>;

void one_file() {
  const char* const path = setting("CHOICES");
  const Question some = {1, -2, 3}, other = {1, -2};
  const Answer first = {1, ~0ull}, second = {2};
  SharedChoices one(path);
  SharedChoices two(path);
  expect(one.find(some).empty(), "nobody knows yet");
  expect(one.add(some, first) == Answers{first}, "what is added is known");
  expect(two.find(some) == Answers{first} && two.find(other).empty(), "also to others");
  expect(one.add(other, second) == Answers{second} && two.find(other) == Answers{second}, "later, too");
  expect(two.add(some, second) == Answers({first, second}), "who came first stays first");
  expect(two.add(some, second) == Answers({first, second}), "and nobody comes twice");
  expect(SharedChoices(path).find(some) == Answers({first, second}), "in a file that says so");
  std::remove(path);
  expect(one.add({4}, second) == Answers{second} && two.find({4}) == Answers{second}, "a new file is read from its start");
  expect(two.find(some) == Answers({first, second}), "and takes back nothing");
}

void one_file_at_once() {
  constexpr int64_t kQuestions = 200;
  constexpr uint64_t kProcesses = 4;
  std::vector<std::vector<Answers>> found(kProcesses, std::vector<Answers>(kQuestions));
  std::vector<std::thread> threads;
  for (uint64_t process = 0; process < kProcesses; ++process) {
    threads.emplace_back([&found, process] {
      SharedChoices choices(setting("CHOICES"));
      for (int64_t at = 0; at < kQuestions; ++at) {
        found[process][at] = choices.find({at});
        if (found[process][at].empty()) found[process][at] = choices.add({at}, {process});
      }
    });
  }
  for (auto& thread : threads) thread.join();
  SharedChoices later(setting("CHOICES"));
  for (int64_t at = 0; at < kQuestions; ++at) {
    for (const auto& process : found) {
      expect(process[at].front() == later.find({at}).front(), "all processes make the same choice");
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  const std::map<std::string, void (*)()> checks = {
      {"numbers", numbers},           {"bias", bias},     {"gelu", gelu},       {"bias_gradient", bias_gradient},
      {"accumulation", accumulation}, {"timing", timing}, {"cold", cold}, {"capture", capture}, {"lengths", lengths},
      {"refusals", refusals},         {"addend", addend}, {"prepared", prepared},
      {"prepared_alignment", prepared_alignment}, {"prepared_otherwise", prepared_otherwise},
      {"prepared_threads", prepared_threads}, {"one_file", one_file}, {"one_file_at_once", one_file_at_once}};
  prepare_reports();
  for (int i = 1; i < count; ++i) {
    if (const int64_t rows = std::atoll(arguments[i])) {
      report(rows);
    } else {
      checks.at(arguments[i])();
    }
  }
  std::puts("passed");
  return 0;
}
