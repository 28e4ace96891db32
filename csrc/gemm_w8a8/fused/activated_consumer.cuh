// The mainloop of a product with one token whose activations are fp32, and whose scale is known as
// soon as its magnitudes are: each warp makes the codes of its part of K where it multiplies them,
// so that nothing waits for the whole row.
//
// A lane makes one word of codes, the one that its place in an MMA fragment asks for in one of
// eight columns: lane l has bytes 16 (l % 4) ... + 15 of each block of 64, four words of two
// blocks, and its column l / 4 holds number l / 4 of these eight words, and else zeros. The sum
// over the eight columns is that of all words. So no code crosses lanes.
#pragma once

#include <cstdint>

#include "common/debug.cuh"
#include "common/launch.cuh"
#include "common/mbarrier.cuh"
#include "common/quantize_math.cuh"
#include "common/ring.cuh"
#include "gemm_w8a8/params.h"
#include "gemm_w8a8/quantize/rows.cuh"
#include "gemm_w8a8/small_m/config.cuh"
#include "gemm_w8a8/small_m/consumer.cuh"
#include "gemm_w8a8/small_m/mma.cuh"
#include "gemm_w8a8/small_m/operands.cuh"
#include "gemm_w8a8/small_m/producer.cuh"
#include "params.h"

namespace ostinato::activated_linear {
namespace {

using small_m::Channel;
using small_m::kChains;
using small_m::kChunkBlocks;
using small_m::kChunkDepth;
using small_m::kDepthWarps;
using small_m::kHalves;
using small_m::kRows;
using small_m::kRowTiles;
using small_m::kStages;
using small_m::kThreads;
using small_m::kWarpBlocks;
using small_m::kWarpDepth;
using small_m::Output;
using small_m::SharedStorage;
using small_m::Work;
static_assert(kWarpBlocks == 2 && kWarpDepth == 32 * 4, "a warp's codes are one word of each lane");
static_assert(small_m::kTokenWarps == 1 && small_m::kTokenTiles == 1, "one token");
static_assert(kRows <= 32, "one warp has the results of a pass");

constexpr int kSlots = OSTINATO_X_SLOTS;

// The codes of a row, of its own scale.
class Codes {
 public:
  __device__ __forceinline__ explicit Codes(float scale) : scale_(scale), divisor_(scale) {}

  __device__ __forceinline__ float scale() const { return scale_; }

  __device__ __forceinline__ uint32_t of(const float4& x) const {
    const float values[4] = {x.x, x.y, x.z, x.w};
    float q[4];
    if (divisor_.fast) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        q[i] = divisor_.divide_fast(values[i]);
      }
      return Grid<dtype::int8>::encode_bounded(q);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      q[i] = divisor_.divide(values[i]);
    }
    return Grid<dtype::int8>(0.0f).encode(q);
  }

 private:
  float scale_;
  Divisor divisor_;
};

class Consumer {
 public:
  __device__ Consumer(SharedStorage& shared, const ActivatedLinearParams& activated,
                      const W8A8GemmParams& params, const Work& work)
      : shared_(shared), activated_(activated), params_(params), work_(work) {
    warp_ = threadIdx.x / 32;
    lane_ = threadIdx.x % 32;
    in_block_ = small_m::place_in_block(lane_);
    const int word = lane_ / 4;  // of the eight
    column_ = warp_ * kWarpDepth + word / 4 * kPackedDepth + lane_ % 4 * 16 + word % 4 * 4;
    resident_ = work.chunks <= kSlots;
    channel_ = channel_of(work.first_tile);
    next_channel_ = channel_of(work.first_tile + kRowTiles);
  }

