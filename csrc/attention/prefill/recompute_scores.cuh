// Recomputes the scores of a warp's rows if weights have overflowed: rare, with warp-wide MMAs.
#pragma once

#include "kv_address.cuh"
#include "softmax.cuh"

namespace ostinato::prefill {

// Scores of the thread's row `kHalf` in a tile without masked keys.
template <int kHalf>
struct RecomputedScores {
  static constexpr int kRow = kHalf;

  const Arguments& args;
  const WorkTile& work_tile;
  int n;
  const Type* q;  // null if the row is not a query

  __device__ __forceinline__ bool is_query() const { return q != nullptr; }

  // The thread's two scores of 8 keys.
  __device__ __forceinline__ float2 scores(int group) const {
    const int lane = threadIdx.x % 32;
    const KvAddress kv_address(args, work_tile, work_tile.tile(n) * kKeys + group * 8 + lane / 4);
    const Type* const k = kv_address.key(args.params, work_tile) + lane % 4 * 2;
    float sums[4] = {};
#pragma unroll 1
    for (int step = 0; step < kDimSteps; ++step) {
      uint32_t rows[4] = {};
      uint32_t columns[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows[kHalf + 2 * half] = q == nullptr ? 0 : load_word(q + lane % 4 * 2, step, half);
        columns[half] = load_word(k, step, half);
      }
      multiply_by_warp<Type>(sums, rows, columns);
    }
    return make_float2(sums[2 * kHalf], sums[2 * kHalf + 1]);
  }

 private:
  __device__ __forceinline__ static uint32_t load_word(const Type* from, int step, int half) {
    return *reinterpret_cast<const uint32_t*>(from + step * 16 + half * 8);
  }
};

}  // namespace ostinato::prefill
