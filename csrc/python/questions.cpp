#include "questions.hpp"

#include "replay.hpp"

namespace py = pybind11;

namespace te_compile::python {
namespace {

Answer truth(PyObject* object) { return static_cast<Answer>(PyObject_IsTrue(object)); }

Answer truth_of(const std::pair<Ref, Ref>& entry) {
  PyObject* const found = found_at(entry);
  return found == nullptr ? kError : truth(Ref::to(found).get());
}

/// "calls", as Triton's chains of hooks have them.
PyObject* calls_name() {
  static PyObject* const name = PyUnicode_InternFromString("calls");
  return name;
}

/// Does the chain of hooks hold any? Triton before it had chains kept one function or None.
Answer has_hooks(PyObject* runtime, PyObject* name) {
  const Ref chain(PyObject_GetAttr(runtime, name));
  if (!chain) return kError;
  const Ref calls(PyObject_GetAttr(chain.get(), calls_name()));
  if (calls) return truth(calls.get());
  if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return kError;
  PyErr_Clear();
  return truth(chain.get());
}

Answer is_watched(const Questions& questions) {
  if (questions.hooks.empty()) return kNo;
  PyObject* const found = found_at(questions.runtime);
  if (found == nullptr) return kError;
  const Ref runtime = Ref::to(found);
  for (const Ref& hook : questions.hooks) {
    const Answer answer = has_hooks(runtime.get(), hook.get());
    if (answer != kNo) return answer;
  }
  return kNo;
}

}  // namespace

std::pair<Ref, Ref> entry_of(const py::handle& pair) {
  const auto entry = py::cast<py::tuple>(pair);
  return {Ref::to(py::cast<py::dict>(entry[0])), Ref::to(entry[1])};
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

int visit_questions(const Questions& asked, visitproc visit, void* arg) {
  std::vector<const Ref*> refs = {&asked.tensor_type,  &asked.profiler_enabled, &asked.device_of,
                                  &asked.current_device, &asked.is_capturing,   &asked.stream_of,
                                  &asked.pending.first,  &asked.runtime.first};
  for (const auto& flag : asked.flags) refs.push_back(&flag.first);
  for (const Ref& function : asked.closed) refs.push_back(&function);
  for (const Ref* ref : refs) Py_VISIT(ref->get());
  return 0;
}

PyObject* found_at(const std::pair<Ref, Ref>& entry) {
  PyObject* const found = PyDict_GetItemWithError(entry.first.get(), entry.second.get());
  if (found == nullptr && PyErr_Occurred() == nullptr) PyErr_SetObject(PyExc_KeyError, entry.second.get());
  return found;
}

Answer truth_of_call(PyObject* function) {
  const Ref result(PyObject_CallNoArgs(function));
  return result ? truth(result.get()) : kError;
}

Answer equals(PyObject* function, PyObject* argument, long wanted) {
  const Ref result(argument == nullptr ? PyObject_CallNoArgs(function) : PyObject_CallOneArg(function, argument));
  if (!result) return kError;
  const long number = PyLong_AsLong(result.get());
  if (number == -1 && PyErr_Occurred() != nullptr) return kError;
  return number == wanted ? kYes : kNo;
}

Answer may_play(const Questions& questions, bool pending) {
  for (const auto& flag : questions.flags) {
    const Answer answer = truth_of(flag);
    if (answer != kNo) return answer == kYes ? kNo : kError;
  }
  const Answer pends = truth_of(questions.pending);
  if (pends == kError || pends != static_cast<Answer>(pending)) return pends == kError ? kError : kNo;
  for (const Ref& function : questions.closed) {
    const Answer answer = truth_of_call(function.get());
    if (answer != kNo) return answer == kYes ? kNo : kError;
  }
  const Answer watched = is_watched(questions);
  return watched == kError ? kError : watched == kYes ? kNo : kYes;
}

bool stream_of(const Questions& questions, PyObject* device, uintptr_t& stream) {
  const Ref number(PyObject_CallOneArg(questions.stream_of.get(), device));
  if (!number) return false;
  stream = PyLong_AsUnsignedLongLong(number.get());
  return PyErr_Occurred() == nullptr;
}

}  // namespace te_compile::python
