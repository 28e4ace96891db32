// The extension of ostinato.graphs: locks, run counts and replays that have to be whole, or fast,
// in C++. It is built by the host compiler alone and links neither CUDA nor torch. Nothing here
// knows under which name the package is imported, so that a copy of it has an extension of its own.
#include "capture_guard.h"
#include "driver.h"
#include "fast_replay_type.h"
#include "run_lock.h"
#include "run_lock_guard.h"

PYBIND11_MODULE(_native, module) {
  using ostinato::CaptureGuard;
  using ostinato::PendingCloses;
  using ostinato::RunCounts;
  using ostinato::RunLock;
  using ostinato::RunLockGuard;
  using py::arg;
  // Two copies of the package in one process have types of their own.
  const py::module_local local;

  module.doc() = "Locks, run counts and fast replays; addresses and streams are integers.";
  module.def("is_capturing", &ostinato::is_capturing, arg("stream"));
  module.def("launch_graph", &ostinato::launch_graph, arg("executable"), arg("stream"),
             py::call_guard<py::gil_scoped_release>());
  module.def("note_fork", &ostinato::note_fork);
  module.attr("FastReplay") = py::reinterpret_steal<py::object>(
      ostinato::fast_replay::type(py::cast<std::string>(module.attr("__name__"))));
  py::class_<RunCounts>(module, "RunCounts", local)
      .def(py::init<>())
      .def("add", &RunCounts::add, arg("n"), arg("replayed") = true)
      .def("read", [](const RunCounts& counts) {
        return std::make_tuple(counts.hits, counts.eager, counts.rows);
      });
  py::class_<RunLock>(module, "RunLock", local)
      .def(py::init<>())
      .def("take", &RunLock::take, arg("owner"), arg("what"), arg("timeout_s") = 0.0)
      .def("end", &RunLock::end)
      .def("forget", &RunLock::forget)
      .def_readwrite("last_stream", &RunLock::last_stream)
      .def_property_readonly("owner", &RunLock::owner)
      .def_property_readonly("what", &RunLock::what);
  py::class_<RunLockGuard>(module, "RunLockGuard", local)
      .def(py::init<py::object, py::object, py::object, double, bool, py::object, py::object>(),
           arg("run_lock"), arg("owner"), arg("what"), arg("timeout_s") = 0.0, py::kw_only(),
           arg("is_run") = false, arg("check") = py::none(), arg("refuse"))
      .def("__enter__",
           [](const py::object& guard) {
             guard.cast<RunLockGuard&>().enter();
             return guard;
           })
      .def("__exit__", [](RunLockGuard& guard, const py::args&) { guard.exit(); })
      .def("detach", &RunLockGuard::detach)
      .def("end", &RunLockGuard::end);
  py::class_<CaptureGuard>(module, "CaptureGuard", local)
      .def(py::init<std::uintptr_t, py::object, py::object, py::object, py::object, py::object,
                    bool>(),
           arg("stream"), py::kw_only(), arg("select"), arg("begin"), arg("end"), arg("reset"),
           arg("note"), arg("keep"))
      .def("__enter__",
           [](const py::object& guard) {
             guard.cast<CaptureGuard&>().enter();
             return guard;
           })
      .def("__exit__", [](CaptureGuard& guard, const py::object& error_type, const py::object&,
                          const py::object&) { guard.exit(error_type); });
  py::class_<PendingCloses>(module, "PendingCloses", local)
      .def(py::init<py::object>(), arg("run_lock"))
      .def("__enter__", &PendingCloses::enter)
      .def("__exit__", [](PendingCloses& closes, const py::args&) { closes.exit(); })
      .def("__bool__", &PendingCloses::any);
}
