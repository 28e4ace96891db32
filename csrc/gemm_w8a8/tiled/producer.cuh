// The producers of the tiled GEMM: one thread copies weights, another, in its own warp, tokens.
// What they do between two copies limits how fast a ring of small stages fills, so that each way to
// copy has a loop of its own.
#pragma once

#include "common/cache_policy.cuh"
#include "common/cluster.cuh"
#include "common/launch.cuh"
#include "common/ring.cuh"
#include "common/tma.cuh"
#include "tile_scheduler.cuh"

namespace ostinato::tiled {

// What both producers know. A stage is full when the bytes of both have arrived; where they have
// one barrier for it, the weights' thread announces them all.
class Producer {
 public:
  __device__ Producer(const Plan& plan, const CUtensorMap& map, uint8_t* ring, FixedStorage& fixed,
                      uint64_t* full)
      : plan_(plan),
        map_(map),
        ring_(ring),
        fixed_(fixed),
        full_(full),
        rank_(plan.cluster > 1 ? cluster_rank() : 0) {}

 protected:
  static constexpr uint16_t kBothCtas = 0b11;

  // Calls copy(work tile, step, stage, full) for every stage of every work tile of this CTA, when
  // the stage is empty; before it announce(full).
  template <class Announce, class Copy>
  __device__ __forceinline__ void fill(Announce announce, Copy copy) {
    RingPosition position;
    for (int index = blockIdx.x >> (plan_.cluster - 1); index < plan_.work_tiles;
         index += plan_.clusters) {
      const WorkTile work_tile = work_tile_at(plan_, index, rank_);
      const int end = work_tile.first_step + work_tile.steps;
#pragma unroll 1
      for (int step = work_tile.first_step; step < end; ++step) {
        uint64_t* const full = &full_[position.slot];
        wait(&fixed_.empty[position.slot], position.parity ^ 1);
        announce(full);
        copy(work_tile, step, ring_ + position.slot * plan_.stage_bytes, full);
        position.advance(plan_.stages);
      }
    }
  }

  const Plan& plan_;
  const CUtensorMap& map_;
  uint8_t* ring_;
  FixedStorage& fixed_;
  uint64_t* full_;
  int rank_;
};

// tma_load and tma_load_multicast of what is read once.
__device__ __forceinline__ void tma_load_once(void* shared, const CUtensorMap& map, int x, int y,
                                              int z, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "l"(kEvictFirst)
      : "memory");
}
__device__ __forceinline__ void tma_load_multicast_once(void* shared, const CUtensorMap& map, int x,
                                                        int y, int z, uint64_t* barrier,
                                                        uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6, %7;" ::"r"(
          shared_address(shared)),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "h"(ctas), "l"(kEvictFirst)
      : "memory");
}

class WeightProducer : Producer {
 public:
  __device__ WeightProducer(const Plan& plan, const CUtensorMap& map, uint8_t* ring,
                            FixedStorage& fixed)
      : Producer(plan, map, ring, fixed, fixed.full),
        early_stages_(ceil_div(kThrottled ? kThrottledBytes : kPrefillBytes, plan.weight_bytes)) {}

