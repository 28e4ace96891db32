// Helpers shared by the epilogues of the tiled GEMM, which compute
//   out = x_scale · (w_scale · (sum − x_zero_point · w_sum)) + bias
// in fp32, and round once. Scales are 1 where the sums are scaled already.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/mbarrier.cuh"
#include "common/pack_pair.cuh"
#include "wgmma.cuh"

namespace ostinato::tiled {

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

// A sum of an INT8 MMA, which CuTe keeps as the bits of an int32.
__device__ __forceinline__ float to_float(uint32_t int32_bits) {
  return static_cast<float>(static_cast<int32_t>(int32_bits));
}

// The scale of a channel or token; zero past the last one.
__device__ __forceinline__ float w_scale_of(const W8A8GemmParams& params, int channel) {
  if (!kResultScales) {
    return 1.0F;
  }
  return channel < params.n ? params.w_scale[int64_t(channel) * params.w_scale_stride] : 0.0F;
}
__device__ __forceinline__ float x_scale_of(const W8A8GemmParams& params, int token) {
  if (!kResultScales) {
    return 1.0F;
  }
  return token < params.m ? params.x_scale[int64_t(token) * params.x_scale_stride] : 0.0F;
}

// Two adjacent scales of results in shared memory.
__device__ __forceinline__ float2 two_scales(const float* scales) {
  return kResultScales ? *reinterpret_cast<const float2*>(scales) : make_float2(1.0F, 1.0F);
}

// Copies 4 bytes to shared memory with cp.async, or writes zero if they do not exist.
__device__ __forceinline__ void copy_word_async(void* shared, const void* global, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(exists ? 4 : 0)
               : "memory");
}

// Stores four 8x8 matrices of 16 bits, transposed; lanes 8 i to 8 i + 7 address the rows of matrix
// i.
__device__ __forceinline__ void store_transposed(uint32_t row, uint32_t a, uint32_t b, uint32_t c,
                                                 uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Waits until all of this thread's cp.async copies have arrived.
__device__ __forceinline__ void wait_async_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace ostinato::tiled
