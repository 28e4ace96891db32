// The epilogue of the tiled GEMM with tokens as MMA rows: four lanes hold adjacent channels of a
// token and store them from registers. (The formula: epilogue_math.cuh.)
#pragma once

#include "epilogue_argmax.cuh"
#include "epilogue_math.cuh"
#include "tile_scheduler.cuh"
#include "wgmma.cuh"

namespace ostinato::tiled {

class Epilogue {
 public:
  __device__ Epilogue(const W8A8GemmParams& params, const Plan& plan, const CUtensorMap&,
                      FixedStorage& fixed, int warpgroup)
      : params_(params),
        plan_(plan),
        w_scale_(fixed.epilogue.w_scale[warpgroup]),
        bias_(fixed.epilogue.bias[warpgroup]),
        w_sum_(fixed.epilogue.w_sum[warpgroup]),
        warpgroup_(warpgroup),
        thread_(threadIdx.x % kWarpgroup) {}

  // Copies scales and weight sums of the tile's channels to shared memory, and loads their bias;
  // the loads complete during the mainloop.
  __device__ __forceinline__ void fetch_channels(const WorkTile& work_tile) {
#pragma unroll
    for (int i = 0; i < kChannelsOfThread; ++i) {
      const int in_tile = thread_ + i * kWarpgroup;
      const int channel = work_tile.channel + in_tile;
      const bool inside = in_tile < kChannels && channel < params_.n;
      if (kResultScales && in_tile < kChannels) {
        const int64_t offset = inside ? int64_t(channel) * params_.w_scale_stride : 0;
        copy_word_async(&w_scale_[in_tile], params_.w_scale + offset, inside);
        if (has_zero_points()) {
          copy_word_async(&w_sum_[in_tile], params_.w_sum + (inside ? channel : 0), inside);
        }
      }
      fetched_bias_[i] = inside && params_.bias != nullptr
                             ? static_cast<const Output*>(params_.bias)[channel]
                             : Output(kFindsArgmax && !inside ? -INFINITY : 0.0F);
    }
  }

