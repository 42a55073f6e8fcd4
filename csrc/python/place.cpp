// A place in generated code where an operator is called: replay.py's Site, with nothing left to look up.
//
// What may have changed since a player was bound to it is asked at each call. Where the answer is not what it was, and
// until there is a player, Python does the call.
#include <pybind11/stl.h>

#include "player.hpp"
#include "replay.hpp"

namespace py = pybind11;

namespace te_compile::python {
namespace {

PyTypeObject* place_type = nullptr;
PyObject* calls_name = nullptr;

/// Where a tensor of the call is: the number of a positional argument, else a name; and the place in a list.
struct Path {
  size_t position;
  Ref name;
  Py_ssize_t within = -1;
  uintptr_t alignment;  // of the address, in the bits that are looked at
};

/// What is asked at each call. All of them are given by Python, as functions and as dictionaries to look into.
struct Questions {
  Ref tensor_type, profiler_enabled, device_of, current_device, is_capturing, stream_of;
  std::vector<std::pair<Ref, Ref>> flags;  // (dictionary, key), all of which must be false
  std::vector<Ref> closed;                 // functions that must return false
  std::pair<Ref, Ref> pending;             // (dictionary, key): true or not as it was when the call was bound
  std::pair<Ref, Ref> runtime;             // (dictionary, key) of Triton's settings
  std::vector<Ref> hooks;                  // their attributes, chains of hooks that must be empty
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
  const Ref calls(PyObject_GetAttr(chain.get(), calls_name));
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

int visit_questions(const Questions& asked, visitproc visit, void* arg) {
  std::vector<const Ref*> refs = {&asked.tensor_type,  &asked.profiler_enabled, &asked.device_of,
                                  &asked.current_device, &asked.is_capturing,   &asked.stream_of,
                                  &asked.pending.first,  &asked.runtime.first};
  for (const auto& flag : asked.flags) refs.push_back(&flag.first);
  for (const Ref& function : asked.closed) refs.push_back(&function);
  for (const Ref* ref : refs) Py_VISIT(ref->get());
  return 0;
}

int traverse_place(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  const auto* const place = reinterpret_cast<Place*>(self);
  Py_VISIT(place->unbound);
  if (place->questions != nullptr) {
    if (const int found = visit_questions(*place->questions, visit, arg)) return found;
  }
  if (*place->bound) Py_VISIT((*place->bound)->player.get());
  return 0;
}

void rebind(Place* place, std::shared_ptr<const Bound> bound) {
  place->bound->swap(bound);  // what was bound may run Python as it goes: it goes last
}

int clear_place(PyObject* self) {
  auto* const place = reinterpret_cast<Place*>(self);
  rebind(place, nullptr);
  const Questions* const questions = place->questions;
  place->questions = nullptr;
  delete questions;
  Py_CLEAR(place->unbound);
  return 0;
}

void destroy_place(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear_place(self);
  delete reinterpret_cast<Place*>(self)->bound;
  type->tp_free(self);
  Py_DECREF(type);
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
PyMethodDef no_methods[] = {{nullptr, nullptr, 0, nullptr}};

}  // namespace

void add_places(py::module_& module) {
  calls_name = PyUnicode_InternFromString("calls");
  place_type = make_type<Place>("te_compile._native.Place", "An operator at one place in generated code.",
                                &traverse_place, &clear_place, &destroy_place, no_methods, place_properties);
  module.attr("Place") = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(place_type));
  module.def("place", &make_place, "(unbound, questions) -> Place; see kernels/player.py");
  module.def("bind", &bind_place,
             "(place, player, paths, positional, named, address_bits, alignments, device, pending)");
  module.def("unbind", &unbind_place, "(place)");
}

}  // namespace te_compile::python
