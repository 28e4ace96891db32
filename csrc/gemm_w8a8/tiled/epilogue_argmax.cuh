// Argmax epilogue for rows of logits that are sampled greedily: the kernel writes the argmax key of
// every slice of a row, so that sampling does not read the row, and logits that are not read are
// not stored.
#pragma once

#include "common/argmax_key.cuh"
#include "config.cuh"
#include "tile_scheduler.cuh"

namespace ostinato::tiled {

// Parts of a tile's row: blocks of channels, each of which one warpgroup looks through; where
// channels are the MMA's columns, the halves of a tile whose K two CTAs share. (As best_parts() of
// runtime/jit/variants/gemm.py.)
__device__ __forceinline__ int parts_of_tile(const Plan& plan) {
  return kTokenRows ? 2 : ceil_div(plan.tile_channels, kMmaRows);
}

// Where the first part of a tile goes, of a token of x.
__device__ __forceinline__ uint64_t* argmax_of_tile(const W8A8GemmParams& params, const Plan& plan,
                                                    const WorkTile& work_tile, int token) {
  const int tile = work_tile.channel / plan.tile_channels;
  return params.best + int64_t(token) * params.best_stride + tile * parts_of_tile(plan);
}

// Whether the results of a token are read, and not the best of them alone.
__device__ __forceinline__ bool is_read(const W8A8GemmParams& params, int token) {
  if (!kFindsArgmax || params.best == nullptr) {
    return true;
  }
  if (token >= params.m) {
    return false;
  }
  const bool penalized = params.repetition_penalty != nullptr;
  return !is_greedy(params.temperature[token], penalized ? params.repetition_penalty[token] : 1.0F);
}

// The best logits of a token that a thread has seen, which come in order of their channels.
struct Argmax {
  float logit = -INFINITY;
  int channel;
  float unordered = 0.0F;  // NaN where one of them may be

  __device__ __forceinline__ explicit Argmax(int first) : channel(first) {}

  __device__ __forceinline__ void see(float y, int of) {
    unordered = fmaf(y, 0.0F, unordered);
    if (y > logit) {
      logit = y;
      channel = of;
    }
  }
  // The first NaN is above all: few rows have one, and so it is looked for apart.
  __device__ __forceinline__ void see_nan(float y, int of) {
    if (isnan(y) && !isnan(logit)) {
      logit = y;
      channel = of;
    }
  }
};

// Where channels are the MMA's rows: the chunks of a tile's tokens of which results are read, one
// bit each. Every warp looks for itself, and all find the same.
__device__ __forceinline__ uint32_t chunks_read(const W8A8GemmParams& params, const Plan& plan,
                                                const WorkTile& work_tile) {
  uint32_t read = 0;
#pragma unroll
  for (int chunk = 0; chunk < kTileChunks; ++chunk) {
    const int in_tile = chunk * kChunkTokens + threadIdx.x % kChunkTokens;
    const bool mine = in_tile < plan.tile_tokens && is_read(params, work_tile.token + in_tile);
    read |= uint32_t(__any_sync(0xffffffff, mine)) << chunk;
  }
  return read;
}

// Hands over the best of a chunk's tokens, among the channels of one part, of which address_of(row,
// byte) is in shared memory. Eight neighbouring threads of the warpgroup have a token.
template <class AddressOf>
__device__ __forceinline__ void hand_over_argmax(const W8A8GemmParams& params, const Plan& plan,
                                                 const WorkTile& work_tile, int part,
                                                 int first_token, int thread,
                                                 AddressOf address_of) {
  constexpr int kLanes = 8, kVectorBytes = 16;
  const int channels = min(params.n, work_tile.channel + plan.tile_channels);
  const int tokens = min(params.m - work_tile.token, plan.tile_tokens);
#pragma unroll
  for (int i = 0; i < kChunkTokens * kLanes / kWarpgroup; ++i) {
    const int row = (i * kWarpgroup + thread) / kLanes;
    ArgmaxKey best = ~ArgmaxKey{0};
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int byte = piece * kPieceBytes + thread % kLanes * kVectorBytes;
      const float4 y = *reinterpret_cast<const float4*>(address_of(row, byte));
      const int channel = work_tile.channel + part * kMmaRows + byte / int(sizeof(float));
      const float logits[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const ArgmaxKey key = argmax_key_of(logits[j], channel + j);
        best = channel + j < channels && key < best ? key : best;
      }
    }
    best = smallest_of_lanes<kLanes>(best);
    const int token = first_token + row;
    if (thread % kLanes == 0 && token < tokens) {
      argmax_of_tile(params, plan, work_tile, work_tile.token + token)[part] = best;
    }
  }
}

}  // namespace ostinato::tiled
