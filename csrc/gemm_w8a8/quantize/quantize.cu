// Row-wise quantisation of activations to 8 bits: of x, after a norm (with residual), or after an
// activation function; and these without quantisation. One pass over memory: a row stays in the
// registers of its warp or CTA.
//
// Compiled with
//   OSTINATO_KIND          per_token, rms_norm, layer_norm, or an activation function (stages.cuh)
//   OSTINATO_IN_DTYPE      bf16, fp16 or fp32, of x, residual and residual_out
//   OSTINATO_OUT_DTYPE     int8 or e4m3; or that of x, not quantised (not per_token)
//   OSTINATO_WEIGHT_DTYPE  of norm_weight and norm_bias: that of x, or fp32 (norms only)
//   OSTINATO_GROUP         128: each 128 of a row have a scale of their own; 0: rows have
//   OSTINATO_ASYMMETRIC    1: each row has a scale and a zero point of its own, int8 only; or 0
//
// The semantics are those of runtime/ops/linear (quantize, rms_norm, layer_norm, activation). A
// row's bits depend on the row alone: not on m, its index, alignment or strides.
// docs/notebooks/quantize_kernels.md has the measurements, and the treatment of NaN and infinities.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/check.h"
#include "common/launch.cuh"
#include "kernels.cuh"
#include "params.h"

