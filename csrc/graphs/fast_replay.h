// Runs like one that was made before: of as many rows, while nothing but runs has been done in
// their memory pool. All that ostinato.graphs looks at before such a run, and does after its inputs
// are staged, is done here, in one function that touches little memory: by the time a step has
// ended, most of what a program uses is no longer in the CPU's caches. What is not so usual takes
// the way through Python, which says what is wrong.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "driver.h"
#include "run_lock.h"

namespace ostinato {

// Forks of this process, counted in the child: nothing of its parent's is repeated there.
inline std::int64_t forks = 0;
inline void note_fork() { ++forks; }

// What there is to know of a run.
struct KnownRun {
  std::uintptr_t executable;
  RunCounts* counts;
  enum Part {
    kBatchSize,
    kReplay,  // replays the graph where `executable` is 0, or says why that cannot be launched
    kCounts,
    kRows,    // (the outputs as they are packed, [(tensor, its shape, strides, address), ...])
    kRemake,  // returns the outputs where these cannot be: one is no longer so, or an odd dict
    kParts
  };
  PyObject* parts[kParts];
};

// An object of Python's, which all begin with `base`; zero at first.
struct FastReplay {
  PyObject base;

  // For good. Null on a CPU, where runs are in program order and nothing is captured.
  PyObject* current_stream;  // torch's function of the device's index
  PyObject* device;          // that index
  PyObject* current_device;  // torch's function; null also where there is one device only

  // Of all runs that are known: none are if `run_lock` is null.
  RunLock* run_lock;
  PyObject* lock_object;
  PyObject* stager;  // whose `stage` writes inputs
  PyObject* look;    // returns None unless memory has moved
  long long runs_per_look;
  long long runs_to_look;  // counted down by every run: at 0 a look is due
  std::int64_t forks;

