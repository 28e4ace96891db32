// The epilogue of the grouped GEMM: scales, gates and stores the sums of a thread.
//   y = x_scale · (w_scale · sum), and if gated silu(gate) · up
// in fp32, and rounds once. Of a gated weight, 8 channels of the gate alternate with the same 8 of
// up, and these are sums of the same thread, whether channels are the MMA's rows or columns.
#pragma once

#include "common/pack_pair.cuh"
#include "config.cuh"
#include "gemm_w8a8/tiled/wgmma.cuh"

namespace ostinato::moe {

__device__ __forceinline__ float sum_of(float sum) { return sum; }
__device__ __forceinline__ float sum_of(uint32_t int32_bits) {
  return static_cast<float>(static_cast<int32_t>(int32_bits));
}

__device__ __forceinline__ float silu_mul(float gate, float up) {
  return __fmul_rn(__fdividef(gate, __fadd_rn(1.0F, expf(-gate))), up);
}

class Epilogue {
 public:
  __device__ Epilogue(const MoeLinearParams& params, const Plan& plan, Storage& storage,
                      int warpgroup)
      : params_(params),
        plan_(plan),
        channel_scales_(storage.channel_scales[kStagesScales ? warpgroup : 0]),
        barrier_(1 + warpgroup),
        lane_(threadIdx.x % 32),
        // From one lane: where the compiler does not know that it is the same for all, lanes may
        // part for it, and nothing of the whole loop over tiles is in uniform registers.
        warp_row_(__shfl_sync(
            0xffffffff, warpgroup * kBlocks * kMmaRows + threadIdx.x % kWarpgroup / 32 * 16, 0)),
        row_(warp_row_ + lane_ / 4) {}

