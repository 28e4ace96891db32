// Multiplies each row by a number.
//
// Compiled with
//   OSTINATO_DTYPE  bf16 or fp32, of the rows
#include <cuda_runtime.h>

#include <cstdint>

#include "common/check.h"
#include "common/launch.cuh"
#include "common/quantize_math.cuh"
#include "params.h"

namespace ostinato {
namespace {

using Element = dtype::OSTINATO_DTYPE;
constexpr uint32_t kThreads = 256;

__global__ void __launch_bounds__(kThreads) scale_rows(const __grid_constant__ ScaleRowsParams p) {
  wait_for_predecessor();
  let_successor_start();
  const int64_t row = blockIdx.x;
  const Element* const x = static_cast<const Element*>(p.x) + row * p.x_stride;
  Element* const out = static_cast<Element*>(p.out) + row * p.dim;
  const float scale = p.scale[row];
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < p.dim; i += kThreads) {
    out[i] = static_cast<Element>(static_cast<float>(x[i]) * scale);
  }
}

}  // namespace
}  // namespace ostinato

OSTINATO_EXPORT int ostinato_prepare(void) { return cudaSuccess; }

OSTINATO_LAUNCH(ostinato::ScaleRowsParams) {
  using namespace ostinato;
  const ScaleRowsParams& p = *params;
  if (p.rows == 0) {
    return cudaSuccess;
  }
  if (p.rows < 0 || p.dim < 1 || p.x == nullptr || p.scale == nullptr || p.out == nullptr) {
    return cudaErrorInvalidValue;
  }
  LaunchConfig config;
  config.grid = dim3(static_cast<uint32_t>(p.rows));
  config.block = dim3(kThreads);
  config.pdl = p.pdl != 0;
  return launch(scale_rows, config, static_cast<cudaStream_t>(stream), p);
}
