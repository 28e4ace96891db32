// A consumer warpgroup of the tiled GEMM: sums a tile over K, then hands it to the epilogue.
#pragma once

#include "common/launch.cuh"
#include "tiled_epilogue.cuh"
#include "tiled_mma.cuh"
#include "tiled_plan.cuh"
#include "tiled_producer.cuh"

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
        warpgroup_(threadIdx.x / kWarpgroup),
        rank_(plan.cluster > 1 ? cluster_rank() : 0) {}

  __device__ __forceinline__ void run() {
    const int clusters = gridDim.x / plan_.ctas;
    const int tiles = plan_.token_tiles * plan_.channel_groups;
    Epilogue epilogue(params_, plan_, out_map_, fixed_, warpgroup_);
    Position position;
    bool waited = false;
    for (int index = blockIdx.x / plan_.ctas; index < tiles; index += clusters) {
      const Tile tile = tile_at(plan_, index, rank_);
      epilogue.fetch_channels(tile);
      if (!waited) {
        wait_for_predecessor();
        waited = true;
      }
      epilogue.fetch_tokens(tile);
      Sum sums[kBlocks][kSums];
      if constexpr (kPromote) {
        sum_promoting(sums, position);
      } else {
        sum(sums, position);
      }
      if (kCanSplit && plan_.split_k > 1) {
        Sum half[kBlocks][kSums / 2];
        exchange(sums, half);
        epilogue.store<kTokens / 2>(tile, cluster_rank() * (kTokens / 2), half);
      } else {
        epilogue.store<kTokens>(tile, 0, sums);
      }
    }
    epilogue.finish();
  }

 private:
  __device__ __forceinline__ uint32_t channels_of(int slot) const {
    return ring_ + slot * plan_.stage_bytes + warpgroup_ * kBlocks * kMmaRows * kPackedDepth;
  }
  __device__ __forceinline__ uint32_t tokens_of(int slot) const {
    return ring_ + slot * plan_.stage_bytes + plan_.weight_bytes;
  }

  // Enqueues the products of a stage, as one group.
  __device__ __forceinline__ void multiply_stage(int slot, bool accumulate,
                                                 Sum (&sums)[kChains][kBlocks][kSums]) {
    const int block_bytes = plan_.tile_channels * kPackedDepth;
    cute::warpgroup_arrive();
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      multiply_unit(channels_of(slot) + unit * kUnitBlocks * block_bytes, block_bytes,
                    tokens_of(slot) + unit * plan_.token_rows * kUnitDepth, accumulate || unit > 0,
                    sums);
    }
    cute::warpgroup_commit_batch();
  }

  // Gives a stage back to the producers that write to it: those of the whole cluster.
  __device__ __forceinline__ void release(int slot) {
    OSTINATO_DELAY(release, warpgroup_ == 0);
    if (plan_.cluster == 1) {
      if (threadIdx.x % kWarpgroup == 0) {
        arrive(&fixed_.empty[slot]);
      }
    } else if (threadIdx.x % kWarpgroup < plan_.cluster) {
      arrive_at(&fixed_.empty[slot], threadIdx.x % kWarpgroup);
    }
  }

  __device__ __forceinline__ void sum(Sum (&sums)[kBlocks][kSums], Position& position) {
    Sum chains[kChains][kBlocks][kSums];
    pin(chains);
    int previous = 0;
    for (int step = 0; step < plan_.depth_steps; ++step) {
      OSTINATO_DELAY(consumer, warpgroup_ == 0);
      wait(&fixed_.full[position.slot], position.parity);
      multiply_stage(position.slot, step > 0, chains);
      // The products of this stage go on while those of the one before are known to have ended.
      cute::warpgroup_wait<1>();
      if (step > 0) {
        release(previous);
      }
      previous = position.slot;
      position.advance(plan_.stages);
    }
    cute::warpgroup_wait<0>();
    pin(chains);
    release(previous);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        sums[b][i] = kChains == 1 ? chains[0][b][i] : chains[0][b][i] + chains[kChains - 1][b][i];
      }
    }
  }

  // Sums of 128 products, added in fp32.
  __device__ __forceinline__ void sum_promoting(Sum (&sums)[kBlocks][kSums], Position& position) {
    const int block_bytes = plan_.tile_channels * kPackedDepth;
#pragma unroll
    for (auto& block : sums) {
#pragma unroll
      for (Sum& s : block) {
        s = 0;
      }
    }
    for (int step = 0; step < plan_.depth_steps; ++step) {
      wait(&fixed_.full[position.slot], position.parity);
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        Sum part[1][kBlocks][kSums];
        pin(part);
        cute::warpgroup_arrive();
        multiply_unit(channels_of(position.slot) + unit * kUnitBlocks * block_bytes, block_bytes,
                      tokens_of(position.slot) + unit * plan_.token_rows * kUnitDepth, false, part);
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<0>();
        pin(part);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
          for (int i = 0; i < kSums; ++i) {
            sums[b][i] += part[0][b][i];
          }
        }
      }
      release(position.slot);
      position.advance(plan_.stages);
    }
  }

  // Adds the partner's sums to ours, each for its half of the tokens: `half` is ours. They travel
  // through the ring of the one who adds, which is idle when both have multiplied everything.
  __device__ __forceinline__ void exchange(const Sum (&sums)[kBlocks][kSums],
                                           Sum (&half)[kBlocks][kSums / 2]) {
    constexpr int kHalf = kSums / 2;
    const uint32_t rank = cluster_rank();
    const uint32_t mine =
        ring_ + (warpgroup_ * kBlocks * kHalf * kWarpgroup + threadIdx.x % kWarpgroup * 4) * 4;
    const uint32_t theirs = remote_address(mine, rank ^ 1);
    sync_cluster();
#pragma unroll
    for (int i = 0; i < kBlocks * kHalf; i += 4) {
      const Sum* const first = &sums[i / kHalf][i % kHalf];
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Sum sum = rank == 0 ? first[kHalf + j] : first[j];
        words[j] = reinterpret_cast<const uint32_t&>(sum);
      }
      store_remote(theirs + i * kWarpgroup * 4, words);
    }
    OSTINATO_DELAY(exchange, warpgroup_ == 0);
    sync_cluster();
#pragma unroll
    for (int i = 0; i < kBlocks * kHalf; i += 4) {
      const Sum* const first = &sums[i / kHalf][i % kHalf];
      uint32_t words[4];
      load_shared(mine + i * kWarpgroup * 4, words);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Sum sum = rank == 0 ? first[j] : first[kHalf + j];
        half[i / kHalf][i % kHalf + j] = sum + reinterpret_cast<const Sum&>(words[j]);
      }
    }
  }

  const W8A8GemmParams& params_;
  const Plan& plan_;
  const CUtensorMap& out_map_;
  uint32_t ring_;
  FixedStorage& fixed_;
  int warpgroup_, rank_;
};

}  // namespace ostinato::tiled
