// ostinato._C: loads kernel libraries and passes them pointers, strides, sizes and a stream. It is
// built by the host compiler alone and links neither CUDA nor torch, so it imports on any machine.
#include "graphs/driver.h"
#include "graphs/fast_replay_type.h"
#include "graphs/run_lock.h"
#include "graphs/run_lock_guard.h"
#include "library_type.h"

PYBIND11_MODULE(_C, module) {
  using py::arg;

  module.doc() = "Loads kernel libraries; pointers and streams are integers.";
  module.attr("Library") = py::reinterpret_steal<py::object>(ostinato::library::type());
  module.def("is_capturing", &ostinato::is_capturing, arg("stream"));
  module.def("launch_graph", &ostinato::launch_graph, arg("executable"), arg("stream"),
             py::call_guard<py::gil_scoped_release>());

  using ostinato::Closing;
  using ostinato::Hold;
  using ostinato::RunCounts;
  using ostinato::Turn;
  module.def("note_fork", &ostinato::note_fork);
  module.attr("Repeat") = py::reinterpret_steal<py::object>(ostinato::repeat::type());
  py::class_<RunCounts>(module, "RunCounts")
      .def(py::init<>())
      .def("add", &RunCounts::add, arg("n"), arg("replayed") = true)
      .def("read", [](const RunCounts& counts) {
        return std::make_tuple(counts.hits, counts.eager, counts.rows);
      });
  py::class_<Turn>(module, "Turn")
      .def(py::init<>())
      .def("take", &Turn::take, arg("owner"), arg("what"), arg("timeout_s") = 0.0)
      .def("end", &Turn::end)
      .def("forget", &Turn::forget)
      .def_readwrite("last_stream", &Turn::last_stream)
      .def_property_readonly("owner", &Turn::owner)
      .def_property_readonly("what", &Turn::what);
  py::class_<Hold>(module, "Hold")
      .def(py::init<py::object, py::object, py::object, double, bool, py::object, py::object>(),
           arg("turn"), arg("owner"), arg("what"), arg("timeout_s") = 0.0, py::kw_only(),
           arg("is_run") = false, arg("check") = py::none(), arg("refuse"))
      .def("__enter__",
           [](const py::object& hold) {
             hold.cast<Hold&>().enter();
             return hold;
           })
      .def("__exit__", [](Hold& hold, const py::args&) { hold.exit(); })
      .def("detach", &Hold::detach)
      .def("end", &Hold::end);
  py::class_<Closing>(module, "Closing")
      .def(py::init<py::object>(), arg("turn"))
      .def("__enter__", &Closing::enter)
      .def("__exit__", [](Closing& closing, const py::args&) { closing.exit(); })
      .def("__bool__", &Closing::any);
}
