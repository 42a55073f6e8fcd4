// A place in generated code where an operator is called: replay.py's Site, with nothing left to look up.
//
// What may have changed since a player was bound to it is asked at each call. Where the answer is not what it was, and
// until there is a player, Python does the call.
//
// A place may also be played early, before the code gets to it (head_start.py). Then the call, if it is of tensors at
// the same addresses and on the same stream, takes the results that there are.
#include <pybind11/stl.h>

#include <algorithm>
#include <utility>

#include "place.hpp"
#include "player.hpp"
#include "questions.hpp"
#include "replay.hpp"

namespace py = pybind11;

namespace te_compile::python {

PyTypeObject* place_type = nullptr;

namespace {

/// Where a tensor of the call is: the number of a positional argument, else a name; and the place in a list.
struct Path {
  size_t position;
  Ref name;
  Py_ssize_t within = -1;
  uintptr_t alignment;  // of the address, in the bits that are looked at
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

/// What was played before the code got here.
struct Early {
  std::vector<uintptr_t> addresses;
  uintptr_t stream = 0;
  Ref results;
};

struct Place {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* unbound;  // (arguments: tuple, named: dict) -> results
  const Questions* questions;
  std::shared_ptr<const Bound>* bound;  // replaced as a whole: another thread may be playing it
  Early* early;                         // null if there is nothing; taken as a whole
  bool missed;                          // was something played early that no call took?
};

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

/// Read one more tensor, and whether its address lies as that of `path` must.
Answer read(const Questions& questions, const Bound& bound, const Path& path, PyObject* tensor, uintptr_t offset,
            Refs& tensors, uintptr_t* addresses) {
  auto* const type = reinterpret_cast<PyTypeObject*>(questions.tensor_type.get());
  if (tensor == nullptr || !PyObject_TypeCheck(tensor, type)) return kNo;
  const size_t at = tensors.size();
  tensors.add(Ref::to(tensor).release());
  if (!address_of(tensor, addresses[at])) return kError;
  addresses[at] += offset;
  return (addresses[at] & bound.address_bits) == path.alignment ? kYes : kNo;
}

/// The arguments of a call.
struct Arguments {
  PyObject* const* given;
  size_t positional;
  PyObject* keywords;

  /// Read the tensors of the call and where they are: kNo if they are not what was bound.
  Answer read(const Questions& questions, const Bound& bound, Refs& tensors, uintptr_t* addresses) const {
    const size_t named = keywords == nullptr ? 0 : static_cast<size_t>(PyTuple_GET_SIZE(keywords));
    if (positional != bound.positional || named != bound.named) return kNo;
    for (const Path& path : bound.paths) {
      PyObject* const tensor = follow(path, given, positional, keywords);
      const Answer answer = python::read(questions, bound, path, tensor, 0, tensors, addresses);
      if (answer != kYes) return answer;
    }
    return kYes;
  }
};

/// A call that the code has yet to make: tensors in the order of the paths, and how many bytes into each its own lies.
struct Announced {
  PyObject* const* given;
  const intptr_t* offsets;
  size_t count;

