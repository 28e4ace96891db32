// Holding a run lock inside of a `with` statement of Python. What a signal handler raises, such as
// KeyboardInterrupt, comes up between two of Python's instructions. `with` looks for signals
// neither between `enter` and its block nor between the block and `exit`, which are whole in here;
// so nothing is taken that is not given back.
#pragma once

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <utility>

#include "run_lock.h"

namespace ostinato {

// One call that holds the run lock.
class RunLockGuard {
 public:
  RunLockGuard(py::object run_lock, py::object owner, py::object what, double timeout_s,
               bool is_run, py::object check, py::object refuse)
      : lock_object_(std::move(run_lock)),
        run_lock_(py::cast<RunLock&>(lock_object_)),
        owner_(std::move(owner)),
        what_(std::move(what)),
        timeout_s_(timeout_s),
        is_run_(is_run),
        check_(std::move(check)),
        refuse_(std::move(refuse)) {}
  RunLockGuard(const RunLockGuard&) = delete;
  RunLockGuard& operator=(const RunLockGuard&) = delete;
  ~RunLockGuard() { exit(); }  // of Pythons that do look for signals behind `enter`

  void enter() {
    if (!run_lock_.take(owner_, what_, timeout_s_)) {
      refuse_(owner_, what_);
      throw std::runtime_error("enter: the run lock is taken");
    }
    has_turn_ = true;
    try {
      if (!is_run_) {
        run_lock_.forget();
      }
      if (!check_.is_none()) {
        check_();
      }
    } catch (...) {
      end();
      throw;
    }
  }

  void exit() {
    if (!is_detached_) {
      end();
    }
  }

  // Lets the run lock outlast the `with` statement, until `end`.
  void detach() {
    run_lock_.detach();
    is_detached_ = true;
  }

  // Gives the run lock back; again does nothing.
  void end() {
    if (has_turn_) {
      has_turn_ = false;
      run_lock_.end();
    }
  }

 private:
  py::object lock_object_;
  RunLock& run_lock_;
  py::object owner_, what_;
  double timeout_s_;
  bool is_run_;
  py::object check_, refuse_;
  bool has_turn_ = false, is_detached_ = false;
};

// The calls that wait to close one runner, each inside of a `with` statement: until they are done,
// nothing is repeated in its run lock.
class PendingCloses {
 public:
  explicit PendingCloses(py::object run_lock)
      : lock_object_(std::move(run_lock)), run_lock_(py::cast<RunLock&>(lock_object_)) {}

  void enter() { add(1); }
  void exit() { add(-1); }
  bool any() const { return count_ != 0; }

 private:
  void add(int calls) {
    count_ += calls;
    run_lock_.count_closing(calls);
  }

  py::object lock_object_;
  RunLock& run_lock_;
  int count_ = 0;
};

}  // namespace ostinato
