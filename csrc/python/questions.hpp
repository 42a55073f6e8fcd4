// What is asked before anything is played, of Python and each time anew, for it may have changed since the last call.
#pragma once

#include <utility>
#include <vector>

#include "refs.hpp"

namespace te_compile::python {

enum Answer { kNo = 0, kYes = 1, kError = -1 };

/// All of them are given by Python (questions in te_compile/kernels/player.py), as functions and as dictionaries to look
/// into.
struct Questions {
  Ref tensor_type, profiler_enabled, device_of, current_device, is_capturing, stream_of;
  std::vector<std::pair<Ref, Ref>> flags;  // (dictionary, key), all of which must be false
  std::vector<Ref> closed;                 // functions that must return false
  std::pair<Ref, Ref> pending;             // (dictionary, key): true or not, as the caller knew it
  std::pair<Ref, Ref> runtime;             // (dictionary, key) of Triton's settings
  std::vector<Ref> hooks;                  // their attributes, chains of hooks that must be empty
};

std::unique_ptr<Questions> questions_of(const pybind11::dict& given);
int visit_questions(const Questions& asked, visitproc visit, void* arg);

/// (dictionary, key).
std::pair<Ref, Ref> entry_of(const pybind11::handle& pair);

/// What stands there, borrowed; null: a Python error is set.
PyObject* found_at(const std::pair<Ref, Ref>& entry);

Answer truth_of_call(PyObject* function);

/// Does an int that a function of `argument` (null for none) returns equal `wanted`?
Answer equals(PyObject* function, PyObject* argument, long wanted);

/// May anything be played now, as far as it is no matter of tensors, devices and streams?
Answer may_play(const Questions& questions, bool pending);

/// The current stream of a device. False: a Python error is set.
bool stream_of(const Questions& questions, PyObject* device, uintptr_t& stream);

}  // namespace te_compile::python