  Answer read(const Questions& questions, const Bound& bound, Refs& tensors, uintptr_t* addresses) const {
    if (count != bound.paths.size()) return kNo;
    for (size_t at = 0; at < count; ++at) {
      const Answer answer = python::read(questions, bound, bound.paths[at], given[at],
                                         static_cast<uintptr_t>(offsets[at]), tensors, addresses);
      if (answer != kYes) return answer;
    }
    return kYes;
  }
};

/// The results, or null with *unplayed if Python should do it, or null with an error. early: what was read goes there.
template <typename Call>
PyObject* play_bound(Place* place, const Call& call, bool* unplayed, Early* early = nullptr) {
  const Questions& questions = *place->questions;
  const std::shared_ptr<const Bound> alive = *place->bound;
  const Bound& bound = *alive;
  auto* const player = reinterpret_cast<Player*>(bound.player.get());
  const auto settle = [&](Answer answer) {
    *unplayed = answer == kNo;
    return answer == kYes;
  };
  const Answer profiled = truth_of_call(questions.profiler_enabled.get());
  if (profiled != kNo) return settle(profiled == kYes ? kNo : kError), nullptr;
  if (!settle(may_play(questions, bound.pending))) return nullptr;
  const size_t count = player->work->tensors();
  Refs tensors(count);
  Elements<uintptr_t, 33> addresses(count + 1);
  if (!settle(call.read(questions, bound, tensors, addresses.data()))) return nullptr;
  if (!settle(equals(questions.device_of.get(), tensors[0], bound.device_number))) return nullptr;
  if (!settle(equals(questions.current_device.get(), nullptr, bound.device_number))) return nullptr;
  const Answer capturing = truth_of_call(questions.is_capturing.get());
  if (capturing != kNo) return settle(capturing == kYes ? kNo : kError), nullptr;
  uintptr_t stream = 0;
  if (!stream_of(questions, bound.device.get(), stream)) return nullptr;
  if (early != nullptr) {
    early->addresses.assign(addresses.data(), addresses.data() + bound.paths.size());
    early->stream = stream;
  }
  return play(player, tensors, addresses.data(), bound.device.get(), stream);
}

/// What was played early, if it was this call: kNo if it was another, which is then nobody's.
Answer was_played(Place* place, const Early& early, const Arguments& call) {
  const std::shared_ptr<const Bound> bound = *place->bound;
  if (!bound || bound->paths.size() != early.addresses.size()) return kNo;
  Refs tensors(early.addresses.size());
  Elements<uintptr_t, 33> addresses(early.addresses.size());
  const Answer answer = call.read(*place->questions, *bound, tensors, addresses.data());
  if (answer != kYes) return answer;
  if (!std::equal(early.addresses.begin(), early.addresses.end(), addresses.data())) return kNo;
  uintptr_t stream = 0;
  if (!stream_of(*place->questions, bound->device.get(), stream)) return kError;
  return stream == early.stream ? kYes : kNo;
}

/// Takes what was played early: the results if it was this call, else null without an error.
PyObject* take_early(Place* place, const Arguments& call) {
  const std::unique_ptr<Early> early(std::exchange(place->early, nullptr));
  const Answer answer = was_played(place, *early, call);
  if (answer == kNo) place->missed = true;
  return answer == kYes ? early->results.release() : nullptr;
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
  const Arguments call{arguments, positional, keywords};
  try {
    if (place->early != nullptr) {
      PyObject* const results = take_early(place, call);
      if (results != nullptr || PyErr_Occurred() != nullptr) return results;
    }
    if (*place->bound) {
      bool unplayed = false;
      PyObject* const results = play_bound(place, call, &unplayed);
      if (!unplayed) return results;
    }
    return call_unbound(place, arguments, positional, keywords);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

PyObject* forget(PyObject* self, PyObject*) { return PyBool_FromLong(forget_early(self)); }

int traverse_place(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  const auto* const place = reinterpret_cast<Place*>(self);
  Py_VISIT(place->unbound);
  if (place->questions != nullptr) {
    if (const int found = visit_questions(*place->questions, visit, arg)) return found;
  }
  if (*place->bound) Py_VISIT((*place->bound)->player.get());
  if (place->early != nullptr) Py_VISIT(place->early->results.get());
  return 0;
}

void rebind(Place* place, std::shared_ptr<const Bound> bound) {
  place->bound->swap(bound);  // what was bound may run Python as it goes: it goes last
}

int clear_place(PyObject* self) {
  auto* const place = reinterpret_cast<Place*>(self);
  rebind(place, nullptr);
  const std::unique_ptr<Early> early(std::exchange(place->early, nullptr));
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
PyMethodDef place_methods[] = {
    {"forget", &forget, METH_NOARGS, "Drop what was played early; was anything that no call took?"},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyObject* play_early(PyObject* self, PyObject* const* tensors, const intptr_t* offsets, size_t count) {
  auto* const place = reinterpret_cast<Place*>(self);
  try {
    if (!*place->bound) return nullptr;
    auto early = std::make_unique<Early>();
    bool unplayed = false;
    Ref results(play_bound(place, Announced{tensors, offsets, count}, &unplayed, early.get()));
    if (!results) return nullptr;
    early->results = Ref::to(results.get());
    const std::unique_ptr<Early> before(std::exchange(place->early, early.release()));
    place->missed = place->missed || before != nullptr;
    return results.release();
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

bool forget_early(PyObject* self) {
  auto* const place = reinterpret_cast<Place*>(self);
  const std::unique_ptr<Early> unused(std::exchange(place->early, nullptr));
  return std::exchange(place->missed, false) || unused != nullptr;
}

void add_places(py::module_& module) {
  place_type = make_type<Place>("te_compile._native.Place", "An operator at one place in generated code.",
                                &traverse_place, &clear_place, &destroy_place, place_methods, place_properties);
  module.attr("Place") = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(place_type));
  module.def("place", &make_place, "(unbound, questions) -> Place; see kernels/player.py");
  module.def("bind", &bind_place,
             "(place, player, paths, positional, named, address_bits, alignments, device, pending)");
  module.def("unbind", &unbind_place, "(place)");
}

}  // namespace te_compile::python
