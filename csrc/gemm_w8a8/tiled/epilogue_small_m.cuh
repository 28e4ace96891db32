// The small-M epilogue of the tiled GEMM, where channels are the MMA's rows and tokens are few: the
// launch is short, so results go from registers to out, without shared memory and without barriers.
// (The formula: epilogue_math.cuh.)
#pragma once

#include "epilogue_math.cuh"
#include "tile_scheduler.cuh"
#include "wgmma.cuh"

namespace ostinato::tiled {

class Epilogue {
  static constexpr int kGroups = kTileColumns / 8;  // of 8 tokens: a thread has two of each

 public:
  __device__ Epilogue(const W8A8GemmParams& params, const Plan& plan, const CUtensorMap&,
                      FixedStorage&, int)
      : params_(params), plan_(plan), warp_(threadIdx.x / 32), lane_(threadIdx.x % 32) {}

  // Scales and bias of the channels whose sums this thread will hold.
  __device__ __forceinline__ void fetch_channels(const WorkTile& work_tile) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int channel = channel_of_thread(work_tile, block, half);
        w_scale_[block][half] = w_scale_of(params_, channel);
        bias_[block][half] = channel < params_.n && params_.bias != nullptr
                                 ? static_cast<const Output*>(params_.bias)[channel]
                                 : Output(0.0F);
      }
    }
  }

  // Scales of its tokens.
  __device__ __forceinline__ void fetch_tokens(const WorkTile& work_tile) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        x_scale_[group][i] = x_scale_of(params_, token_of_thread(work_tile, group) + i);
      }
    }
  }

  __device__ __forceinline__ void store_tile(const WorkTile& work_tile,
                                             Sum (&sums)[kBlocks][kSums]) {
    const int tokens_end = min(params_.m, work_tile.token + plan_.tile_tokens);
    const int channels_end = min(params_.n, work_tile.channel + plan_.tile_channels);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (work_tile.channel + block * kMmaRows >= channels_end) {
        break;  // what lies there is not of this tile
      }
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if (work_tile.token + group * 8 < tokens_end) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            store_pair(work_tile, block, group, half, tokens_end, channels_end,
                       &sums[block][group * 4 + half * 2]);
          }
        }
      }
    }
  }

  // What is stored is stored at once.
  __device__ __forceinline__ void store_deferred(int) {}
  __device__ __forceinline__ void store_deferred_from(int) {}
  __device__ __forceinline__ void finish() {}

 private:
  // Of the two channels of a block whose sums the thread holds.
  __device__ __forceinline__ int channel_of_thread(const WorkTile& work_tile, int block,
                                                   int half) const {
    return work_tile.channel + block * kMmaRows + warp_ * 16 + half * 8 + lane_ / 4;
  }

  // The first of two neighbouring tokens.
  __device__ __forceinline__ int token_of_thread(const WorkTile& work_tile, int group) const {
    return work_tile.token + group * 8 + lane_ % 4 * 2;
  }

  // Stores the results of a channel and two tokens: traded with the lane that has the neighbouring
  // channel, so that each has both channels of one of the tokens.
  __device__ __forceinline__ void store_pair(const WorkTile& work_tile, int block, int group,
                                             int half, int tokens_end, int channels_end,
                                             const Sum* sums) const {
    const int channel = channel_of_thread(work_tile, block, half);
    const int first_token = token_of_thread(work_tile, group);
    float y[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Sum sum = sums[i];
      if (kInt8 && params_.x_zero_point != nullptr) {
        sum = without_zero_point(sum, channel, first_token + i);
      }
      y[i] = fmaf(x_scale_[group][i], w_scale_[block][half] * to_float(sum),
                  to_float(bias_[block][half]));
    }
    const bool odd = lane_ / 4 % 2;
    const float theirs = __shfl_xor_sync(0xffffffff, odd ? y[0] : y[1], 4);
    const float low = odd ? theirs : y[0], high = odd ? y[1] : theirs;
    const int token = first_token + odd;
    const int first_channel = channel - odd;
    if (token >= tokens_end || first_channel >= channels_end) {
      return;
    }
    Output* const out =
        static_cast<Output*>(params_.out) + int64_t(token) * params_.out_stride + first_channel;
    if (plan_.aligned_out && first_channel + 1 < channels_end) {
      if constexpr (sizeof(Output) == 4) {
        *reinterpret_cast<float2*>(out) = make_float2(low, high);
      } else {
        *reinterpret_cast<uint32_t*>(out) = pack_pair<Output>(low, high);
      }
    } else {
      out[0] = static_cast<Output>(low);
      if (first_channel + 1 < channels_end) {
        out[1] = static_cast<Output>(high);
      }
    }
  }

  // Not fetched ahead as scales are: few calls have any.
  __device__ __forceinline__ Sum without_zero_point(Sum sum, int channel, int token) const {
    if (channel >= params_.n || token >= params_.m) {
      return sum;
    }
    const uint32_t zero_point = params_.x_zero_point[int64_t(token) * params_.x_zero_point_stride];
    // Unsigned, since the product alone may overflow; the difference never does.
    return sum - zero_point * static_cast<uint32_t>(params_.w_sum[channel]);
  }

  const W8A8GemmParams& params_;
  const Plan& plan_;
  const int warp_, lane_;
  float w_scale_[kBlocks][2], x_scale_[kGroups][2];
  Output bias_[kBlocks][2];  // as it is read: converting it would wait for it
};

}  // namespace ostinato::tiled
