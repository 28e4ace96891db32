// The producers of the grouped GEMM: one thread copies weights by TMA; three warps gather the rows
// of x, which TMA can not, into the same swizzle, and copy block scales.
#pragma once

#include "common/async_copy.cuh"
#include "common/ring.cuh"
#include "common/tma.cuh"
#include "config.cuh"

namespace ostinato::moe {

class Producer {
 public:
  __device__ Producer(const MoeLinearParams& params, const Plan& plan, uint8_t* ring,
                      Storage& storage, int tiles)
      : params_(params), plan_(plan), ring_(ring), storage_(storage), tiles_(tiles) {}

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
  }

  // By kTokenWarps warps, of which this one is the `warp`-th.
  __device__ __forceinline__ void copy_tokens(int warp) {
    RingPosition position;
    const int lane = threadIdx.x % 32, thread = warp * 32 + lane;
    for_each_tile([&](const WorkTile& tile) {
      int scaled[kLaneScales];
#pragma unroll
      for (int i = 0; i < kLaneScales; ++i) {
        scaled[i] = kBlockScales ? x_row_of(tile, i * kTokenLanes + thread) : -1;
      }
      const float* const of_channels = kBlockScales ? w_scale_of(tile, thread) : nullptr;
      // Each warp reads only what it has written.
      __syncwarp();
      for (int entry = lane; entry < kRowsAtOnce * kListedRows; entry += 32) {
        const int i = entry % kListedRows, first = warp * kRowsAtOnce + entry / kListedRows;
        (&storage_.x_rows[warp][0][0])[entry] = x_row_of(tile, first + i * kRowStep);
      }
      __syncwarp();
      for (int step = 0; step < plan_.depth_steps; ++step) {
        wait(&storage_.empty[position.slot], position.parity ^ 1);
        OSTINATO_DELAY(tokens, true);
        copy_rows(warp, lane, step, position.slot);
        if constexpr (kBlockScales) {
          copy_x_scales(scaled, thread, step, position.slot);
          copy_w_scale(of_channels, thread, step, position.slot);
        }
        arrive_when_copied(&storage_.full_tokens[position.slot]);
        position.advance(plan_.stages);
      }
    });
  }

 protected:
  static constexpr int kVectorBytes = 16;
  static constexpr int kTokenLanes = kTokenWarps * 32;

  template <class Visit>
  __device__ __forceinline__ void for_each_tile(const Visit& visit) {
    moe::for_each_tile(params_, plan_, tiles_, visit);
  }

  // The row of x that is a row of a tile, -1 where that does not exist.
  __device__ __forceinline__ int x_row_of(const WorkTile& tile, int row) const {
    if (row >= tile.rows) {
      return -1;
    }
    const int of_plan = tile.first_row + row;
    return params_.to_experts != 0 ? params_.rows[of_plan] / params_.top_k : of_plan;
  }

  // By one thread.
  __device__ __forceinline__ void load_weights(const CUtensorMap& map, const WorkTile& tile,
                                               int step, int slot) {
    const int packed_tile = tile.expert * plan_.expert_tiles + tile.channel / kPackedRows;
    const int pairs = pairs_of(plan_), blocks = kStageBlocks >> pairs;  // of a copy
    uint64_t* const full = &storage_.full[slot];
    arrive_expecting(full, plan_.weight_bytes);
    uint8_t* const stage = ring_ + slot * plan_.stage_bytes;
    if (pairs != 0 && tile.shared) {
      const int first = static_cast<int>(cluster_rank()) * blocks;
      tma_load_multicast(stage + first * plan_.block_bytes, map, 0, packed_tile,
                         step * kStageBlocks + first, full, 0b11);
    } else {
      for (int first = 0; first < kStageBlocks; first += blocks) {
        tma_load(stage + first * plan_.block_bytes, map, 0, packed_tile,
                 step * kStageBlocks + first, full);
      }
    }
  }

  // The first group's scale of the channels that a thread copies, the `index`-th of a tile's; null
  // if there is none.
  __device__ __forceinline__ const float* w_scale_of(const WorkTile& tile, int index) const {
    const int scales = ceil_div(params_.n, kScaleChannels);
    const int of_half = params_.gated != 0 ? scales / 2 : scales;
    // Of a gated weight, 8 channels of the gate alternate with the same 8 of up.
    const int block = tile.channel / kScaleChannels + index / kAlternatingScales;
    const int next = (kAlternatingScales == 1 ? block : index) % 2;
    const int in_half = params_.gated != 0 ? block / 2 : block;
    if (in_half >= of_half) {
      return nullptr;
    }
    return params_.w_scale + int64_t(tile.expert) * ceil_div(params_.k, kUnitDepth) * scales +
           (params_.gated != 0 ? in_half + next * of_half : in_half);
  }

