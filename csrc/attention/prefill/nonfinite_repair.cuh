// Non-finite repair: recomputes output rows that masked non-finite values have turned into NaN.
//
// The weight of a masked key is 0, but 0 * NaN and 0 * infinity are NaN. Values masked for all
// queries of a work tile are cleared in shared memory. Tiles with values masked for some queries
// are processed first; after them, rows that have become NaN are recomputed without tensor cores
// from their visible keys alone. A row with a visible NaN stays NaN. This is slow, and finite
// values never cause it.
#pragma once

#include "kv_address.cuh"
#include "score_fragment.cuh"

namespace ostinato::prefill {

// Index of a thread's output element in its row `half`.
__device__ __forceinline__ constexpr int output_index(int half, int group, int i) {
  return group * 4 + half * 2 + i;
}

__device__ __forceinline__ float2 load_pair(const Type* from) {
  return make_float2(static_cast<float>(from[0]), static_cast<float>(from[1]));
}

// Computes q·k: each thread sums every fourth pair of the head dim, and its quad adds the results.
__device__ __forceinline__ float score_of(const Type* q, const Type* k) {
  float sum = 0;
#pragma unroll 1
  for (int column = first_column(); column < kDim; column += 8) {
    const float2 a = load_pair(q + column), b = load_pair(k + column);
    sum = fmaf(a.x, b.x, fmaf(a.y, b.y, sum));
  }
  sum += __shfl_xor_sync(0xffffffff, sum, 1);
  return sum + __shfl_xor_sync(0xffffffff, sum, 2);
}

// Recomputes a row over the keys of the first `tiles` tiles. Called by a warp: lanes whose row is
// not `nonfinite` only take part in the shuffles.
template <int kHalf, class Softmax>
__device__ __forceinline__ void recompute_row(const Arguments& args, const WorkTile& work_tile,
                                              const Softmax& softmax, const VisibleKeys& visible,
                                              int tiles, const Type* q, bool nonfinite,
                                              float (&outputs)[kOutputs]) {
  if (nonfinite) {
#pragma unroll
    for (int group = 0; group < kOutputs / 4; ++group) {
      outputs[output_index(kHalf, group, 0)] = 0;
      outputs[output_index(kHalf, group, 1)] = 0;
    }
  }
#pragma unroll 1
  for (int n = 0; n < tiles * kKeys; ++n) {
    const int key = work_tile.tile(n / kKeys) * kKeys + n % kKeys;
    if (key < work_tile.visible_begin || key >= work_tile.visible_end) {
      continue;
    }
    const KvAddress kv_address(args, work_tile, key);
    const Type* const k = kv_address.key(args.params, work_tile);
    const Type* const v = kv_address.value(args.params, work_tile);
    // Rounded to the type of the values, as in the MMA.
    const float weight = static_cast<float>(Type(softmax.weight(kHalf, score_of(q, k))));
    if (nonfinite && visible.contains(kHalf, key)) {
#pragma unroll
      for (int group = 0; group < kOutputs / 4; ++group) {
        const float2 pair = load_pair(v + first_column() + group * 8);
        float& low = outputs[output_index(kHalf, group, 0)];
        float& high = outputs[output_index(kHalf, group, 1)];
        low = fmaf(weight, pair.x, low);
        high = fmaf(weight, pair.y, high);
      }
    }
  }
}

// Whether some output of this thread is NaN or infinite.
__device__ __forceinline__ bool is_nonfinite(const float (&outputs)[kOutputs]) {
  float zero[4] = {};
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) {
    zero[i % 4] = fmaf(outputs[i], 0.0f, zero[i % 4]);
  }
  return zero[0] + zero[1] + zero[2] + zero[3] != 0;  // NaN
}

// The same for one row.
template <int kHalf>
__device__ __forceinline__ bool is_row_nonfinite(const float (&outputs)[kOutputs]) {
  float zero = 0;
#pragma unroll
  for (int group = 0; group < kOutputs / 4; ++group) {
    zero = fmaf(outputs[output_index(kHalf, group, 0)], 0.0f, zero);
    zero = fmaf(outputs[output_index(kHalf, group, 1)], 0.0f, zero);
  }
  return zero != 0;
}

// Repairs one of the thread's two rows. Called by a warp. `q`: the row's query, or null if the row
// is not a query.
template <int kHalf, class Softmax>
__device__ __forceinline__ void repair_row(const Arguments& args, const WorkTile& work_tile,
                                           const Softmax& softmax, const VisibleKeys& visible,
                                           int tiles, const Type* q, float (&outputs)[kOutputs]) {
  const int quad = threadIdx.x % 32 / 4 * 4;
  const uint32_t found =
      __ballot_sync(0xffffffff, q != nullptr && is_row_nonfinite<kHalf>(outputs));
  if (found == 0) {
    return;
  }
  const bool nonfinite = (found >> quad & 0xf) != 0;
  const Params& p = args.params;
  // Lanes without a query read another query, to take part in the shuffles.
  const Type* const some = static_cast<const Type*>(p.q.data) + work_tile.first_row * p.q.stride +
                           work_tile.first_head * p.q.head_stride;
  recompute_row<kHalf>(args, work_tile, softmax, visible, tiles, q == nullptr ? some : q, nonfinite,
                       outputs);
}

}  // namespace ostinato::prefill
