// The mainloop and epilogue of the small-M GEMM: eight warps multiply the copied weights by x and
// write the output.
#pragma once

#include "common/debug.cuh"
#include "common/launch.cuh"
#include "common/mbarrier.cuh"
#include "common/ring.cuh"
#include "config.cuh"
#include "gemm_w8a8/params.h"
#include "operands.cuh"
#include "producer.cuh"

namespace ostinato::small_m {

__device__ __forceinline__ void sync_mma_warps() { sync_named(kMmaDone, kMmaThreads); }

// What becomes of results: they are stored.
struct StoredResults {
  // Of thread t of the first kRows * tokens: the result of row t % kRows of a pass.
  __device__ __forceinline__ void take(const W8A8GemmParams& params, int token, int n, float y) {
    static_cast<Output*>(params.out)[token * params.out_stride + n] = static_cast<Output>(y);
  }
  __device__ __forceinline__ void finish() {}  // called by all threads after the last
};

template <bool kVectorLoads, class Results = StoredResults>
class Consumer {
 public:
  __device__ Consumer(SharedStorage& shared, const W8A8GemmParams& params, const Work& work,
                      const Results& results = {})
      : shared_(shared), params_(params), work_(work), results_(results) {
    const int warp = threadIdx.x / 32;
    lane_ = threadIdx.x % 32;
    depth_warp_ = warp % kDepthWarps;
    in_block_ = place_in_block(lane_);
    first_token_ = warp / kDepthWarps * kTokenTiles * 8;
    const int column = depth_warp_ * kWarpDepth + lane_ % 8 * 16;
    x_token_ = first_token_ + lane_ / 8;
    x_ = static_cast<const uint8_t*>(params.x) + x_token_ * params.x_stride + column;
    x_limit_ = params.k - column;
    // Padding rows of x and their results would take as long as others, so they are skipped.
    active_ = params.n_active == nullptr ? params.m : min(params.m, *params.n_active);
    resident_ = work.chunks <= kSlots;
    // Weight scales are constants, so they may be read before the wait; two passes ahead, since
    // these loads queue behind the ring.
    channel_ = channel_of(work.first_tile);
    next_channel_ = channel_of(work.first_tile + kRowTiles);
  }

  __device__ void run() {
    wait_for_predecessor();
    fill_slots();
    announce_x();
    multiply();
  }

  // Loads the first chunks of x into registers.
  __device__ __forceinline__ void fill_slots() {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      load_slot(slots_[slot], slot);
    }
  }

  // Tells the producer that x has been requested, and waits for its barriers to be initialised.
  __device__ __forceinline__ void announce_x() {
    sync_named(kInitialized, kThreads);
    OSTINATO_DELAY(small_m_x_requested, threadIdx.x / 32 == 4);
    __syncwarp();
    if (lane_ == 0) {
      arrive(&shared_.x_requested);
    }
  }

  __device__ __forceinline__ void multiply() {
    OSTINATO_DELAY(small_m_scale_store, threadIdx.x / 32 == 0);
    if (threadIdx.x < params_.m) {
      shared_.x_scale[threadIdx.x] =
          params_.x_scale[static_cast<int64_t>(threadIdx.x) * params_.x_scale_stride];
      shared_.x_zero_point[threadIdx.x] =
          params_.x_zero_point == nullptr
              ? 0
              : params_
                    .x_zero_point[static_cast<int64_t>(threadIdx.x) * params_.x_zero_point_stride];
    }
    for (int tile = work_.first_tile; tile < work_.end_tile; tile += kRowTiles) {
      const bool last = tile + kRowTiles >= work_.end_tile;
      multiply_tiles(work_.end_tile - tile, last);
      fresh_ = !resident_;
      store_partial();
      OSTINATO_DELAY(small_m_partial_store, threadIdx.x / 32 == 1);
      sync_mma_warps();
      OSTINATO_DELAY(small_m_partial_load, threadIdx.x / 32 == 2);
      write_output(tile, channel_);
      if (last) {
        break;
      }
      channel_ = next_channel_;
      next_channel_ = channel_of(tile + 2 * kRowTiles);
      sync_mma_warps();  // before the next tiles' sums overwrite these
    }
    results_.finish();
  }

