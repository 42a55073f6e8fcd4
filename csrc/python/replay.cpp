// Calls that are replayed: what te_compile/kernels/replay.py's Tape and Site do, with nothing left to look up.
//
// A Player makes memory and plays steps: a Triton kernel through the driver, a product through cuBLASLt, or a call of
// Python's. A Place stands for an operator in generated code and asks what may have changed since its player was made.
// What each of them does is decided in Python (kernels/player.py); here it is only done.
//
// State that a call changes lives on its stack, so calls may nest and threads may mix. The interpreter lock is released
// while the driver is at work: a launch waits where the GPU's queue is full, maybe for what another thread must do.
#include "replay.hpp"

#include <pybind11/stl.h>
#include <structmember.h>

#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "driver.hpp"
#include "failure.hpp"

namespace py = pybind11;

namespace te_compile::python {
namespace {

constexpr Py_ssize_t kVectorcallOffset = PY_VECTORCALL_ARGUMENTS_OFFSET;

/// `length` elements on the stack if there are few.
template <typename T, size_t kFew>
class Elements {
 public:
  explicit Elements(size_t length) {
    if (length > kFew) many_ = std::make_unique<T[]>(length);
  }
  T* data() { return many_ ? many_.get() : few_; }
  T& operator[](size_t at) { return data()[at]; }

 private:
  T few_[kFew];
  std::unique_ptr<T[]> many_;
};

/// An owned reference that may be null.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {}
  Ref(Ref&& other) noexcept : object_(other.release()) {}
  Ref& operator=(Ref&& other) noexcept {
    PyObject* const before = object_;
    object_ = other.release();
    Py_XDECREF(before);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }
  static Ref to(const py::handle& object) { return Ref(Py_XNewRef_(object.ptr())); }
  PyObject* get() const { return object_; }
  PyObject* release() {
    PyObject* const owned = object_;
    object_ = nullptr;
    return owned;
  }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  static PyObject* Py_XNewRef_(PyObject* object) {
    Py_XINCREF(object);
    return object;
  }
  PyObject* object_ = nullptr;
};

/// References that die together, also when a call fails halfway.
class Refs {
 public:
  explicit Refs(size_t most) : objects_(most) {}
  ~Refs() {
    for (size_t at = 0; at < count_; ++at) Py_DECREF(objects_[at]);
  }
  Refs(const Refs&) = delete;
  Refs& operator=(const Refs&) = delete;
  void add(PyObject* owned) { objects_[count_++] = owned; }
  PyObject* operator[](size_t at) { return objects_[at]; }
  PyObject** data() { return objects_.data(); }
  size_t size() const { return count_; }

 private:
  Elements<PyObject*, 32> objects_;
  size_t count_ = 0;
};

struct Names {
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* calls = PyUnicode_InternFromString("calls");
};
Names* names = nullptr;  // made once, never destroyed

/// Where `tensor` begins. False: a Python error is set.
bool address_of(PyObject* tensor, uintptr_t& address) {
  const Ref number(PyObject_CallMethodNoArgs(tensor, names->data_ptr));
  if (!number) return false;
  address = PyLong_AsUnsignedLongLong(number.get());
  return address != static_cast<uintptr_t>(-1) || PyErr_Occurred() == nullptr;
}

// --- what is played ---------------------------------------------------------------------------------------------------

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

/// `call` does the same by way of Python, and is all there is of a step of another kind.
struct Step {
  Call call;
  std::optional<Launch> launch;
  std::optional<Product> product;
  bool is_native() const { return launch || product; }
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

// --- playing ------------------------------------------------------------------------------------------------------------

/// The object for the stream, made when the first one asks for it.
class Stream {
 public:
  Stream(PyObject* device, uintptr_t stream) : device_(device), stream_(stream) {}
  PyObject* device() const { return device_; }
  PyObject* object() {
    if (!object_) object_ = Ref(PyLong_FromUnsignedLongLong(stream_));
    return object_.get();
  }

