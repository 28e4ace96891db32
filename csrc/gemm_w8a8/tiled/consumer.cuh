// A consumer warpgroup of the tiled GEMM: sums a tile over K, then hands it to the epilogue.
#pragma once

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
#include "tile_scheduler.cuh"
#include "wgmma.cuh"

namespace ostinato::tiled {

class Consumer {
 public:
  __device__ Consumer(const W8A8GemmParams& params, const Plan& plan, const CUtensorMap& out_map,
                      uint8_t* ring, FixedStorage& fixed)
      : params_(params),
        plan_(plan),
        out_map_(out_map),
        ring_(shared_address(ring)),
        fixed_(fixed),
        warpgroup_(threadIdx.x / kWarpgroup) {}

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
      shared_ = work_tile.shared;
      epilogue.fetch_channels(work_tile);
      wait_for_predecessor();  // returns at once when it has returned before
      epilogue.fetch_tokens(work_tile);
      Sum sums[kBlocks][kSums];
      if constexpr (kPromote) {
        sum_promoting(work_tile.steps, sums, position);
      } else {
        sum(work_tile.steps, sums, position, epilogue);
      }
      if (!kSmallM) {
        // Computed again: while a tile is summed, every register is needed for sums.
        work_tile = work_tile_at(plan_, forget(index), rank());
      }
      store(epilogue, work_tile, sums);
      if (kPingPong) {
        position.advance(plan_.stages, plan_.depth_steps);
      }
    }
    epilogue.finish();
  }

 private:
  // The same value, of which the compiler no longer knows what it has computed from it.
  __device__ static __forceinline__ int forget(int value) {
    asm volatile("" : "+r"(value));
    return value;
  }

  __device__ __forceinline__ int rank() const { return plan_.cluster > 1 ? cluster_rank() : 0; }

  // A template, so that an epilogue of tiles that are never shared need not store parts of them.
  template <class AnyEpilogue>
  __device__ __forceinline__ void store(AnyEpilogue& epilogue, const WorkTile& work_tile,
                                        Sum (&sums)[kBlocks][kSums]) {
    if constexpr (kCanSplit) {
      if (work_tile.shared) {
        Sum half[kBlocks][kSums / 2];
        cluster_reduce(sums, half);
        epilogue.template store<kTileColumns / 2>(work_tile, rank() * (kTileColumns / 2), half);
        return;
      }
    }
    epilogue.store_tile(work_tile, sums);
  }

  // Where this warpgroup's channels and tokens of a stage begin.
  __device__ __forceinline__ Channels channels_of(int slot) const {
    return Channels(
        ring_ + slot * plan_.stage_bytes +
        (kTokenRows ? 0 : part_of_tile(warpgroup_) * kBlocks * kMmaRows * kPackedDepth));
  }
  __device__ __forceinline__ Tokens tokens_of(int slot) const {
    return Tokens(ring_ + slot * plan_.stage_bytes + plan_.weight_bytes +
                  (kTokenRows ? part_of_tile(warpgroup_) * kBlocks * kMmaRows * kUnitDepth : 0));
  }

  __device__ __forceinline__ void wait_full(const RingPosition& position) {
    wait(&fixed_.full[position.slot], position.parity);
    if (kThrottled) {
      wait(&fixed_.full_tokens[position.slot], position.parity);
    }
  }

  // Enqueues the products of a unit of a stage.
  __device__ __forceinline__ void multiply_unit(Channels channels, Tokens tokens, int unit,
                                                bool accumulate,
                                                Sum (&sums)[kBlocks][kSums]) const {
    tiled::multiply_unit(channels, unit * kUnitBlocks * plan_.block_bytes, plan_.block_bytes,
                         tokens, unit * plan_.token_rows * kUnitDepth, accumulate, sums);
  }

  // Enqueues the products of a stage, as one group.
  __device__ __forceinline__ void multiply_stage(int slot, bool accumulate,
                                                 Sum (&sums)[kBlocks][kSums]) {
    const Channels channels = channels_of(slot);
    const Tokens tokens = tokens_of(slot);
    cute::warpgroup_arrive();
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      multiply_unit(channels, tokens, unit, accumulate || unit > 0, sums);
    }
    cute::warpgroup_commit_batch();
  }

  // Gives a stage back to the producers that write to it: those of the whole cluster, or while the
  // CTAs share K, each its own. The barrier counts as many arrivals either way.
  __device__ __forceinline__ void release(int slot) {
    OSTINATO_DELAY(release, warpgroup_ == 0);
    const int thread = threadIdx.x % kWarpgroup;
    if (thread >= plan_.cluster) {
      return;
    }
    if (plan_.cluster == 1 || shared_) {
      arrive(&fixed_.empty[slot]);
    } else {
      arrive_at(&fixed_.empty[slot], thread);
    }
  }

  // One warpgroup multiplies while the other stores its tile. The turn also keeps a warpgroup from
  // a stage that the ring has yet to reach again: a barrier's parity tells only two rounds apart.
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

  __device__ __forceinline__ void sum(int steps, Sum (&sums)[kBlocks][kSums],
                                      RingPosition& position, Epilogue& epilogue) {
    pin(sums);
    int previous = 0;
    wait_turn();
    for (int step = 0; step < steps; ++step) {
      OSTINATO_DELAY(consumer, warpgroup_ == 0);
      wait_full(position);
      multiply_stage(position.slot, step > 0, sums);
      epilogue.store_deferred(step);
      // The products of this stage go on while those of the one before are known to have ended.
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

  // Sums of 128 products, added in fp32.
  __device__ __forceinline__ void sum_promoting(int steps, Sum (&sums)[kBlocks][kSums],
                                                RingPosition& position) {
#pragma unroll
    for (auto& block : sums) {
#pragma unroll
      for (Sum& s : block) {
        s = 0;
      }
    }
    wait_turn();
    for (int step = 0; step < steps; ++step) {
      wait_full(position);
      const Channels channels = channels_of(position.slot);
      const Tokens tokens = tokens_of(position.slot);
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        Sum part[kBlocks][kSums];
        pin(part);
        cute::warpgroup_arrive();
        multiply_unit(channels, tokens, unit, false, part);
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<0>();
        pin(part);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
          for (int i = 0; i < kSums; ++i) {
            sums[b][i] += part[b][i];
          }
        }
      }
      release(position.slot);
      position.advance(plan_.stages);
    }
    give_turn();
  }

  // Adds the partner's sums to ours, each for its half of the columns: `half` is ours. They travel
  // through the ring of the one who adds, which is idle when both have multiplied everything.
  __device__ __forceinline__ void cluster_reduce(Sum (&sums)[kBlocks][kSums],
                                                 Sum (&half)[kBlocks][kSums / 2]) {
    constexpr int kHalf = kSums / 2;
    constexpr int kVector = 4;
    const uint32_t mine =
        ring_ + (warpgroup_ * kBlocks * kHalf * kWarpgroup + threadIdx.x % kWarpgroup * kVector) *
                    sizeof(Sum);
    const bool first = rank() == 0;
    const uint32_t theirs = remote_address(mine, first ? 1 : 0);
    sync_cluster();
#pragma unroll
    for (int i = 0; i < kBlocks * kHalf; i += kVector) {
      Sum* const low = &sums[i / kHalf][i % kHalf];
      Sum* const high = low + kHalf;
      uint32_t words[kVector];
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        // Ours to the low half: from here on the other half of the registers is free.
        const Sum sent = first ? high[j] : low[j];
        low[j] = first ? low[j] : high[j];
        words[j] = reinterpret_cast<const uint32_t&>(sent);
      }
      store_remote(theirs + i * kWarpgroup * sizeof(Sum), words);
    }
    OSTINATO_DELAY(cluster_reduce, warpgroup_ == 0);
    sync_cluster();
#pragma unroll
    for (int i = 0; i < kBlocks * kHalf; i += kVector) {
      uint32_t words[kVector];
      load_shared(mine + i * kWarpgroup * sizeof(Sum), words);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        half[i / kHalf][i % kHalf + j] =
            sums[i / kHalf][i % kHalf + j] + reinterpret_cast<const Sum&>(words[j]);
      }
    }
  }

  const W8A8GemmParams& params_;
  const Plan& plan_;
  const CUtensorMap& out_map_;
  uint32_t ring_;
  FixedStorage& fixed_;
  int warpgroup_;
  bool shared_ = false;
  uint32_t turn_parity_ = warpgroup_ == 0 ? 1 : 0;  // the first turn is warpgroup 0's
};

}  // namespace ostinato::tiled
