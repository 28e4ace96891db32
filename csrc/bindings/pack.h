// Keyword arguments of Python -> the bytes of a struct of a known layout.
#pragma once

#include <pybind11/pybind11.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "layout.h"

namespace py = pybind11;

namespace ostinato {

// Packs calls for one layout. Which field each keyword is has to be found out once for a call site:
// its tuple of names is the same object in every call, or has the same names.
class Packer {
 public:
  // `what` names the call in errors. With `stream` the call takes one beside the fields.
  Packer(std::string path, std::string what, Layout layout, bool takes_stream)
      : path_(std::move(path)),
        what_(std::move(what)),
        layout_(std::move(layout)),
        takes_stream_(takes_stream) {}

  const Layout& layout() const { return layout_; }

  // Fills the struct, which has room for Layout::kMaxSize bytes. Returns false with an error of
  // Python set.
  bool pack(PyObject* const* values, Py_ssize_t positional, PyObject* names, unsigned char* to,
            std::uintptr_t* stream) {
    if (positional != 0) {
      PyErr_Format(PyExc_TypeError, "%s: %s: got %zd positional arguments, expected keywords",
                   path_.c_str(), what_.c_str(), positional);
      return false;
    }
    const std::shared_ptr<const CallSite> site = find(names);
    if (site == nullptr) {
      return false;
    }
    std::memset(to, 0, layout_.size);
    for (std::size_t i = 0; i < site->targets.size(); ++i) {
      const LayoutField* const field = site->targets[i];
      const bool is_packed = field == nullptr ? pack_number('p', values[i], kStream, stream)
                                              : pack_field(*field, values[i], to);
      if (!is_packed) {
        return false;
      }
    }
    return true;
  }

 private:
  static constexpr const char* kStream = "stream";
  static constexpr std::size_t kMaxSites = 8;

  struct CallSite {
    py::object names;                         // kept, so that no other tuple gets its address
    std::vector<const LayoutField*> targets;  // null: the stream
  };

  // Shared with the callers that are using it: a value of theirs may run code that evicts it.
  std::shared_ptr<const CallSite> find(PyObject* names) {
    for (const auto& site : sites_) {
      if (site->names.ptr() == names) {
        return site;
      }
    }
    for (const auto& site : sites_) {
      if (has_same_names(*site, names)) {
        return site;
      }
    }
    return learn(names);
  }

  // Names that the source spells are interned: those of a dict are mostly the same objects.
  static bool has_same_names(const CallSite& site, PyObject* names) {
    const Py_ssize_t count = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
    if (static_cast<std::size_t>(count) != site.targets.size()) {
      return false;
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* const name = PyTuple_GET_ITEM(names, i);
      PyObject* const known = PyTuple_GET_ITEM(site.names.ptr(), i);
      if (name != known && PyUnicode_Compare(name, known) != 0) {
        return false;
      }
    }
    return true;
  }

  std::shared_ptr<const CallSite> learn(PyObject* names) {
    auto site = std::make_shared<CallSite>();
    site->names = py::reinterpret_borrow<py::object>(names);
    const Py_ssize_t count = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
    bool has_stream = !takes_stream_;
    for (Py_ssize_t i = 0; i < count; ++i) {
      const char* const name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(names, i));
      if (name == nullptr) {
        return nullptr;
      }
      const bool is_stream = takes_stream_ && std::strcmp(name, kStream) == 0;
      const LayoutField* const field = layout_.find(name);
      if (field == nullptr && !is_stream) {
        refuse_name(name);
        return nullptr;
      }
      has_stream |= is_stream;
      site->targets.push_back(field);
    }
    for (const LayoutField& field : layout_.fields) {
      bool is_given = !field.required;
      for (const LayoutField* const target : site->targets) {
        is_given |= target == &field;
      }
      if (!is_given || !has_stream) {
        PyErr_Format(PyExc_TypeError, "%s: %s: got no %s, which every call must pass",
                     path_.c_str(), what_.c_str(), is_given ? kStream : field.name.c_str());
        return nullptr;
      }
    }
    if (sites_.size() == kMaxSites) {  // callers that make names up as they go
      sites_.erase(sites_.begin());
    }
    sites_.push_back(site);
    return site;
  }

