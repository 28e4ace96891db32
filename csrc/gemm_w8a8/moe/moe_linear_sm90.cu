// Grouped GEMM of a mixture of experts on Hopper (sm_90a): the rows of each expert times its
// weight.
//
// A persistent grid walks the list of row tiles that routing has left on the device, one for each
// tile of channels: no CTA and no copy is for an expert without rows. Mainloop, operands and the
// order of summation are those of the tiled GEMM (gemm_w8a8/tiled), but that rows of x are gathered
// (producer.cuh), or gathered and quantised (quantizing_producer.cuh), and results scattered
// (epilogue.cuh). Macros: gemm_w8a8/tiled/config.cuh, with OSTINATO_PINGPONG=0, and config.cuh.
//
// Any n and k. x has a 16-byte aligned base and row stride. Which weights are needed follows from
// routing: nothing is read before the preceding kernel has ended, but with params.early the plan,
// and the weights that fit in the ring.
#include <cuda_runtime.h>

#include "common/alignment.h"
#include "common/check.h"
#include "common/cluster.cuh"
#include "common/launch.cuh"
#include "common/sizes.cuh"
#include "common/tma.cuh"
#include "config.cuh"
#include "consumer.cuh"
#include "params.h"
#include "producer.cuh"
#include "stages.cuh"
#if OSTINATO_QUANTIZES
#include "quantizing_producer.cuh"
#endif

