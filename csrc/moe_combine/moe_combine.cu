// The sum over the experts of each token, in the order of its slots, with the shared expert and the
// residual: one rounding at the end.
//
// Compiled with
//   OSTINATO_DTYPE  bf16, fp16 or fp32, of all rows
//
// A thread has a vector of 16 bytes of a token. Every operation is rounded by itself, as
// runtime/ops/moe/combine.py does it with torch's operators.
#include <cuda_runtime.h>

#include <cstdint>

#include "common/check.h"
#include "common/launch.cuh"
#include "common/quantize_math.cuh"
#include "common/vector.cuh"
#include "params.h"

namespace ostinato {
namespace {

using Element = dtype::OSTINATO_DTYPE;
constexpr int kVector = 16 / static_cast<int>(sizeof(Element));
constexpr uint32_t kThreads = 128;
constexpr int kBatch = 8;
constexpr uint32_t kMaxSlices = 65535;  // slices per row: the limit of a grid's second dimension

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <bool kAligned>
__device__ __forceinline__ void add_scaled(const void* row, int64_t offset, float weight,
                                           uint32_t first, uint32_t dim, float (&sums)[kVector]) {
  Packed<Element, kVector> vector;
  load<kAligned, Reuse::kOnce>(static_cast<const Element*>(row) + offset, first, dim, vector);
  float values[kVector];
  vector.unpack(values);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    sums[i] = __fadd_rn(sums[i], __fmul_rn(weight, values[i]));
  }
}

// Adds kBatch slots, whose rows are in flight at once.
template <bool kAligned>
__device__ __forceinline__ void add_slots(const MoeCombineParams& p, int64_t token, int batch,
                                          uint32_t first, uint32_t dim, float (&sums)[kVector]) {
  Packed<Element, kVector> vectors[kBatch];
  float weights[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const int slot = batch + i;
    const bool exists = slot < p.top_k;
    weights[i] = exists ? p.weights[token * p.top_k + slot] : 0.0F;
    // What a slot without an expert holds was never written: its weight, 0 or NaN, times 0.
    const bool has_row = exists && p.ids[token * p.top_k + slot] >= 0;
    load<kAligned, Reuse::kOnce>(
        static_cast<const Element*>(p.y) + token * p.y_token_stride + slot * p.y_slot_stride, first,
        has_row ? dim : 0, vectors[i]);
  }
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    if (batch + i < p.top_k) {
      float values[kVector];
      vectors[i].unpack(values);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        sums[j] = __fadd_rn(sums[j], __fmul_rn(weights[i], values[j]));
      }
    }
  }
}

__device__ __forceinline__ float gate_of(const MoeCombineParams& p, int64_t token) {
  if (p.shared_gate == nullptr) {
    return 1.0F;
  }
  const int64_t at = token * p.shared_gate_stride;
  const float logit = p.shared_gate_fp32 != 0
                          ? static_cast<const float*>(p.shared_gate)[at]
                          : to_float(static_cast<const Element*>(p.shared_gate)[at]);
  return 1.0F / __fadd_rn(1.0F, expf(-logit));
}

// A CTA has a slice of token blockIdx.x, or every gridDim.y-th slice.
template <bool kAligned>
__global__ void __launch_bounds__(kThreads)
    moe_combine(const __grid_constant__ MoeCombineParams p) {
  wait_for_predecessor();
  let_successor_start();
  const int64_t token = blockIdx.x;
  const uint32_t dim = static_cast<uint32_t>(p.dim);
  const uint32_t step = gridDim.y * blockDim.x * kVector;
  for (uint32_t first = (blockIdx.y * blockDim.x + threadIdx.x) * kVector; first < dim;
       first += step) {
    float sums[kVector] = {};
    for (int batch = 0; batch < p.top_k; batch += kBatch) {
      add_slots<kAligned>(p, token, batch, first, dim, sums);
    }
    if (p.shared != nullptr) {
      add_scaled<kAligned>(p.shared, token * p.shared_stride, gate_of(p, token), first, dim, sums);
    }
    if (p.residual != nullptr) {
      add_scaled<kAligned>(p.residual, token * p.residual_stride, 1.0F, first, dim, sums);
    }
    Packed<Element, kVector> out;
    out.pack(sums);
    store<kAligned, Element, kVector>(static_cast<Element*>(p.total) + token * p.total_stride,
                                      first, dim, out.words);
  }
}

bool is_aligned(const void* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % kVector == 0;
}

}  // namespace
}  // namespace ostinato

OSTINATO_EXPORT int ostinato_prepare(void) { return cudaSuccess; }

OSTINATO_LAUNCH(ostinato::MoeCombineParams) {
  using namespace ostinato;
  const MoeCombineParams& p = *params;
  if (p.tokens == 0) {  // tensors without elements have no address
    return cudaSuccess;
  }
  if (p.tokens < 0 || p.top_k < 1 || p.dim < 1 || p.y == nullptr || p.ids == nullptr ||
      p.weights == nullptr || p.total == nullptr) {
    return cudaErrorInvalidValue;
  }
  const uint32_t vectors = (static_cast<uint32_t>(p.dim) + kVector - 1) / kVector;
  const uint32_t slices = (vectors + kThreads - 1) / kThreads;
  LaunchConfig config;
  config.block = dim3(vectors < kThreads ? (vectors + 31) / 32 * 32 : kThreads);
  config.grid = dim3(static_cast<uint32_t>(p.tokens), slices < kMaxSlices ? slices : kMaxSlices);
  config.pdl = p.pdl != 0;
  const bool aligned = p.dim % kVector == 0 && is_aligned(p.y, p.y_token_stride) &&
                       p.y_slot_stride % kVector == 0 &&
                       (p.shared == nullptr || is_aligned(p.shared, p.shared_stride)) &&
                       (p.residual == nullptr || is_aligned(p.residual, p.residual_stride)) &&
                       is_aligned(p.total, p.total_stride);
  return launch(aligned ? moe_combine<true> : moe_combine<false>, config,
                static_cast<cudaStream_t>(stream), p);
}