 private:
  PyObject* const device_;
  const uintptr_t stream_;
  Ref object_;
};

Ref key_of(Stream& stream, PyObject* kind) {
  PyObject* const number = stream.object();
  return number == nullptr ? Ref() : Ref(PyTuple_Pack(3, stream.device(), number, kind));
}

/// The last of the list under `key`; null without an error if there is none.
Ref popped(PyObject* table, PyObject* key) {
  PyObject* const list = PyDict_GetItemWithError(table, key);
  if (list == nullptr || !PyList_CheckExact(list)) return Ref();
  const Py_ssize_t length = PyList_GET_SIZE(list);
  if (length == 0) return Ref();
  Ref last = Ref::to(PyList_GET_ITEM(list, length - 1));
  if (PyList_SetSlice(list, length - 1, length, nullptr) != 0) return Ref();
  return last;
}

Ref made(const Make& make, Stream& stream) {
  if (make.how == Make::kFresh) {
    std::array<PyObject*, 5> arguments{};  // the first is the callee's to write
    for (size_t at = 0; at < make.arguments.size(); ++at) arguments[at + 1] = make.arguments[at].get();
    return Ref(PyObject_Vectorcall(make.function.get(), arguments.data() + 1,
                                   make.arguments.size() | static_cast<size_t>(kVectorcallOffset), nullptr));
  }
  if (make.table) {
    const Ref key = key_of(stream, make.kind.get());
    if (!key) return Ref();
    Ref found = popped(make.table.get(), key.get());
    if (found || PyErr_Occurred() != nullptr) return found;
  }
  PyObject* const number = stream.object();
  if (number == nullptr) return Ref();
  PyObject* arguments[] = {nullptr, stream.device(), number, make.kind.get()};
  const size_t count = make.how == Make::kStock ? 3 : 2;
  return Ref(PyObject_Vectorcall(make.function.get(), arguments + 1, count | static_cast<size_t>(kVectorcallOffset),
                                 nullptr));
}

/// Puts back what was borrowed when the call is over, however it ends: what it launched on this stream comes before what
/// the next borrower launches.
class Borrowed {
 public:
  Borrowed(const Work& work, Refs& tensors, Stream& stream) : work_(work), tensors_(tensors), stream_(stream) {}
  ~Borrowed() {
    for (size_t at = 0; at < work_.makes.size(); ++at) {
      const Make& make = work_.makes[at];
      if (make.how == Make::kBorrowed && work_.given + at < tensors_.size()) put_back(make, work_.given + at);
    }
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

 private:
  void put_back(const Make& make, size_t tensor) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    const Ref key = key_of(stream_, make.kind.get());
    if (key) {
      PyObject* list = PyDict_GetItemWithError(make.table.get(), key.get());
      if (list == nullptr && PyErr_Occurred() == nullptr) {
        const Ref fresh(PyList_New(0));
        list = fresh ? PyDict_SetDefault(make.table.get(), key.get(), fresh.get()) : nullptr;
      }
      if (list != nullptr && PyList_CheckExact(list)) PyList_Append(list, tensors_[tensor]);
    }
    PyErr_Clear();  // then it is freed
    PyErr_Restore(type, value, trace);
  }

