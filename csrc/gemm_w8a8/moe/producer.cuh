// The producers of the grouped GEMM: one thread copies weights by TMA; three warps gather the rows
// of x, which TMA can not, into the same swizzle, and copy block scales.
#pragma once

#include "common/async_copy.cuh"
#include "common/l2_prefetch.cuh"
#include "common/ring.cuh"
#include "common/tma.cuh"
#include "config.cuh"

namespace ostinato::moe {

// How many tiles of rows there are, and with which tile this CTA begins.
struct Work {
  int tiles;
  WorkTile first;

  // By all lanes of a warp. Where tiles are few, the first one is loaded beside their number,
  // before it is known which it is: that saves the way to the L2 once. Nobody looks at what is
  // loaded from behind the last.
  __device__ __forceinline__ Work(const MoeLinearParams& params, const Plan& plan) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int* const entry = params.tiles + (lane < params.max_tiles ? lane : 0) * 4;
    const int expert = entry[0], first_row = entry[1], stop = entry[2];
    tiles = *params.n_tiles;
    if (tiles == 0) {
      return;
    }
    const int index = static_cast<int>(blockIdx.x), channel_tile = index / tiles;
    const int tile = index - channel_tile * tiles;
    if (tile >= 32) {
      first = work_tile_at(params, plan, tiles, index);
      return;
    }
    first.expert = __shfl_sync(0xffffffff, expert, tile);
    first.first_row = __shfl_sync(0xffffffff, first_row, tile);
    first.rows = __shfl_sync(0xffffffff, stop, tile) - first.first_row;
    first.channel = channel_tile * plan.tile_channels;
  }

  // Visits this CTA's tiles.
  template <class Visit>
  __device__ __forceinline__ void for_each_tile(const MoeLinearParams& params, const Plan& plan,
                                                const Visit& visit) const {
    const int count = tiles * plan.channel_tiles;
    WorkTile tile = first;
    for (int index = blockIdx.x; index < count;) {
      visit(tile);
      index += gridDim.x;
      if (index < count) {
        tile = work_tile_at(params, plan, tiles, index);
      }
    }
  }
};

class Producer {
 public:
  __device__ Producer(const MoeLinearParams& params, const Plan& plan, uint8_t* ring,
                      Storage& storage, const Work& work)
      : params_(params), plan_(plan), ring_(ring), storage_(storage), work_(work) {}

  // By a warp, of which one thread copies.
  __device__ __forceinline__ void copy_weights(const CUtensorMap& map) {
    if (!elect_lane()) {
      return;
    }
    RingPosition position;
    for_each_tile([&](const WorkTile& tile) {
      for (int step = 0; step < plan_.depth_steps; ++step) {
        wait(&storage_.empty[position.slot], position.parity ^ 1);
        OSTINATO_DELAY(weights, true);
        load_weights(map, tile, step, position.slot);
        position.advance(plan_.stages);
      }
    });
    prefetch_next();
  }

  // By kTokenWarps warps, of which this one is the `warp`-th.
  __device__ __forceinline__ void copy_tokens(int warp) {
    RingPosition position;
    const int lane = threadIdx.x % 32;
    for_each_tile([&](const WorkTile& tile) {
      find_rows(tile, warp, lane);
      for (int step = 0; step < plan_.depth_steps; ++step) {
        wait(&storage_.empty[position.slot], position.parity ^ 1);
        OSTINATO_DELAY(tokens, true);
        copy_rows(tile, warp, lane, step, position.slot);
        if constexpr (kBlockScales) {
          copy_x_scales(tile, warp, lane, step, position.slot);
          copy_w_scales(tile, warp * 32 + lane, kTokenWarps * 32, step, position.slot);
        }
        arrive_when_copied(&storage_.full_tokens[position.slot]);
        position.advance(plan_.stages);
      }
    });
  }

 protected:
  static constexpr int kVectorBytes = 16;

  template <class Visit>
  __device__ __forceinline__ void for_each_tile(const Visit& visit) {
    work_.for_each_tile(params_, plan_, visit);
  }

  // Finds the rows of x of a tile. Each warp reads only what it has written.
  __device__ __forceinline__ void find_rows(const WorkTile& tile, int warp, int lane) {
    __syncwarp();
    for (int row = lane; row < tile.rows; row += 32) {
      const int of_plan = tile.first_row + row;
      storage_.x_rows[warp][row] =
          params_.to_experts != 0 ? params_.rows[of_plan] / params_.top_k : of_plan;
    }
    __syncwarp();
  }

  // By one thread.
  __device__ __forceinline__ void load_weights(const CUtensorMap& map, const WorkTile& tile,
                                               int step, int slot) {
    const int packed_tile = tile.expert * plan_.expert_tiles + tile.channel / kPackedRows;
    uint64_t* const full = &storage_.full[slot];
    arrive_expecting(full, plan_.weight_bytes);
    tma_load(ring_ + slot * plan_.stage_bytes, map, 0, packed_tile, step * kStageBlocks, full);
  }

