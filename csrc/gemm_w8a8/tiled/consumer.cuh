// The mainloop of a consumer warpgroup of the tiled GEMM: accumulates a tile over K, then calls the
// epilogue.
#pragma once

#include <type_traits>

#include "cluster_reduce.cuh"
#include "common/cluster.cuh"
#include "common/launch.cuh"
#include "common/ring.cuh"
#if OSTINATO_TOKEN_ROWS
#include "epilogue.cuh"
#elif OSTINATO_SMALL_M
#include "epilogue_small_m.cuh"
#else
#include "epilogue_swap_ab.cuh"
#endif
#include "scaled_mainloop.cuh"
#include "stages.cuh"
#include "tile_scheduler.cuh"
#include "wgmma.cuh"

namespace ostinato::tiled {

using Mainloop = std::conditional_t<kBlockScales, ScaledMainloop<Stages>, Stages>;

class Consumer : Mainloop {
 public:
  __device__ Consumer(const W8A8GemmParams& params, const Plan& plan, const CUtensorMap& out_map,
                      uint8_t* ring, FixedStorage& fixed)
      : Mainloop(plan, ring, fixed), params_(params), out_map_(out_map) {}

  __device__ __forceinline__ void run() {
    const int clusters = plan_.clusters;
    Epilogue epilogue(params_, plan_, out_map_, fixed_, warpgroup_);
    RingPosition position;
    int first = blockIdx.x >> (plan_.cluster - 1);
    if (kPingPong && warpgroup_ == 1) {
      first += clusters;
      position.advance(plan_.stages, plan_.depth_steps);
    }
    for (int index = first; index < plan_.work_tiles; index += clusters * (kPingPong ? 2 : 1)) {
      WorkTile work_tile = work_tile_at(plan_, index, rank());
      begin_tile(work_tile.shared);
      epilogue.fetch_channels(work_tile);
      wait_for_predecessor();  // returns at once after the first time
      epilogue.fetch_tokens(work_tile);
      Sum sums[kBlocks][kSums];
#if OSTINATO_BLOCK_SCALES
      sum_scaled(work_tile, work_tile.steps, sums, position);
#else
      if constexpr (kPromote) {
        sum_promoting(work_tile.steps, sums, position);
      } else {
        sum(work_tile.steps, sums, position, epilogue);
      }
#endif
      if (!kSmallM) {
        // Recomputed: during the mainloop every register is needed for accumulators.
        work_tile = work_tile_at(plan_, opaque(index), rank());
      }
      store(epilogue, work_tile, sums);
      if (kPingPong) {
        position.advance(plan_.stages, plan_.depth_steps);
      }
    }
    epilogue.finish();
  }

 private:
  // Hides from the compiler that a value is known, so that it recomputes what depends on it.
  __device__ static __forceinline__ int opaque(int value) {
    asm volatile("" : "+r"(value));
    return value;
  }

  __device__ __forceinline__ int rank() const { return plan_.cluster > 1 ? cluster_rank() : 0; }

  // A template, so that epilogues of tiles that are never shared need no store() of part of a tile.
  template <class AnyEpilogue>
  __device__ __forceinline__ void store(AnyEpilogue& epilogue, const WorkTile& work_tile,
                                        Sum (&sums)[kBlocks][kSums]) {
    if constexpr (kCanSplit) {
      if (work_tile.shared) {
        Sum reduced[kBlocks][kSums / 2];
        cluster_reduce(ring_, warpgroup_, rank(), sums, reduced);
        epilogue.template store<kTileColumns / 2>(work_tile, rank() * (kTileColumns / 2), reduced);
        return;
      }
    }
    epilogue.store_tile(work_tile, sums);
  }

  // Issues the MMAs of a stage as one wgmma group.
  template <class Sums>
  __device__ __forceinline__ void multiply_stage(int slot, bool accumulate, Sums& sums) {
    const Channels channels = channels_of(slot);
    const Tokens tokens = tokens_of(slot);
    cute::warpgroup_arrive();
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      multiply_unit(channels, tokens, unit, 0, accumulate || unit > 0, sums);
    }
    cute::warpgroup_commit_batch();
  }

  // Ping-pong: one warpgroup issues MMAs while the other stores its tile. The turn also keeps a
  // warpgroup from running ahead by a whole ring, where the parity of a barrier would be ambiguous.
  __device__ __forceinline__ void wait_turn() {
    if (kPingPong) {
      wait(&fixed_.turn[warpgroup_], turn_parity_);
      turn_parity_ ^= 1;
    }
  }
  __device__ __forceinline__ void give_turn() {
    if (kPingPong && threadIdx.x % 32 == 0) {
      arrive(&fixed_.turn[warpgroup_ ^ 1]);
    }
  }

  // Mainloops are templates, so that only the variant's own has to suit its pieces.
  template <class Sums>
  __device__ __forceinline__ void sum(int steps, Sums& sums, RingPosition& position,
                                      Epilogue& epilogue) {
    pin(sums);
    int previous = 0;
    wait_turn();
    for (int step = 0; step < steps; ++step) {
      OSTINATO_DELAY(consumer, warpgroup_ == 0);
      wait_full(position);
      multiply_stage(position.slot, step > 0, sums);
      epilogue.store_deferred(step);
      // The MMAs of this stage run on; those of the previous stage have completed.
      cute::warpgroup_wait<1>();
      if (step > 0) {
        release(previous);
      }
      previous = position.slot;
      position.advance(plan_.stages);
    }
    give_turn();
    epilogue.store_deferred_from(steps);
    cute::warpgroup_wait<0>();
    pin(sums);
    release(previous);
  }

  // Two-level accumulation: sums of 128 products are added in fp32.
  template <class Sums>
  __device__ __forceinline__ void sum_promoting(int steps, Sums& sums, RingPosition& position) {
    clear(sums);
    wait_turn();
    for (int step = 0; step < steps; ++step) {
      wait_full(position);
      const Channels channels = channels_of(position.slot);
      const Tokens tokens = tokens_of(position.slot);
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        Sums products;
        pin(products);
        cute::warpgroup_arrive();
        multiply_unit(channels, tokens, unit, 0, false, products);
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<0>();
        pin(products);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
          for (int i = 0; i < kSums; ++i) {
            sums[b][i] += products[b][i];
          }
        }
      }
      release(position.slot);
      position.advance(plan_.stages);
    }
    give_turn();
  }

  const W8A8GemmParams& params_;
  const CUtensorMap& out_map_;
  uint32_t turn_parity_ = warpgroup_ == 0 ? 1 : 0;  // the first turn belongs to warpgroup 0
};

}  // namespace ostinato::tiled
