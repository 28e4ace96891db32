// Two states of attention, outputs and LSE of the same queries over different keys, become that of
// attention to all of these keys, in one launch.
//
// Compiled with
//   OSTINATO_DTYPE  bf16, fp16 or fp32, of the outputs
//
// The semantics are those of runtime/ops/attention/merge_states.py. A thread has 16 bytes of a
// head's output, the threads of a head side by side; it is bound by memory. The bits of a head
// depend on the head alone.
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
constexpr uint32_t kThreads = 256;

struct Shape {
  uint32_t rows;           // tokens * heads
  uint32_t lanes;          // threads of a row
  uint32_t rows_of_block;  // kThreads / lanes
};

// How much of each state is in the merged one, and its LSE.
struct Weights {
  float a, b, lse;

  __device__ __forceinline__ Weights(float lse_a, float lse_b) {
    const float top = fmaxf(lse_a, lse_b);
    // A state without keys has no part, whatever its output holds; NaN is neither, and spreads.
    const float weight_a = lse_a == -INFINITY ? 0.0f : expf(lse_a - top);
    const float weight_b = lse_b == -INFINITY ? 0.0f : expf(lse_b - top);
    const float total = weight_a + weight_b;
    if (total == 0) {
      a = b = 0;
      lse = -INFINITY;
    } else {
      a = weight_a / total;
      b = weight_b / total;
      lse = top + logf(total);
    }
  }
};

__device__ __forceinline__ float merge(const Weights& weights, float a, float b) {
  // 0 * NaN is NaN.
  const float part = weights.a == 0 ? 0.0f : weights.a * a;
  return weights.b == 0 ? part : fmaf(weights.b, b, part);
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads)
    merge_states(const __grid_constant__ MergeStatesParams p, const __grid_constant__ Shape shape) {
  wait_for_predecessor();
  let_successor_start();
  const uint32_t in_block = threadIdx.x / shape.lanes, lane = threadIdx.x % shape.lanes;
  const uint32_t row = blockIdx.x * shape.rows_of_block + in_block;
  const bool exists = in_block < shape.rows_of_block && row < shape.rows;
  const uint32_t heads = static_cast<uint32_t>(p.heads);
  const int64_t token = exists ? row / heads : 0;
  const int64_t head = exists ? row % heads : 0;
  const auto lse_of = [&](const MergeLse& lse) {
    return lse.data + token * lse.stride + head * lse.head_stride;
  };
  const auto output_of = [&](const Heads& o) {
    return static_cast<Element*>(o.data) + token * o.stride + head * o.head_stride;
  };
  const Weights weights(*lse_of(p.lse_a), *lse_of(p.lse_b));
  __syncthreads();  // out_lse may be one of those that were read
  if (!exists) {
    return;
  }
  if (lane == 0) {
    *lse_of(p.out_lse) = weights.lse;
  }
  const uint32_t dim = static_cast<uint32_t>(p.dim);
  for (uint32_t first = lane * kVector; first < dim; first += shape.lanes * kVector) {
    Packed<Element, kVector> of_a, of_b;
    load<kAligned, Reuse::kOnce>(output_of(p.o_a), first, dim, of_a);
    load<kAligned, Reuse::kOnce>(output_of(p.o_b), first, dim, of_b);
    float a[kVector], b[kVector];
    of_a.unpack(a);
    of_b.unpack(b);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      a[i] = merge(weights, a[i], b[i]);
    }
    of_a.pack(a);
    store<kAligned, Element, kVector>(output_of(p.out), first, dim, of_a.words);
  }
}

bool is_aligned(const Heads& o, const MergeStatesParams& p) {
  return reinterpret_cast<uintptr_t>(o.data) % 16 == 0 &&
         (p.tokens == 1 || o.stride % kVector == 0) &&
         (p.heads == 1 || o.head_stride % kVector == 0);
}

bool has_pointers(const MergeStatesParams& p) {
  return p.o_a.data != nullptr && p.o_b.data != nullptr && p.out.data != nullptr &&
         p.lse_a.data != nullptr && p.lse_b.data != nullptr && p.out_lse.data != nullptr;
}

}  // namespace
}  // namespace ostinato

OSTINATO_EXPORT int ostinato_prepare(void) { return cudaSuccess; }

OSTINATO_LAUNCH(ostinato::MergeStatesParams) {
  using namespace ostinato;
  const MergeStatesParams& p = *params;
  const int64_t rows = int64_t{p.tokens} * p.heads;
  if (p.tokens < 0 || p.heads < 1 || p.dim < 1 || rows > UINT32_MAX) {
    return cudaErrorInvalidValue;
  }
  if (rows == 0) {  // tensors without elements have no address
    return cudaSuccess;
  }
  if (!has_pointers(p)) {
    return cudaErrorInvalidValue;
  }
  Shape shape;
  shape.rows = static_cast<uint32_t>(rows);
  const uint32_t vectors = (static_cast<uint32_t>(p.dim) + kVector - 1) / kVector;
  shape.lanes = vectors < kThreads ? vectors : kThreads;
  shape.rows_of_block = kThreads / shape.lanes;
  LaunchConfig config;
  config.block = dim3(kThreads);
  config.grid = dim3(static_cast<uint32_t>((rows + shape.rows_of_block - 1) / shape.rows_of_block));
  config.pdl = p.pdl != 0;
  const bool aligned =
      p.dim % kVector == 0 && is_aligned(p.o_a, p) && is_aligned(p.o_b, p) && is_aligned(p.out, p);
  return launch(aligned ? merge_states<true> : merge_states<false>, config,
                static_cast<cudaStream_t>(stream), p, shape);
}
