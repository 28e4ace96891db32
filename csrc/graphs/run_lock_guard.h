// Having a turn inside of a `with` statement of Python. What a signal handler raises, such as
// KeyboardInterrupt, comes up between two of Python's instructions. `with` looks for signals
// neither between `enter` and its block nor between the block and `exit`, which are whole in here;
// so nothing is taken that is not given back.
#pragma once

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <utility>

#include "run_lock.h"

namespace ostinato {

// One call that has the turn.
class Hold {
 public:
  Hold(py::object turn, py::object owner, py::object what, double timeout_s, bool is_run,
       py::object check, py::object refuse)
      : turn_object_(std::move(turn)),
        turn_(py::cast<Turn&>(turn_object_)),
        owner_(std::move(owner)),
        what_(std::move(what)),
        timeout_s_(timeout_s),
        is_run_(is_run),
        check_(std::move(check)),
        refuse_(std::move(refuse)) {}
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  ~Hold() { exit(); }  // of Pythons that do look for signals behind `enter`

  void enter() {
    if (!turn_.take(owner_, what_, timeout_s_)) {
      refuse_(owner_, what_);
      throw std::runtime_error("enter: the turn is taken");
    }
    has_turn_ = true;
    try {
      if (!is_run_) {
        turn_.forget();
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

  // Lets the turn outlast the `with` statement, until `end`.
  void detach() {
    turn_.detach();
    is_detached_ = true;
  }

  // Gives the turn back; again does nothing.
  void end() {
    if (has_turn_) {
      has_turn_ = false;
      turn_.end();
    }
  }

 private:
  py::object turn_object_;
  Turn& turn_;
  py::object owner_, what_;
  double timeout_s_;
  bool is_run_;
  py::object check_, refuse_;
  bool has_turn_ = false, is_detached_ = false;
};

// The calls that wait to close one runner, each inside of a `with` statement: until they are done,
// nothing is repeated in its turn.
class Closing {
 public:
  explicit Closing(py::object turn)
      : turn_object_(std::move(turn)), turn_(py::cast<Turn&>(turn_object_)) {}

  void enter() { add(1); }
  void exit() { add(-1); }
  bool any() const { return count_ != 0; }

 private:
  void add(int calls) {
    count_ += calls;
    turn_.count_closing(calls);
  }

  py::object turn_object_;
  Turn& turn_;
  int count_ = 0;
};

}  // namespace ostinato