  // Weights are constants: the first are on their way before the predecessor, which may write x,
  // has ended.
  __device__ void run(bool packed) {
    // CTAs that share weights copy as many blocks of K each, for both.
    constexpr int kHalf = kStageBlocks / 2;
    const int first = plan_.share_weights ? rank_ * kHalf : 0;
    const int blocks = plan_.share_weights ? kHalf : kStageBlocks;
    const int offset = first * plan_.block_bytes;
    const auto announce = [&](uint64_t* full) {
      if (!x_requested_ && copied_ >= early_stages_) {
        hold_back();
      }
      ++copied_;
      OSTINATO_DELAY(weights, true);
      arrive_expecting(full, kThrottled ? plan_.weight_bytes : plan_.stage_bytes);
    };
    // Each is read by one CTA, once: what the kernels around this one read shall stay in the L2.
    const bool once = packed && plan_.token_tiles == 1;
    if (once && plan_.share_weights) {
      fill(announce, [&](const WorkTile& work_tile, int step, uint8_t* stage, uint64_t* full) {
        tma_load_multicast_once(stage + offset, map_, 0, work_tile.channel / kPackedRows,
                                step * kStageBlocks + first, full, kBothCtas);
      });
    } else if (once) {
      fill(announce, [&](const WorkTile& work_tile, int step, uint8_t* stage, uint64_t* full) {
        tma_load_once(stage, map_, 0, work_tile.channel / kPackedRows, step * kStageBlocks, full);
      });
    } else if (packed && plan_.share_weights) {
      fill(announce, [&](const WorkTile& work_tile, int step, uint8_t* stage, uint64_t* full) {
        tma_load_multicast(stage + offset, map_, 0, work_tile.channel / kPackedRows,
                           step * kStageBlocks + first, full, kBothCtas);
      });
    } else if (packed) {
      fill(announce, [&](const WorkTile& work_tile, int step, uint8_t* stage, uint64_t* full) {
        tma_load(stage, map_, 0, work_tile.channel / kPackedRows, step * kStageBlocks, full);
      });
    } else {
      fill(announce, [&](const WorkTile& work_tile, int step, uint8_t* stage, uint64_t* full) {
#pragma unroll 1
        for (int block = first; block < first + blocks; ++block) {
          uint8_t* const to = stage + block * plan_.block_bytes;
          const int depth = (step * kStageBlocks + block) * kPackedDepth;
          if (plan_.share_weights) {
            tma_load_multicast(to, map_, depth, work_tile.channel, full, kBothCtas);
          } else {
            tma_load(to, map_, depth, work_tile.channel, full);
          }
        }
      });
    }
    if (copied_ <= early_stages_) {
      let_successor_start();
    }
  }

 private:
  // Waits for x to be asked for, or, if paced, for an earlier stage to have landed.
  __device__ __forceinline__ void hold_back() {
    if (copied_ == early_stages_) {
      let_successor_start();
    }
    if (!kThrottled) {
      wait(&fixed_.prefilled, 0);
      x_requested_ = true;
      return;
    }
    // A slot is used again when x has been multiplied.
    x_requested_ = copied_ >= plan_.stages;
    while (!x_requested_ && !is_complete(&full_[copied_ - early_stages_], 0)) {
      x_requested_ = is_complete(&fixed_.prefilled, 0);
    }
  }

  const int early_stages_;  // in flight, or asked for, before x is
  int copied_ = 0;
  bool x_requested_ = false;
};

class TokenProducer : Producer {
 public:
  __device__ TokenProducer(const Plan& plan, const CUtensorMap& map, uint8_t* ring,
                           FixedStorage& fixed)
      : Producer(plan, map, ring, fixed, kThrottled ? fixed.full_tokens : fixed.full) {}

  // Each CTA of a cluster that shares tokens reads some of them for all, unless the CTAs share K.
  __device__ void run() {
    bool waited = false, announced = false;
    const auto announce = [&](uint64_t* full) {
      if (!waited) {
        // Here, where all is known that the first copies need.
        wait_for_predecessor();
        waited = true;
      }
      OSTINATO_DELAY(tokens, true);
      if (kThrottled) {
        arrive_expecting(full, plan_.stage_bytes - plan_.weight_bytes);
      }
    };
    const auto copy_units = [&](int step, uint8_t* stage, auto copy) {
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        copy(stage + plan_.weight_bytes + unit * plan_.token_rows * kUnitDepth,
             step * kStageDepth + unit * kUnitDepth);
      }
      if (!announced) {
        arrive(&fixed_.prefilled);
        announced = true;
      }
    };
    if (plan_.cluster == 1 || plan_.share_weights) {
      fill(announce, [&](const WorkTile& work_tile, int step, uint8_t* stage, uint64_t* full) {
        copy_units(step, stage, [&](uint8_t* to, int depth) {
          tma_load(to, map_, depth, work_tile.token, full);
        });
      });
      return;
    }
    const int share = plan_.token_share;
    fill(announce, [&](const WorkTile& work_tile, int step, uint8_t* stage, uint64_t* full) {
      copy_units(step, stage, [&](uint8_t* to, int depth) {
        if (!work_tile.shared) {
          const int first = rank_ * share;
          tma_load_multicast(to + first * kUnitDepth, map_, depth, work_tile.token + first, full,
                             kBothCtas);
        } else {
          tma_load(to, map_, depth, work_tile.token, full);
          tma_load(to + share * kUnitDepth, map_, depth, work_tile.token + share, full);
        }
      });
    });
  }
};

}  // namespace ostinato::tiled
