// The type `FastReplay`: how it is made, learns runs and is collected.
#pragma once

#include <pybind11/pybind11.h>
#include <structmember.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "fast_replay.h"
#include "run_lock.h"

namespace ostinato::fast_replay {

// A place for a run of so many rows that is not known: a free one, or that of another run.
inline int place_for(FastReplay& replay_cache, long n) {
  const int first = set_of(n);
  for (int i = first; i < first + FastReplay::kWays; ++i) {
    if (replay_cache.keys[i].n == 0) {
      return i;
    }
  }
  replay_cache.next = (replay_cache.next + 1) % FastReplay::kWays;
  return first + replay_cache.next;
}

// Takes note of a run that has just been made; its caller holds the run lock.
inline PyObject* learn(PyObject* self, PyObject* arguments, PyObject* keywords) {
  static const char* names[] = {"run_lock",   "n",      "variant", "batch_size", "stager",
                                "executable", "replay", "counts",  "look",       "runs_per_look",
                                "rows",       "remake", nullptr};
  auto& replay_cache = *reinterpret_cast<FastReplay*>(self);
  PyObject *lock_object, *variant, *stager, *look;
  PyObject* parts[KnownRun::kParts];
  long n;
  unsigned long long executable;
  long long runs_per_look;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "$OlOOOKOOOLO!O", const_cast<char**>(names),
                                   &lock_object, &n, &variant, &parts[KnownRun::kBatchSize],
                                   &stager, &executable, &parts[KnownRun::kReplay],
                                   &parts[KnownRun::kCounts], &look, &runs_per_look, &PyTuple_Type,
                                   &parts[KnownRun::kRows], &parts[KnownRun::kRemake])) {
    return nullptr;
  }
  RunLock* run_lock;
  RunCounts* counts;
  try {
    run_lock = py::cast<RunLock*>(py::handle(lock_object));
    counts = py::cast<RunCounts*>(py::handle(parts[KnownRun::kCounts]));
  } catch (const py::cast_error& error) {
    return PyErr_Format(PyExc_TypeError, "learn: %s", error.what());
  }
  if (n < 1) {
    return PyErr_Format(PyExc_ValueError, "learn: got n %ld, expected at least 1", n);
  }
  if (replay_cache.run_lock == nullptr) {
    replay_cache.run_lock = run_lock;
    replay_cache.lock_object = Py_NewRef(lock_object);
    replay_cache.stager = Py_NewRef(stager);
    replay_cache.look = Py_NewRef(look);
    replay_cache.runs_per_look = runs_per_look;
    replay_cache.forks = forks;
    run_lock->fast_replays.push_back(&replay_cache);
  } else if (replay_cache.run_lock != run_lock || replay_cache.stager != stager ||
             replay_cache.forks != forks) {
    return PyErr_Format(PyExc_ValueError,
                        "learn: got another run lock than that of the known runs");
  }
  int index = index_of(replay_cache, n, variant);
  if (PyErr_Occurred()) {
    return nullptr;
  }
  if (index < 0) {
    index = place_for(replay_cache, n);
  }
  forget_run(replay_cache, index);
  KnownRun& run = replay_cache.runs[index];
  run.executable = static_cast<std::uintptr_t>(executable);
  run.counts = counts;
  for (int i = 0; i < KnownRun::kParts; ++i) {
    run.parts[i] = Py_NewRef(parts[i]);
  }
  replay_cache.keys[index] = {n, Py_NewRef(variant)};
  Py_RETURN_NONE;
}

inline PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  static const char* names[] = {"current_stream", "device", "current_device", nullptr};
  PyObject *current_stream = Py_None, *device = Py_None, *current_device = Py_None;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|OOO", const_cast<char**>(names),
                                   &current_stream, &device, &current_device)) {
    return nullptr;
  }
  auto* const made = reinterpret_cast<FastReplay*>(type->tp_alloc(type, 0));
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
  const auto& replay_cache = *reinterpret_cast<FastReplay*>(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(replay_cache.current_stream);
  Py_VISIT(replay_cache.device);
  Py_VISIT(replay_cache.current_device);
  Py_VISIT(replay_cache.lock_object);
  Py_VISIT(replay_cache.stager);
  Py_VISIT(replay_cache.look);
  for (int i = 0; i < FastReplay::kRuns; ++i) {
    Py_VISIT(replay_cache.keys[i].variant);
    for (PyObject* const part : replay_cache.runs[i].parts) {
      Py_VISIT(part);
    }
  }
  return 0;
}

inline int clear(PyObject* self) {
  auto& replay_cache = *reinterpret_cast<FastReplay*>(self);
  leave_run_lock(replay_cache);
  Py_CLEAR(replay_cache.current_stream);
  Py_CLEAR(replay_cache.device);
  Py_CLEAR(replay_cache.current_device);
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
// `module` is the name under which its extension is imported.
inline PyObject* type(const std::string& module) {
  static PyMethodDef methods[] = {
      {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run)), METH_FASTCALL,
       nullptr},
      {"learn", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(learn)),
       METH_VARARGS | METH_KEYWORDS, nullptr},
      {nullptr, nullptr, 0, nullptr}};
  static PyMemberDef members[] = {
      {"runs_to_look", T_LONGLONG, offsetof(FastReplay, runs_to_look), 0, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
                                {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                                {Py_tp_clear, reinterpret_cast<void*>(clear)},
                                {Py_tp_methods, methods},
                                {Py_tp_members, members},
                                {0, nullptr}};
  static const std::string name = module + ".FastReplay";  // Python keeps the address
  static PyType_Spec spec = {name.c_str(), sizeof(FastReplay), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
  return PyType_FromSpec(&spec);
}

}  // namespace ostinato::fast_replay