  // By the thread that loads weights, behind all of its own: memory would be idle from the last of
  // them until the next product's CTAs have begun. Their tiles follow from the same list.
  __device__ __forceinline__ void prefetch_next() const {
    if (params_.next_w == nullptr || work_.tiles == 0) {
      return;
    }
    const int index = static_cast<int>(blockIdx.x), channel_tile = index / work_.tiles;
    const int cta_tiles = params_.next_tile_channels / kPackedRows;
    const int begin = channel_tile * cta_tiles;
    const int stop = min(begin + cta_tiles, params_.next_expert_tiles);
    if (begin >= stop) {
      return;  // it has fewer tiles than this grid has CTAs
    }
    const int expert = params_.tiles[int64_t(index - channel_tile * work_.tiles) * 4];
    const uint8_t* const of_expert =
        static_cast<const uint8_t*>(params_.next_w) +
        int64_t(expert) * params_.next_expert_tiles * params_.next_tile_bytes;
    for (int tile = begin; tile < stop; ++tile) {
      prefetch_to_l2(of_expert + int64_t(tile) * params_.next_tile_bytes, params_.next_bytes);
    }
  }

  // By `threads` threads, of which this one is the `thread`-th.
  __device__ __forceinline__ void copy_w_scales(const WorkTile& tile, int thread, int threads,
                                                int step, int slot) {
    const int groups = ceil_div(params_.k, kUnitDepth);
    const int scales = ceil_div(params_.n, kScaleChannels);
    const int of_half = params_.gated != 0 ? scales / 2 : scales;
    const float* const of_expert = params_.w_scale + int64_t(tile.expert) * groups * scales;
    for (int unit = 0; unit < kUnits; ++unit) {
      const int group = step * kUnits + unit;
      for (int i = thread; i < kTileScales; i += threads) {
        // Of a gated weight, 8 channels of the gate alternate with the same 8 of up.
        const int block = tile.channel / kScaleChannels + i / kAlternatingScales;
        const int next = (kAlternatingScales == 1 ? block : i) % 2;
        const int in_half = params_.gated != 0 ? block / 2 : block;
        const int at = params_.gated != 0 ? in_half + next * of_half : in_half;
        const bool exists = group < groups && in_half < of_half;
        copy_word_part(shared_address(&storage_.w_scales[slot][unit][i]),
                       of_expert + (exists ? int64_t(group) * scales + at : 0), exists);
      }
    }
  }

  const MoeLinearParams& params_;
  const Plan& plan_;
  uint8_t* ring_;
  Storage& storage_;
  const Work& work_;

 private:
  static constexpr int kRowVectors = kUnitDepth / kVectorBytes;  // a lane of each copies a unit
  static constexpr int kRowsAtOnce = 32 / kRowVectors;

  // Rows of a tile's end that do not exist stay as they are: nobody reads the results.
  __device__ __forceinline__ void copy_rows(const WorkTile& tile, int warp, int lane, int step,
                                            int slot) {
    const int vector = lane % kRowVectors;
    const uint32_t tokens = shared_address(ring_ + slot * plan_.stage_bytes + plan_.weight_bytes);
    for (int first = warp * kRowsAtOnce; first < tile.rows; first += kTokenWarps * kRowsAtOnce) {
      const int row = first + lane / kRowVectors;
      if (row >= tile.rows) {
        break;
      }
      const uint8_t* const x =
          static_cast<const uint8_t*>(params_.x) + storage_.x_rows[warp][row] * params_.x_stride;
      const uint32_t to = tokens + row * kUnitDepth + (vector ^ row % kGroupRows) * kVectorBytes;
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        const int depth = step * kStageDepth + unit * kUnitDepth + vector * kVectorBytes;
        const int bytes = max(0, min(kVectorBytes, plan_.k_bytes - depth));
        copy_vector_part(to + unit * kTokens * kUnitDepth, x + (bytes > 0 ? depth : 0), bytes);
      }
    }
  }

  __device__ __forceinline__ void copy_x_scales(const WorkTile& tile, int warp, int lane, int step,
                                                int slot) {
    const int groups = ceil_div(params_.k, kUnitDepth);
    for (int unit = 0; unit < kUnits; ++unit) {
      const int group = step * kUnits + unit;
      for (int row = warp * 32 + lane; row < tile.rows; row += kTokenWarps * 32) {
        copy_word_part(shared_address(&storage_.x_scales[slot][unit][row]),
                       params_.x_scale + (group < groups ? group * params_.x_scale_stride : 0) +
                           storage_.x_rows[warp][row],
                       group < groups);
      }
    }
  }
};

}  // namespace ostinato::moe
