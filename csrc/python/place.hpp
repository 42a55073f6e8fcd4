// A place in generated code where an operator is called, as others than the code itself see it.
#pragma once

#include "refs.hpp"

namespace te_compile::python {

extern PyTypeObject* place_type;

/// What the code has yet to call at `place`, a call of these tensors in the order of its paths, each so many bytes
/// further than its tensor begins. Returns its results, which the call takes if it is this one; null without an error if
/// it cannot be played now.
PyObject* play_early(PyObject* place, PyObject* const* tensors, const intptr_t* offsets, size_t count);

/// Drops what was played early. Was anything, since this was last asked, that no call took?
bool forget_early(PyObject* place);

}  // namespace te_compile::python
