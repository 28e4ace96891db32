// A warp's queries: the columns of its MMAs, as operands.
#pragma once

#include "common/pack_pair.cuh"
#include "dequant.cuh"
#include "kernel_args.cuh"
#include "mma.cuh"
#include "score_fragment.cuh"

namespace ostinato::decode {

class Queries {
 public:
  static __device__ __forceinline__ int first_column() {
    return threadIdx.x / 32 % kColumnWarps * kWarpColumns;
  }

  // Finds those of a work tile.
  __device__ __forceinline__ void locate(const Arguments& params, int first_row, int queries,
                                         int head) {
    const int lane = threadIdx.x % 32;
    const int group = params.group;
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
      const int column = first_column() + t * 8 + lane / 4;
      // What is no row may be anything: a copy of the first.
      const int query = params.by.group.divide(column);
      const int row = query < queries ? query : 0;
      const int of_group = query < queries ? column - query * group : 0;
      located_[t] = static_cast<const Type*>(params.q.data) + lane % 4 * kQueryPairStride +
                    (first_row + row) * params.q.stride +
                    (head * group + of_group) * params.q.head_stride;
    }
  }

  // Begins to load them.
  __device__ __forceinline__ void fetch() {
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          fetched_[s][t][i] =
              *reinterpret_cast<const uint32_t*>(located_[t] + s * 16 + i * kNextPair);
        }
      }
    }
  }

  // Those that were fetched from now on. `key_scale` is that of all keys.
  __device__ __forceinline__ void take(const Arguments& params, float key_scale) {
    const float scale = params.softcap > 0 ? params.scale / params.softcap : params.scale * kLog2E;
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        q_[s][t][0] = fetched_[s][t][0];
        q_[s][t][1] = fetched_[s][t][1];
      }
      factor_[t][0] = factor_[t][1] = scale * key_scale;
      if constexpr (!std::is_same_v<Operand, Type>) {
        convert(t);
      }
    }
  }

  // Of a step of the head dim and a tile of columns.
  __device__ __forceinline__ const uint32_t (&words(int s, int t) const)[2] { return q_[s][t]; }
  // Of a column's scores.
  __device__ __forceinline__ float factor(int t, int e) const { return factor_[t][e]; }

 private:
  // Where a lane's two pairs of a step begin: see dequant.cuh.
  static constexpr int kQueryPairStride = kQuantized ? 4 : 2, kNextPair = kQuantized ? 2 : 8;

  // BF16 queries as FP16: each row brought near 1, which its scores make up for. What then is below
  // FP16's range adds less to a score than the rounding of the sum.
  __device__ __forceinline__ void convert(int t) {
    const auto low = [](uint32_t pair) { return __uint_as_float(pair << 16); };
    const auto high = [](uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); };
    float magnitude = 0;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        magnitude = fmaxf(magnitude, fmaxf(fabsf(low(q_[s][t][i])), fabsf(high(q_[s][t][i]))));
      }
    }
    magnitude = fmaxf(magnitude, __shfl_xor_sync(0xffffffff, magnitude, 1));
    magnitude = fmaxf(magnitude, __shfl_xor_sync(0xffffffff, magnitude, 2));
    const float exponent = exponent_of(magnitude);
    const float inverse = 1.0f / exponent;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        q_[s][t][i] = pack_pair<Operand>(low(q_[s][t][i]) * inverse, high(q_[s][t][i]) * inverse);
      }
    }
    // From the lanes of a column of Q to those of the column of S.
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = threadIdx.x % 4 * 2 + e;
      factor_[t][e] *= __shfl_sync(0xffffffff, exponent, column * 4);
    }
  }

  const Type* located_[kColumnTiles];
  uint32_t q_[kSteps][kColumnTiles][2], fetched_[kSteps][kColumnTiles][2];
  float factor_[kColumnTiles][2];
};

}  // namespace ostinato::decode