  void refuse_name(const char* name) const {
    try {
      py::list known;
      for (const LayoutField& field : layout_.fields) {
        known.append(field.name);
      }
      const py::list close =
          py::module_::import("difflib").attr("get_close_matches")(name, known, 1, 0.0);
      const std::string closest =
          close.empty() ? "no field" : py::cast<std::string>(py::object(close[0]));
      PyErr_Format(PyExc_TypeError, "%s: %s: got field %s, which it has not; the closest is %s",
                   path_.c_str(), what_.c_str(), name, closest.c_str());
    } catch (py::error_already_set& error) {
      error.restore();
    }
  }

  bool pack_field(const LayoutField& field, PyObject* value, unsigned char* to) const {
    const std::vector<Number>& numbers = field.numbers;
    if (numbers.size() == 1) {
      return pack_number(numbers[0].kind, value, field.name.c_str(), to + numbers[0].offset);
    }
    const bool is_sequence = PyTuple_Check(value) || PyList_Check(value);
    if (!is_sequence) {
      return refuse_value(PyExc_TypeError, field.name.c_str(), value, "a tuple or a list");
    }
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(value);
    if (static_cast<std::size_t>(size) != numbers.size()) {
      PyErr_Format(PyExc_ValueError, "%s: %s: %s: got %zd numbers, expected %zu", path_.c_str(),
                   what_.c_str(), field.name.c_str(), size, numbers.size());
      return false;
    }
    PyObject** const items = PySequence_Fast_ITEMS(value);
    for (Py_ssize_t i = 0; i < size; ++i) {
      if (!pack_number(numbers[i].kind, items[i], field.name.c_str(), to + numbers[i].offset)) {
        return false;
      }
    }
    return true;
  }

  bool pack_number(char kind, PyObject* value, const char* name, void* to) const {
    if (kind == 'f') {
      return pack_float(value, name, to);
    }
    if (PyLong_Check(value)) {  // a bool, too
      return pack_integer(kind, value, name, to);
    }
    const auto integer = py::reinterpret_steal<py::object>(PyNumber_Index(value));  // of numpy
    if (!integer) {
      PyErr_Clear();
      return refuse_value(PyExc_TypeError, name, value, "an integer");
    }
    return pack_integer(kind, integer.ptr(), name, to);
  }

  bool pack_integer(char kind, PyObject* value, const char* name, void* to) const {
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    switch (kind) {
      case 'p':
        return overflow == 0 && number >= 0
                   ? store(static_cast<std::uint64_t>(number), to)
                   : refuse_value(PyExc_ValueError, name, value, "an address from 0 to 2**63 - 1");
      case 'q':
        return overflow == 0 ? store(static_cast<std::int64_t>(number), to)
                             : refuse_value(PyExc_ValueError, name, value, "-2**63 to 2**63 - 1");
      case 'i':
        return overflow == 0 && number >= INT32_MIN && number <= INT32_MAX
                   ? store(static_cast<std::int32_t>(number), to)
                   : refuse_value(PyExc_ValueError, name, value, "-2**31 to 2**31 - 1");
      default:
        return overflow == 0 && number >= 0 && number <= UINT32_MAX
                   ? store(static_cast<std::uint32_t>(number), to)
                   : refuse_value(PyExc_ValueError, name, value, "0 to 2**32 - 1");
    }
  }

  bool pack_float(PyObject* value, const char* name, void* to) const {
    const double number = PyFloat_AsDouble(value);
    if (number == -1.0 && PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      return refuse_value(PyExc_TypeError, name, value, "a number");
    }
    const float rounded = static_cast<float>(number);
    if (std::isinf(rounded) && !std::isinf(number)) {
      return refuse_value(PyExc_ValueError, name, value, "a number that fits in fp32");
    }
    return store(rounded, to);
  }

  template <typename T>
  static bool store(T number, void* to) {
    std::memcpy(to, &number, sizeof(number));
    return true;
  }

  bool refuse_value(PyObject* error, const char* name, PyObject* value,
                    const char* expected) const {
    PyErr_Format(error, "%s: %s: %s: got %R, expected %s", path_.c_str(), what_.c_str(), name,
                 value, expected);
    return false;
  }

  std::string path_;
  std::string what_;
  Layout layout_;
  bool takes_stream_;
  std::vector<std::shared_ptr<const CallSite>> sites_;
};

}  // namespace ostinato
