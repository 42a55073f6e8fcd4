// The first operators of a graph, played before it is called: see te_compile/head_start.py.
//
// Which tensors they are of is known by where these stand among what the caller gives and what earlier ones made, so a
// start is a few numbers. It is played as far as there is what it takes.
#include <vector>

#include "place.hpp"
#include "questions.hpp"
#include "replay.hpp"

namespace py = pybind11;

namespace te_compile::python {
namespace {

PyTypeObject* start_type = nullptr;

/// A tensor of a step: number `at` of what step `which` made, or of what the caller gives, whose lists are counted from
/// -1 down; and how many bytes into it.
struct Source {
  Py_ssize_t which, at;
  intptr_t offset;
};

struct Step {
  Ref place;
  std::vector<Source> sources;
};

struct Steps {
  std::vector<Step> each;
  std::vector<Ref> plain;  // the types of tensors that have an address for sure
};

struct Start {
  PyObject_HEAD vectorcallfunc vectorcall;
  Steps* steps;
};

bool is_plain(const Steps& steps, PyObject* object) {
  for (const Ref& type : steps.plain) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(object)) == type.get()) return true;
  }
  return false;
}

/// The tensor of a source, borrowed; null if there is none, or one that may have no address.
PyObject* find(const Steps& steps, const Source& source, PyObject* given, PyObject* made) {
  const bool is_given = source.which < 0;
  const Py_ssize_t list = is_given ? -1 - source.which : source.which;
  if (list >= (is_given ? PyTuple_GET_SIZE(given) : PyList_GET_SIZE(made))) return nullptr;
  PyObject* const among = is_given ? PyTuple_GET_ITEM(given, list) : PyList_GET_ITEM(made, list);
  PyObject* tensor = nullptr;
  if (PyList_Check(among)) {
    tensor = source.at < PyList_GET_SIZE(among) ? PyList_GET_ITEM(among, source.at) : nullptr;
  } else if (PyTuple_Check(among)) {
    tensor = source.at < PyTuple_GET_SIZE(among) ? PyTuple_GET_ITEM(among, source.at) : nullptr;
  } else if (source.at == 0) {
    tensor = among;  // the only result of a step
  }
  return tensor != nullptr && is_plain(steps, tensor) ? tensor : nullptr;
}

/// Plays one more step: kNo if it cannot be now, kError with a Python error.
Answer play_step(const Steps& steps, const Step& step, PyObject* given, PyObject* made) {
  std::vector<Ref> alive;
  std::vector<PyObject*> tensors;
  std::vector<intptr_t> offsets;
  for (const Source& source : step.sources) {
    PyObject* const tensor = find(steps, source, given, made);
    if (tensor == nullptr) return kNo;
    alive.push_back(Ref::to(tensor));
    tensors.push_back(tensor);
    offsets.push_back(source.offset);
  }
  const Ref results(play_early(step.place.get(), tensors.data(), offsets.data(), tensors.size()));
  if (!results) return PyErr_Occurred() == nullptr ? kNo : kError;
  return PyList_Append(made, results.get()) == 0 ? kYes : kError;
}

/// (given: tuple of lists or tuples, made: list) adds the results of each step that can be played to `made`, beginning
/// with the first one that has none there.
PyObject* play_start(PyObject* self, PyObject* const* arguments, size_t flags, PyObject* keywords) {
  if (PyVectorcall_NARGS(flags) != 2 || keywords != nullptr || !PyTuple_Check(arguments[0]) ||
      !PyList_Check(arguments[1])) {
    return PyErr_Format(PyExc_TypeError, "a start takes (given: tuple, made: list)");
  }
  const Steps& steps = *reinterpret_cast<Start*>(self)->steps;
  try {
    for (auto at = static_cast<size_t>(PyList_GET_SIZE(arguments[1])); at < steps.each.size(); ++at) {
      const Answer answer = play_step(steps, steps.each[at], arguments[0], arguments[1]);
      if (answer == kError) return nullptr;
      if (answer == kNo) break;
    }
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  Py_RETURN_NONE;
}

/// Drops what was played and not taken. Was there anything?
PyObject* forget(PyObject* self, PyObject*) {
  bool missed = false;
  for (const Step& step : reinterpret_cast<Start*>(self)->steps->each) missed = forget_early(step.place.get()) || missed;
  return PyBool_FromLong(missed);
}

int traverse_start(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  const Steps* const steps = reinterpret_cast<Start*>(self)->steps;
  if (steps == nullptr) return 0;
  for (const Step& step : steps->each) Py_VISIT(step.place.get());
  for (const Ref& type : steps->plain) Py_VISIT(type.get());
  return 0;
}

void destroy_start(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  delete reinterpret_cast<Start*>(self)->steps;
  type->tp_free(self);
  Py_DECREF(type);
}

/// steps: (place, [(which, at)], [offset in bytes]).
py::object make_start(const py::sequence& each, const py::sequence& plain) {
  auto steps = std::make_unique<Steps>();
  for (const py::handle one : each) {
    const auto [place, sources, offsets] = py::cast<std::tuple<py::object, py::sequence, py::sequence>>(one);
    if (Py_TYPE(place.ptr()) != place_type) throw py::type_error("a start is of places");
    if (sources.size() != offsets.size()) throw py::value_error("sources and offsets must be as many");
    Step step;
    step.place = Ref::to(place);
    for (size_t at = 0; at < sources.size(); ++at) {
      const auto [which, number] = py::cast<std::pair<Py_ssize_t, Py_ssize_t>>(sources[at]);
      if (number < 0) throw py::value_error("tensors are counted from 0");
      step.sources.push_back({which, number, py::cast<intptr_t>(offsets[at])});
    }
    steps->each.push_back(std::move(step));
  }
  steps->plain = refs_of(plain, false);
  auto* const start = allocated<Start>(start_type);
  start->vectorcall = &play_start;
  start->steps = steps.release();
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(start));
}

PyMethodDef methods[] = {
    {"forget", &forget, METH_NOARGS, "Drop what was played and not taken; was there anything?"},
    {nullptr, nullptr, 0, nullptr},
};
PyGetSetDef no_properties[] = {{nullptr, nullptr, nullptr, nullptr, nullptr}};

}  // namespace

void add_starts(py::module_& module) {
  start_type = make_type<Start>("te_compile._native.Start", "The first operators of a graph.", &traverse_start, nullptr,
                                &destroy_start, methods, no_properties);
  module.def("start", &make_start, "(steps: (place, sources, offsets), plain: types) -> Start; see head_start.py");
}

}  // namespace te_compile::python
