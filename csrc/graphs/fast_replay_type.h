// The type `Repeat` of ostinato._C: how it is made, learns runs and is collected.
#pragma once

#include <pybind11/pybind11.h>
#include <structmember.h>

#include <cstddef>
#include <cstdint>

#include "fast_replay.h"
#include "run_lock.h"

namespace ostinato::repeat {

// A place for a run of so many rows that is not known: a free one, or that of another run.
inline int place_for(Repeat& repeat, long n) {
  const int first = set_of(n);
  for (int i = first; i < first + Repeat::kWays; ++i) {
    if (repeat.keys[i].n == 0) {
      return i;
    }
  }
  repeat.next = (repeat.next + 1) % Repeat::kWays;
  return first + repeat.next;
}

// Takes note of a run that has just been made; its caller has the turn.
inline PyObject* learn(PyObject* self, PyObject* arguments, PyObject* keywords) {
  static const char* names[] = {"turn",       "n",      "variant", "batch_size", "stager",
                                "executable", "replay", "counts",  "look",       "runs_per_look",
                                "rows",       "remake", nullptr};
  auto& repeat = *reinterpret_cast<Repeat*>(self);
  PyObject *turn_object, *variant, *stager, *look;
  PyObject* parts[KnownRun::kParts];
  long n;
  unsigned long long executable;
  long long runs_per_look;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "$OlOOOKOOOLO!O", const_cast<char**>(names),
                                   &turn_object, &n, &variant, &parts[KnownRun::kBatchSize],
                                   &stager, &executable, &parts[KnownRun::kReplay],
                                   &parts[KnownRun::kCounts], &look, &runs_per_look, &PyTuple_Type,
                                   &parts[KnownRun::kRows], &parts[KnownRun::kRemake])) {
    return nullptr;
  }
  Turn* turn;
  RunCounts* counts;
  try {
    turn = py::cast<Turn*>(py::handle(turn_object));
    counts = py::cast<RunCounts*>(py::handle(parts[KnownRun::kCounts]));
  } catch (const py::cast_error& error) {
    return PyErr_Format(PyExc_TypeError, "learn: %s", error.what());
  }
  if (n < 1) {
    return PyErr_Format(PyExc_ValueError, "learn: got n %ld, expected at least 1", n);
  }
  if (repeat.turn == nullptr) {
    repeat.turn = turn;
    repeat.turn_object = Py_NewRef(turn_object);
    repeat.stager = Py_NewRef(stager);
    repeat.look = Py_NewRef(look);
    repeat.runs_per_look = runs_per_look;
    repeat.forks = forks;
    turn->repeats.push_back(&repeat);
  } else if (repeat.turn != turn || repeat.stager != stager || repeat.forks != forks) {
    return PyErr_Format(PyExc_ValueError, "learn: got another turn than that of the known runs");
  }
  int index = index_of(repeat, n, variant);
  if (PyErr_Occurred()) {
    return nullptr;
  }
  if (index < 0) {
    index = place_for(repeat, n);
  }
  forget_run(repeat, index);
  KnownRun& run = repeat.runs[index];
  run.executable = static_cast<std::uintptr_t>(executable);
  run.counts = counts;
  for (int i = 0; i < KnownRun::kParts; ++i) {
    run.parts[i] = Py_NewRef(parts[i]);
  }
  repeat.keys[index] = {n, Py_NewRef(variant)};
  Py_RETURN_NONE;
}

inline PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  static const char* names[] = {"current_stream", "device", "current_device", nullptr};
  PyObject *current_stream = Py_None, *device = Py_None, *current_device = Py_None;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|OOO", const_cast<char**>(names),
                                   &current_stream, &device, &current_device)) {
    return nullptr;
  }
  auto* const made = reinterpret_cast<Repeat*>(type->tp_alloc(type, 0));
  if (made == nullptr) {
    return nullptr;
  }
  const auto given = [](PyObject* value) { return value == Py_None ? nullptr : Py_NewRef(value); };
  made->current_stream = given(current_stream);
  made->device = given(device);
  made->current_device = given(current_device);
  return reinterpret_cast<PyObject*>(made);
}

inline int traverse(PyObject* self, visitproc visit, void* arg) {
  const auto& repeat = *reinterpret_cast<Repeat*>(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(repeat.current_stream);
  Py_VISIT(repeat.device);
  Py_VISIT(repeat.current_device);
  Py_VISIT(repeat.turn_object);
  Py_VISIT(repeat.stager);
  Py_VISIT(repeat.look);
  for (int i = 0; i < Repeat::kRuns; ++i) {
    Py_VISIT(repeat.keys[i].variant);
    for (PyObject* const part : repeat.runs[i].parts) {
      Py_VISIT(part);
    }
  }
  return 0;
}

inline int clear(PyObject* self) {
  auto& repeat = *reinterpret_cast<Repeat*>(self);
  leave_turn(repeat);
  Py_CLEAR(repeat.current_stream);
  Py_CLEAR(repeat.device);
  Py_CLEAR(repeat.current_device);
  return 0;
}

inline void destroy(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// A type of Python's own interface: a call of pybind11's takes as long as all of a run.
inline PyObject* type() {
  static PyMethodDef methods[] = {
      {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run)), METH_FASTCALL,
       nullptr},
      {"learn", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(learn)),
       METH_VARARGS | METH_KEYWORDS, nullptr},
      {nullptr, nullptr, 0, nullptr}};
  static PyMemberDef members[] = {
      {"runs_to_look", T_LONGLONG, offsetof(Repeat, runs_to_look), 0, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
                                {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                                {Py_tp_clear, reinterpret_cast<void*>(clear)},
                                {Py_tp_methods, methods},
                                {Py_tp_members, members},
                                {0, nullptr}};
  static PyType_Spec spec = {"ostinato._C.Repeat", sizeof(Repeat), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
  return PyType_FromSpec(&spec);
}

}  // namespace ostinato::repeat
