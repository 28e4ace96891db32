// The type `Library` of ostinato._C, by Python's own interface: a call of pybind11's that takes
// thirty keywords is slower than the launch.
#pragma once

#include <exception>
#include <new>
#include <string>

#include "library.h"

namespace ostinato::library {

struct Object {
  PyObject_HEAD Library* library;
};

inline const Library& of(PyObject* self) { return *reinterpret_cast<Object*>(self)->library; }

inline PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  static const char* names[] = {"path", "opened", nullptr};
  PyObject* path = nullptr;
  PyObject* opened = nullptr;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O&|O&", const_cast<char**>(names),
                                   PyUnicode_FSConverter, &path, PyUnicode_FSConverter, &opened)) {
    return nullptr;
  }
  const py::bytes name = py::reinterpret_steal<py::bytes>(path);
  const py::bytes file = opened == nullptr ? name : py::reinterpret_steal<py::bytes>(opened);
  try {
    auto library = std::make_unique<Library>(name, file);
    auto* const made = reinterpret_cast<Object*>(type->tp_alloc(type, 0));
    if (made != nullptr) {
      made->library = library.release();
    }
    return reinterpret_cast<PyObject*>(made);
  } catch (const std::exception& error) {
    return PyErr_Format(PyExc_RuntimeError, "%s", error.what());
  }
}

inline void destroy(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  delete reinterpret_cast<Object*>(self)->library;
  type->tp_free(self);
  Py_DECREF(type);
}

inline PyObject* prepare(PyObject* self, PyObject*) { return of(self).prepare(); }

inline PyObject* launch(PyObject* self, PyObject* const* values, Py_ssize_t positional,
                        PyObject* names) {
  return of(self).launch(values, positional, names);
}

inline PyObject* workspace_bytes(PyObject* self, PyObject* const* values, Py_ssize_t positional,
                                 PyObject* names) {
  return of(self).workspace_bytes(values, positional, names);
}

inline PyObject* path(PyObject* self, void*) {
  return PyUnicode_DecodeFSDefault(of(self).path().c_str());
}

inline PyObject* fields(PyObject* self, void*) {
  try {
    py::dict found;
    for (const LayoutField& field : of(self).layout().fields) {
      found[field.name.c_str()] = field.kind;
    }
    return found.release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
}

template <typename Function>
PyCFunction method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

inline PyObject* type() {
  static PyMethodDef methods[] = {
      {"prepare", prepare, METH_NOARGS, nullptr},
      {"launch", method(launch), METH_FASTCALL | METH_KEYWORDS, nullptr},
      {"workspace_bytes", method(workspace_bytes), METH_FASTCALL | METH_KEYWORDS, nullptr},
      {nullptr, nullptr, 0, nullptr}};
  static PyGetSetDef attributes[] = {{"path", path, nullptr, nullptr, nullptr},
                                     {"fields", fields, nullptr, nullptr, nullptr},
                                     {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
                                {Py_tp_methods, methods},
                                {Py_tp_getset, attributes},
                                {0, nullptr}};
  static PyType_Spec spec = {"ostinato._C.Library", sizeof(Object), 0, Py_TPFLAGS_DEFAULT, slots};
  return PyType_FromSpec(&spec);
}

}  // namespace ostinato::library
