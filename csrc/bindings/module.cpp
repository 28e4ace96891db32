// ostinato._C: loads kernel libraries and passes them pointers, strides, sizes and a stream. It is
// built by the host compiler alone and links neither CUDA nor torch, so it imports on any machine.
#include "graphs/driver.h"
#include "library_type.h"

PYBIND11_MODULE(_C, module) {
  using py::arg;

  module.doc() = "Loads kernel libraries; pointers and streams are integers.";
  module.attr("Library") = py::reinterpret_steal<py::object>(ostinato::library::type());
  module.def("is_capturing", &ostinato::is_capturing, arg("stream"));
}