  // Loads where this thread's rows go, and the scales of its rows and of few channels: before the
  // mainloop, so that nothing waits for them behind it.
  __device__ __forceinline__ void fetch(const WorkTile& tile) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int of_columns = i / 2 * 8 + lane_ % 4 * 2 + i % 2;
      rows_[i] = row_of(tile, kTokenRows ? row_ + i / 2 * kMmaRows + i % 2 * 8 : of_columns);
    }
    if constexpr (kStagesScales) {
#pragma unroll
      for (int i = 0; i < kOwnScales; ++i) {
        own_scales_[i] = scale_of_packed(tile, threadIdx.x % kWarpgroup + i * kWarpgroup);
      }
    }
    if constexpr (!kTokenRows) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const int first = row_ + block * kMmaRows;
        const bool gated = params_.gated != 0;
        // Gated, 16 channels of the weight are 8 of out.
        const int channel =
            gated ? (tile.channel + first / 16 * 16) / 2 + first % 16 : tile.channel + first;
        w_scales_[block][0] = w_scale_of(tile, channel);
        w_scales_[block][1] = w_scale_of(tile, channel + (gated ? plan_.width : 8));
      }
    }
  }

  // Takes the scales of the tile's rows, which the kernel has found itself. What there is of rows
  // that do not exist is not used.
  __device__ __forceinline__ void take_scales(const float* x_scales) {
    static_assert(!kTokenRows || !kQuantizes, "rows that are quantised are columns");
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      rows_[i].scale = x_scales[i / 2 * 8 + lane_ % 4 * 2 + i % 2];
    }
  }

  __device__ __forceinline__ void store(const WorkTile& tile, const Sum (&sums)[kBlocks][kSums]) {
    if constexpr (kStagesScales) {
      sync_named(barrier_, kWarpgroup);  // all have read those of the tile before
#pragma unroll
      for (int i = 0; i < kOwnScales; ++i) {
        channel_scales_[threadIdx.x % kWarpgroup + i * kWarpgroup] = own_scales_[i];
      }
      sync_named(barrier_, kWarpgroup);
    }
    if constexpr (kTokenRows) {
      if (params_.gated != 0) {
        store_token_rows<true>(tile, sums);
      } else {
        store_token_rows<false>(tile, sums);
      }
    } else {
      store_channel_rows(tile, sums);
    }
  }

 private:
  // Where a row of x goes, and its scale.
  struct Row {
    float scale;
    int out;  // -1: it does not exist
  };

  __device__ __forceinline__ Row row_of(const WorkTile& tile, int row) const {
    if (row >= tile.rows) {
      return {0.0F, -1};
    }
    const int of_plan = tile.first_row + row;
    const int slot = params_.rows[of_plan];
    const bool to_experts = params_.to_experts != 0;
    const int x_row = to_experts ? slot / params_.top_k : of_plan;
    return {kResultScales && !kQuantizes ? params_.x_scale[x_row] : 1.0F,
            to_experts ? of_plan : slot};
  }

  // Of a channel of a tile in the packed order, 1 behind the tile's last.
  __device__ __forceinline__ float scale_of_packed(const WorkTile& tile, int packed) const {
    if (packed >= plan_.tile_channels) {
      return 1.0F;
    }
    const int channel = tile.channel + packed;
    return w_scale_of(tile, params_.gated == 0 ? channel
                                               : channel / 16 * 8 + channel % 8 +
                                                     (channel % 16 >= 8 ? plan_.width : 0));
  }

  // Of a channel of the weight; 1 where sums are scaled already.
  __device__ __forceinline__ float w_scale_of(const WorkTile& tile, int channel) const {
    return kResultScales && channel < params_.n
               ? params_.w_scale[int64_t(tile.expert) * params_.n + channel]
               : 1.0F;
  }

  static __device__ __forceinline__ float scaled(Sum sum, float w_scale, float x_scale) {
    return kResultScales ? __fmul_rn(x_scale, __fmul_rn(w_scale, sum_of(sum))) : sum_of(sum);
  }

  __device__ __forceinline__ Output* out_of(int row) const {
    return static_cast<Output*>(params_.out) + row * params_.out_stride;
  }

  // Stores two adjacent channels of a row of out.
  __device__ __forceinline__ void store_pair(int row, int channel, float low, float high) const {
    if (row < 0 || channel >= plan_.width) {
      return;
    }
    Output* const out = out_of(row) + channel;
    if (plan_.aligned_out != 0 && channel + 1 < plan_.width) {
      if constexpr (sizeof(Output) == 4) {
        *reinterpret_cast<float2*>(out) = make_float2(low, high);
      } else {
        *reinterpret_cast<uint32_t*>(out) = pack_pair<Output>(low, high);
      }
      return;
    }
    out[0] = static_cast<Output>(low);
    if (channel + 1 < plan_.width) {
      out[1] = static_cast<Output>(high);
    }
  }

  // Tokens are rows of the MMA: a thread has two of each block, and of each 8 channels two adjacent
  // ones. Its quad has four times 8 channels of out at once.
  template <bool kGated>
  __device__ __forceinline__ void store_token_rows(const WorkTile& tile,
                                                   const Sum (&sums)[kBlocks][kSums]) const {
    constexpr int kEight = kGated ? 16 : 8;  // channels of the weight for 8 of out
    const int in_eight = lane_ % 4 * 2;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int first = 0; first < kChannels; first += 4 * kEight) {
        if (first >= plan_.tile_channels) {
          break;  // of another tile
        }
        const int channel = (tile.channel + first) / (kEight / 8);
        float y[2][4][2];  // of a row, 8 channels, and an adjacent one
#pragma unroll
        for (int eight = 0; eight < 4; ++eight) {
          const Sum* const of_eight = &sums[block][(first + eight * kEight) / 2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int packed = first + eight * kEight + in_eight + i;
            const float w = kStagesScales ? channel_scales_[packed] : 1.0F;
            const float up = kStagesScales && kGated ? channel_scales_[packed + 8] : 1.0F;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const float x = rows_[2 * block + half].scale;
              const float value = scaled(of_eight[half * 2 + i], w, x);
              y[half][eight][i] =
                  kGated ? silu_mul(value, scaled(of_eight[4 + half * 2 + i], up, x)) : value;
            }
          }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int eights = min(4, (plan_.tile_channels - first) / kEight);
          store_eights(rows_[2 * block + half].out, channel, eights, y[half]);
        }
      }
    }
  }

  // Stores a quad's 8 channels, `eights` times, of a row of out.
  __device__ __forceinline__ void store_eights(int row, int channel, int eights,
                                               const float (&y)[4][2]) const {
    if constexpr (sizeof(Output) == 2) {
      if (plan_.vector_out != 0) {
        uint32_t words[4];
#pragma unroll
        for (int eight = 0; eight < 4; ++eight) {
          words[eight] = pack_pair<Output>(y[eight][0], y[eight][1]);
        }
        transpose_quad(words);
        const int mine = lane_ % 4;
        const int at = channel + mine * 8;
        if (row >= 0 && mine < eights && at < plan_.width) {
          *reinterpret_cast<uint4*>(out_of(row) + at) =
              make_uint4(words[0], words[1], words[2], words[3]);
        }
        return;
      }
    }
#pragma unroll
    for (int eight = 0; eight < 4; ++eight) {
      if (eight < eights) {
        store_pair(row, channel + eight * 8 + lane_ % 4 * 2, y[eight][0], y[eight][1]);
      }
    }
  }

  // Of four lanes with four words each, gives lane i the i-th words of all, in the order of lanes.
  __device__ __forceinline__ void transpose_quad(uint32_t (&words)[4]) const {
#pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2) {
      const bool high = (lane_ & distance) != 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t& low_word = words[distance == 1 ? 2 * i : i];
        uint32_t& high_word = words[distance == 1 ? 2 * i + 1 : i + 2];
        const uint32_t theirs = __shfl_xor_sync(0xffffffff, high ? low_word : high_word, distance);
        low_word = high ? theirs : low_word;
        high_word = high ? high_word : theirs;
      }
    }
  }

  // Channels are rows of the MMA: a thread has two of each block, 8 apart, and two adjacent tokens
  // of each 8.
  __device__ __forceinline__ void store_channel_rows(const WorkTile& tile,
                                                     const Sum (&sums)[kBlocks][kSums]) const {
    const bool gated = params_.gated != 0;
#pragma unroll
    for (int group = 0; group < kTokens / 8; ++group) {
      if (group * 8 >= tile.rows) {
        break;
      }
      const Row* const rows = &rows_[2 * group];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const int first = row_ + block * kMmaRows;  // of the tile's channels
        if (warp_row_ + block * kMmaRows >= plan_.tile_channels) {
          continue;  // of another tile
        }
        const Sum* const of_group = &sums[block][group * 4];
        if (gated) {
          const int channel = (tile.channel + first / 16 * 16) / 2 + first % 16;
          const float gate = w_scales_[block][0], up = w_scales_[block][1];
          float y[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            y[i] = silu_mul(scaled(of_group[i], gate, rows[i].scale),
                            scaled(of_group[2 + i], up, rows[i].scale));
          }
          store_exchanged(rows, channel, y);
          continue;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int channel = tile.channel + first + half * 8;
          const float w = w_scales_[block][half];
          const float y[2] = {scaled(of_group[half * 2], w, rows[0].scale),
                              scaled(of_group[half * 2 + 1], w, rows[1].scale)};
          store_exchanged(rows, channel, y);
        }
      }
    }
  }

  // Stores the results of a channel and two tokens. Exchanges with the lane of the adjacent
  // channel, so that each lane has both channels of one token.
  __device__ __forceinline__ void store_exchanged(const Row* rows, int channel,
                                                  const float (&y)[2]) const {
    const bool odd = lane_ / 4 % 2 != 0;
    const float theirs = __shfl_xor_sync(0xffffffff, odd ? y[0] : y[1], 4);
    store_pair(odd ? rows[1].out : rows[0].out, channel - (odd ? 1 : 0), odd ? theirs : y[0],
               odd ? y[1] : theirs);
  }

  const MoeLinearParams& params_;
  const Plan& plan_;
  const int lane_;
  // Of the MMA's rows, the first that the warp has of its first block, and the first of the two
  // that the thread has of it.
  const int warp_row_, row_;
  // Two of each block of rows or, where tokens are columns, of each 8.
  static constexpr int kRows = 2 * (kTokenRows ? kBlocks : kTokens / 8);
  Row rows_[kRows];
  float w_scales_[kBlocks][2];
  // Where tokens are rows: the scales that this thread hands over to its warpgroup.
  static constexpr int kOwnScales = kChannels / kWarpgroup;
  float* const channel_scales_;
  const int barrier_;
  float own_scales_[kOwnScales];
};

}  // namespace ostinato::moe
