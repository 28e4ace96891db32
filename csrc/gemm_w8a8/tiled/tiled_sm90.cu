// W8A8 and 16-bit GEMM for any number of tokens on Hopper (sm_90a): TMA, wgmma, a persistent grid.
//
// Tokens or channels are the MMA's 64 rows, the others its columns (swap-AB). Two producers fill a
// ring of stages, and one or two consumer warpgroups multiply (consumer.cuh). A tile may be smaller
// than the compiled one in both dimensions, so that tiles fit the SMs and time grows evenly with m.
// Scheduler: tile_scheduler.cuh. Mainloop: consumer.cuh. Epilogues: epilogue.cuh,
// epilogue_small_m.cuh, epilogue_swap_ab.cuh, epilogue_argmax.cuh. docs/notebooks/gemm_tiled.md has
// reasons and measurements.
//
// Any m, n and k. x has a 16-byte aligned base and row stride (TMA); w is packed (w_stride 0) or
// plain with 16-byte aligned rows. With params.pdl, the preceding kernel may write x, x_scale and
// x_zero_point. It must not write w, w_scale, w_sum or bias, which are read before the wait.
//
// With block scales, each stage of the ring has those of its weights and tokens, copied by TMA.
#include <cuda_runtime.h>

#include "common/check.h"
#include "common/cluster.cuh"
#include "common/launch.cuh"
#include "common/tma.cuh"
#include "config.cuh"
#include "consumer.cuh"
#include "cute/arch/cluster_sm90.hpp"
#include "gemm_w8a8/params.h"
#include "producer.cuh"
#include "tile_scheduler.cuh"

