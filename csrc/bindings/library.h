// A loaded kernel library: its symbols, the hash of its params.h, and how it is launched.
#pragma once

#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "attention/common/params.h"
#include "attention/merge/params.h"
#include "attention/prefill/params.h"
#include "embed/params.h"
#include "gemm_w8a8/fused/params.h"
#include "gemm_w8a8/params.h"
#include "gemm_w8a8/quantize/params.h"
#include "l2/params.h"
#include "sampling/params.h"

namespace py = pybind11;

namespace ostinato {

template <typename T = void>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Hashes of each folder's params.h, and of headers that add to it: a library made for another one
// would read its arguments from the wrong places.
template <typename Params>
constexpr std::uint64_t kAbi = OSTINATO_ABI_ATTENTION;
template <>
constexpr std::uint64_t kAbi<ScaledPrefillParams> = OSTINATO_ABI_ATTENTION_PREFILL;
template <>
constexpr std::uint64_t kAbi<EmbedParams> = OSTINATO_ABI_EMBED;
template <>
constexpr std::uint64_t kAbi<FusedLinearParams> = OSTINATO_ABI_FUSED_LINEAR;
template <>
constexpr std::uint64_t kAbi<W8A8GemmParams> = OSTINATO_ABI_GEMM_W8A8;
template <>
constexpr std::uint64_t kAbi<PaddedQuantizeParams> = OSTINATO_ABI_GEMM_W8A8_QUANTIZE;
template <>
constexpr std::uint64_t kAbi<L2ProbeParams> = OSTINATO_ABI_L2;
template <>
constexpr std::uint64_t kAbi<MergeStatesParams> = OSTINATO_ABI_MERGE;
template <>
constexpr std::uint64_t kAbi<SampleParams> = OSTINATO_ABI_SAMPLING;

// One loaded kernel library. It stays loaded for the life of the process: a captured graph holds
// its kernels without our knowing.
template <typename Params>
class Library {
 public:
  explicit Library(const std::string& path) : path_(path) {
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      throw std::runtime_error(std::string("cannot load a kernel library: ") + dlerror());
    }
    handle_ = handle;
    const auto abi_version = symbol<std::uint64_t (*)()>(handle, "ostinato_abi_version");
    if (abi_version() != kAbi<Params>) {
      throw std::runtime_error(path +
                               ": compiled with another params.h than ostinato._C; "
                               "reinstall the package (`pip install -e .` in a checkout)");
    }
    error_string_ = symbol<const char* (*)(int)>(handle, "ostinato_error_string");
    prepare_ = symbol<int (*)()>(handle, "ostinato_prepare");
    launch_ = symbol<int (*)(const Params*, void*)>(handle, "ostinato_launch");
  }

  void prepare() const {
    int error;
    {
      py::gil_scoped_release unlocked;
      error = prepare_();
    }
    check(error, "prepare");
  }

  void launch(const Params& params, std::uintptr_t stream) const {
    int error;
    {
      // The driver may block here, on a full queue or on another thread's capture.
      py::gil_scoped_release unlocked;
      error = launch_(&params, pointer(stream));
    }
    check(error, "launch");
  }

 protected:
  template <typename Function>
  Function symbol(void* handle, const char* name) const {
    void* const found = dlsym(handle, name);
    if (found == nullptr) {
      throw std::runtime_error(path_ + ": not a kernel library: it has no symbol " + name);
    }
    return reinterpret_cast<Function>(found);
  }

  void check(int error, const char* what) const {
    if (error != 0) {
      throw std::runtime_error(std::string("CUDA error in ") + what + " of " + path_ + ": " +
                               error_string_(error));
    }
  }

  void* handle_;

 private:
  std::string path_;
  const char* (*error_string_)(int);
  int (*prepare_)();
  int (*launch_)(const Params*, void*);
};

class PagedDecodeLibrary : public Library<PagedDecodeParams> {
 public:
  explicit PagedDecodeLibrary(const std::string& path) : Library(path) {
    workspace_bytes_ = symbol<WorkspaceBytes*>(handle_, "ostinato_workspace_bytes");
  }

  std::int64_t workspace_bytes(int rows, std::int64_t segments, std::int64_t tokens) const {
    std::int64_t bytes = 0;
    check(workspace_bytes_(rows, segments, tokens, &bytes), "workspace_bytes");
    return bytes;
  }

 private:
  using WorkspaceBytes = int(int, std::int64_t, std::int64_t, std::int64_t*);
  WorkspaceBytes* workspace_bytes_;
};

class PrefillLibrary : public Library<ScaledPrefillParams> {
 public:
  explicit PrefillLibrary(const std::string& path) : Library(path) {
    workspace_bytes_ = symbol<int (*)(std::int64_t*)>(handle_, "ostinato_workspace_bytes");
  }

  std::int64_t workspace_bytes() const {
    std::int64_t bytes = 0;
    check(workspace_bytes_(&bytes), "workspace_bytes");
    return bytes;
  }

 private:
  int (*workspace_bytes_)(std::int64_t*);
};

}  // namespace ostinato
