// Are a call's weights those of the last one, and is all else that was found out about them still so? See
// te_compile/again.py.
//
// Each weight is known by the object that it is, which is no reference: whoever makes this drops it when one dies.
#include <pybind11/stl.h>

#include <vector>

#include "player.hpp"
#include "questions.hpp"
#include "replay.hpp"

namespace py = pybind11;

namespace te_compile::python {
namespace {

PyTypeObject* unchanged_type = nullptr;
PyObject* version_name = nullptr;

struct Weight {
  Py_ssize_t position;
  PyObject* itself;  // for comparison only
  uintptr_t address;
  long version;
};

struct Knowledge {
  std::unique_ptr<Questions> questions;
  std::vector<Weight> weights;
  std::vector<std::pair<std::pair<Ref, Ref>, Ref>> numbers;  // ((dictionary, key), what stands there)
  Ref device;
  long device_number;
  uintptr_t stream;
};

struct Unchanged {
  PyObject_HEAD vectorcallfunc vectorcall;
  Knowledge* knowledge;
};

bool version_of(PyObject* tensor, long& version) {
  const Ref number(PyObject_GetAttr(tensor, version_name));
  if (!number) return false;
  version = PyLong_AsLong(number.get());
  return version != -1 || PyErr_Occurred() == nullptr;
}

Answer is_same(const Weight& weight, PyObject* arguments) {
  if (weight.position >= PyTuple_GET_SIZE(arguments)) return kNo;
  PyObject* const now = PyTuple_GET_ITEM(arguments, weight.position);
  if (now != weight.itself) return kNo;
  uintptr_t address = 0;
  long version = 0;
  if (!address_of(now, address) || !version_of(now, version)) return kError;
  return address == weight.address && version == weight.version ? kYes : kNo;
}

Answer holds(const Knowledge& known, PyObject* arguments) {
  for (const auto& [entry, number] : known.numbers) {
    PyObject* const found = found_at(entry);
    if (found == nullptr) return kError;
    const int equal = PyObject_RichCompareBool(found, number.get(), Py_EQ);
    if (equal != 1) return static_cast<Answer>(equal);
  }
  for (const Weight& weight : known.weights) {
    const Answer answer = is_same(weight, arguments);
    if (answer != kYes) return answer;
  }
  const Questions& questions = *known.questions;
  Answer answer = may_play(questions, false);
  if (answer != kYes) return answer;
  answer = equals(questions.current_device.get(), nullptr, known.device_number);
  if (answer != kYes) return answer;
  answer = truth_of_call(questions.is_capturing.get());
  if (answer != kNo) return answer == kYes ? kNo : kError;
  uintptr_t stream = 0;
  if (!stream_of(questions, known.device.get(), stream)) return kError;
  return stream == known.stream ? kYes : kNo;
}

/// (arguments: tuple) -> bool.
PyObject* ask(PyObject* self, PyObject* const* arguments, size_t flags, PyObject* keywords) {
  if (PyVectorcall_NARGS(flags) != 1 || keywords != nullptr || !PyTuple_Check(arguments[0])) {
    return PyErr_Format(PyExc_TypeError, "unchanged takes (arguments: tuple)");
  }
  const Answer answer = holds(*reinterpret_cast<Unchanged*>(self)->knowledge, arguments[0]);
  return answer == kError ? nullptr : PyBool_FromLong(answer == kYes);
}

int traverse_unchanged(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  const Knowledge* const known = reinterpret_cast<Unchanged*>(self)->knowledge;
  if (known == nullptr) return 0;
  for (const auto& [entry, number] : known->numbers) Py_VISIT(entry.first.get());
  return visit_questions(*known->questions, visit, arg);
}

void destroy_unchanged(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  delete reinterpret_cast<Unchanged*>(self)->knowledge;
  type->tp_free(self);
  Py_DECREF(type);
}

/// positions: of the weights among the arguments, whose values these are now. numbers: entries of dictionaries.
py::object make_unchanged(const py::dict& questions, const py::tuple& arguments, const std::vector<size_t>& positions,
                          const py::sequence& numbers, long device) {
  auto known = std::make_unique<Knowledge>();
  known->questions = questions_of(questions);
  for (const size_t position : positions) {
    if (position >= arguments.size()) throw py::index_error("no such argument");
    Weight weight{static_cast<Py_ssize_t>(position), PyTuple_GET_ITEM(arguments.ptr(), position), 0, 0};
    if (!address_of(weight.itself, weight.address) || !version_of(weight.itself, weight.version)) {
      throw py::error_already_set();
    }
    known->weights.push_back(weight);
  }
  for (const py::handle entry : numbers) {
    std::pair<Ref, Ref> place = entry_of(entry);
    PyObject* const now = found_at(place);
    if (now == nullptr) throw py::error_already_set();
    known->numbers.emplace_back(std::move(place), Ref::to(now));
  }
  known->device = Ref::to(py::int_(device));
  known->device_number = device;
  if (!stream_of(*known->questions, known->device.get(), known->stream)) throw py::error_already_set();
  auto* const unchanged = allocated<Unchanged>(unchanged_type);
  unchanged->vectorcall = &ask;
  unchanged->knowledge = known.release();
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(unchanged));
}

PyMethodDef no_methods[] = {{nullptr, nullptr, 0, nullptr}};
PyGetSetDef no_properties[] = {{nullptr, nullptr, nullptr, nullptr, nullptr}};

}  // namespace

void add_unchanged(py::module_& module) {
  version_name = PyUnicode_InternFromString("_version");
  unchanged_type = make_type<Unchanged>("te_compile._native.Unchanged", "Are weights what they were?",
                                        &traverse_unchanged, nullptr, &destroy_unchanged, no_methods, no_properties);
  module.def("unchanged", &make_unchanged, "(questions, arguments, positions, numbers, device) -> Unchanged; see again.py");
}

}  // namespace te_compile::python