  // Loads the scales of this thread's tokens, and whether their results are read. For the same
  // tokens as before the latter is kept: the loads would be waited for.
  __device__ __forceinline__ void fetch_tokens(const WorkTile& work_tile) {
    const bool others = work_tile.token != known_token_;
    known_token_ = work_tile.token;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int token = token_of_thread(work_tile, block, half);
        x_scale_[block][half] = x_scale_of(params_, token);
        if (kFindsArgmax && others) {
          read_[block][half] = is_read(params_, token);
        }
      }
    }
  }

  // Writes the accumulators of kCount channels from `first` on, counted in the tile.
  template <int kCount>
  __device__ __forceinline__ void store(const WorkTile& work_tile, int first,
                                        Sum (&sums)[kBlocks][kCount / 2]) {
#pragma unroll
    for (int i = 0; i < kChannelsOfThread; ++i) {
      if (thread_ + i * kWarpgroup < kChannels) {
        bias_[thread_ + i * kWarpgroup] = to_float(fetched_bias_[i]);
      }
    }
    wait_async_copies();
    sync_warpgroup();
    OSTINATO_DELAY(epilogue_store, thread_ / 32 == 1);
    const int left = min(plan_.tile_channels, params_.n - work_tile.channel);
    const int tokens_end = min(params_.m, work_tile.token + plan_.tile_tokens);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      Row rows[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int token = token_of_thread(work_tile, block, half);
        const bool inside = token < tokens_end;
        rows[half].out = static_cast<Output*>(params_.out) + int64_t(token) * params_.out_stride +
                         work_tile.channel;
        rows[half].end = inside && (!kFindsArgmax || read_[block][half]) ? left : 0;
        rows[half].scale = x_scale_[block][half];
        rows[half].zero_point =
            inside && has_zero_points()
                ? params_.x_zero_point[int64_t(token) * params_.x_zero_point_stride]
                : 0;
      }
      if constexpr (kFindsArgmax) {
        if (params_.best != nullptr) {
          if (left > 0) {  // the last cluster may have a surplus tile
            store_argmax<kCount>(work_tile, block, first, left, sums[block]);
          }
          if (__all_sync(0xffffffff, rows[0].end + rows[1].end == 0)) {
            continue;
          }
        }
      }
      const bool whole = plan_.aligned_out && left % 16 == 0;
      if (whole && !has_zero_points()) {
        store_rows<kCount, true, false>(first, sums[block], rows);
      } else if (whole) {
        store_rows<kCount, true, true>(first, sums[block], rows);
      } else {
        store_rows<kCount, false, true>(first, sums[block], rows);
      }
    }
    // The next tile overwrites scales and bias, which a slow warp may still be reading.
    sync_warpgroup();
  }

  __device__ __forceinline__ void store_tile(const WorkTile& work_tile,
                                             Sum (&sums)[kBlocks][kSums]) {
    store<kTileColumns>(work_tile, 0, sums);
  }

  // This epilogue defers no stores.
  __device__ __forceinline__ void store_deferred(int) {}
  __device__ __forceinline__ void store_deferred_from(int) {}
  __device__ __forceinline__ void finish() {}

 private:
  __device__ __forceinline__ void sync_warpgroup() { sync_named(1 + warpgroup_, kWarpgroup); }

  // One of the two tokens of a block whose accumulators the thread holds.
  __device__ __forceinline__ int token_of_thread(const WorkTile& work_tile, int block,
                                                 int half) const {
    return work_tile.token + (warpgroup_ * kBlocks + block) * kMmaRows + thread_ / 32 * 16 +
           half * 8 + thread_ % 32 / 4;
  }

  // The first of two adjacent channels, of 8, whose accumulators the thread holds.
  __device__ __forceinline__ int lane_channel() const { return thread_ % 4 * 2; }

  __device__ __forceinline__ bool has_zero_points() const {
    return kInt8 && params_.x_zero_point != nullptr;
  }

  // A token's row of the tile: its start in out, and how many of its channels are stored.
  struct Row {
    Output* out;
    int end;
    float scale;
    uint32_t zero_point;
  };

  // Stores channels of two tokens from `first` of the tile on, 16 at a time: the thread has two of
  // the first 8 channels and, 4 accumulators later, two of the others. kWhole: rows of out are
  // whole vectors. Only the stores are conditional, for instruction-level parallelism.
  template <int kCount, bool kWhole, bool kZeroPoints>
  __device__ __forceinline__ void store_rows(int first, const Sum (&sums)[kCount / 2],
                                             const Row (&rows)[2]) const {
#pragma unroll
    for (int pair = 0; pair < kCount / kStoredChannels; ++pair) {
      const int column = first + pair * kStoredChannels + lane_channel();
      const float2 w_scale[2] = {two_scales(w_scale_ + column), two_scales(w_scale_ + column + 8)};
      const float2 bias[2] = {pair_of<float2>(bias_, column), pair_of<float2>(bias_, column + 8)};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Row& row = rows[half];
        float y[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          Sum sum[2] = {sums[pair * 8 + half * 2 + i * 4], sums[pair * 8 + half * 2 + i * 4 + 1]};
          if constexpr (kInt8 && kZeroPoints) {
            // Unsigned, since the product alone may overflow; the difference never does.
            const uint2 w_sum = pair_of<uint2>(w_sum_, column + i * 8);
            sum[0] -= row.zero_point * w_sum.x;
            sum[1] -= row.zero_point * w_sum.y;
          }
          y[i * 2] = fmaf(row.scale, w_scale[i].x * to_float(sum[0]), bias[i].x);
          y[i * 2 + 1] = fmaf(row.scale, w_scale[i].y * to_float(sum[1]), bias[i].y);
        }
        if constexpr (sizeof(Output) == 4) {
          store_vector<kWhole>(row, column,
                               make_uint2(__float_as_uint(y[0]), __float_as_uint(y[1])));
          store_vector<kWhole>(row, column + 8,
                               make_uint2(__float_as_uint(y[2]), __float_as_uint(y[3])));
        } else {
          // Adjacent lanes exchange, so that each has four adjacent channels, and a quad a whole
          // sector.
          const uint32_t low = pack_pair<Output>(y[0], y[1]), high = pack_pair<Output>(y[2], y[3]);
          const bool odd = thread_ % 2;
          const uint32_t theirs = __shfl_xor_sync(0xffffffff, odd ? low : high, 1);
          const uint2 four = odd ? make_uint2(theirs, high) : make_uint2(low, theirs);
          const int from = first + pair * kStoredChannels + (odd ? 8 : 0) + thread_ % 4 / 2 * 4;
          store_vector<kWhole>(row, from, four);
        }
      }
      // Limits the number of values in flight, to save registers. Partial tiles may be slow.
      if (!kWhole || pair % 4 == 3) {
        __syncwarp();
      }
    }
  }

  // Stores the argmax keys of two tokens over channels from `first` of the tile on, as one slice;
  // as both slices if these are all channels of the tile.
  template <int kCount>
  __device__ __forceinline__ void store_argmax(const WorkTile& work_tile, int block, int first,
                                               int left, const Sum (&sums)[kCount / 2]) const {
    const int end = min(params_.m, work_tile.token + plan_.tile_tokens);
    const float scales[2] = {x_scale_[block][0], x_scale_[block][1]};
    Argmax best[2] = {Argmax(first + lane_channel()), Argmax(first + lane_channel())};
    for_each_result<kCount>(first, left, sums, scales, [&](int half, int channel, float y) {
      best[half].include(y, channel);
    });
    if (isnan(best[0].unordered + best[1].unordered)) {
      for_each_result<kCount>(first, left, sums, scales, [&](int half, int channel, float y) {
        if (channel < left) {
          best[half].include_nan(y, channel);
        }
      });
    }
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = token_of_thread(work_tile, block, half);
      const ArgmaxKey key = smallest_of_lanes<4>(
          argmax_key_of(best[half].logit, work_tile.channel + best[half].channel));
      if (thread_ % 4 == 0 && token < end) {
        uint64_t* const out = argmax_of_tile(params_, plan_, work_tile, token);
        if (first == 0) {
          out[0] = key;
        }
        if (first > 0 || kCount == kTileColumns) {
          out[1] = key;
        }
      }
    }
  }

  // Calls visit(token of two, channel of the tile, result) in order of the channels. In the last
  // group of 16, results past `left` are -inf unless they become NaN.
  template <int kCount, class Visit>
  __device__ __forceinline__ void for_each_result(int first, int left,
                                                  const Sum (&sums)[kCount / 2],
                                                  const float (&scales)[2], Visit visit) const {
#pragma unroll
    for (int pair = 0; pair < kCount / kStoredChannels; ++pair) {
      if (first + pair * kStoredChannels < left) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = first + pair * kStoredChannels + i * 8 + lane_channel();
          const float2 w_scale = two_scales(w_scale_ + column);
          const float2 bias = pair_of<float2>(bias_, column);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const Sum* const sum = &sums[pair * 8 + half * 2 + i * 4];
            visit(half, column, fmaf(scales[half], w_scale.x * to_float(sum[0]), bias.x));
            visit(half, column + 1, fmaf(scales[half], w_scale.y * to_float(sum[1]), bias.y));
          }
        }
      }
    }
  }

  template <class Pair, class Value>
  static __device__ __forceinline__ Pair pair_of(const Value* values, int column) {
    return *reinterpret_cast<const Pair*>(&values[column]);
  }

  // Stores those of 8 bytes that lie within the row.
  template <bool kWhole>
  static __device__ __forceinline__ void store_vector(const Row& row, int channel, uint2 vector) {
    using Bits = std::conditional_t<sizeof(Output) == 4, uint32_t, uint16_t>;
    constexpr int kCount = sizeof(vector) / sizeof(Bits);
    if constexpr (kWhole) {
      if (channel < row.end) {
        *reinterpret_cast<uint2*>(row.out + channel) = vector;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (channel + i < row.end) {
          const uint32_t word = i < kCount / 2 ? vector.x : vector.y;
          reinterpret_cast<Bits*>(row.out)[channel + i] =
              static_cast<Bits>(word >> (i * 8 * sizeof(Bits) % 32));
        }
      }
    }
  }

  static constexpr int kChannelsOfThread = ceil_div(kChannels, kWarpgroup);

  const W8A8GemmParams& params_;
  const Plan& plan_;
  float* const w_scale_;
  float* const bias_;
  int32_t* const w_sum_;
  const int warpgroup_, thread_;
  float x_scale_[kBlocks][2];
  bool read_[kBlocks][2];
  int known_token_ = -1;  // the tile's token for which read_ is valid
  Output fetched_bias_[kChannelsOfThread];
};

}  // namespace ostinato::tiled
