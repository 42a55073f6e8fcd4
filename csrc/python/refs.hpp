// References to Python objects, and types of our own that are called by the vectorcall protocol.
#pragma once

#include <pybind11/pybind11.h>
#include <structmember.h>

#include <memory>

namespace te_compile::python {

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
  static Ref to(PyObject* object) {
    Py_XINCREF(object);
    return Ref(object);
  }
  static Ref to(const pybind11::handle& object) { return to(object.ptr()); }
  PyObject* get() const { return object_; }
  PyObject* release() {
    PyObject* const owned = object_;
    object_ = nullptr;
    return owned;
  }
  explicit operator bool() const { return object_ != nullptr; }

 private:
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
  if (type == nullptr) throw pybind11::error_already_set();
  return reinterpret_cast<PyTypeObject*>(type);
}

template <typename Object>
Object* allocated(PyTypeObject* type) {
  PyObject* const object = type->tp_alloc(type, 0);
  if (object == nullptr) throw pybind11::error_already_set();
  return reinterpret_cast<Object*>(object);
}

}  // namespace te_compile::python
