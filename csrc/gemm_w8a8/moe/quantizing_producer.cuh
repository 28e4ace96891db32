// The producers of a grouped GEMM that quantises its rows of x: three warps read those of a tile
// in 16 bits, all K of them at once, and write codes and scales into the stages of the ring, with
// the bits of the standalone kernels (gemm_w8a8/quantize). All CTAs of an expert repeat this: few
// rows take less time than the boundary between two kernels.
#pragma once

#include "common/async_copy.cuh"
#include "common/debug.cuh"
#include "common/launch.cuh"
#include "common/quantize_math.cuh"
#include "common/ring.cuh"
#include "common/tma.cuh"
#include "common/vector.cuh"
#include "config.cuh"
#include "gemm_w8a8/quantize/rows.cuh"
#include "producer.cuh"

namespace ostinato::moe {

class QuantizingProducer : public Producer {
 public:
  __device__ QuantizingProducer(const MoeLinearParams& params, const Plan& plan, uint8_t* ring,
                                Storage& storage, int tiles)
      : Producer(params, plan, ring, storage, tiles), waiting_(ring - waiting_bytes(plan)) {}

  // By a warp, of which one thread copies weights. Their block scales come with them: before the
  // preceding kernel has ended, if it may.
  __device__ __forceinline__ void copy_weights(const CUtensorMap& map) {
    if constexpr (kBlockScales) {
      RingPosition position;
      const int lane = threadIdx.x % 32;
      for_each_tile([&](const WorkTile& tile) {
        const float* const of_channels = w_scale_of(tile, lane);
        for (int step = 0; step < plan_.depth_steps; ++step) {
          wait(&storage_.empty[position.slot], position.parity ^ 1);
          OSTINATO_DELAY(weights, true);
          if (elect_lane()) {
            load_weights(map, tile, step, position.slot);
          }
          copy_w_scale(of_channels, lane, step, position.slot);
          arrive_when_copied(&storage_.full[position.slot]);
          position.advance(plan_.stages);
        }
      });
    } else {
      Producer::copy_weights(map);
    }
  }

  // By kTokenWarps warps, of which this one is the `warp`-th. The preceding kernel may write x.
  __device__ __forceinline__ void copy_tokens(int warp) {
    RingPosition position;
    const int lane = threadIdx.x % 32;
    for_each_tile([&](const WorkTile& tile) {
      find_rows(tile, warp, lane);
      wait_for_predecessor();
      sync_token_warps();  // all have read the tile before
      copy_rows(tile, warp, lane);
      OSTINATO_DELAY(quantized_rows, warp == 1);
      sync_token_warps();
      if constexpr (kResultScales) {
        find_scales(tile, warp, lane);
        OSTINATO_DELAY(row_scales, warp == 0);
        sync_token_warps();
      }
      // The rows of all stages, in turn: of one row, each warp has a stage.
      int row = warp;
      for (int step = 0; step < plan_.depth_steps; ++step) {
        wait(&storage_.empty[position.slot], position.parity ^ 1);
        OSTINATO_DELAY(tokens, true);
        for (; row < tile.rows; row += kTokenWarps) {
          encode(row, lane, step, position.slot);
        }
        row -= tile.rows;
        fence_shared_for_tma();  // written by threads, read by wgmma
        __syncwarp();
        if (lane == 0) {
          arrive(&storage_.full_tokens[position.slot]);
        }
        position.advance(plan_.stages);
      }
    });
  }

 private:
  using X = tiled::dtype::OSTINATO_X;
  using Code = std::conditional_t<kInt8, ostinato::dtype::int8, ostinato::dtype::e4m3>;
  static constexpr int kVector = kVectorBytes / int{sizeof(X)};  // codes of a vector of x
  static constexpr int kGroupLanes = kUnitDepth / kVector;
  static_assert(kStageDepth == 32 * kVector, "each lane of a warp has a vector of a row's stage");
  static_assert(!kBlockScales || kTileScales <= 32, "a lane of a warp copies one");
  static_assert(kTokens <= 32 && kTokens <= kRowsAtOnce * kListedRows, "each warp lists all rows");
  using Values = float[kVector];
  using Vector = Packed<X, kVector>;

  // Barriers of warpgroups that stage scales begin at 1, too: their tiles have more rows.
  static __device__ __forceinline__ void sync_token_warps() { sync_named(1, kTokenWarps * 32); }

