// Who holds the run lock among the runners of a memory pool, and how often each of their graphs was
// run: what ostinato.graphs and a run that is repeated without it (fast_replay.h) share.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace ostinato {

struct FastReplay;
inline void forget_runs(FastReplay& replay_cache);

// All of it is called with the GIL held.
class RunLock {
 public:
  RunLock() : lock_(PyThread_allocate_lock()) {
    if (lock_ == nullptr) {
      throw std::bad_alloc();
    }
  }
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;
  ~RunLock() {
    PyThread_acquire_lock(lock_, NOWAIT_LOCK);
    PyThread_release_lock(lock_);
    PyThread_free_lock(lock_);
  }

  // Takes the run lock if it is free.
  bool take_now(py::handle owner, py::handle what) {
    if (!PyThread_acquire_lock(lock_, NOWAIT_LOCK)) {
      return false;
    }
    note(owner, what);
    return true;
  }

  // Takes the run lock, waiting so long for other threads; false if it is taken by then.
  bool take(const py::object& owner, const py::object& what, double timeout_s) {
    if (!PyThread_acquire_lock(lock_, NOWAIT_LOCK) && !wait(timeout_s)) {
      return false;
    }
    note(owner, what);
    return true;
  }

  // Whoever holds the run lock and does more than one run lets nobody repeat what was before.
  void forget() {
    while (!fast_replays.empty()) {
      FastReplay& replay_cache = *fast_replays.back();
      // What goes with its runs may be the last that holds it.
      const auto held =
          py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(&replay_cache));
      fast_replays.pop_back();
      forget_runs(replay_cache);
    }
  }

  // Lets the run lock outlast the call that took it: any thread may end it, or wait for that.
  void detach() { thread_ = 0; }

  void end() {
    if (!is_taken_) {
      throw std::runtime_error("end: the run lock is not taken");
    }
    is_taken_ = false;
    thread_ = 0;
    const py::object dropped = std::move(owner_);  // whose end may call us
    PyThread_release_lock(lock_);
  }

  // One more call, or one less, that waits to close a runner: until then nothing is repeated.
  void count_closing(int calls) { closing_ += calls; }

  bool is_closing() const { return closing_ != 0; }
  py::object owner() const { return owner_ ? owner_ : py::none(); }
  py::object what() const { return what_ ? what_ : py::none(); }

  std::vector<FastReplay*> fast_replays;  // that know runs; each takes itself out when it ends
  std::int64_t last_stream = -1;          // of the last call; -1: none, or one that may be gone

 private:
  void note(py::handle owner, py::handle what) {
    owner_ = py::reinterpret_borrow<py::object>(owner);
    what_ = py::reinterpret_borrow<py::object>(what);
    thread_ = PyThread_get_thread_ident();
    is_taken_ = true;
  }

  bool wait(double timeout_s) {
    // What this thread is in the middle of does not end while it waits here.
    if (!(timeout_s > 0) || thread_ == PyThread_get_thread_ident()) {
      return false;
    }
    using Clock = std::chrono::steady_clock;
    using std::chrono::microseconds;
    constexpr double kMost = 1e12;  // microseconds
    const auto end =
        Clock::now() + microseconds(static_cast<std::int64_t>(std::min(1e6 * timeout_s, kMost)));
    while (true) {
      const auto left = std::chrono::duration_cast<microseconds>(end - Clock::now()).count();
      PyLockStatus status;
      {
        py::gil_scoped_release unlocked;
        status = PyThread_acquire_lock_timed(lock_, std::max<std::int64_t>(left, 0), 1);
      }
      if (status != PY_LOCK_INTR) {
        return status == PY_LOCK_ACQUIRED;
      }
      if (PyErr_CheckSignals() != 0) {
        throw py::error_already_set();
      }
    }
  }

  PyThread_type_lock lock_;
  py::object owner_, what_;
  unsigned long thread_ = 0;
  bool is_taken_ = false;
  int closing_ = 0;
};

// How a graph was used since the last capture. Read whole: the GIL is held in between.
struct RunCounts {
  std::int64_t hits = 0;   // runs that a replay served
  std::int64_t eager = 0;  // runs that called the step
  std::int64_t rows = 0;   // real ones, of both

  void add(std::int64_t n, bool replayed) {
    ++(replayed ? hits : eager);
    rows += n;
  }
};

}  // namespace ostinato