  const Work& work_;
  Refs& tensors_;
  Stream& stream_;
};

/// What went wrong without the interpreter lock.
struct Trouble {
  driver::Result driver = driver::kSuccess;
  te_status core = TE_OK;
  explicit operator bool() const { return driver != driver::kSuccess || core != TE_OK; }
};

void set_error_of(const Trouble& trouble) {
  if (trouble.core != TE_OK) return python::set_error_of(trouble.core);
  const char* text = nullptr;
  driver::entry_points().error_string(trouble.driver, &text);
  // In the words of Triton's launcher, which would have raised it.
  PyErr_Format(PyExc_RuntimeError, "Triton Error [CUDA]: %s", text == nullptr ? "unknown error" : text);
}

bool call(const Call& call, const uintptr_t* addresses) {
  const size_t length = call.arguments.size();
  Elements<PyObject*, 48> arguments(length + 1);
  Refs numbers(call.spots.size());
  arguments[0] = nullptr;
  for (size_t at = 0; at < length; ++at) arguments[at + 1] = call.arguments[at].get();
  for (const Spot& spot : call.spots) {
    PyObject* const number = PyLong_FromUnsignedLongLong(addresses[spot.tensor] + static_cast<uintptr_t>(spot.offset));
    if (number == nullptr) return false;
    numbers.add(number);
    arguments[spot.where + 1] = number;
  }
  return static_cast<bool>(Ref(PyObject_Vectorcall(call.function.get(), arguments.data() + 1,
                                                   length | static_cast<size_t>(kVectorcallOffset), nullptr)));
}

driver::Result run(const Launch& launch, const driver::Driver& driver, const uintptr_t* addresses, size_t stream) {
  const size_t count = launch.values.size();
  Elements<uint64_t, 40> values(count);
  Elements<void*, 40> parameters(count);
  std::memcpy(values.data(), launch.values.data(), count * sizeof(uint64_t));
  for (const Spot& spot : launch.spots) values[spot.where] = addresses[spot.tensor] + static_cast<uint64_t>(spot.offset);
  for (size_t at = 0; at < count; ++at) parameters[at] = values.data() + at;
  return driver.launch(launch.function, launch.grid[0], launch.grid[1], launch.grid[2], launch.threads, 1, 1,
                       launch.shared_bytes, reinterpret_cast<void*>(addresses[stream]), parameters.data(), nullptr);
}

te_gemm pointed(const Product& product, const uintptr_t* addresses) {
  te_gemm gemm = product.gemm;
  for (const Spot& spot : product.spots) {
    const uintptr_t address = addresses[spot.tensor] + static_cast<uintptr_t>(spot.offset);
    std::memcpy(reinterpret_cast<char*>(&gemm) + spot.where, &address, sizeof address);
  }
  return gemm;
}

Trouble run_natively(const Step* first, const Step* last, const driver::Driver* driver, const uintptr_t* addresses,
                     size_t stream) {
  Trouble trouble;
  for (; first != last && !trouble; ++first) {
    if (first->launch) {
      trouble.driver = run(*first->launch, *driver, addresses, stream);
    } else {
      const te_gemm gemm = pointed(*first->product, addresses);
      trouble.core = te_cublaslt_run(first->product->prepared, &gemm);
    }
  }
  return trouble;
}

/// Is the driver there, with a context in this thread, and is every product among these steps prepared? Else Python does
/// the work, in which all of this is seen to. Errors are set by that, too.
const driver::Driver* ready(Step* first, const Step* last, const uintptr_t* addresses) {
  const driver::Driver* driver = nullptr;
  try {
    driver = &driver::entry_points();
  } catch (const Failure&) {
    return nullptr;
  }
  void* context = nullptr;
  if (driver->current_context(&context) != driver::kSuccess || context == nullptr) return nullptr;
  for (; first != last; ++first) {
    if (!first->product || first->product->prepared != nullptr) continue;
    const te_gemm gemm = pointed(*first->product, addresses);
    if (te_cublaslt_prepare(&gemm, &first->product->prepared) != TE_OK) return nullptr;
  }
  return driver;
}

bool play_steps(Work& work, const uintptr_t* addresses) {
  Step* step = work.steps.data();
  Step* const end = step + work.steps.size();
  while (step != end) {
    Step* last = step;
    while (last != end && last->is_native()) ++last;
    const driver::Driver* const driver = step == last ? nullptr : ready(step, last, addresses);
    if (driver == nullptr) {
      if (!call(step->call, addresses)) return false;
      ++step;
      continue;
    }
    Trouble trouble;
    Py_BEGIN_ALLOW_THREADS;
    trouble = run_natively(step, last, driver, addresses, work.tensors());
    Py_END_ALLOW_THREADS;
    if (trouble) return set_error_of(trouble), false;
    step = last;
  }
  return true;
}

PyObject* results_of(const Work& work, Refs& tensors) {
  const auto tensor = [&](size_t at) {
    PyObject* const found = tensors[work.results[at]];
    Py_INCREF(found);
    return found;
  };
  if (work.shape == Work::kOne) return tensor(0);
  const auto length = static_cast<Py_ssize_t>(work.results.size());
  PyObject* const results = work.shape == Work::kList ? PyList_New(length) : PyTuple_New(length);
  if (results == nullptr) return nullptr;
  for (Py_ssize_t at = 0; at < length; ++at) {
    if (work.shape == Work::kList) {
      PyList_SET_ITEM(results, at, tensor(static_cast<size_t>(at)));
    } else {
      PyTuple_SET_ITEM(results, at, tensor(static_cast<size_t>(at)));
    }
  }
  return results;
}

/// tensors, addresses: those of the call, with room for what is made and, among the addresses, for the stream.
PyObject* play(Player* player, Refs& tensors, uintptr_t* addresses, PyObject* device, uintptr_t stream) {
  Work& work = *player->work;
  Stream streams(device, stream);
  const Borrowed borrowed(work, tensors, streams);
  for (const Make& make : work.makes) {
    Ref tensor = made(make, streams);
    if (!tensor) {
      if (PyErr_Occurred() == nullptr) PyErr_SetString(PyExc_RuntimeError, "replay: no memory was made");
      return nullptr;
    }
    const size_t at = tensors.size();
    tensors.add(tensor.release());
    if (!address_of(tensors[at], addresses[at])) return nullptr;
  }
  addresses[work.tensors()] = stream;
  if (!play_steps(work, addresses)) return nullptr;
  return results_of(work, tensors);
}

/// (tensors, addresses, device, stream) -> results: a Tape's call, and a list of addresses for those who have read them.
PyObject* play_lists(PyObject* self, PyObject* const* arguments, size_t flags, PyObject* keywords) {
  auto* const player = reinterpret_cast<Player*>(self);
  const Work& work = *player->work;
  if (PyVectorcall_NARGS(flags) != 4 || keywords != nullptr || !PyList_Check(arguments[0]) ||
      !PyList_Check(arguments[1])) {
    PyErr_SetString(PyExc_TypeError, "a player takes (tensors: list, addresses: list, device: int, stream: int)");
    return nullptr;
  }
  const auto given = static_cast<Py_ssize_t>(work.given);
  if (PyList_GET_SIZE(arguments[0]) != given || PyList_GET_SIZE(arguments[1]) != given) {
    return PyErr_Format(PyExc_ValueError, "%zd tensors with %zd addresses: this player takes %zd",
                        PyList_GET_SIZE(arguments[0]), PyList_GET_SIZE(arguments[1]), given);
  }
  const uintptr_t stream = PyLong_AsUnsignedLongLong(arguments[3]);
  if (PyErr_Occurred() != nullptr) return nullptr;
  try {
    Refs tensors(work.tensors());
    Elements<uintptr_t, 33> addresses(work.tensors() + 1);
    for (Py_ssize_t at = 0; at < given; ++at) {
      addresses[static_cast<size_t>(at)] = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(arguments[1], at));
      if (PyErr_Occurred() != nullptr) return nullptr;
      tensors.add(Ref::to(PyList_GET_ITEM(arguments[0], at)).release());
    }
    return play(player, tensors, addresses.data(), arguments[2], stream);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

// --- a place in generated code ------------------------------------------------------------------------------------------

/// Where a tensor of the call is: the number of a positional argument, else the name of another; and its place in a list.
struct Path {
  size_t position;
  Ref name;
  Py_ssize_t within = -1;
  uintptr_t alignment;  // of the address, in the bits that are looked at
};

/// What is asked at each call. All of them are given by Python, as functions and as dictionaries to look into.
struct Questions {
  Ref tensor_type, profiler_enabled, device_of, current_device, is_capturing, stream_of;
  std::vector<std::pair<Ref, Ref>> flags;     // (dictionary, key), all of which must be false
  std::vector<Ref> closed;                    // functions that must return false
  std::pair<Ref, Ref> pending;                // (dictionary, key): true as it was when the call was bound
  std::pair<Ref, Ref> runtime;                // (dictionary, key) of Triton's settings
  std::vector<Ref> hooks;                     // their attributes, chains of hooks that must be empty
};

struct Bound {
  Ref player;
  std::vector<Path> paths;
  size_t positional, named;
  uintptr_t address_bits;
  Ref device;
  long device_number;
  bool pending;
};

struct Place {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* unbound;  // (arguments: tuple, named: dict) -> results
  const Questions* questions;
  std::shared_ptr<const Bound>* bound;  // replaced as a whole: another thread may be playing it
};

enum Answer { kNo = 0, kYes = 1, kError = -1 };

Answer truth(PyObject* object) { return static_cast<Answer>(PyObject_IsTrue(object)); }

Answer truth_of_call(PyObject* function) {
  const Ref result(PyObject_CallNoArgs(function));
  return result ? truth(result.get()) : kError;
}

Answer truth_of(const std::pair<Ref, Ref>& entry) {
  PyObject* const found = PyDict_GetItemWithError(entry.first.get(), entry.second.get());
  if (found == nullptr) {
    if (PyErr_Occurred() == nullptr) PyErr_SetObject(PyExc_KeyError, entry.second.get());
    return kError;
  }
  return truth(Ref::to(found).get());
}

/// Does the chain of hooks hold any? Triton before it had chains kept one function or None.
Answer has_hooks(PyObject* runtime, PyObject* name) {
  const Ref chain(PyObject_GetAttr(runtime, name));
  if (!chain) return kError;
  const Ref calls(PyObject_GetAttr(chain.get(), names->calls));
  if (calls) return truth(calls.get());
  if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return kError;
  PyErr_Clear();
  return truth(chain.get());
}

Answer is_watched(const Questions& questions) {
  if (questions.hooks.empty()) return kNo;
  PyObject* const found = PyDict_GetItemWithError(questions.runtime.first.get(), questions.runtime.second.get());
  if (found == nullptr) {
    if (PyErr_Occurred() == nullptr) PyErr_SetObject(PyExc_KeyError, questions.runtime.second.get());
    return kError;
  }
  const Ref runtime = Ref::to(found);
  for (const Ref& hook : questions.hooks) {
    const Answer answer = has_hooks(runtime.get(), hook.get());
    if (answer != kNo) return answer;
  }
  return kNo;
}

/// Does an int that a function of `argument` (null for none) returns equal `wanted`?
Answer equals(PyObject* function, PyObject* argument, long wanted) {
  const Ref result(argument == nullptr ? PyObject_CallNoArgs(function) : PyObject_CallOneArg(function, argument));
  if (!result) return kError;
  const long number = PyLong_AsLong(result.get());
  if (number == -1 && PyErr_Occurred() != nullptr) return kError;
  return number == wanted ? kYes : kNo;
}

/// May what is bound be played now, as far as it is no matter of the tensors?
Answer may_play(const Questions& questions, const Bound& bound) {
  for (const auto& flag : questions.flags) {
    const Answer answer = truth_of(flag);
    if (answer != kNo) return answer == kYes ? kNo : kError;
  }
  const Answer pending = truth_of(questions.pending);
  if (pending == kError || pending != static_cast<Answer>(bound.pending)) return pending == kError ? kError : kNo;
  for (const Ref& function : questions.closed) {
    const Answer answer = truth_of_call(function.get());
    if (answer != kNo) return answer == kYes ? kNo : kError;
  }
  const Answer watched = is_watched(questions);
  return watched == kError ? kError : watched == kYes ? kNo : kYes;
}

/// The argument that a path leads to, borrowed; null if there is none.
PyObject* follow(const Path& path, PyObject* const* arguments, size_t positional, PyObject* keywords) {
  PyObject* found = nullptr;
  if (!path.name) {
    found = path.position < positional ? arguments[path.position] : nullptr;
  } else if (keywords != nullptr) {
    const Py_ssize_t count = PyTuple_GET_SIZE(keywords);
    for (Py_ssize_t at = 0; at < count && found == nullptr; ++at) {
      PyObject* const name = PyTuple_GET_ITEM(keywords, at);
      if (name == path.name.get() || PyUnicode_Compare(name, path.name.get()) == 0) found = arguments[positional + at];
    }
  }
  if (found == nullptr || path.within < 0) return found;
  if (PyList_Check(found)) return path.within < PyList_GET_SIZE(found) ? PyList_GET_ITEM(found, path.within) : nullptr;
  if (PyTuple_Check(found)) return path.within < PyTuple_GET_SIZE(found) ? PyTuple_GET_ITEM(found, path.within) : nullptr;
  return nullptr;
}

/// Read the tensors of the call and where they are: kNo if they are not what was bound.
Answer read(const Questions& questions, const Bound& bound, PyObject* const* arguments, size_t positional,
            PyObject* keywords, Refs& tensors, uintptr_t* addresses) {
  const size_t named = keywords == nullptr ? 0 : static_cast<size_t>(PyTuple_GET_SIZE(keywords));
  if (positional != bound.positional || named != bound.named) return kNo;
  auto* const type = reinterpret_cast<PyTypeObject*>(questions.tensor_type.get());
  for (const Path& path : bound.paths) {
    PyObject* const tensor = follow(path, arguments, positional, keywords);
    if (tensor == nullptr || !PyObject_TypeCheck(tensor, type)) return kNo;
    const size_t at = tensors.size();
    tensors.add(Ref::to(tensor).release());
    if (!address_of(tensor, addresses[at])) return kError;
    if ((addresses[at] & bound.address_bits) != path.alignment) return kNo;
  }
  return kYes;
}

/// The results, or null with *unplayed if Python should do it, or null with an error.
PyObject* play_bound(Place* place, PyObject* const* arguments, size_t positional, PyObject* keywords, bool* unplayed) {
  const Questions& questions = *place->questions;
  const std::shared_ptr<const Bound> alive = *place->bound;
  const Bound& bound = *alive;
  auto* const player = reinterpret_cast<Player*>(bound.player.get());
  PyObject* const device = bound.device.get();
  const auto settle = [&](Answer answer) {
    *unplayed = answer == kNo;
    return answer == kYes;
  };
  const Answer profiled = truth_of_call(questions.profiler_enabled.get());
  if (profiled != kNo) return settle(profiled == kYes ? kNo : kError), nullptr;
  if (!settle(may_play(questions, bound))) return nullptr;
  const size_t count = player->work->tensors();
  Refs tensors(count);
  Elements<uintptr_t, 33> addresses(count + 1);
  if (!settle(read(questions, bound, arguments, positional, keywords, tensors, addresses.data()))) return nullptr;
  if (!settle(equals(questions.device_of.get(), tensors[0], bound.device_number))) return nullptr;
  if (!settle(equals(questions.current_device.get(), nullptr, bound.device_number))) return nullptr;
  const Answer capturing = truth_of_call(questions.is_capturing.get());
  if (capturing != kNo) return settle(capturing == kYes ? kNo : kError), nullptr;
  const Ref number(PyObject_CallOneArg(questions.stream_of.get(), device));
  if (!number) return nullptr;
  const uintptr_t stream = PyLong_AsUnsignedLongLong(number.get());
  if (PyErr_Occurred() != nullptr) return nullptr;
  return play(player, tensors, addresses.data(), device, stream);
}

PyObject* call_unbound(Place* place, PyObject* const* arguments, size_t positional, PyObject* keywords) {
  const Ref tuple(PyTuple_New(static_cast<Py_ssize_t>(positional)));
  const Ref named(PyDict_New());
  if (!tuple || !named) return nullptr;
  for (size_t at = 0; at < positional; ++at) {
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(at), Ref::to(arguments[at]).release());
  }
  const Py_ssize_t count = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t at = 0; at < count; ++at) {
    if (PyDict_SetItem(named.get(), PyTuple_GET_ITEM(keywords, at), arguments[positional + at]) != 0) return nullptr;
  }
  const Ref function = Ref::to(place->unbound);
  if (!function) return PyErr_Format(PyExc_RuntimeError, "replay: this place is gone");
  return PyObject_CallFunctionObjArgs(function.get(), tuple.get(), named.get(), nullptr);
}

PyObject* call_place(PyObject* self, PyObject* const* arguments, size_t flags, PyObject* keywords) {
  auto* const place = reinterpret_cast<Place*>(self);
  const auto positional = static_cast<size_t>(PyVectorcall_NARGS(flags));
  try {
    if (*place->bound) {
      bool unplayed = false;
      PyObject* const results = play_bound(place, arguments, positional, keywords, &unplayed);
      if (!unplayed) return results;
    }
    return call_unbound(place, arguments, positional, keywords);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

// --- the two types ------------------------------------------------------------------------------------------------------

int visit_ref(const Ref& ref, visitproc visit, void* arg) { return ref ? visit(ref.get(), arg) : 0; }

int visit_work(const Work& work, visitproc visit, void* arg) {
  for (const Make& make : work.makes) {
    for (const Ref* ref : {&make.function, &make.table, &make.kind}) {
      if (const int found = visit_ref(*ref, visit, arg)) return found;
    }
    for (const Ref& ref : make.arguments) {
      if (const int found = visit_ref(ref, visit, arg)) return found;
    }
  }
  for (const Step& step : work.steps) {
    if (const int found = visit_ref(step.call.function, visit, arg)) return found;
    for (const Ref& ref : step.call.arguments) {
      if (const int found = visit_ref(ref, visit, arg)) return found;
    }
  }
  return visit_ref(work.kept, visit, arg);
}

int traverse_player(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  const Work* const work = reinterpret_cast<Player*>(self)->work;
  return work == nullptr ? 0 : visit_work(*work, visit, arg);
}

void destroy_player(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  delete reinterpret_cast<Player*>(self)->work;
  type->tp_free(self);
  Py_DECREF(type);
}

int traverse_place(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  const auto* const place = reinterpret_cast<Place*>(self);
  Py_VISIT(place->unbound);
  if (*place->bound) Py_VISIT((*place->bound)->player.get());
  return 0;
}

void rebind(Place* place, std::shared_ptr<const Bound> bound) {
  place->bound->swap(bound);  // what was bound may run Python as it goes: it goes last
}

int clear_place(PyObject* self) {
  auto* const place = reinterpret_cast<Place*>(self);
  rebind(place, nullptr);
  Py_CLEAR(place->unbound);
  return 0;
}

void destroy_place(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear_place(self);
  delete reinterpret_cast<Place*>(self)->questions;
  delete reinterpret_cast<Place*>(self)->bound;
  type->tp_free(self);
  Py_DECREF(type);
}

template <typename Object>
PyMemberDef* vectorcall_member() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(Object, vectorcall), READONLY, nullptr}, {}};
  return members;
}

