// ostinato._C: loads kernel libraries and passes them pointers, strides, sizes and a stream. It is
// built by the host compiler alone and links neither CUDA nor torch, so it imports on any machine.
#include "graph_hold.h"
#include "graphs/driver.h"
#include "library_type.h"

PYBIND11_MODULE(_C, module) {
  using py::arg;

  module.doc() = "Loads kernel libraries; pointers and streams are integers.";
  module.attr("Library") = py::reinterpret_steal<py::object>(ostinato::library::type());
  module.def("is_capturing", &ostinato::is_capturing, arg("stream"));
  module.def("capture_of", &ostinato::capture_of, arg("stream"));
  py::class_<ostinato::GraphHold>(module, "GraphHold")
      .def(py::init<std::uintptr_t>(), arg("stream"))
      .def_property_readonly("is_alive", &ostinato::GraphHold::is_alive);
}