namespace ostinato {
namespace {

constexpr int kWarpRowThreads = 128;  // of a CTA with one row per warp
constexpr int kMaxCtasPerRow = 8;     // the largest portable cluster

// Whether few long rows are bound by the arithmetic of one SM, so that several CTAs share them.
constexpr bool kSharesRows = kGated || kFunction == Function::silu || kFunction == Function::gelu ||
                             kFunction == Function::gelu_tanh;

struct Plan {
  void (*kernel)(QuantizeParams, KnownDivisor);
  uint32_t threads;
  uint32_t rows_per_cta;
  uint32_t ctas_per_row;
};

template <int kElements, Share kShare, int kThreads>
Plan rows_plan(bool aligned, uint32_t threads, uint32_t ctas_per_row = 1) {
  // Unbounded, unaligned rows of 16 bits take 96 registers on sm_90 where they are gated, and up to
  // 71 as they are: 5 and 7 CTAs on an SM.
  constexpr bool kMeasured = kKind == Kind::per_token || kKind == Kind::silu_mul;
  constexpr bool kBounded = kMeasured && kElements == 32 && sizeof(In) == 2 &&
                            kThreads == kWarpRowThreads && kTargets[0] == 900;
  constexpr int kCtas = !kBounded ? 1 : kKind == Kind::silu_mul ? 6 : 8;
  return {aligned ? quantize_rows<kElements, kShare, kThreads, 1, true>
                  : quantize_rows<kElements, kShare, kThreads, kCtas, false>,
          threads, kShare == Share::warp ? threads / 32 : 1, ctas_per_row};
}

// Plan for kCtas CTAs of kThreads threads per SM. The counts were measured on sm_90; compilers for
// other GPUs need more registers, so there it is a third fewer.
template <int kElements, int kThreads, int kCtas>
Plan aligned_rows_plan(uint32_t threads) {
  constexpr int kFitting = kTargets[0] == 900 || kCtas == 1 ? kCtas : kCtas * 2 / 3;
  return {quantize_rows<kElements, Share::cta, kThreads, kFitting, true>, threads, 1, 1};
}

// Threads per CTA, in whole warps, for k elements on `ctas` CTAs.
uint32_t threads_for(int32_t k, int32_t elements_per_thread, int32_t ctas = 1) {
  const int64_t per_warp = int64_t{32} * elements_per_thread * ctas;
  return static_cast<uint32_t>((k + per_warp - 1) / per_warp * 32);
}

// For many rows, bandwidth matters: more bytes in flight per thread, less work that every thread
// repeats.
Plan many_rows_plan(const QuantizeParams& p) {
  if constexpr (kNorm) {
    // A residual adds enough memory traffic to hide the rest.
    if (p.k <= 2048 || (p.k <= 4096 && (p.residual != nullptr || p.m <= 4096))) {
      constexpr int kCtas = sizeof(Weight) == 4 ? 3 : kLayerNorm ? 4 : 5;
      return aligned_rows_plan<16, 256, kCtas>(threads_for(p.k, 16));
    }
  }
  const uint32_t threads = threads_for(p.k, 32);
  // Variants that would spill with that many CTAs per SM get one fewer.
  constexpr bool kWide =
      sizeof(In) == 4 ? kNorm || kFunction == Function::gelu : kLayerNorm && sizeof(Weight) == 4;
  constexpr int kCtasOf128 = !kWide ? 6 : sizeof(In) == 4 && kKind != Kind::rms_norm ? 4 : 5;
  if (threads <= 128) {
    return aligned_rows_plan<32, 128, kCtasOf128>(threads);
  }
  if (threads <= 256) {
    return aligned_rows_plan<32, 256, kWide ? 2 : 3>(threads);
  }
  constexpr bool kWideWeights =
      kEncodes && std::is_same_v<In, __nv_bfloat16> && sizeof(Weight) == 4;
  constexpr int kCtasOf448 = sizeof(In) == 4 || kWideWeights || kLayerNorm ? 1 : 2;
  constexpr int kCtasOf512 = sizeof(In) == 4 || kNorm ? 1 : 2;
  if (threads <= 448) {
    return aligned_rows_plan<32, 448, kCtasOf448>(threads);
  }
  return aligned_rows_plan<32, 512, kCtasOf512>(threads);
}

// Chosen from capacities, alignment and the set of tensors, all fixed at graph capture; a row's
// bits do not depend on the choice. docs/notebooks/quantize_kernels.md has the measurements behind
// the bounds.
Plan plan(const QuantizeParams& p, bool aligned) {
  constexpr int32_t kSms = 132;
  // With 8 elements per thread: limited by the registers of an SM.
  constexpr int32_t kThreadsPerSm = kKind == Kind::per_token ? 2048 : kNorm ? 1536 : 1280;
  const int32_t m = p.m;
  const int32_t k = p.k;
  if (k <= 8 * 32) {
    return rows_plan<8, Share::warp, kWarpRowThreads>(aligned, kWarpRowThreads);
  }
  // With few rows latency matters, and a long row may be bound by the arithmetic of one SM:
  // several CTAs share it. The other kinds have too little arithmetic to pay for the exchange. With
  // more than 16 rows, each stays in one CTA if it fits: the next GEMM gains more from SMs without
  // a row. Rows without a scale need no exchange.
  if constexpr (kSharesRows && kHasClusters) {
    const bool share = !kEncodes || kGroup > 0 || m <= 16 || k > 16 * kMaxThreads;
    const int32_t ctas = m <= 8                   ? kMaxCtasPerRow
                         : share && m <= kSms / 4 ? 4
                         : share && m <= kSms / 2 ? 2
                                                  : 1;
    if (ctas > 1 && k > 8 * kMaxThreads && k <= 8 * kMaxThreads * ctas) {
      return rows_plan<8, Share::cluster, kMaxThreads>(aligned, threads_for(k, 8, ctas),
                                                       static_cast<uint32_t>(ctas));
    }
  }
  const int32_t threads = static_cast<int32_t>(threads_for(k, 8));
  const int32_t at_once = k <= 32 * 32 ? 2 * kSms : kThreadsPerSm / threads * kSms;
  if (k <= 8 * kMaxThreads && m <= at_once) {
    return rows_plan<8, Share::cta, kMaxThreads>(aligned, threads_for(k, 8));
  }
  if (k <= 32 * 32) {
    return rows_plan<32, Share::warp, kWarpRowThreads>(aligned, kWarpRowThreads);
  }
  const int32_t few = k <= 4096 ? 1024 : k <= 8 * kMaxThreads ? 2 * kSms : kSms;
  if (aligned && m > few && k <= 32 * 512) {
    return many_rows_plan(p);
  }
  // What does not fit into the 64 registers of a thread is read again instead: norms with a scale
  // for each group on GPUs before sm_90, layer norms on those after it.
  constexpr bool kGroupNorm = kNorm && kGroup > 0 && kTargets[0] < 900;
  if constexpr (!(kLayerNorm && kTargets[0] >= 1000) && !(kGroupNorm && sizeof(In) == 4)) {
    if (k <= 16 * kMaxThreads) {
      return rows_plan<16, Share::cta, kMaxThreads>(aligned, threads_for(k, 16));
    }
  }
  // fp32 and layer_norm would spill, and so would everything on sm_100 and sm_120.
  if constexpr (sizeof(In) == 2 && sizeof(Weight) == 2 && !kLayerNorm && !kGroupNorm &&
                kTargets[0] < 1000) {
    if (aligned && k <= 32 * kMaxThreads) {
      return aligned_rows_plan<32, kMaxThreads, 1>(threads_for(k, 32));
    }
  }
  return {aligned ? quantize_long_rows<true> : quantize_long_rows<false>, kMaxThreads, 1, 1};
}

bool divides(int64_t alignment, const void* pointer, int64_t stride_bytes, int32_t rows) {
  return reinterpret_cast<uintptr_t>(pointer) % alignment == 0 &&
         (rows == 1 || stride_bytes % alignment == 0);
}

// Whether every row consists of whole, aligned vectors.
bool is_aligned(const QuantizeParams& p) {
  constexpr int64_t kSize = sizeof(In);
  constexpr int64_t kOutSize = sizeof(Stored);
  bool aligned = p.k % kVectorSize == 0 && divides(16, p.x, p.x_stride * kSize, p.m) &&
                 divides(kVectorSize * kOutSize, p.out, p.out_stride * kOutSize, p.m);
  if constexpr (kNorm) {
    aligned = aligned && divides(16, p.norm_weight, 0, p.m) && divides(16, p.norm_bias, 0, p.m);
    if (p.residual != nullptr) {
      aligned = aligned && divides(16, p.residual, p.residual_stride * kSize, p.m) &&
                divides(16, p.residual_out, p.residual_out_stride * kSize, p.m);
    }
  }
  return aligned;
}

// Whether every row that is activated, or each of its halves, consists of whole cache lines.
bool has_whole_lines(const QuantizeParams& p) {
  constexpr int64_t kSize = sizeof(In);
  return p.k * kSize % kLineBytes == 0 && divides(kLineBytes, p.x, p.x_stride * kSize, p.m);
}

bool is_valid(const QuantizeParams& p) {
  return (p.scale_out != nullptr) == kEncodes &&
         (p.static_scale == nullptr || (kEncodes && kGroup == 0 && !kAsymmetric)) &&
         (p.zero_point_out != nullptr) == kAsymmetric &&
         (p.zero_point == nullptr || p.static_scale != nullptr) &&
         (!kNorm || p.norm_weight != nullptr) && (kLayerNorm || p.norm_bias == nullptr) &&
         (p.residual == nullptr) == (p.residual_out == nullptr) &&
         (kNorm || p.residual == nullptr) &&
         (p.heads <= 1 ||
          (kLayerNorm && p.m % p.heads == 0 && p.residual == nullptr && p.n_active == nullptr));
}

}  // namespace
}  // namespace ostinato

OSTINATO_EXPORT int ostinato_prepare(void) { return cudaSuccess; }

OSTINATO_LAUNCH(ostinato::QuantizeParams) {
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
  const Plan chosen = plan(*params, is_aligned(*params));
  LaunchConfig config;
  config.grid = dim3((static_cast<uint32_t>(params->m) + chosen.rows_per_cta - 1) /
                     chosen.rows_per_cta * chosen.ctas_per_row);
  config.block = dim3(chosen.threads);
  config.cluster = dim3(chosen.ctas_per_row);
  config.pdl = params->pdl != 0;
  QuantizeParams given = *params;
  given.discard_x = given.discard_x != 0 && has_whole_lines(given);
  return launch(chosen.kernel, config, static_cast<cudaStream_t>(stream), given,
                KnownDivisor(static_cast<float>(params->k)));
}
