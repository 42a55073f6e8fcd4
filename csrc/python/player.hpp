// What is played: the memory, the steps and the results of one kind of call.
#pragma once

#include <optional>
#include <vector>

#include "refs.hpp"
#include "te_compile.h"

namespace te_compile::python {

/// An address goes to the place `where`: that of tensor `tensor`, `offset` bytes in. After all tensors comes the stream.
struct Spot {
  size_t where, tensor;
  int64_t offset;
};

/// Memory that each call makes. Fresh: by a function of these arguments. Stock: the last of a list, found in a dictionary
/// by device, stream and kind, else what `otherwise` makes. Borrowed: the same, and put back after the call.
struct Make {
  enum How { kFresh, kStock, kBorrowed, kCalled } how;
  Ref function;  // of kFresh: its arguments; else (device, stream), or of kStock (device, stream, kind)
  std::vector<Ref> arguments;
  Ref table, kind;
};

struct Call {
  Ref function;
  std::vector<Ref> arguments;  // null where an address goes
  std::vector<Spot> spots;
};

struct Launch {
  void* function;
  unsigned grid[3], threads, shared_bytes;
  std::vector<uint64_t> values;  // one word a parameter, of which the kernel reads as many low bytes as it declares
  std::vector<Spot> spots;
};

struct Product {
  Product() = default;
  Product(Product&& other) noexcept : gemm(other.gemm), spots(std::move(other.spots)), prepared(other.prepared) {
    other.prepared = nullptr;
  }
  Product& operator=(Product&&) = delete;
  ~Product() { te_cublaslt_release(prepared); }

  te_gemm gemm{};
  std::vector<Spot> spots;               // `where`: bytes into the struct
  te_prepared_gemm* prepared = nullptr;  // by the first call, whose addresses are known
};

struct Norm {
  te_norm norm{};
  std::vector<Spot> spots;  // as a product's
};

/// `call` does the same by way of Python, and is all there is of a step of another kind.
struct Step {
  Call call;
  std::optional<Launch> launch;
  std::optional<Product> product;
  std::optional<Norm> norm;
  bool is_native() const { return launch || product || norm; }
};

struct Work {
  size_t given = 0;  // tensors of the call's own
  std::vector<Make> makes;
  std::vector<Step> steps;
  std::vector<size_t> results;
  enum Shape { kOne, kList, kTuple } shape = kOne;
  Ref kept;
  size_t tensors() const { return given + makes.size(); }
};

struct Player {
  PyObject_HEAD vectorcallfunc vectorcall;
  Work* work;
};
extern PyTypeObject* player_type;

/// Make the type; once.
void add_player_type();

Player* new_player(std::unique_ptr<Work> work);

/// Where `tensor` begins. False: a Python error is set.
bool address_of(PyObject* tensor, uintptr_t& address);

/// tensors, addresses: those of the call, with room for what is made and, among the addresses, for the stream.
PyObject* play(Player* player, Refs& tensors, uintptr_t* addresses, PyObject* device, uintptr_t stream);

}  // namespace te_compile::python