  // Waits for all copies that this thread has asked for.
  static __device__ __forceinline__ void wait_until_copied() {
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

  // The rows of x of a tile, for each warp.
  __device__ __forceinline__ int32_t* rows_of(int warp) { return &storage_.x_rows[warp][0][0]; }

  // Each warp reads only what it has written.
  __device__ __forceinline__ void find_rows(const WorkTile& tile, int warp, int lane) {
    __syncwarp();
    if (lane < kTokens) {
      rows_of(warp)[lane] = x_row_of(tile, lane);
    }
    __syncwarp();
  }

  // Copies the rows of a tile; what a stage has behind K is 0.
  __device__ __forceinline__ void copy_rows(const WorkTile& tile, int warp, int lane) {
    const int vectors = plan_.x_row_bytes / kVectorBytes;
    const uint32_t waiting = shared_address(waiting_);
    for (int row = 0; row < tile.rows; ++row) {
      const uint8_t* const x =
          static_cast<const uint8_t*>(params_.x) + rows_of(warp)[row] * params_.x_stride;
      for (int vector = warp * 32 + lane; vector < vectors; vector += kTokenWarps * 32) {
        const int at = vector * kVectorBytes;
        const int bytes = max(0, min(kVectorBytes, params_.k * kXBytes - at));
        copy_vector_part(waiting + row * plan_.x_row_bytes + at, x + (bytes > 0 ? at : 0), bytes);
      }
    }
    wait_until_copied();
  }

  __device__ __forceinline__ void load(int row, int vector, Values& values) const {
    const uint4 words =
        *reinterpret_cast<const uint4*>(waiting_ + row * plan_.x_row_bytes + vector * kVectorBytes);
    const Vector packed = {{words.x, words.y, words.z, words.w}};
    packed.unpack(values);
  }

  // Finds the scales of whole rows; a warp has every third of them.
  __device__ __forceinline__ void find_scales(const WorkTile& tile, int warp, int lane) {
    for (int row = warp; row < tile.rows; row += kTokenWarps) {
      float largest = 0.0F;
#pragma unroll 4
      for (int step = 0; step < plan_.depth_steps; ++step) {
        Values values;
        load(row, step * 32 + lane, values);
        largest = max_magnitude(largest, max_magnitude_of(0.0F, values));
      }
      const float scale = dynamic_scale<Code>(warp_max(largest));
      if (lane == 0) {
        storage_.row_scales[row] = scale;
      }
    }
  }

  // Writes a row's codes and scales into a stage: each lane 8 codes, of half a vector.
  __device__ __forceinline__ void encode(int row, int lane, int step, int slot) {
    Values values;
    load(row, step * 32 + lane, values);
    float scale;
    if constexpr (kBlockScales) {
      scale = dynamic_scale<Code>(lanes_max<kGroupLanes>(max_magnitude_of(0.0F, values)));
      if (params_.power_of_two != 0) {
        scale = ceil_power_of_two(scale);
      }
    } else {
      scale = storage_.row_scales[row];
    }
    const int unit = lane / kGroupLanes, in_unit = lane % kGroupLanes;
    if (in_unit == 0) {
      storage_.x_scales[slot][unit][row] = scale;
    }
    uint2 codes = {};  // a row whose scale is NaN ends in zeros, too
    if ((step * 32 + lane) * kVector < params_.k) {
      const Divisor divisor(scale);
      codes = divisor.fast ? encoded<true>(divisor, values) : encoded<false>(divisor, values);
    }
    uint8_t* const tokens = ring_ + slot * plan_.stage_bytes + plan_.weight_bytes;
    const int place = (in_unit / 2 ^ row % kGroupRows) * kVectorBytes + in_unit % 2 * kVector;
    *reinterpret_cast<uint2*>(tokens + (unit * kTokens + row) * kUnitDepth + place) = codes;
  }

  // `kFast`: the quotients are within the grid, and divisions are short.
  template <bool kFast>
  static __device__ __forceinline__ uint2 encoded(const Divisor& scale, const Values& values) {
    const Grid<Code> grid(0.0F);
    uint32_t codes[2];
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      float q[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float value = values[4 * word + i];
        q[i] = kFast ? scale.divide_fast(value) : scale.divide(value);
      }
      codes[word] = kFast ? grid.encode_bounded(q) : grid.encode(q);
    }
    return make_uint2(codes[0], codes[1]);
  }

  const uint8_t* waiting_;
};

}  // namespace ostinato::moe
