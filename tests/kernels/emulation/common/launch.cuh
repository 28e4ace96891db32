// A launch runs the kernel here and now, on a device of as many SMs as the test says.
#pragma once

#include <cstddef>

#include "check.h"
#include "emulator.h"
#include "target.cuh"

namespace emulator {

void seed(uint64_t value);
void run(int ctas, int cluster, int threads, std::function<void()> kernel);

inline int sms = 1, clusters = 1;  // of the device; clusters that it runs at the same time

}  // namespace emulator

namespace ostinato {

struct LaunchConfig {
  dim3 grid, block;
  std::size_t dynamic_smem = 0;
  dim3 cluster = dim3(1, 1, 1);
  bool pdl = false;
};

template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), const LaunchConfig& config, cudaStream_t,
                   Arguments&&... arguments) {
  emulator::run(static_cast<int>(config.grid.x), static_cast<int>(config.cluster.x),
                static_cast<int>(config.block.x), [&] { kernel(arguments...); });
  return cudaSuccess;
}
inline cudaError_t count_sms(int* sms) {
  *sms = emulator::sms;
  return cudaSuccess;
}
template <typename... Parameters>
cudaError_t allow_dynamic_smem(void (* /*kernel*/)(Parameters...), std::size_t) {
  return cudaSuccess;
}
inline void wait_for_predecessor() {}
inline void let_successor_start() {}

}  // namespace ostinato