 private:
  // Byte loads need registers, and are slow anyway.
  static constexpr int kSlots = kVectorLoads ? kXSlots : 1;

  // Every thread computes the output of one weight row, for every kTokenStep-th token.
  static constexpr int kTokenStep = kMmaThreads / kRows;

  static __device__ int output_row() { return threadIdx.x % kRows; }

  __device__ Channel channel_of(int tile) const {
    return Channel(params_, tile < work_.end_tile ? work_.channel(tile, output_row()) : params_.n);
  }

  // This warp's share of a chunk of x, as loaded. For whole 128-byte lines, eight lanes load two
  // blocks of one token, and the second vector of a lane belongs to the token four further on.
  // make_fragments() reorders them.
  using XChunk = uint4[kWarpBlocks][kTokenTiles];

  __device__ __forceinline__ void load_slot(XChunk& x, int chunk) {
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j) {
#pragma unroll
      for (int b = 0; b < kWarpBlocks; ++b) {
        const int token = j * 8 + b * 4;
        x[b][j] = load_x<kVectorLoads>(x_ + token * params_.x_stride, chunk * kChunkDepth,
                                       x_token_ + token < active_ ? x_limit_ : 0);
      }
    }
  }

  // Exchanges between adjacent quads of lanes: afterwards an even quad 2i has both blocks of token
  // i, and an odd quad 2i + 1 those of token i + 4, which thus becomes column 2i + 1 of the MMA.
  __device__ __forceinline__ void make_fragments(XChunk& x) const {
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j) {
      exchange(x[0][j].x, x[1][j].x);
      exchange(x[0][j].y, x[1][j].y);
      exchange(x[0][j].z, x[1][j].z);
      exchange(x[0][j].w, x[1][j].w);
    }
  }

  __device__ __forceinline__ void exchange(uint32_t& first, uint32_t& second) const {
    const bool odd = lane_ & 4;
    const uint32_t received = __shfl_xor_sync(0xffffffff, odd ? first : second, 4);
    first = odd ? received : first;
    second = odd ? second : received;
  }

  using Sums = Accumulator[kChains][kRowTiles][kTokenTiles];

  static __device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Sums) / sizeof(int32_t)); ++i) {
      sums[i / (4 * kTokenTiles * kRowTiles)][i / (4 * kTokenTiles) % kRowTiles]
          [i / 4 % kTokenTiles][i % 4] = 0;
    }
  }

  __device__ __forceinline__ void multiply_tiles(int tiles, bool last) {
    clear(sum_);
    for (int first = 0; first < work_.chunks; first += kSlots) {
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        const int chunk = first + slot;
        if (chunk < work_.chunks) {
          multiply_stage(slots_[slot], chunk, tiles);
          const bool ahead = chunk + kSlots < work_.chunks;
          if (ahead || (!resident_ && !last)) {
            load_slot(slots_[slot], ahead ? chunk + kSlots : slot);
          }
        }
      }
    }
  }

  // Waits for this warp's half of a tile of the stage.
  __device__ __forceinline__ void wait_for_tile(int r) {
    wait(&shared_.full[position_.slot][r][depth_warp_ / (kDepthWarps / kHalves)], position_.parity);
    OSTINATO_DELAY(small_m_stage_load, threadIdx.x / 32 == 5);
  }

  // A warp without blocks in a short chunk still waits and releases the stage.
  __device__ __forceinline__ void multiply_stage(XChunk& x, int chunk, int tiles) {
    const uint8_t* stage =
        shared_.ring[position_.slot] + depth_warp_ * kWarpBlocks * kPackedBlockBytes + in_block_;
    const bool has_blocks = chunk * kChunkBlocks + depth_warp_ * kWarpBlocks < work_.depth_blocks;
    multiply_tile_by_tile(x, stage, has_blocks, tiles);
    OSTINATO_DELAY(small_m_stage_release, threadIdx.x / 32 == 3);
    __syncwarp();
    if (lane_ == 0) {
      arrive(&shared_.empty[position_.slot]);
    }
    position_.advance(kStages);
  }

  // Multiplies tiles in the order in which they land.
  __device__ __forceinline__ void multiply_tile_by_tile(XChunk& x, const uint8_t* stage,
                                                        bool has_blocks, int tiles) {
    // A copy of x: using x in place costs ptxas two more registers with three row tiles.
    uint4 tokens[kWarpBlocks][kTokenTiles];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      if (r > 0 && r >= tiles) {
        break;
      }
      wait_for_tile(r);
      if (has_blocks) {
        WeightFragment w[kWarpBlocks];
#pragma unroll
        for (int b = 0; b < kWarpBlocks; ++b) {
          w[b] = load_weights(stage + r * kChunkTileBytes + b * kPackedBlockBytes);
        }
        if (r == 0) {  // after the weights, which arrive before x at the start of a launch
          if (fresh_) {
            make_fragments(x);  // waits for x
          }
#pragma unroll
          for (int b = 0; b < kWarpBlocks; ++b) {
#pragma unroll
            for (int j = 0; j < kTokenTiles; ++j) {
              tokens[b][j] = x[b][j];
            }
          }
        }
#pragma unroll
        for (int b = 0; b < kWarpBlocks; ++b) {
#pragma unroll
          for (int j = 0; j < kTokenTiles; ++j) {
            ostinato::multiply(sum_[b % kChains][r][j], w[b], tokens[b][j]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void store_partial() {
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j) {
      const int token = first_token_ + j * 8 + lane_ % 4;
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        const int row = r * kPackedRows + lane_ / 4;
        Accumulator sum;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[i] = sum_[0][r][j][i];
          if constexpr (kChains == 2) {
            sum[i] += sum_[1][r][j][i];
          }
        }
        auto& partial = shared_.partial[depth_warp_];
        partial[token][row] = sum[0];
        partial[token + 4][row] = sum[1];
        partial[token][row + 8] = sum[2];
        partial[token + 4][row + 8] = sum[3];
      }
    }
  }

  __device__ __forceinline__ void write_output(int tile, const Channel& channel) {
    const int row = output_row();
    const int n = work_.channel(tile, row);
    const int tiles = min(kRowTiles, work_.end_tile - tile);
    if (n >= params_.n || row >= tiles * kPackedRows || threadIdx.x >= kTokenStep * kRows) {
      return;
    }
#pragma unroll
    for (int i = 0; i < ceil_div(kTokens, kTokenStep); ++i) {
      const int token = threadIdx.x / kRows + i * kTokenStep;
      if (token >= active_) {
        break;
      }
      // Unsigned, since the product alone may overflow; the difference does not.
      const int32_t sum = static_cast<int32_t>(static_cast<uint32_t>(sum_of(shared_, token, row)) -
                                               static_cast<uint32_t>(shared_.x_zero_point[token]) *
                                                   static_cast<uint32_t>(channel.sum));
      const float y = fmaf(shared_.x_scale[token], channel.scale * static_cast<float>(sum),
                           static_cast<float>(channel.bias));
      OSTINATO_DELAY(small_m_output_store, threadIdx.x / 32 == 0);
      results_.take(params_, token, n, y);
    }
  }

  SharedStorage& shared_;
  const W8A8GemmParams& params_;
  const Work& work_;
  int lane_, depth_warp_, first_token_;
  int in_block_;  // offset of this lane's weights in a block of K
  RingPosition position_;
  const uint8_t* x_;       // this lane's first bytes of x
  int x_token_, x_limit_;  // their token, and the bytes left in its row from there
  int active_;             // rows of x that are not padding
  Channel channel_, next_channel_;
  bool resident_;      // the slots hold all of K, for every pass
  bool fresh_ = true;  // the slots are as loaded, not yet fragments
  XChunk slots_[kSlots];
  Sums sum_;
  Results results_;
};

}  // namespace ostinato::small_m
