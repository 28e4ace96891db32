// A predecessor as decode attention may have one: its successor starts at once, and what that reads
// is written much later.
#include <cuda_runtime.h>

#include <cstdint>

#include "common/check.h"
#include "common/launch.cuh"

namespace ostinato {
namespace {

__global__ void write_late(int32_t* to, const int32_t* from, int count) {
  let_successor_start();
  wait_for_predecessor();
  for (int i = 0; i < 30; ++i) {
    __nanosleep(1000);
  }
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    to[i] = from[i];
  }
}

}  // namespace
}  // namespace ostinato

OSTINATO_EXPORT int ostinato_write_late(void* to, const void* from, int count, void* stream) {
  ostinato::LaunchConfig config;
  config.grid = dim3(1);
  config.block = dim3(256);
  return ostinato::launch(ostinato::write_late, config, static_cast<cudaStream_t>(stream),
                          static_cast<int32_t*>(to), static_cast<const int32_t*>(from), count);
}
