// What native modules ask of the CUDA driver itself, which they do not link.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>

namespace ostinato {

// Whether launches on the stream are being captured. The driver is asked only where the process
// has loaded it already: without it nothing can be capturing.
inline bool is_capturing(std::uintptr_t stream) {
  constexpr int kNotCapturing = 0;
  constexpr int kCaptureImplicit = 906;  // the legacy stream, while another one is capturing
  using Ask = int (*)(void*, int*);
  static std::atomic<Ask> found = nullptr;  // every run of a graph asks
  Ask ask = found.load(std::memory_order_relaxed);
  if (ask == nullptr) {
    void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (driver == nullptr) {
      return false;
    }
    ask = reinterpret_cast<Ask>(dlsym(driver, "cuStreamIsCapturing"));
    if (ask == nullptr) {
      throw std::runtime_error("libcuda.so.1 has no cuStreamIsCapturing");
    }
    found.store(ask, std::memory_order_relaxed);
  }
  int status = kNotCapturing;
  const int error = ask(reinterpret_cast<void*>(stream), &status);
  return error == kCaptureImplicit || (error == 0 && status != kNotCapturing);
}

// Launches an instantiated graph. By this call, since one through ctypes takes a microsecond more
// of every step of a decode loop. Returns the driver's CUresult: 0 if the graph was launched.
inline int launch_graph(std::uintptr_t executable, std::uintptr_t stream) {
  using Launch = int (*)(void*, void*);
  static const Launch launch = [] {
    void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
    void* const found = driver == nullptr ? nullptr : dlsym(driver, "cuGraphLaunch");
    if (found == nullptr) {
      throw std::runtime_error("libcuda.so.1 with cuGraphLaunch: got none, expected a CUDA driver");
    }
    return reinterpret_cast<Launch>(found);
  }();
  return launch(reinterpret_cast<void*>(executable), reinterpret_cast<void*>(stream));
}

}  // namespace ostinato
