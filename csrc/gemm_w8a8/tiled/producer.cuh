// The producers of the tiled GEMM: one thread copies weights, another, in its own warp, copies
// tokens. Instructions between two copies limit how fast a ring of small stages fills, so every way
// to copy has its own loop.
#pragma once

#include "common/cache_policy.cuh"
#include "common/cluster.cuh"
#include "common/launch.cuh"
#include "common/ring.cuh"
#include "common/tma.cuh"
#include "tile_scheduler.cuh"

namespace ostinato::tiled {

// Common part of both producers. A stage is full when the bytes of both have arrived; if they share
// one barrier, the weight producer expects the bytes of both.
template <bool kOfWeights>
class Producer {
 public:
  __device__ Producer(const Plan& plan, const CUtensorMap& map, const CUtensorMap* scale_map,
                      uint8_t* ring, FixedStorage& fixed, uint64_t* full)
      : plan_(plan),
        map_(map),
        scale_map_(scale_map),
        ring_(ring),
        fixed_(fixed),
        full_(full),
        rank_(plan.cluster > 1 ? cluster_rank() : 0) {}

 protected:
  static constexpr uint16_t kBothCtas = 0b11;

  // For every stage of every work tile of this CTA: waits until the stage is empty, then calls
  // announce(full) and copy(work tile, step, stage, full), and copies the stage's scales.
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
        if constexpr (kBlockScales) {
          copy_scales(work_tile, step, position.slot, full, fixed_);
        }
        position.advance(plan_.stages);
      }
    }
  }

  // Copies a box with all scales of the compiled tile: zeros past the last ones.
  template <class Fixed>
  __device__ __forceinline__ void copy_scales(const WorkTile& work_tile, int step, int slot,
                                              uint64_t* full, Fixed& fixed) {
    if constexpr (kOfWeights) {
      tma_load(&fixed.w_scales[slot], *scale_map_,
               scale_box_start(work_tile.channel / kScaleChannels), step * kUnits, full);
    } else {
      tma_load(&fixed.x_scales[slot], *scale_map_, scale_box_start(work_tile.token), step * kUnits,
               full);
    }
  }

  const Plan& plan_;
  const CUtensorMap& map_;
  const CUtensorMap* scale_map_;
  uint8_t* ring_;
  FixedStorage& fixed_;
  uint64_t* full_;
  int rank_;
};

// tma_load and tma_load_multicast of data that is read once (evict-first).
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

class WeightProducer : Producer<true> {
 public:
  __device__ WeightProducer(const Plan& plan, const CUtensorMap& map, const CUtensorMap* scale_map,
                            uint8_t* ring, FixedStorage& fixed)
      : Producer(plan, map, scale_map, ring, fixed, fixed.full),
        early_stages_(ceil_div(kThrottled ? kThrottledBytes : kPrefillBytes, plan.weight_bytes)) {}

  // Weights are constants: the first ones are loaded before the preceding kernel, which may write
  // x, has ended.
  __device__ void run(bool packed) {
    // CTAs that share weights copy half of the blocks of K each, for both.
    constexpr int kHalf = kStageBlocks / 2;
    const int first = plan_.share_weights ? rank_ * kHalf : 0;
    const int blocks = plan_.share_weights ? kHalf : kStageBlocks;
    const int offset = first * plan_.block_bytes;
    const auto announce = [&](uint64_t* full) {
      if (!x_requested_ && copied_ >= early_stages_) {
        throttle();
      }
      ++copied_;
      OSTINATO_DELAY(weights, true);
      arrive_expecting(full, kThrottled ? plan_.weight_bytes + kWeightScaleBytes
                                        : plan_.stage_bytes + kWeightScaleBytes + kTokenScaleBytes);
    };
    // Each weight is read by one CTA, once: evict-first keeps data of adjacent kernels in L2.
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
  // Waits until x has been requested or, if throttled, until an earlier stage has landed.
  __device__ __forceinline__ void throttle() {
    if (copied_ == early_stages_) {
      let_successor_start();
    }
    if (!kThrottled) {
      wait(&fixed_.prefilled, 0);
      x_requested_ = true;
      return;
    }
    // When a slot is reused, x has been multiplied, hence requested.
    x_requested_ = copied_ >= plan_.stages;
    while (!x_requested_ && !is_complete(&full_[copied_ - early_stages_], 0)) {
      x_requested_ = is_complete(&fixed_.prefilled, 0);
    }
  }

  const int early_stages_;  // that may be in flight, or requested, before x is
  int copied_ = 0;
  bool x_requested_ = false;
};

class TokenProducer : Producer<false> {
 public:
  __device__ TokenProducer(const Plan& plan, const CUtensorMap& map, const CUtensorMap* scale_map,
                           uint8_t* ring, FixedStorage& fixed)
      : Producer(plan, map, scale_map, ring, fixed, kThrottled ? fixed.full_tokens : fixed.full) {}

  // CTAs of a cluster that share tokens each load some of them for both, unless the CTAs share K.
  __device__ void run() {
    bool waited = false, announced = false;
    const auto announce = [&](uint64_t* full) {
      if (!waited) {
        // As late as possible: everything that the first copies need has been computed.
        wait_for_predecessor();
        waited = true;
      }
      OSTINATO_DELAY(tokens, true);
      if (kThrottled) {
        arrive_expecting(full, plan_.stage_bytes - plan_.weight_bytes + kTokenScaleBytes);
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