  // Copies a group's scale of these channels, for a stage, by the `index`-th thread.
  __device__ __forceinline__ void copy_w_scale(const float* of_channels, int index, int step,
                                               int slot) {
    const int scales = ceil_div(params_.n, kScaleChannels);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const int group = step * kUnits + unit;
      if (index < kTileScales) {
        const bool copied = group * kUnitDepth < params_.k && of_channels != nullptr;
        copy_word_part(shared_address(&storage_.w_scales[slot][unit][index]),
                       copied ? of_channels + int64_t(group) * scales : params_.w_scale, copied);
      }
    }
  }

  const MoeLinearParams& params_;
  const Plan& plan_;
  uint8_t* ring_;
  Storage& storage_;
  int tiles_;

 private:
  static constexpr int kLaneScales = ceil_div(kTokens, kTokenLanes);
  static_assert(kTileScales <= kTokenLanes, "a lane copies one");

  // Copies a lane's vector of its rows. Rows of a tile's end that do not exist stay as they are:
  // nobody reads the results.
  __device__ __forceinline__ void copy_rows(int warp, int lane, int step, int slot) {
    static_assert(kRowStep % (kGroupRows / 2) == 0, "rows are of two places in the swizzle");
    const int vector = lane % kRowVectors, group = lane / kRowVectors;
    const int first = warp * kRowsAtOnce + group;
    const uint32_t to =
        shared_address(ring_ + slot * plan_.stage_bytes + plan_.weight_bytes) + first * kUnitDepth;
    const auto place = [&](int i) {
      return (vector ^ first % kGroupRows ^ i * kRowStep % kGroupRows) * kVectorBytes +
             i * kRowStep * kUnitDepth;
    };
    const auto row_at = [&](int row, int depth) {
      return static_cast<const uint8_t*>(params_.x) + depth +
             uint64_t{static_cast<uint32_t>(row)} * static_cast<uint32_t>(params_.x_stride);
    };
    const int depth = step * kStageDepth + vector * kVectorBytes;
    const int* const rows = storage_.x_rows[warp][group];
    if ((step + 1) * kStageDepth <= plan_.k_bytes) {
#pragma unroll
      for (int four = 0; four < kListedRows; four += 4) {
        const int4 listed = *reinterpret_cast<const int4*>(rows + four);
        const int of_four[] = {listed.x, listed.y, listed.z, listed.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (of_four[i] >= 0) {
            const uint8_t* const from = row_at(of_four[i], depth);
#pragma unroll
            for (int unit = 0; unit < kUnits; ++unit) {
              copy_vector(to + place(four + i) + unit * kTokens * kUnitDepth,
                          from + unit * kUnitDepth);
            }
          }
        }
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kListedRows && rows[i] >= 0; ++i) {
#pragma unroll 1
      for (int unit = 0; unit < kUnits; ++unit) {
        const int of_unit = depth + unit * kUnitDepth;
        const int bytes = max(0, min(kVectorBytes, plan_.k_bytes - of_unit));
        copy_vector_part(to + place(i) + unit * kTokens * kUnitDepth,
                         row_at(rows[i], bytes > 0 ? of_unit : 0), bytes);
      }
    }
  }

  // By this lane of those that copy tokens: the scales of its rows.
  __device__ __forceinline__ void copy_x_scales(const int (&rows)[kLaneScales], int lane, int step,
                                                int slot) {
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const int group = step * kUnits + unit;
      const bool exists = group * kUnitDepth < params_.k;
      const float* const of_rows = params_.x_scale + (exists ? group * params_.x_scale_stride : 0);
#pragma unroll
      for (int i = 0; i < kLaneScales; ++i) {
        if (rows[i] >= 0) {
          copy_word_part(shared_address(&storage_.x_scales[slot][unit][i * kTokenLanes + lane]),
                         of_rows + rows[i], exists);
        }
      }
    }
  }
};

}  // namespace ostinato::moe
