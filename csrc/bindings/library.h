// A loaded kernel library: its symbols, what its calls take, and how they are made. It knows no
// kernel: a library says itself which fields its struct has (common/fields.h).
#pragma once

#include <dlfcn.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "pack.h"

namespace ostinato {

inline void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

// It stays loaded for the life of the process: a captured graph holds its kernels without our
// knowing.
class Library {
 public:
  // `path` is its name in errors, `opened` where it is loaded from.
  Library(const std::string& path, const std::string& opened) : path_(path) {
    handle_ = dlopen(opened.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ == nullptr) {
      throw std::runtime_error(path + ": cannot load a kernel library: " + dlerror());
    }
    launch_packer_ = packer("ostinato_fields", "launch", "stream");
    error_string_ = symbol<const char* (*)(int)>("ostinato_error_string");
    prepare_ = symbol<int (*)()>("ostinato_prepare");
    launch_ = symbol<int (*)(const void*, void*)>("ostinato_launch");
    if (dlsym(handle_, "ostinato_workspace_fields") != nullptr) {
      workspace_packer_ = packer("ostinato_workspace_fields", "workspace_bytes", "");
      workspace_bytes_ = symbol<int (*)(const void*, std::int64_t*)>("ostinato_workspace_bytes");
    }
  }

  const std::string& path() const { return path_; }
  const Layout& layout() const { return launch_packer_->layout(); }

  PyObject* prepare() const {
    return unlocked("prepare", [this] { return prepare_(); });
  }

  PyObject* launch(PyObject* const* values, Py_ssize_t positional, PyObject* names) const {
    alignas(std::max_align_t) unsigned char params[Layout::kMaxSize];
    std::uintptr_t stream = 0;
    if (!launch_packer_->pack(values, positional, names, params, &stream)) {
      return nullptr;
    }
    return unlocked("launch", [&] { return launch_(params, pointer(stream)); });
  }

  PyObject* workspace_bytes(PyObject* const* values, Py_ssize_t positional, PyObject* names) const {
    if (workspace_packer_ == nullptr) {
      return PyErr_Format(PyExc_RuntimeError, "%s: workspace_bytes: its launches take no workspace",
                          path_.c_str());
    }
    alignas(std::max_align_t) unsigned char capacities[Layout::kMaxSize];
    if (!workspace_packer_->pack(values, positional, names, capacities, nullptr)) {
      return nullptr;
    }
    std::int64_t bytes = 0;
    if (const int error = workspace_bytes_(capacities, &bytes)) {
      return raise("workspace_bytes", error);
    }
    return PyLong_FromLongLong(bytes);
  }

 private:
  std::unique_ptr<Packer> packer(const char* table, const char* what, const char* reserved) const {
    Layout layout = read_layout(path_, symbol<const FieldTable* (*)()>(table)(), reserved);
    return std::make_unique<Packer>(path_, what, std::move(layout), *reserved != '\0');
  }

  template <typename Function>
  Function symbol(const char* name) const {
    void* const found = dlsym(handle_, name);
    if (found == nullptr) {
      throw std::runtime_error(path_ + ": not a kernel library: it has no symbol " + name);
    }
    return reinterpret_cast<Function>(found);
  }

  // The driver may block in these, on a full queue or on another thread's capture.
  template <typename Call>
  PyObject* unlocked(const char* what, const Call& call) const {
    PyThreadState* const state = PyEval_SaveThread();
    const int error = call();
    PyEval_RestoreThread(state);
    if (error != 0) {
      return raise(what, error);
    }
    Py_RETURN_NONE;
  }

  PyObject* raise(const char* what, int error) const {
    return PyErr_Format(PyExc_RuntimeError, "CUDA error in %s of %s: %s", what, path_.c_str(),
                        error_string_(error));
  }

  std::string path_;
  void* handle_;
  std::unique_ptr<Packer> launch_packer_;
  std::unique_ptr<Packer> workspace_packer_;  // null: there is nothing to ask
  const char* (*error_string_)(int);
  int (*prepare_)();
  int (*launch_)(const void*, void*);
  int (*workspace_bytes_)(const void*, std::int64_t*) = nullptr;
};

}  // namespace ostinato
