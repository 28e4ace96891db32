// Caps logits smoothly, in place: between the output projection and sampling.
//
// Compiled with
//   OSTINATO_DTYPE  bf16, fp16 or fp32, of the logits
//
// The semantics are those of runtime/ops/sampling/softcap.py.
#include <cuda_runtime.h>

#include <cstdint>

#include "common/argmax_key.cuh"
#include "common/check.h"
#include "common/launch.cuh"
#include "common/quantize_math.cuh"
#include "common/vector.cuh"
#include "params.h"

namespace ostinato {
namespace {

using Logit = dtype::OSTINATO_DTYPE;
constexpr int kVector = 16 / static_cast<int>(sizeof(Logit));
constexpr int kVectors = 2;  // of a thread, in flight at once
constexpr uint32_t kThreads = 256;
constexpr uint32_t kSlice = kThreads * kVectors * kVector;  // logits of a CTA
constexpr int32_t kMostRows = 65535;                        // of a grid's second dimension

// Every operation is rounded, as in torch's operators.
__device__ __forceinline__ float capped(float logit, float cap) {
  return __fmul_rn(tanhf(__fdiv_rn(logit, cap)), cap);
}

// A CTA has a slice of every gridDim.y-th row.
template <bool kAligned>
__global__ void __launch_bounds__(kThreads) softcap(const __grid_constant__ SoftcapParams p) {
  wait_for_predecessor();
  let_successor_start();
  const int32_t rows = p.n_active == nullptr ? p.rows : min(p.rows, *p.n_active);
  const uint32_t vocabulary = static_cast<uint32_t>(p.vocabulary);
  const uint32_t first = blockIdx.x * kSlice + threadIdx.x * kVector;
  for (int32_t row = static_cast<int32_t>(blockIdx.y); row < rows;
       row += static_cast<int32_t>(gridDim.y)) {
    if (p.temperature != nullptr &&
        is_greedy(p.temperature[row],
                  p.repetition_penalty == nullptr ? 1.0f : p.repetition_penalty[row])) {
      continue;
    }
    Logit* const logits = static_cast<Logit*>(p.logits) + row * p.logits_stride;
    Packed<Logit, kVector> vectors[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      load<kAligned, Reuse::kEveryRow>(logits, first + v * kThreads * kVector, vocabulary,
                                       vectors[v]);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float values[kVector];
      vectors[v].unpack(values);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        values[i] = capped(values[i], p.cap);
      }
      vectors[v].pack(values);
      store<kAligned, Logit, kVector>(logits, first + v * kThreads * kVector, vocabulary,
                                      vectors[v].words);
    }
  }
}

bool is_aligned(const SoftcapParams& p) {
  return reinterpret_cast<uintptr_t>(p.logits) % 16 == 0 && p.vocabulary % kVector == 0 &&
         (p.rows == 1 || p.logits_stride % kVector == 0);
}

}  // namespace
}  // namespace ostinato

OSTINATO_EXPORT int ostinato_prepare(void) { return cudaSuccess; }

OSTINATO_LAUNCH(ostinato::SoftcapParams) {
  using namespace ostinato;
  const SoftcapParams& p = *params;
  if (p.rows == 0) {  // tensors without elements have no address
    return cudaSuccess;
  }
  if (p.rows < 0 || p.vocabulary < 1 || p.logits == nullptr || !(p.cap > 0.0f)) {
    return cudaErrorInvalidValue;
  }
  LaunchConfig config;
  config.block = dim3(kThreads);
  config.grid = dim3((static_cast<uint32_t>(p.vocabulary) + kSlice - 1) / kSlice,
                     static_cast<uint32_t>(p.rows < kMostRows ? p.rows : kMostRows));
  config.pdl = p.pdl != 0;
  return launch(is_aligned(p) ? softcap<true> : softcap<false>, config,
                static_cast<cudaStream_t>(stream), p);
}
