// Plays a Work: makes memory, reads addresses, and takes the steps, the native ones without the interpreter lock.
//
// State that a call changes lives on its stack, so calls may nest and threads may mix. The lock is released while the
// driver is at work: a launch waits where the GPU's queue is full, maybe for what another thread must do.
#include "player.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <new>

#include "driver.hpp"
#include "failure.hpp"
#include "replay.hpp"

namespace te_compile::python {

PyTypeObject* player_type = nullptr;

namespace {

constexpr auto kOffset = static_cast<size_t>(PY_VECTORCALL_ARGUMENTS_OFFSET);  // the word before the arguments is free

PyObject* data_ptr = nullptr;  // the name, made once

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
    const size_t count = make.arguments.size() | kOffset;
    return Ref(PyObject_Vectorcall(make.function.get(), arguments.data() + 1, count, nullptr));
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
  return Ref(PyObject_Vectorcall(make.function.get(), arguments + 1, count | kOffset, nullptr));
}

/// Puts back what was borrowed when the call is over, however it ends: what it launched on this stream comes before
/// what the next borrower launches.
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
  const Ref result(PyObject_Vectorcall(call.function.get(), arguments.data() + 1, length | kOffset, nullptr));
  return static_cast<bool>(result);
}

driver::Result run(const Launch& launch, const driver::Driver& driver, const uintptr_t* addresses, size_t stream) {
  const size_t count = launch.values.size();
  Elements<uint64_t, 40> values(count);
  Elements<void*, 40> parameters(count);
  std::copy(launch.values.begin(), launch.values.end(), values.data());
  for (const Spot& spot : launch.spots) values[spot.where] = addresses[spot.tensor] + static_cast<uint64_t>(spot.offset);
  for (size_t at = 0; at < count; ++at) parameters[at] = values.data() + at;
  return driver.launch(launch.function, launch.grid[0], launch.grid[1], launch.grid[2], launch.threads, 1, 1,
                       launch.shared_bytes, reinterpret_cast<void*>(addresses[stream]), parameters.data(), nullptr);
}

/// The request with this call's addresses in it.
template <typename Request>
Request pointed(Request request, const std::vector<Spot>& spots, const uintptr_t* addresses) {
  for (const Spot& spot : spots) {
    const uintptr_t address = addresses[spot.tensor] + static_cast<uintptr_t>(spot.offset);
    std::memcpy(reinterpret_cast<char*>(&request) + spot.where, &address, sizeof address);
  }
  return request;
}

Trouble run_natively(const Step* first, const Step* last, const driver::Driver* driver, const uintptr_t* addresses,
                     size_t stream) {
  Trouble trouble;
  for (; first != last && !trouble; ++first) {
    if (first->launch) {
      trouble.driver = run(*first->launch, *driver, addresses, stream);
    } else if (first->product) {
      const te_gemm gemm = pointed(first->product->gemm, first->product->spots, addresses);
      trouble.core = te_cublaslt_run(first->product->prepared, &gemm);
    } else {
      const te_norm norm = pointed(first->norm->norm, first->norm->spots, addresses);
      trouble.core = te_cuda_norm_quantize(&norm);
    }
  }
  return trouble;
}

/// What `body` returns, while other threads may run Python.
template <typename Body>
auto unlocked(const Body& body) {
  const struct Unlocked {
    PyThreadState* const state = PyEval_SaveThread();
    ~Unlocked() { PyEval_RestoreThread(state); }
  } while_running;
  return body();
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
    const te_gemm gemm = pointed(first->product->gemm, first->product->spots, addresses);
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
    const Trouble trouble = unlocked([&] { return run_natively(step, last, driver, addresses, work.tensors()); });
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

}  // namespace

bool address_of(PyObject* tensor, uintptr_t& address) {
  const Ref number(PyObject_CallMethodNoArgs(tensor, data_ptr));
  if (!number) return false;
  address = PyLong_AsUnsignedLongLong(number.get());
  return address != static_cast<uintptr_t>(-1) || PyErr_Occurred() == nullptr;
}

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

namespace {

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

PyMethodDef no_methods[] = {{nullptr, nullptr, 0, nullptr}};
PyObject* steps_of(PyObject* self, void*) {
  Py_ssize_t native = 0;
  const std::vector<Step>& steps = reinterpret_cast<Player*>(self)->work->steps;
  for (const Step& step : steps) native += step.is_native();
  return Py_BuildValue("(nn)", native, static_cast<Py_ssize_t>(steps.size()));
}

PyGetSetDef properties[] = {
    {"steps", &steps_of, nullptr, "(how many need no Python, of how many)", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

}  // namespace

void add_player_type() {
  data_ptr = PyUnicode_InternFromString("data_ptr");
  player_type = make_type<Player>("te_compile._native.Player", "Memory, steps and results of one kind of call.",
                                  &traverse_player, nullptr, &destroy_player, no_methods, properties);
}

Player* new_player(std::unique_ptr<Work> work) {
  auto* const player = allocated<Player>(player_type);
  player->vectorcall = &play_lists;
  player->work = work.release();
  return player;
}

}  // namespace te_compile::python