namespace ostinato::tiled {
namespace {

using Registers = RegisterTable<2, kDebugPrint>;

// Tensor maps of block scales.
struct ScaleMaps {
  CUtensorMap x, w;
};
struct NoScaleMaps {};
using Scales = std::conditional_t<kBlockScales, ScaleMaps, NoScaleMaps>;

__device__ __forceinline__ const CUtensorMap* x_map_of(const ScaleMaps& maps) { return &maps.x; }
__device__ __forceinline__ const CUtensorMap* w_map_of(const ScaleMaps& maps) { return &maps.w; }
__device__ __forceinline__ const CUtensorMap* x_map_of(const NoScaleMaps&) { return nullptr; }
__device__ __forceinline__ const CUtensorMap* w_map_of(const NoScaleMaps&) { return nullptr; }

// The other CTA's copies and arrivals need this CTA's barriers, and vice versa.
__device__ __forceinline__ void sync_ctas(const Plan& plan) {
  if (plan.cluster > 1) {
    __syncwarp();
    sync_cluster_relaxed();
  } else {
    __syncthreads();
  }
}

// One lane of each warp initialises some barriers: one warp for all would take long.
__device__ __forceinline__ void init_barriers(const Plan& plan, FixedStorage& fixed) {
  constexpr int kWarps = kThreads / 32;
  if (threadIdx.x % 32 != 0) {
    return;
  }
  for (int i = threadIdx.x / 32; i < plan.stages; i += kWarps) {
    init_barrier(&fixed.full[i], 1);
    if (kThrottled) {
      init_barrier(&fixed.full_tokens[i], 1);
    }
    init_barrier(&fixed.empty[i], kSharers * kReleases * plan.cluster);
  }
  if (threadIdx.x == 0) {
    init_barrier(&fixed.prefilled, 1);
    if (kPingPong) {
      init_barrier(&fixed.turn[0], kWarpgroup / 32);
      init_barrier(&fixed.turn[1], kWarpgroup / 32);
    }
  }
  fence_barrier_init();
}

__global__ void __launch_bounds__(kThreads, 1)
    tiled_gemm(const __grid_constant__ W8A8GemmParams params, const __grid_constant__ Plan plan,
               const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
               const __grid_constant__ CUtensorMap out_map,
               const __grid_constant__ Scales scale_maps) {
  extern __shared__ __align__(1024) uint8_t storage[];
  FixedStorage& fixed = *reinterpret_cast<FixedStorage*>(storage);
  uint8_t* const ring = storage + kRingOffset;
  // One producer warp copies weights and one tokens. ptxas issues TMA without a loop over lanes
  // only if it can prove that warp and thread are unique.
  const int producer = __shfl_sync(0xffffffff, threadIdx.x / 32, 0) - kConsumers * kWarpgroup / 32;
  if (producer == 0) {
    prefetch_tensor_map(w_map);
  } else if (producer == 1) {
    prefetch_tensor_map(x_map);
  }
  init_barriers(plan, fixed);
  sync_ctas(plan);
  if (producer >= 0) {
    if constexpr (kConsumers > 1) {
      give_up_registers<Registers::kSplit.producer>();
    }
    if (producer == 0 && cute::elect_one_sync()) {
      WeightProducer(plan, w_map, w_map_of(scale_maps), ring, fixed).run(params.w_stride == 0);
    } else if (producer == 1 && cute::elect_one_sync()) {
      TokenProducer(plan, x_map, x_map_of(scale_maps), ring, fixed).run();
    }
    if (plan.whole_work_tiles + int(blockIdx.x >> (plan.cluster - 1)) < plan.work_tiles) {
      // Consumers that share a tile exchange accumulators between these two barriers.
      __syncwarp();
      sync_cluster();
      sync_cluster();
    }
  } else {
    if constexpr (kConsumers > 1) {
      take_registers<Registers::kSplit.consumer>();
    }
    Consumer(params, plan, out_map, ring, fixed).run();
  }
  if (plan.cluster > 1) {
    __syncwarp();
    sync_cluster_relaxed();
  }
}

// Sizes are counted in 32 bits, rounded up to whole tiles plus one tile.
constexpr int kLargestSize = INT32_MAX - 1024;

bool implemented(const W8A8GemmParams& params) {
  return params.m >= 0 && params.n >= 0 && params.k > 0 && params.m <= kLargestSize &&
         params.n <= kLargestSize && params.k <= kLargestSize / kOperandBytes &&
         (params.x_scale != nullptr) == !k16Bit && (params.w_scale != nullptr) == !k16Bit &&
         aligned(params.x, params.x_stride * kOperandBytes) &&
         aligned(params.w, params.w_stride * kOperandBytes) &&
         (!kBlockScales ||
          (aligned(params.x_scale, params.x_scale_stride * int64_t{sizeof(float)}) &&
           aligned(params.w_scale, params.w_scale_stride * int64_t{sizeof(float)}) &&
           params.x_scale_stride > 0 && params.w_scale_stride > 0)) &&
         (params.x_zero_point == nullptr || (kInt8 && params.w_sum != nullptr)) &&
         (params.best == nullptr ||
          (kFindsArgmax && params.temperature != nullptr && params.x_zero_point == nullptr));
}

cudaError_t encode_x(const W8A8GemmParams& params, const Plan& plan, CUtensorMap* map) {
  const TensorMapShape<2> shape = {{uint64_t(params.k), uint64_t(params.m)},
                                   {1, uint64_t(params.x_stride)},
                                   {kUnitDepth, uint32_t(plan.token_share)}};
  return encode_tensor_map(map, params.x, shape, CU_TENSOR_MAP_SWIZZLE_128B);
}

cudaError_t encode_w(const W8A8GemmParams& params, const Plan& plan, CUtensorMap* map) {
  if (params.w_stride != 0) {
    const TensorMapShape<2> plain = {{uint64_t(params.k), uint64_t(params.n)},
                                     {1, uint64_t(params.w_stride)},
                                     {kPackedDepth, uint32_t(plan.tile_channels)}};
    return encode_tensor_map(map, params.w, plain, CU_TENSOR_MAP_SWIZZLE_64B);
  }
  // Tiles and blocks as runs of 1 KB, in 8-byte elements: a box has at most 256 elements per
  // dimension.
  constexpr uint64_t kRun = kPackedBlockBytes / sizeof(uint64_t);
  const uint64_t tiles = ceil_div(params.n, kPackedRows);
  const uint64_t blocks = round_up(params.k, kPackedDepthUnit) / kPackedDepth;
  const TensorMapShape<3> packed = {
      {kRun, tiles, blocks},
      {1, blocks * kPackedBlockBytes, kPackedBlockBytes},
      {kRun, uint32_t(plan.tile_channels / kPackedRows),
       uint32_t(plan.share_weights ? kStageBlocks / 2 : kStageBlocks)}};
  return encode_tensor_map(map, params.w, packed, CU_TENSOR_MAP_SWIZZLE_NONE,
                           CU_TENSOR_MAP_DATA_TYPE_UINT64);
}

// Only for TMA stores; without them the map is unused.
cudaError_t encode_out(const W8A8GemmParams& params, const Plan& plan, CUtensorMap* map) {
  if (kTokenRows || !plan.whole_blocks) {
    return cudaSuccess;
  }
  const TensorMapShape<2> shape = {{uint64_t(params.n) * sizeof(Output), uint64_t(params.m)},
                                   {1, uint64_t(params.out_stride) * sizeof(Output)},
                                   {kStripBytes, kChunkTokens}};
  return encode_tensor_map(map, params.out, shape, CU_TENSOR_MAP_SWIZZLE_128B);
}

// Each row of a map holds the scales of 128 of K.
cudaError_t encode_scales(const W8A8GemmParams&, NoScaleMaps*) { return cudaSuccess; }
cudaError_t encode_scales(const W8A8GemmParams& params, ScaleMaps* maps) {
  const uint64_t groups = ceil_div(params.k, kUnitDepth);
  const TensorMapShape<2> x = {{uint64_t(params.m), groups},
                               {1, uint64_t(params.x_scale_stride) * sizeof(float)},
                               {kTokenScales, kUnits}};
  const TensorMapShape<2> w = {{uint64_t(ceil_div(params.n, kScaleChannels)), groups},
                               {1, uint64_t(params.w_scale_stride) * sizeof(float)},
                               {kWeightScales, kUnits}};
  constexpr auto kWhole = CU_TENSOR_MAP_SWIZZLE_NONE;
  constexpr auto kElement = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  OSTINATO_RETURN_IF_ERROR(encode_tensor_map(&maps->x, params.x_scale, x, kWhole, kElement));
  return encode_tensor_map(&maps->w, params.w_scale, w, kWhole, kElement);
}

// Counts K in bytes, as all that follows does.
W8A8GemmParams in_bytes(W8A8GemmParams params) {
  params.x_stride *= kOperandBytes;
  params.w_stride *= kOperandBytes;
  params.k *= kOperandBytes;
  return params;
}

cudaError_t launch_gemm(const W8A8GemmParams& in_elements, cudaStream_t stream) {
  if (!implemented(in_elements)) {
    return cudaErrorInvalidValue;
  }
  const W8A8GemmParams params = in_bytes(in_elements);
  if (params.m == 0 || params.n == 0) {
    return cudaSuccess;
  }
  int sms = 0;
  OSTINATO_RETURN_IF_ERROR(count_sms(&sms));
  Plan plan;
  if (!make_plan(params, sms, &plan)) {
    return cudaErrorInvalidValue;
  }
  CUtensorMap x_map, w_map, out_map = {};
  OSTINATO_RETURN_IF_ERROR(encode_x(params, plan, &x_map));
  OSTINATO_RETURN_IF_ERROR(encode_w(params, plan, &w_map));
  OSTINATO_RETURN_IF_ERROR(encode_out(params, plan, &out_map));
  Scales scale_maps = {};
  OSTINATO_RETURN_IF_ERROR(encode_scales(params, &scale_maps));
  LaunchConfig config;
  config.grid = dim3(plan.clusters * plan.cluster);
  config.block = dim3(kThreads);
  config.dynamic_smem = plan.smem_bytes;
  config.cluster = dim3(plan.cluster);
  config.pdl = params.pdl != 0;
  return launch(tiled_gemm, config, stream, params, plan, x_map, w_map, out_map, scale_maps);
}

}  // namespace
}  // namespace ostinato::tiled

OSTINATO_EXPORT int ostinato_prepare(void) {
  using namespace ostinato::tiled;
  return ostinato::allow_dynamic_smem(tiled_gemm, kSmemLimit);
}

OSTINATO_LAUNCH(ostinato::W8A8GemmParams) {
  return ostinato::tiled::launch_gemm(*params, static_cast<cudaStream_t>(stream));
}
