// The producer of the tiled GEMM: one thread that keeps the ring full.
#pragma once

#include "common/launch.cuh"
#include "common/tma.cuh"
#include "tiled_plan.cuh"

namespace ostinato::tiled {

// A position in the ring, and how often the ring has gone round (its parity).
struct Position {
  int slot;
  uint32_t parity;

  __device__ __forceinline__ void advance(int stages) {
    if (++slot == stages) {
      slot = 0;
      parity ^= 1;
    }
  }
};

class Producer {
 public:
  __device__ Producer(const W8A8GemmParams& params, const Plan& plan, const CUtensorMap& x_map,
                      const CUtensorMap& w_map, uint8_t* ring, FixedStorage& fixed)
      : params_(params),
        plan_(plan),
        x_map_(x_map),
        w_map_(w_map),
        ring_(ring),
        fixed_(fixed),
        rank_(plan.cluster > 1 ? cluster_rank() : 0),
        // Weights that one tile alone reads should not push activations out of the L2 cache.
        w_policy_(plan.token_tiles == 1 ? evict_first_policy() : evict_normal_policy()),
        x_policy_(evict_normal_policy()) {}

  __device__ void run() {
    const int clusters = gridDim.x / plan_.cluster;
    const int first = blockIdx.x / plan_.cluster;
    // Weights are constants: some are on their way before the predecessor, which may write x, has
    // ended.
    Item item = item_at(plan_, first, rank_);
    const int room = item.steps < plan_.stages ? item.steps : plan_.stages;
    const int wanted = ceil_div(kPrefillBytes, plan_.weight_bytes);
    const int ahead = wanted < room ? wanted : room;
#pragma unroll 1
    for (int step = 0; step < ahead; ++step) {
      arrive_expecting(&fixed_.full[step], plan_.stage_bytes);
      load_weights(item, step, step);
    }
    let_successor_start();
    wait_for_predecessor();
#pragma unroll 1
    for (int step = 0; step < ahead; ++step) {
      load_tokens(item, step, step);
    }
    Position position{ahead < plan_.stages ? ahead : 0, ahead < plan_.stages ? 0u : 1u};
    int step = ahead;
#pragma unroll 1
    for (int index = first; index < plan_.items; index += clusters) {
      item = item_at(plan_, index, rank_);
#pragma unroll 1
      for (; step < item.steps; ++step) {
        OSTINATO_DELAY(producer, true);
        wait(&fixed_.empty[position.slot], position.parity ^ 1);
        arrive_expecting(&fixed_.full[position.slot], plan_.stage_bytes);
        load_weights(item, step, position.slot);
        load_tokens(item, step, position.slot);
        position.advance(plan_.stages);
      }
      step = 0;
    }
  }

 private:
  __device__ __forceinline__ void load_weights(const Item& item, int step, int slot) {
    uint8_t* const stage = ring_ + slot * plan_.stage_bytes;
    if (params_.w_stride == 0) {
      tma_load(stage, w_map_, 0, 0, item.channel / kPackedRows,
               (item.first_step + step) * kStageBlocks, &fixed_.full[slot], w_policy_);
      return;
    }
#pragma unroll 1
    for (int block = 0; block < kStageBlocks; ++block) {
      tma_load(stage + block * plan_.tile_channels * kPackedDepth, w_map_,
               (item.first_step + step) * kStageDepth + block * kPackedDepth, item.channel,
               &fixed_.full[slot], w_policy_);
    }
  }

  // Each CTA of a cluster reads its share of the tokens for all of them, unless they share K.
  __device__ __forceinline__ void load_tokens(const Item& item, int step, int slot) {
    uint8_t* const stage = ring_ + slot * plan_.stage_bytes + plan_.weight_bytes;
    const int share = plan_.token_rows / plan_.cluster;
    const bool multicast = plan_.cluster > 1 && !item.shared;
#pragma unroll 1
    for (int unit = 0; unit < kUnits; ++unit) {
      const int depth = (item.first_step + step) * kStageDepth + unit * kUnitDepth;
      uint8_t* const rows = stage + unit * plan_.token_rows * kUnitDepth;
      if (multicast) {
        tma_load_multicast(rows + rank_ * share * kUnitDepth, x_map_, depth,
                           item.token + rank_ * share, &fixed_.full[slot],
                           static_cast<uint16_t>((1 << plan_.cluster) - 1), x_policy_);
        continue;
      }
#pragma unroll 1
      for (int first = 0; first < plan_.token_rows; first += share) {
        tma_load(rows + first * kUnitDepth, x_map_, depth, item.token + first, &fixed_.full[slot],
                 x_policy_);
      }
    }
  }

  const W8A8GemmParams& params_;
  const Plan& plan_;
  const CUtensorMap& x_map_;
  const CUtensorMap& w_map_;
  uint8_t* ring_;
  FixedStorage& fixed_;
  int rank_;
  uint64_t w_policy_, x_policy_;
};

}  // namespace ostinato::tiled