  __device__ void run() {
    wait_for_predecessor();
    // As bits, of which NaN has the largest. Nothing waits for them before x is asked for.
    uint32_t maxima[kMaxima];
#pragma unroll
    for (int i = 0; i < kMaxima; ++i) {
      maxima[i] = load_maximum(32 * i);
    }
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      load_slot(slots_[slot], slot);
    }
    announce_x();
    uint32_t largest = 0;
#pragma unroll
    for (const uint32_t maximum : maxima) {
      largest = max(largest, maximum);
    }
    for (int first = 32 * kMaxima; first < activated_.n_maxima; first += 32) {
      largest = max(largest, load_maximum(first));
    }
    largest = __reduce_max_sync(0xffffffffu, largest);
    multiply(Codes(dynamic_scale<dtype::int8>(__uint_as_float(largest))));
  }

 private:
  static constexpr int kMaxima = 5;  // of a lane that are loaded at once: 132 SMs have 132

  using Sums = Accumulator[kChains][kRowTiles];

  __device__ Channel channel_of(int tile) const {
    return Channel(params_, tile < work_.end_tile
                                ? work_.channel(tile, static_cast<int>(threadIdx.x) % kRows)
                                : params_.n);
  }

  // Tells the producer that x has been requested, and waits for its barriers to be initialised.
  __device__ __forceinline__ void announce_x() {
    sync_named(small_m::kInitialized, kThreads);
    OSTINATO_DELAY(activated_linear_x_requested, warp_ == 4);
    __syncwarp();
    if (lane_ == 0) {
      arrive(&shared_.x_requested);
    }
  }

  __device__ __forceinline__ uint32_t load_maximum(int first) const {
    const uint32_t* maxima = reinterpret_cast<const uint32_t*>(activated_.maxima);
    return first + lane_ < activated_.n_maxima ? __ldcg(maxima + first + lane_) : 0;
  }

  __device__ __forceinline__ void load_slot(float4& x, int chunk) const {
    const int first = chunk * kChunkDepth + column_;
    x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (first < params_.k) {  // of which 4 is a divisor
      x = __ldcg(reinterpret_cast<const float4*>(activated_.x + first));
    }
  }

  __device__ __forceinline__ void multiply(const Codes& codes) {
    for (int tile = work_.first_tile; tile < work_.end_tile; tile += kRowTiles) {
      const bool last = tile + kRowTiles >= work_.end_tile;
      Sums sums = {};
      multiply_tiles(codes, work_.end_tile - tile, last, sums);
      store_partial(sums);
      OSTINATO_DELAY(activated_linear_partial_store, warp_ == 1);
      small_m::sync_mma_warps();
      OSTINATO_DELAY(activated_linear_partial_load, warp_ == 0);
      write_output(codes, tile);
      if (last) {
        break;
      }
      channel_ = next_channel_;
      next_channel_ = channel_of(tile + 2 * kRowTiles);
      small_m::sync_mma_warps();  // before the next tiles' sums overwrite these
    }
  }

  __device__ __forceinline__ void multiply_tiles(const Codes& codes, int tiles, bool last,
                                                 Sums& sums) {
    for (int first = 0; first < work_.chunks; first += kSlots) {
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        const int chunk = first + slot;
        if (chunk < work_.chunks) {
          multiply_stage(codes, slots_[slot], chunk, tiles, sums);
          const bool ahead = chunk + kSlots < work_.chunks;
          if (ahead || (!resident_ && !last)) {
            load_slot(slots_[slot], ahead ? chunk + kSlots : slot);
          }
        }
      }
    }
  }

  // A warp without blocks in a short chunk still waits and releases the stage.
  __device__ __forceinline__ void multiply_stage(const Codes& codes, const float4& x, int chunk,
                                                 int tiles, Sums& sums) {
    const uint8_t* stage =
        shared_.ring[position_.slot] + warp_ * kWarpBlocks * kPackedBlockBytes + in_block_;
    const bool has_blocks = chunk * kChunkBlocks + warp_ * kWarpBlocks < work_.depth_blocks;
    uint32_t words[kWarpBlocks][4];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      if (r > 0 && r >= tiles) {
        break;
      }
      wait(&shared_.full[position_.slot][r][warp_ / (kDepthWarps / kHalves)], position_.parity);
      OSTINATO_DELAY(activated_linear_stage_load, warp_ == 5);
      if (has_blocks) {
        WeightFragment w[kWarpBlocks];
#pragma unroll
        for (int b = 0; b < kWarpBlocks; ++b) {
          w[b] =
              small_m::load_weights(stage + r * small_m::kChunkTileBytes + b * kPackedBlockBytes);
        }
        if (r == 0) {  // after the weights, which arrive before x at the start of a launch
          const uint32_t word = codes.of(x);
#pragma unroll
          for (int i = 0; i < 4 * kWarpBlocks; ++i) {
            words[i / 4][i % 4] = lane_ / 4 == i ? word : 0;
          }
        }
#pragma unroll
        for (int b = 0; b < kWarpBlocks; ++b) {
          ostinato::multiply(sums[b % kChains][r], w[b],
                             make_uint4(words[b][0], words[b][1], words[b][2], words[b][3]));
        }
      }
    }
    OSTINATO_DELAY(activated_linear_stage_release, warp_ == 3);
    __syncwarp();
    if (lane_ == 0) {
      arrive(&shared_.empty[position_.slot]);
    }
    position_.advance(kStages);
  }

  // Adds the columns: a lane has two of each of its two rows, and three others the rest.
  __device__ __forceinline__ void store_partial(const Sums& sums) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      int32_t low = 0, high = 0;
#pragma unroll
      for (int chain = 0; chain < kChains; ++chain) {
        low += sums[chain][r][0] + sums[chain][r][1];
        high += sums[chain][r][2] + sums[chain][r][3];
      }
#pragma unroll
      for (int distance = 1; distance <= 2; distance *= 2) {
        low += __shfl_xor_sync(0xffffffffu, low, distance);
        high += __shfl_xor_sync(0xffffffffu, high, distance);
      }
      if (lane_ % 4 == 0) {
        const int row = r * kPackedRows + lane_ / 4;
        shared_.partial[warp_][0][row] = low;
        shared_.partial[warp_][0][row + 8] = high;
      }
    }
  }

  __device__ __forceinline__ void write_output(const Codes& codes, int tile) const {
    const int row = static_cast<int>(threadIdx.x);
    if (row >= kRows) {
      return;
    }
    const int n = work_.channel(tile, row);
    if (n >= params_.n || row >= min(kRowTiles, work_.end_tile - tile) * kPackedRows) {
      return;
    }
    const float sum = static_cast<float>(small_m::sum_of(shared_, 0, row));
    const float y = fmaf(codes.scale(), channel_.scale * sum, static_cast<float>(channel_.bias));
    OSTINATO_DELAY(activated_linear_output_store, true);
    static_cast<Output*>(params_.out)[n] = static_cast<Output>(y);
  }

  SharedStorage& shared_;
  const ActivatedLinearParams& activated_;
  const W8A8GemmParams& params_;
  const Work& work_;
  int warp_, lane_;
  int in_block_;  // offset of this lane's weights in a block of K
  int column_;    // of this lane's first element of x in a chunk
  small_m::Channel channel_, next_channel_;
  RingPosition position_;
  bool resident_;  // the slots hold all of K, for every pass
  float4 slots_[kSlots];
};

}  // namespace
}  // namespace ostinato::activated_linear