template <typename Object>
PyTypeObject* make_type(const char* name, const char* text, traverseproc traverse, inquiry clear, destructor destroy,
                        PyMethodDef* methods, PyGetSetDef* properties) {
  PyType_Slot slots[] = {
      {Py_tp_doc, const_cast<char*>(text)},
      {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
      {Py_tp_members, vectorcall_member<Object>()},
      {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
      {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
      {Py_tp_methods, methods},
      {Py_tp_getset, properties},
      {clear == nullptr ? 0 : Py_tp_clear, reinterpret_cast<void*>(clear)},
      {0, nullptr},
  };
  PyType_Spec spec{name, sizeof(Object), 0,
                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                       Py_TPFLAGS_DISALLOW_INSTANTIATION,
                   slots};
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  return reinterpret_cast<PyTypeObject*>(type);
}

PyTypeObject* player_type = nullptr;
PyTypeObject* place_type = nullptr;

// --- made from Python ---------------------------------------------------------------------------------------------------

std::vector<Ref> refs_of(const py::sequence& objects, bool with_gaps) {
  std::vector<Ref> refs;
  for (const py::handle object : objects) refs.push_back(with_gaps && object.is_none() ? Ref() : Ref::to(object));
  return refs;
}

/// Places are (where, tensor, offset), of tensors from 0, with -1 for the stream.
std::vector<Spot> spots_of(const py::sequence& places, size_t tensors, size_t length) {
  std::vector<Spot> spots;
  for (const py::handle place : places) {
    const auto [where, tensor, offset] = py::cast<std::tuple<size_t, int64_t, int64_t>>(place);
    if (where >= length || tensor < -1 || tensor >= static_cast<int64_t>(tensors)) {
      throw py::value_error("a place leads to no argument, or comes from no tensor");
    }
    spots.push_back({where, tensor < 0 ? tensors : static_cast<size_t>(tensor), offset});
  }
  return spots;
}

Make make_of(const py::tuple& how) {
  const auto name = py::cast<std::string>(how[0]);
  Make make{};
  make.function = Ref::to(how[1]);
  if (name == "called") {
    make.how = Make::kCalled;
  } else if (name == "fresh") {
    make.how = Make::kFresh;
    make.arguments = refs_of(how[2], false);
    if (make.arguments.size() > 4) throw py::value_error("memory is made of at most 4 arguments");
  } else if (name == "stock" || name == "borrowed") {
    make.how = name == "stock" ? Make::kStock : Make::kBorrowed;
    make.table = Ref::to(py::cast<py::dict>(how[2]));
    make.kind = Ref::to(how[3]);
  } else {
    throw py::value_error("memory is 'called', 'fresh', 'stock' or 'borrowed', not '" + name + "'");
  }
  return make;
}

Call call_of(const py::tuple& step, size_t tensors) {
  Call call;
  call.function = Ref::to(step[0]);
  call.arguments = refs_of(step[1], false);
  call.spots = spots_of(step[2], tensors, call.arguments.size());
  return call;
}

/// (function, (x, y, z), threads, shared bytes, values of the parameters, places among them)
Launch launch_of(const py::tuple& description, size_t tensors) {
  Launch launch{};
  launch.function = reinterpret_cast<void*>(py::cast<uintptr_t>(description[0]));
  const auto grid = py::cast<std::array<unsigned, 3>>(description[1]);
  std::copy(grid.begin(), grid.end(), launch.grid);
  launch.threads = py::cast<unsigned>(description[2]);
  launch.shared_bytes = py::cast<unsigned>(description[3]);
  launch.values = py::cast<std::vector<uint64_t>>(description[4]);
  launch.spots = spots_of(description[5], tensors, launch.values.size());
  for (const unsigned length : {grid[0], grid[1], grid[2], launch.threads}) {
    if (length == 0) throw py::value_error("a launch of nothing");
  }
  if (launch.function == nullptr) throw py::value_error("a launch without a kernel");
  return launch;
}

/// Where the address at this argument of cublaslt_gemm is kept.
size_t field_of(size_t argument) {
  constexpr size_t kStream = 29, kWorkspace = 26;
  constexpr size_t kFields[] = {offsetof(te_gemm, a),           offsetof(te_gemm, b),       offsetof(te_gemm, d),
                                offsetof(te_gemm, a_scale_inv), offsetof(te_gemm, b_scale_inv),
                                offsetof(te_gemm, d_scale),     offsetof(te_gemm, amax_d),  offsetof(te_gemm, bias),
                                offsetof(te_gemm, aux),         offsetof(te_gemm, addend)};
  if (argument >= 1 && argument <= std::size(kFields)) return kFields[argument - 1];
  if (argument == kWorkspace) return offsetof(te_gemm, workspace);
  if (argument == kStream) return offsetof(te_gemm, stream);
  throw py::value_error("a product has no address at argument " + std::to_string(argument));
}

/// (cublaslt_gemm's arguments with 0 where addresses go, places among them)
Product product_of(const py::tuple& description, size_t tensors) {
  Product product;
  const auto arguments = py::cast<py::sequence>(description[0]);
  product.gemm = gemm_of_arguments(arguments);
  product.spots = spots_of(description[1], tensors, arguments.size());
  for (Spot& spot : product.spots) spot.where = field_of(spot.where);
  return product;
}

Step step_of(const py::tuple& described, size_t tensors) {
  Step step;
  step.call = call_of(described, tensors);
  if (described.size() == 3) return step;
  const auto how = py::cast<std::string>(described[3]);
  if (how == "launch") {
    step.launch.emplace(launch_of(described[4], tensors));
  } else if (how == "product") {
    step.product.emplace(product_of(described[4], tensors));
  } else {
    throw py::value_error("a step is a 'launch' or a 'product', not '" + how + "'");
  }
  return step;
}

template <typename Object>
Object* allocated(PyTypeObject* type) {
  PyObject* const object = type->tp_alloc(type, 0);
  if (object == nullptr) throw py::error_already_set();
  return reinterpret_cast<Object*>(object);
}

py::object make_player(size_t given, const py::sequence& makes, const py::sequence& steps, const py::object& results,
                       const py::object& kept) {
  auto work = std::make_unique<Work>();
  work->given = given;
  for (const py::handle make : makes) work->makes.push_back(make_of(py::cast<py::tuple>(make)));
  const size_t tensors = work->tensors();
  for (const py::handle step : steps) work->steps.push_back(step_of(py::cast<py::tuple>(step), tensors));
  if (py::isinstance<py::int_>(results)) {
    work->results = {py::cast<size_t>(results)};
  } else {
    work->results = py::cast<std::vector<size_t>>(results);
    work->shape = py::isinstance<py::list>(results) ? Work::kList : Work::kTuple;
  }
  for (const size_t result : work->results) {
    if (result >= tensors) throw py::value_error("a result is no tensor of the call");
  }
  work->kept = Ref::to(kept);
  auto* const player = allocated<Player>(player_type);
  player->vectorcall = &play_lists;
  player->work = work.release();
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(player));
}

std::pair<Ref, Ref> entry_of(const py::handle& entry) {
  const auto pair = py::cast<py::tuple>(entry);
  return {Ref::to(py::cast<py::dict>(pair[0])), Ref::to(pair[1])};
}

std::unique_ptr<Questions> questions_of(const py::dict& given) {
  auto questions = std::make_unique<Questions>();
  questions->tensor_type = Ref::to(py::cast<py::type>(given["tensor_type"]));
  questions->profiler_enabled = Ref::to(given["profiler_enabled"]);
  questions->device_of = Ref::to(given["device_of"]);
  questions->current_device = Ref::to(given["current_device"]);
  questions->is_capturing = Ref::to(given["is_capturing"]);
  questions->stream_of = Ref::to(given["stream_of"]);
  for (const py::handle flag : py::cast<py::sequence>(given["flags"])) questions->flags.push_back(entry_of(flag));
  questions->closed = refs_of(given["closed"], false);
  questions->pending = entry_of(given["pending"]);
  questions->runtime = entry_of(given["runtime"]);
  questions->hooks = refs_of(given["hooks"], false);
  return questions;
}

py::object make_place(const py::object& unbound, const py::dict& questions) {
  std::unique_ptr<Questions> asked = questions_of(questions);
  auto nothing = std::make_unique<std::shared_ptr<const Bound>>();
  auto* const place = allocated<Place>(place_type);
  place->vectorcall = &call_place;
  place->unbound = Ref::to(unbound).release();
  place->questions = asked.release();
  place->bound = nothing.release();
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(place));
}

/// paths: (number or name of the argument, place in a list or None), one for each tensor that the player takes.
void bind_place(const py::object& self, const py::object& player, const py::sequence& paths, size_t positional,
                size_t named, int64_t address_bits, const std::vector<uint64_t>& alignments, long device, bool pending) {
  if (Py_TYPE(self.ptr()) != place_type || Py_TYPE(player.ptr()) != player_type) {
    throw py::type_error("bind takes a place and a player");
  }
  auto bound = std::make_shared<Bound>();
  const size_t given = reinterpret_cast<Player*>(player.ptr())->work->given;
  if (given == 0 || paths.size() != given || alignments.size() != given) {
    throw py::value_error("paths and alignments must be as many as the player takes tensors, and at least one");
  }
  bound->player = Ref::to(player);
  for (size_t at = 0; at < given; ++at) {
    const auto pair = py::cast<py::tuple>(paths[at]);
    Path path{};
    path.within = -1;
    if (py::isinstance<py::str>(pair[0])) {
      path.name = Ref::to(pair[0]);
    } else {
      path.position = py::cast<size_t>(pair[0]);
    }
    if (!pair[1].is_none()) path.within = py::cast<Py_ssize_t>(pair[1]);
    path.alignment = static_cast<uintptr_t>(alignments[at]);
    bound->paths.push_back(std::move(path));
  }
  bound->positional = positional;
  bound->named = named;
  bound->address_bits = static_cast<uintptr_t>(address_bits);
  bound->device = Ref::to(py::int_(device));
  bound->device_number = device;
  bound->pending = pending;
  rebind(reinterpret_cast<Place*>(self.ptr()), std::move(bound));
}

void unbind_place(const py::object& self) {
  if (Py_TYPE(self.ptr()) != place_type) throw py::type_error("unbind takes a place");
  rebind(reinterpret_cast<Place*>(self.ptr()), nullptr);
}

PyObject* is_bound(PyObject* self, void*) { return PyBool_FromLong(*reinterpret_cast<Place*>(self)->bound != nullptr); }

PyGetSetDef place_properties[] = {
    {"bound", &is_bound, nullptr, "Is there something to play?", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
PyGetSetDef no_properties[] = {{nullptr, nullptr, nullptr, nullptr, nullptr}};
PyMethodDef no_methods[] = {{nullptr, nullptr, 0, nullptr}};

std::string driver_missing() {
  try {
    driver::entry_points();
    return "";
  } catch (const Failure& failure) {
    return failure.what();
  }
}

void pretend_driver(uintptr_t launch, uintptr_t current_context, uintptr_t error_string) {
  static driver::Driver instead;
  if (launch == 0) return driver::pretend(nullptr);
  instead = {reinterpret_cast<driver::LaunchKernel>(launch),
             reinterpret_cast<driver::GetCurrentContext>(current_context),
             reinterpret_cast<driver::GetErrorString>(error_string)};
  driver::pretend(&instead);
}

}  // namespace

void add_replay(py::module_& module) {
  names = new Names;
  player_type = make_type<Player>("te_compile._native.Player", "Memory, steps and results of one kind of call.",
                                  &traverse_player, nullptr, &destroy_player, no_methods, no_properties);
  place_type = make_type<Place>("te_compile._native.Place", "An operator at one place in generated code.",
                                &traverse_place, &clear_place, &destroy_place, no_methods, place_properties);
  module.attr("Player") = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(player_type));
  module.attr("Place") = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(place_type));
  module.def("player", &make_player, "(given, makes, steps, results, kept) -> Player; see kernels/player.py");
  module.def("place", &make_place, "(unbound, questions) -> Place; see kernels/player.py");
  module.def("bind", &bind_place,
             "(place, player, paths, positional, named, address_bits, alignments, device, pending)");
  module.def("unbind", &unbind_place, "(place)");
  module.def("driver_missing", &driver_missing, "() -> why no kernel can be launched; empty if one can");
  module.def("pretend_driver", &pretend_driver, "(launch, current_context, error_string): for tests; 0 ends it");
}

}  // namespace te_compile::python
