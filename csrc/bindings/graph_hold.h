// What ostinato._C asks the CUDA driver about captures: which one a stream is in, and whether the
// graphs that came of it are still there.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace ostinato {

// The driver's functions, found in the library that the process has loaded already.
class CaptureDriver {
 public:
  // Null without a driver: then nothing can be capturing.
  static const CaptureDriver* loaded() {
    static std::atomic<const CaptureDriver*> found = nullptr;
    const CaptureDriver* driver = found.load(std::memory_order_acquire);
    if (driver == nullptr) {
      void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
      if (library == nullptr) {
        return nullptr;
      }
      driver = new CaptureDriver(library);  // of two threads' one stays unused
      found.store(driver, std::memory_order_release);
    }
    return driver;
  }

  struct Capture {
    std::uint64_t id = 0;  // 0: the stream is not being captured
    void* graph = nullptr;
  };

  Capture capture_of(std::uintptr_t stream) const {
    constexpr int kActive = 1;
    Capture capture;
    int status = 0;
    void* const handle = reinterpret_cast<void*>(stream);
    const int error =
        info_v3_ != nullptr
            ? info_v3_(handle, &status, &capture.id, &capture.graph, nullptr, nullptr, nullptr)
            : info_v2_(handle, &status, &capture.id, &capture.graph, nullptr, nullptr);
    return error == 0 && status == kActive ? capture : Capture{};
  }

  // Calls destroy(state) once `graph`, its executables and their launches are gone; at once if the
  // driver refuses.
  void retain(void* graph, void* state, void (*destroy)(void*)) const {
    constexpr unsigned kNoDestructorSync = 1, kMove = 1;
    void* object = nullptr;
    if (const int error = create_(&object, state, destroy, 1, kNoDestructorSync)) {
      destroy(state);
      throw std::runtime_error("cuUserObjectCreate: CUresult " + std::to_string(error));
    }
    if (const int error = retain_(graph, object, 1, kMove)) {
      release_(object, 1);
      throw std::runtime_error("cuGraphRetainUserObject: CUresult " + std::to_string(error));
    }
  }

 private:
  explicit CaptureDriver(void* library) {
    info_v3_ = reinterpret_cast<InfoV3>(dlsym(library, "cuStreamGetCaptureInfo_v3"));
    info_v2_ = reinterpret_cast<InfoV2>(dlsym(library, "cuStreamGetCaptureInfo_v2"));
    create_ = reinterpret_cast<Create>(dlsym(library, "cuUserObjectCreate"));
    retain_ = reinterpret_cast<Retain>(dlsym(library, "cuGraphRetainUserObject"));
    release_ = reinterpret_cast<Release>(dlsym(library, "cuUserObjectRelease"));
    if ((info_v3_ == nullptr && info_v2_ == nullptr) || create_ == nullptr || retain_ == nullptr ||
        release_ == nullptr) {
      throw std::runtime_error(
          "libcuda.so.1: got a CUDA driver without user objects, expected one of CUDA 12 or newer");
    }
  }

  using InfoV2 = int (*)(void*, int*, std::uint64_t*, void**, void*, void*);
  using InfoV3 = int (*)(void*, int*, std::uint64_t*, void**, void*, void*, void*);
  using Create = int (*)(void**, void*, void (*)(void*), unsigned, unsigned);
  using Retain = int (*)(void*, void*, unsigned, unsigned);
  using Release = int (*)(void*, unsigned);

  InfoV3 info_v3_;
  InfoV2 info_v2_;
  Create create_;
  Retain retain_;
  Release release_;
};

// The id of the capture that a stream is in, unique in the process; 0 for none.
inline std::uint64_t capture_of(std::uintptr_t stream) {
  const CaptureDriver* const driver = CaptureDriver::loaded();
  return driver == nullptr ? 0 : driver->capture_of(stream).id;
}

// Says of the graph that a stream is being captured into whether anything may still run it.
class GraphHold {
 public:
  explicit GraphHold(std::uintptr_t stream) : is_alive_(std::make_shared<std::atomic<bool>>(true)) {
    const CaptureDriver* const driver = CaptureDriver::loaded();
    const auto capture = driver == nullptr ? CaptureDriver::Capture{} : driver->capture_of(stream);
    if (capture.graph == nullptr) {
      throw std::runtime_error("stream: got one that is not being captured");
    }
    // The driver calls it in a thread of its own, which may neither call CUDA nor wait for Python.
    driver->retain(capture.graph, new State(is_alive_), [](void* held) {
      const std::unique_ptr<State> state(static_cast<State*>(held));
      (*state)->store(false);
    });
  }

  bool is_alive() const { return is_alive_->load(); }

 private:
  using State = std::shared_ptr<std::atomic<bool>>;
  State is_alive_;
};

}  // namespace ostinato
