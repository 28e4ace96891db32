// A capture inside of a `with` statement of Python, ended whatever is raised in its block and
// whenever (run_lock_guard.h says why `with` loses nothing): a graph of torch's that is destroyed
// while it is being captured leaves torch's allocators calling what is gone.
#pragma once

#include <dlfcn.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace py = pybind11;

namespace ostinato {

class CaptureGuard {
 public:
  CaptureGuard(std::uintptr_t stream, py::object select, py::object begin, py::object end,
               py::object reset, py::object note, bool keep)
      : stream_(reinterpret_cast<void*>(stream)),
        select_(std::move(select)),
        begin_(std::move(begin)),
        end_(std::move(end)),
        reset_(std::move(reset)),
        note_(std::move(note)),
        keep_(keep) {}
  CaptureGuard(const CaptureGuard&) = delete;
  CaptureGuard& operator=(const CaptureGuard&) = delete;
  ~CaptureGuard() {  // of Pythons that look for signals behind `enter`
    if (is_active_) {
      try {
        abandon();
      } catch (py::error_already_set& error) {
        error.discard_as_unraisable("the end of a capture");
      } catch (const std::exception&) {
        // There is nobody left to tell.
      }
    }
  }

  void enter() {
    try {
      begin_();
    } catch (...) {
      // Torch's allocators may call the graph from now on, which must outlive them.
      begin_.inc_ref();
      throw;
    }
    is_active_ = true;
  }

  void exit(const py::object& error_type) {
    if (!is_active_) {
      return;
    }
    if (error_type.is_none() && keep_) {
      try {
        end_();
        is_active_ = false;
        return;
      } catch (const py::error_already_set&) {
        note_and_abandon();
        throw;
      }
    }
    note_and_abandon();
  }

 private:
  void note_and_abandon() {
    try {
      note_();  // of Python's: it may be interrupted
    } catch (const py::error_already_set&) {
      abandon();
      throw;
    }
    abandon();
  }

  // Ends a failed capture so that the stream, the allocators and the generators are usable.
  //
  // `end` raises at the driver's first complaint, before it tells torch's allocators and random
  // generators that the capture is over: they would refuse the next capture, and random numbers
  // outside of it. So the failed capture is ended here, and another begun in its place for `end` to
  // end.
  void abandon() {
    is_active_ = false;
    const Driver& driver = Driver::loaded();
    select_();  // the block may have left another stream as torch's current one
    driver.end_capture(stream_);
    if (const int error = driver.begin(stream_, kThreadLocal)) {
      throw std::runtime_error("the stream is unusable after a failed capture: CUresult " +
                               std::to_string(error));
    }
    // Of an empty graph torch would warn, in Python, where a signal handler could raise.
    driver.launch_host(stream_, [](void*) {}, nullptr);
    try {
      end_();
    } catch (...) {
      driver.end_capture(stream_);
      throw;
    }
    reset_();
  }

  static constexpr int kThreadLocal = 1;

  struct Driver {
    int (*begin)(void*, int);
    int (*end)(void*, void**);
    int (*destroy)(void*);
    int (*launch_host)(void*, void (*)(void*), void*);

    static const Driver& loaded() {
      static const Driver driver = [] {
        void* const library = dlopen("libcuda.so.1", RTLD_NOW);
        Driver found{};
        found.begin = symbol<decltype(found.begin)>(library, "cuStreamBeginCapture_v2");
        found.end = symbol<decltype(found.end)>(library, "cuStreamEndCapture");
        found.destroy = symbol<decltype(found.destroy)>(library, "cuGraphDestroy");
        found.launch_host = symbol<decltype(found.launch_host)>(library, "cuLaunchHostFunc");
        return found;
      }();
      return driver;
    }

    // Ends whatever capture the stream is in, valid, failed or none, and drops its graph. The
    // driver's error repeats why the capture failed, which is being raised already.
    void end_capture(void* stream) const {
      void* graph = nullptr;
      end(stream, &graph);
      if (graph != nullptr) {
        destroy(graph);
      }
    }

    template <typename Function>
    static Function symbol(void* library, const char* name) {
      void* const found = library == nullptr ? nullptr : dlsym(library, name);
      if (found == nullptr) {
        throw std::runtime_error(std::string("libcuda.so.1 with ") + name +
                                 ": got none, expected a CUDA driver");
      }
      return reinterpret_cast<Function>(found);
    }
  };

  void* stream_;
  py::object select_, begin_, end_, reset_, note_;
  bool keep_;
  bool is_active_ = false;
};

}  // namespace ostinato
