// Prints for how many gates the fast SiLU has other bits than the compiler's operations.
#include <cstdio>

#include "gemm_w8a8/quantize/silu_math.cuh"

__device__ unsigned long long differing;

__global__ void compare() {
  const unsigned step = gridDim.x * blockDim.x;
  for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i >> 32 == 0; i += step) {
    const float gate = __uint_as_float(static_cast<unsigned>(i));
    if (fabsf(gate) <= ostinato::kSiluFastLimit) {
      const float expected = __fdiv_rn(gate, __fadd_rn(1.0f, expf(-gate)));
      if (__float_as_uint(ostinato::silu_fast(gate)) != __float_as_uint(expected)) {
        atomicAdd(&differing, 1ull);
      }
    }
  }
}

int main() {
  compare<<<132 * 8, 256>>>();
  unsigned long long found = 0;
  const cudaError_t error = cudaMemcpyFromSymbol(&found, differing, sizeof(found));
  std::printf("%s: %llu\n", cudaGetErrorString(error), found);
  return 0;
}