  // Their rows (0: no run) and variants apart from the rest. A run of n rows is in set n % kSets,
  // whose keys fill one line of the caches.
  static constexpr int kSets = 32, kWays = 4, kRuns = kSets * kWays;
  struct Key {
    long n;
    PyObject* variant;
  };
  int next;  // of a set's ways, to be replaced
  Key keys[kRuns];
  KnownRun runs[kRuns];
};

inline void forget_run(FastReplay& replay_cache, int index) {
  PyObject* const variant = replay_cache.keys[index].variant;
  const KnownRun run = replay_cache.runs[index];
  replay_cache.keys[index] = {};
  replay_cache.runs[index] = {};
  Py_XDECREF(variant);
  for (PyObject* const part : run.parts) {
    Py_XDECREF(part);
  }
}

// What goes with the runs may call anything.
inline void forget_runs(FastReplay& replay_cache) {
  PyObject* const common[] = {replay_cache.lock_object, replay_cache.stager, replay_cache.look};
  replay_cache.run_lock = nullptr;
  replay_cache.lock_object = replay_cache.stager = replay_cache.look = nullptr;
  for (int i = 0; i < FastReplay::kRuns; ++i) {
    forget_run(replay_cache, i);
  }
  for (PyObject* const object : common) {
    Py_XDECREF(object);
  }
}

// The same where the run lock does not do it.
inline void leave_run_lock(FastReplay& replay_cache) {
  if (replay_cache.run_lock != nullptr) {
    auto& known = replay_cache.run_lock->fast_replays;
    known.erase(std::remove(known.begin(), known.end(), &replay_cache), known.end());
    forget_runs(replay_cache);
  }
}

namespace fast_replay {

// What a test has found out of Python's objects.
enum class Found { no, yes, error };

inline Found found(int answer) {
  return answer < 0 ? Found::error : answer == 0 ? Found::no : Found::yes;
}

// Whether an object that was just made equals another.
inline Found equals(PyObject* made, PyObject* other) {
  if (made == nullptr) {
    return Found::error;
  }
  const int answer = PyObject_RichCompareBool(made, other, Py_EQ);
  Py_DECREF(made);
  return found(answer);
}

// The caller's current stream, if it is that of the last call, and not being captured.
inline Found find_stream(const FastReplay& replay_cache, std::uintptr_t& stream) {
  if (replay_cache.current_stream == nullptr) {
    return Found::yes;
  }
  if (replay_cache.current_device != nullptr) {
    const Found same =
        equals(PyObject_CallNoArgs(replay_cache.current_device), replay_cache.device);
    if (same != Found::yes) {
      return same;  // the default stream is another one for each device
    }
  }
  PyObject* const current = PyObject_CallOneArg(replay_cache.current_stream, replay_cache.device);
  if (current == nullptr) {
    return Found::error;
  }
  const unsigned long long handle = PyLong_AsUnsignedLongLongMask(current);
  Py_DECREF(current);
  stream = static_cast<std::uintptr_t>(handle);
  return found(static_cast<std::int64_t>(handle) == replay_cache.run_lock->last_stream &&
               !is_capturing(stream));
}

// The first of the places where runs of so many rows may be.
inline int set_of(long n) { return static_cast<int>(n % FastReplay::kSets) * FastReplay::kWays; }

// Where the run of so many rows is, or -1. Variants are few, and mostly the same object.
inline int index_of(const FastReplay& replay_cache, long n, PyObject* variant) {
  const int first = set_of(n);
  for (int i = first; i < first + FastReplay::kWays; ++i) {
    const FastReplay::Key& key = replay_cache.keys[i];
    if (key.n == n &&
        (key.variant == variant || PyObject_RichCompareBool(key.variant, variant, Py_EQ) == 1)) {
      return i;
    }
  }
  return -1;
}

// Whether declared memory is where it was, as far as it is looked at now.
inline Found is_in_place(FastReplay& replay_cache) {
  if (--replay_cache.runs_to_look > 0) {
    return Found::yes;
  }
  PyObject* const moved = PyObject_CallNoArgs(replay_cache.look);
  if (moved == nullptr) {
    return Found::error;
  }
  Py_DECREF(moved);
  if (moved != Py_None) {
    return Found::no;  // the next look is due, and finds it again
  }
  replay_cache.runs_to_look = replay_cache.runs_per_look;
  return Found::yes;
}

inline bool is_done(PyObject* returned) {
  Py_XDECREF(returned);
  return returned != nullptr;
}

inline bool stage(const FastReplay& replay_cache, const KnownRun& run, PyObject* inputs,
                  PyObject* n) {
  static PyObject* const name = PyUnicode_InternFromString("stage");
  PyObject* const arguments[] = {replay_cache.stager, inputs, n, run.parts[KnownRun::kBatchSize]};
  return is_done(PyObject_VectorcallMethod(name, arguments, 4, nullptr));
}

inline bool replay(const KnownRun& run, std::uintptr_t stream) {
  if (run.executable != 0) {
    int error;
    Py_BEGIN_ALLOW_THREADS;  // the driver may block, on a full queue or another thread's capture
    error = launch_graph(run.executable, stream);
    Py_END_ALLOW_THREADS;
    if (error == 0) {
      return true;
    }
  }
  return is_done(PyObject_CallNoArgs(run.parts[KnownRun::kReplay]));
}

// Whether a caller has left a tensor as it was: (tensor, its shape, strides, address).
inline Found is_in_its_place(PyObject* place) {
  static PyObject* const shape = PyUnicode_InternFromString("shape");
  static PyObject* const stride = PyUnicode_InternFromString("stride");
  static PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* const tensor = PyTuple_GET_ITEM(place, 0);
  Found same = equals(PyObject_GetAttr(tensor, shape), PyTuple_GET_ITEM(place, 1));
  if (same == Found::yes) {
    same = equals(PyObject_CallMethodNoArgs(tensor, stride), PyTuple_GET_ITEM(place, 2));
  }
  if (same == Found::yes) {
    same = equals(PyObject_CallMethodNoArgs(tensor, data_ptr), PyTuple_GET_ITEM(place, 3));
  }
  return same;
}

inline PyObject* outputs(const KnownRun& run, PyObject* n) {
  PyObject* const packed = PyTuple_GET_ITEM(run.parts[KnownRun::kRows], 0);
  PyObject* const places = PyTuple_GET_ITEM(run.parts[KnownRun::kRows], 1);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(places); ++i) {
    const Found same = is_in_its_place(PyList_GET_ITEM(places, i));
    if (same == Found::error) {
      return nullptr;
    }
    if (same == Found::no) {
      return PyObject_CallOneArg(run.parts[KnownRun::kRemake], n);
    }
  }
  if (PyDict_CheckExact(packed)) {
    return PyDict_Copy(packed);
  }
  // One of another class is made anew, since the caller may change it.
  return PyDict_Check(packed) ? PyObject_CallOneArg(run.parts[KnownRun::kRemake], n)
                              : Py_NewRef(packed);
}

inline PyObject* run_locked(FastReplay& replay_cache, PyObject* n, PyObject* inputs,
                            PyObject* variant) {
  int overflow;
  const long rows = PyLong_CheckExact(n) ? PyLong_AsLongAndOverflow(n, &overflow) : 0;
  const int index = rows > 0 ? index_of(replay_cache, rows, variant) : -1;  // what overflows is -1
  if (index < 0) {
    PyErr_Clear();  // of an odd variant, which Python refuses
    Py_RETURN_NONE;
  }
  std::uintptr_t stream = 0;
  Found usual = find_stream(replay_cache, stream);
  if (usual == Found::yes) {
    usual = is_in_place(replay_cache);
  }
  if (usual == Found::no) {
    Py_RETURN_NONE;
  }
  const KnownRun& run = replay_cache.runs[index];
  if (usual == Found::error || !stage(replay_cache, run, inputs, n) || !replay(run, stream)) {
    return nullptr;
  }
  run.counts->add(rows, true);
  return outputs(run, n);
}

// run(owner, n, inputs, variant): the outputs, or None if nothing was done. What is known changes
// only in the hands of who holds the run lock.
inline PyObject* run(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 4) {
    return PyErr_Format(PyExc_TypeError, "run: got %zd arguments, expected 4", count);
  }
  auto& replay_cache = *reinterpret_cast<FastReplay*>(self);
  static PyObject* const what = PyUnicode_InternFromString("run");
  RunLock* const run_lock = replay_cache.run_lock;
  if (run_lock == nullptr || run_lock->is_closing() || replay_cache.forks != forks ||
      !run_lock->take_now(arguments[0], what)) {
    Py_RETURN_NONE;
  }
  PyObject* const outputs = run_locked(replay_cache, arguments[1], arguments[2], arguments[3]);
  run_lock->end();
  return outputs;
}

}  // namespace fast_replay
}  // namespace ostinato
