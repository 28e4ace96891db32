// The producers of the tiled GEMM: one thread copies weights, another, in its own warp, tokens.
#pragma once

#include "common/cache_policy.cuh"
#include "common/cluster.cuh"
#include "common/launch.cuh"
#include "common/ring.cuh"
#include "common/tma.cuh"
#include "tiled_plan.cuh"

namespace ostinato::tiled {

// What both producers know. A stage is full when the bytes of both have arrived; the weights'
// thread announces them all.
class Producer {
 public:
  __device__ Producer(const Plan& plan, uint8_t* ring, FixedStorage& fixed)
      : plan_(plan),
        ring_(ring),
        fixed_(fixed),
        rank_(plan.cluster > 1 ? cluster_rank() : 0),
        clusters_(gridDim.x / plan.cluster),
        cluster_(blockIdx.x / plan.cluster) {}

 protected:
  __device__ __forceinline__ void wait_empty(const RingPosition& position) {
    wait(&fixed_.empty[position.slot], position.parity ^ 1);
  }

  const Plan& plan_;
  uint8_t* ring_;
  FixedStorage& fixed_;
  int rank_, clusters_, cluster_;
};

class WeightProducer : Producer {
 public:
  __device__ WeightProducer(const W8A8GemmParams& params, const Plan& plan, const CUtensorMap& map,
                            uint8_t* ring, FixedStorage& fixed)
      : Producer(plan, ring, fixed),
        packed_(params.w_stride == 0),
        map_(map),
        // Weights that one tile alone reads should not push activations out of the L2 cache.
        policy_(plan.token_tiles == 1 ? evict_first_policy() : evict_normal_policy()) {}

  // Weights are constants: the first are on their way before the predecessor, which may write x,
  // has ended. No more than some: tokens wait behind them.
  __device__ void run() {
    const int prefill = ceil_div(kPrefillBytes, plan_.weight_bytes);
    int copied = 0;
    RingPosition position;
    for (int index = cluster_; index < plan_.items; index += clusters_) {
      const Item item = item_at(plan_, index, rank_);
      for (int step = 0; step < item.steps; ++step) {
        if (copied == prefill) {
          let_successor_start();
          wait(&fixed_.prefilled, 0);
        }
        ++copied;
        OSTINATO_DELAY(weights, true);
        wait_empty(position);
        arrive_expecting(&fixed_.full[position.slot], plan_.stage_bytes);
        copy(item, step, position.slot);
        position.advance(plan_.stages);
      }
    }
    let_successor_start();
  }

 private:
  __device__ __forceinline__ void copy(const Item& item, int step, int slot) {
    uint8_t* const stage = ring_ + slot * plan_.stage_bytes;
    if (packed_) {
      tma_load(stage, map_, 0, 0, item.channel / kPackedRows,
               (item.first_step + step) * kStageBlocks, &fixed_.full[slot], policy_);
      return;
    }
#pragma unroll 1
    for (int block = 0; block < kStageBlocks; ++block) {
      tma_load(stage + block * plan_.tile_channels * kPackedDepth, map_,
               (item.first_step + step) * kStageDepth + block * kPackedDepth, item.channel,
               &fixed_.full[slot], policy_);
    }
  }

  bool packed_;
  const CUtensorMap& map_;
  uint64_t policy_;
};

class TokenProducer : Producer {
 public:
  __device__ TokenProducer(const Plan& plan, const CUtensorMap& map, uint8_t* ring,
                           FixedStorage& fixed)
      : Producer(plan, ring, fixed),
        map_(map),
        share_(plan.token_rows / plan.cluster),
        policy_(evict_normal_policy()) {}

  __device__ void run() {
    wait_for_predecessor();
    RingPosition position;
    for (int index = cluster_; index < plan_.items; index += clusters_) {
      const Item item = item_at(plan_, index, rank_);
      for (int step = 0; step < item.steps; ++step) {
        OSTINATO_DELAY(tokens, true);
        wait_empty(position);
        copy(item, step, position.slot);
        if (index == cluster_ && step == 0) {
          arrive(&fixed_.prefilled);
        }
        position.advance(plan_.stages);
      }
    }
  }

 private:
  // Each CTA of a cluster reads its share of the tokens for all of them, unless they share K.
  __device__ __forceinline__ void copy(const Item& item, int step, int slot) {
    uint8_t* const stage = ring_ + slot * plan_.stage_bytes + plan_.weight_bytes;
    uint64_t* const full = &fixed_.full[slot];
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const int depth = (item.first_step + step) * kStageDepth + unit * kUnitDepth;
      uint8_t* const rows = stage + unit * plan_.token_rows * kUnitDepth;
      if (plan_.cluster == 1) {
        tma_load(rows, map_, depth, item.token, full, policy_);
      } else if (!item.shared) {
        tma_load_multicast(rows + rank_ * share_ * kUnitDepth, map_, depth,
                           item.token + rank_ * share_, full, kBothCtas, policy_);
      } else {
        tma_load(rows, map_, depth, item.token, full, policy_);
        tma_load(rows + share_ * kUnitDepth, map_, depth, item.token + share_, full, policy_);
      }
    }
  }

  static constexpr uint16_t kBothCtas = 0b11;

  const CUtensorMap& map_;
  int share_;
  uint64_t policy_;
};

}  // namespace ostinato::tiled
