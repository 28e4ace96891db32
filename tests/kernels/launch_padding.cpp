// Prints what launch() would hand to the driver, beside members that are all ones: the bytes of an
// argument that belong to none.
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "common/launch.cuh"

struct Argument {
  void* address;
  int number;  // 4 bytes behind it are nobody's
};

extern "C" cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void** values) {
  uint64_t words[2];
  std::memcpy(words, values[0], sizeof(words));
  std::printf("%016llx %016llx %d\n", static_cast<unsigned long long>(words[0]),
              static_cast<unsigned long long>(words[1]), *static_cast<int*>(values[1]));
  return cudaSuccess;
}

int main() {
  Argument argument;
  std::memset(&argument, 0xff, sizeof(argument));
  return ostinato::launch(static_cast<void (*)(Argument, int)>(nullptr), {}, nullptr, argument, 7);
}
