// Quantisation of activations to 8 bits, row by row: bare, after RMS norm (with residual), or after
// SiLU gating. One pass over memory: a row stays in the registers of its warp or CTA.
//
// Compiled with
//   OSTINATO_KIND          per_token, rms_norm or silu_mul
//   OSTINATO_IN_DTYPE      bf16, fp16 or fp32, of x, residual and residual_out
//   OSTINATO_OUT_DTYPE     int8 or e4m3
//   OSTINATO_WEIGHT_DTYPE  of norm_weight: that of x, or fp32 (rms_norm only)
//
// The semantics are those of runtime/ops/{quantize,norm,silu}.py. A row's bits depend on the row
// alone: not on m, on its place, nor on alignment or strides. docs/quantize_kernels.md has the
// counts, the measurements, and what becomes of NaN and infinities.
#include <cuda_runtime.h>

#include <cstdint>

#include "common/check.h"
#include "common/launch.cuh"
#include "common/params.h"
#include "gemm_w8a8/quantize_kernels.cuh"

namespace ostinato {
namespace {

constexpr int kWarpRowThreads = 128;  // of a CTA whose warps have a row each
constexpr int kMaxCtasPerRow = 8;     // the largest portable cluster

struct Plan {
  void (*kernel)(QuantizeParams);
  uint32_t threads;
  uint32_t rows_per_cta;
  uint32_t ctas_per_row;
};

template <int kElements, Share kShare, int kThreads>
Plan rows_plan(bool aligned, uint32_t threads, uint32_t ctas_per_row = 1) {
  return {aligned ? quantize_rows<kElements, kShare, kThreads, true>
                  : quantize_rows<kElements, kShare, kThreads, false>,
          threads, kShare == Share::warp ? threads / 32 : 1, ctas_per_row};
}

// Threads of each of `ctas` CTAs, in whole warps, for k elements.
uint32_t threads_for(int32_t k, int32_t elements_per_thread, int32_t ctas = 1) {
  const int64_t per_warp = int64_t{32} * elements_per_thread * ctas;
  return static_cast<uint32_t>((k + per_warp - 1) / per_warp * 32);
}

// Chosen from capacities alone; a row's bits do not depend on the choice. docs/quantize_kernels.md
// has the measurements behind the bounds.
Plan plan(int32_t m, int32_t k, bool aligned) {
  constexpr int32_t kSms = 132;
  // Of CTAs with 32 elements a thread: the norm's weights, and fp32, need the registers of two.
  constexpr int kManyThreads =
      kKind == Kind::rms_norm || sizeof(In) == 4 ? kMaxThreads / 2 : kMaxThreads;
  if (k <= 8 * 32) {
    return rows_plan<8, Share::warp, kWarpRowThreads>(aligned, kWarpRowThreads);
  }
  // With few rows latency counts, and a long gated row is bound by one SM's arithmetic: several
  // share it. The other kinds have too little of it to pay for the exchange.
  if constexpr (kKind == Kind::silu_mul) {
    const int32_t ctas = m <= 8 ? kMaxCtasPerRow : m <= kSms / 4 ? 4 : m <= kSms / 2 ? 2 : 1;
    if (ctas > 1 && k > 8 * kMaxThreads && k <= 8 * kMaxThreads * ctas) {
      return rows_plan<8, Share::cluster, kMaxThreads>(aligned, threads_for(k, 8, ctas),
                                                       static_cast<uint32_t>(ctas));
    }
  }
  if (m <= 2 * kSms && k <= 8 * kMaxThreads) {
    return rows_plan<8, Share::cta, kMaxThreads>(aligned, threads_for(k, 8));
  }
  if (k <= 32 * 32) {
    return rows_plan<32, Share::warp, kWarpRowThreads>(aligned, kWarpRowThreads);
  }
  // With many rows memory counts: more bytes in flight per thread, less that every thread repeats.
  if (m > kSms && k <= 32 * kManyThreads && (k > 8 * kMaxThreads || m > 1024)) {
    return rows_plan<32, Share::cta, kManyThreads>(aligned, threads_for(k, 32));
  }
  if (k <= 16 * kMaxThreads) {
    return rows_plan<16, Share::cta, kMaxThreads>(aligned, threads_for(k, 16));
  }
  if constexpr (sizeof(In) == 2) {  // fp32 would spill
    if (k <= 32 * kMaxThreads) {
      return rows_plan<32, Share::cta, kMaxThreads>(aligned, threads_for(k, 32));
    }
  }
  return {aligned ? quantize_long_rows<true> : quantize_long_rows<false>, kMaxThreads, 1, 1};
}

bool divides(int64_t alignment, const void* pointer, int64_t stride_bytes, int32_t rows) {
  return reinterpret_cast<uintptr_t>(pointer) % alignment == 0 &&
         (rows == 1 || stride_bytes % alignment == 0);
}

// Whether every row is made of whole vectors that lie on addresses their size divides.
bool is_aligned(const QuantizeParams& p) {
  constexpr int64_t kSize = sizeof(In);
  bool aligned = p.k % kVectorSize == 0 && divides(16, p.x, p.x_stride * kSize, p.m) &&
                 divides(kVectorSize, p.out, p.out_stride, p.m);
  if constexpr (kKind == Kind::rms_norm) {
    aligned = aligned && divides(16, p.norm_weight, 0, p.m);
    if (p.residual != nullptr) {
      aligned = aligned && divides(16, p.residual, p.residual_stride * kSize, p.m) &&
                divides(16, p.residual_out, p.residual_out_stride * kSize, p.m);
    }
  }
  return aligned;
}

bool is_valid(const QuantizeParams& p) {
  return (p.static_scale != nullptr || p.scale_out != nullptr) &&
         (p.zero_point == nullptr || p.static_scale != nullptr) &&
         (kKind != Kind::rms_norm || p.norm_weight != nullptr) &&
         (p.residual == nullptr) == (p.residual_out == nullptr) &&
         (kKind == Kind::rms_norm || p.residual == nullptr);
}

}  // namespace
}  // namespace ostinato

OSTINATO_EXPORT int ostinato_prepare(void) { return cudaSuccess; }

OSTINATO_EXPORT int ostinato_launch(const ostinato::QuantizeParams* params, void* stream) {
  using namespace ostinato;
  if (params->m < 0 || params->k <= 0) {
    return cudaErrorInvalidValue;
  }
  if (params->m == 0) {  // tensors without elements have no address
    return cudaSuccess;
  }
  if (!is_valid(*params)) {
    return cudaErrorInvalidValue;
  }
  const Plan chosen = plan(params->m, params->k, is_aligned(*params));
  LaunchConfig config;
  config.grid = dim3((static_cast<uint32_t>(params->m) + chosen.rows_per_cta - 1) /
                     chosen.rows_per_cta * chosen.ctas_per_row);
  config.block = dim3(chosen.threads);
  config.cluster = dim3(chosen.ctas_per_row);
  config.pdl = params->pdl != 0;
  return launch(chosen.kernel, config, static_cast<cudaStream_t>(stream), *params);
}