namespace ostinato::moe {
namespace {

using Registers = RegisterTable<2, kDebugPrint>;
#if OSTINATO_QUANTIZES
using TileProducer = QuantizingProducer;
#else
using TileProducer = Producer;
#endif

// Waits for all threads of a CTA, or of a pair.
__device__ __forceinline__ void sync_ctas(const Plan& plan) {
  if (pairs_of(plan) != 0) {
    __syncwarp();
    sync_cluster_relaxed();
  } else {
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kCtaThreads, 1)
    moe_linear(const __grid_constant__ MoeLinearParams params, const __grid_constant__ Plan plan,
               const __grid_constant__ CUtensorMap w_map) {
  extern __shared__ __align__(1024) uint8_t storage[];
  Storage& fixed = *reinterpret_cast<Storage*>(storage);
  uint8_t* const ring = storage + kStorageBytes + waiting_bytes(plan);
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  const int producer = warp - kConsumers * kWarpgroup / 32;
  if (producer == 0) {
    prefetch_tensor_map(w_map);
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < plan.stages; ++i) {
      init_barrier(&fixed.full[i], kWeightArrivals);
      init_barrier(&fixed.full_tokens[i], kTokenArrivals);
      init_barrier(&fixed.empty[i], (1 + pairs_of(plan)) * kConsumers * kWarpgroup / 32);
    }
    fence_barrier_init();
  }
  sync_ctas(plan);
  // Those who quantise rows wait for them when they know which.
  if (producer < 0 || (producer > 0 && !kQuantizes) || params.early == 0) {
    wait_for_predecessor();
    // Not before: what follows may take for granted that the routing has ended.
    let_successor_start();
  }
  const int tiles = *params.n_tiles;
  if (producer >= 0) {
    if constexpr (kConsumers > 1) {
      give_up_registers<Registers::kSplit.producer>();
    }
    TileProducer producers(params, plan, ring, fixed, tiles);
    if (producer > 0) {
      producers.copy_tokens(producer - 1);
    } else {
      producers.copy_weights(w_map);
    }
  } else {
    if constexpr (kConsumers > 1) {
      take_registers<Registers::kSplit.consumer>();
    }
    Consumer(params, plan, ring, fixed).run(tiles);
  }
  if (pairs_of(plan) != 0) {
    // The other CTA may still arrive at this one's barriers.
    sync_ctas(plan);
  }
}

constexpr int kLargestSize = INT32_MAX - 1024;

bool implemented(const MoeLinearParams& params) {
  const int64_t k_bytes = int64_t(params.k) * kOperandBytes;
  return params.experts > 0 && params.n > 0 && params.k > 0 && params.top_k > 0 &&
         params.n <= kLargestSize && k_bytes <= kLargestSize && params.max_tiles >= 0 &&
         (params.x_scale != nullptr) == (!k16Bit && !kQuantizes) &&
         (params.w_scale != nullptr) == !k16Bit && (params.gated == 0 || params.n % 2 == 0) &&
         (params.gated == 0 || !kBlockScales || params.n % (2 * kScaleChannels) == 0) &&
         aligned(params.x, params.x_stride * kXBytes) &&
         params.x_stride * kXBytes <= kLargestSize &&
         (!kQuantizes || (params.k % 8 == 0 && params.k <= kSmemLimit)) &&
         (params.power_of_two == 0 || (kQuantizes && kBlockScales)) && params.tile_channels >= 0 &&
         params.tile_channels <= kChannels && params.tile_channels % kTileStep == 0 &&
         (params.pairs == 0 || (kPairs && params.pairs == 1));
}

bool make_plan(const MoeLinearParams& params, Plan* plan) {
  plan->width = params.gated != 0 ? params.n / 2 : params.n;
  plan->expert_tiles =
      params.gated != 0 ? ceil_div(plan->width, kPackedRows / 2) : ceil_div(params.n, kPackedRows);
  plan->tile_channels = params.tile_channels != 0 ? params.tile_channels : kChannels;
  plan->channel_tiles = ceil_div(plan->expert_tiles, plan->tile_channels / kPackedRows);
  plan->block_bytes = plan->tile_channels * kPackedDepth;
  plan->weight_bytes = plan->block_bytes * kStageBlocks;
  plan->stage_bytes = plan->weight_bytes + kTokenBytes;
  plan->k_bytes = params.k * kOperandBytes;
  plan->depth_steps = ceil_div(plan->k_bytes, kStageDepth);
  // MMAs of a smaller tile read past its channels, within the ring or behind it.
  const int past = (kChannels - plan->tile_channels) * kPackedDepth;
  plan->x_row_bytes = kQuantizes ? plan->depth_steps * kStageDepth * kXBytes : 0;
  const int room = kSmemLimit - kStorageBytes - waiting_bytes(*plan) - past;
  plan->stages = room / plan->stage_bytes < kMaxStages ? room / plan->stage_bytes : kMaxStages;
  if (kDebugPrint && plan->stages > 2) {
    plan->stages = 2;
  }
  plan->pairs = params.pairs;
  const int64_t row_bytes = params.out_stride * int64_t{sizeof(Output)};
  const int64_t pair = 2 * sizeof(Output);
  plan->aligned_out =
      row_bytes % pair == 0 && reinterpret_cast<uintptr_t>(params.out) % pair == 0 ? 1 : 0;
  plan->vector_out = aligned(params.out, row_bytes) && plan->width % 8 == 0 ? 1 : 0;
  return plan->stages >= 2 && int64_t(params.max_tiles) * plan->channel_tiles <= kLargestSize &&
         int64_t(params.experts) * plan->expert_tiles <= kLargestSize;
}

// Tiles and blocks as runs of 1 KB, in 8-byte elements: a box has at most 256 elements per
// dimension. Blocks past the last one are zeros.
cudaError_t encode_w(const MoeLinearParams& params, const Plan& plan, CUtensorMap* map) {
  constexpr uint64_t kRun = kPackedBlockBytes / sizeof(uint64_t);
  const uint64_t tiles = uint64_t(params.experts) * plan.expert_tiles;
  const uint64_t blocks = round_up(plan.k_bytes, kPackedDepthUnit) / kPackedDepth;
  const TensorMapShape<3> packed = {
      {kRun, tiles, blocks},
      {1, blocks * kPackedBlockBytes, kPackedBlockBytes},
      {kRun, uint32_t(plan.tile_channels / kPackedRows), uint32_t(kStageBlocks >> plan.pairs)}};
  return encode_tensor_map(map, params.w, packed, CU_TENSOR_MAP_SWIZZLE_NONE,
                           CU_TENSOR_MAP_DATA_TYPE_UINT64);
}

cudaError_t launch_moe_linear(MoeLinearParams params, cudaStream_t stream) {
  Plan plan;
  if (!implemented(params) || !make_plan(params, &plan)) {
    return cudaErrorInvalidValue;
  }
  if (params.max_tiles == 0) {
    return cudaSuccess;
  }
  params.x_stride *= kXBytes;
  int sms = 0;
  OSTINATO_RETURN_IF_ERROR(count_sms(&sms));
  CUtensorMap w_map;
  OSTINATO_RETURN_IF_ERROR(encode_w(params, plan, &w_map));
  const int ctas = 1 + plan.pairs, most = ceil_div(params.max_tiles, ctas) * plan.channel_tiles;
  LaunchConfig config;
  config.grid = dim3((most < sms / ctas ? most : sms / ctas) * ctas);
  config.cluster = dim3(ctas);
  config.block = dim3(kCtaThreads);
  config.dynamic_smem = kStorageBytes + waiting_bytes(plan) + plan.stages * plan.stage_bytes +
                        (kChannels - plan.tile_channels) * kPackedDepth;
  config.pdl = params.pdl != 0;
  return launch(moe_linear, config, stream, params, plan, w_map);
}

}  // namespace
}  // namespace ostinato::moe

OSTINATO_EXPORT int ostinato_prepare(void) {
  using namespace ostinato::moe;
  return ostinato::allow_dynamic_smem(moe_linear, kSmemLimit);
}

OSTINATO_LAUNCH(ostinato::MoeLinearParams) {
  return ostinato::moe::launch_moe_linear(*params, static_cast<cudaStream_t>(stream));
}
