// Rows of the output: combines accumulators with different maxima, normalises them, and writes rows
// of out and LSE.
#pragma once

#include "kv_loader.cuh"
#include "mainloop.cuh"

namespace ostinato::decode {

inline constexpr float kLn2 = 0.6931471805599453f;

// The rows of q and out that belong to a work tile.
struct Rows {
  int first, head, group, count;

  Rows() = default;
  __device__ Rows(const Arguments& params, const Seqlens& seqlens, int sequence, int head)
      : first(seqlens.first_row(sequence)),
        head(head),
        group(params.group),
        count(seqlens.queries(sequence) * group) {}
};

// Softmax state of a row: outputs and sum are relative to 2^max.
struct Weight {
  float max, sum;
};

// Softmax states of two adjacent columns.
struct PairWeights {
  Weight columns[2];

  static __device__ __forceinline__ PairWeights of(const float4& raw) {
    return {{{raw.x, raw.y}, {raw.z, raw.w}}};
  }
  // Adds the sums of another state, times factors.
  __device__ __forceinline__ void add(const PairWeights& other, const float (&factors)[2]) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      columns[e].sum = fmaf(other.columns[e].sum, factors[e], columns[e].sum);
    }
  }
  __device__ __forceinline__ float4 raw() const {
    return make_float4(columns[0].max, columns[0].sum, columns[1].max, columns[1].sum);
  }
};

// Two columns by two elements of the head dim, in the order of an MMA accumulator: both columns of
// the first element, then both of the second.
struct PairOutputs {
  float values[4] = {};

  __device__ __forceinline__ void add(const float4& other, float first, float second) {
    values[0] = fmaf(other.x, first, values[0]);
    values[1] = fmaf(other.y, second, values[1]);
    values[2] = fmaf(other.z, first, values[2]);
    values[3] = fmaf(other.w, second, values[3]);
  }
};

// Rescales results with different maxima to their common maximum.
struct Combiner {
  float highest[2] = {kNothing, kNothing};

  __device__ __forceinline__ void include(const PairWeights& weights) {
    highest[0] = fmaxf(highest[0], weights.columns[0].max);
    highest[1] = fmaxf(highest[1], weights.columns[1].max);
  }
  __device__ __forceinline__ float factor(const PairWeights& weights, int e) const {
    return power_of_2(weights.columns[e].max - highest[e]);
  }
};

// The scale shared by all keys or values of a work tile. Per-token scales are applied earlier.
__device__ __forceinline__ float kv_scale(const Arguments& params, const Slots& scale, int head) {
  const float* const scales = static_cast<const float*>(scale.data);
  const int64_t offset = head * scale.head_stride;
  return !kQuantized || scales == nullptr || has_token_scales(params) ? 1.0f : scales[offset];
}

// Destination of a row, and what its normalisation needs besides the softmax state.
struct RowTarget {
  int64_t token;
  int head;
  Type* out;
  float sink;   // as a power of 2; set if there are sinks
  float scale;  // of the values

  RowTarget() = default;
  __device__ __forceinline__ RowTarget(const Arguments& params, const Rows& rows, int row) {
    const int query = params.by.group.divide(row);
    head = rows.head * rows.group + row - query * rows.group;
    token = rows.first + query;
    out = static_cast<Type*>(params.out.data) + token * params.out.stride +
          head * params.out.head_stride;
    if (params.sinks != nullptr) {
      sink = params.sinks[head] * kLog2E;
    }
    scale = kv_scale(params, params.v_scale, rows.head);
  }
};

// Normalisation of a row: outputs are multiplied by `factor`.
struct FinalRow {
  const RowTarget& target;
  float factor;
  Weight weight;  // including the sink

  __device__ __forceinline__ FinalRow(const Arguments& params, const RowTarget& target,
                                      const Weight& raw)
      : target(target), factor(1), weight(raw) {
    if (params.sinks != nullptr && weight.sum != 0) {
      const float top = fmaxf(weight.max, target.sink);
      factor = power_of_2(weight.max - top);
      weight = {top, weight.sum * factor + power_of_2(target.sink - top)};
    }
    factor = weight.sum == 0 ? 0.0f : __fdividef(factor, weight.sum);
    if constexpr (kQuantized) {
      factor *= target.scale;
    }
  }

  __device__ __forceinline__ void write_lse(const Arguments& params) const {
    if (params.lse.data != nullptr) {
      static_cast<float*>(params.lse.data)[target.token * params.lse.stride +
                                           target.head * params.lse.head_stride] =
          weight.sum == 0 ? -INFINITY : (weight.max + log2f(weight.sum)) * kLn2;
    }
  }
};

// Writes one of the 8 pairs of elements of a step of the head dim, for one column.
__device__ __forceinline__ void write_out(const FinalRow& row, int step, int pair_index,
                                          float first, float second) {
  Type* const out = row.target.out + step * 16;
  const uint32_t pair = pack_pair<Type>(first * row.factor, second * row.factor);
  if constexpr (kQuantized) {
    *reinterpret_cast<uint32_t*>(out + Mainloop::dim_of(pair_index, 0)) = pair;
  } else {
    uint16_t* const words = reinterpret_cast<uint16_t*>(out);
    words[Mainloop::dim_of(pair_index, 0)] = static_cast<uint16_t>(pair);
    words[Mainloop::dim_of(pair_index, 1)] = static_cast<uint16_t>(pair >> 16);
  }
}

// Number of this warp's pairs of columns that have rows.
__device__ __forceinline__ int count_pairs(const Rows& rows) {
  const int columns = min(rows.count - Queries::first_column(), kWarpColumns);
  return columns > 0 ? ceil_div(columns, 2) : 0;
}

// Destinations of the rows of one of this warp's pairs of columns.
struct PairRows {
  int rows;  // 1 or 2
  RowTarget targets[2];

  PairRows() = default;
  __device__ __forceinline__ PairRows(const Arguments& params, const Rows& all, int pair) {
    const int column = Queries::first_column() + pair * 2;
    rows = min(all.count - column, 2);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      targets[e] = RowTarget(params, all, min(column + e, all.count - 1));
    }
  }
};

// Writes element `vector` of what this CTA owns of a pair of columns; one lane writes the LSE.
__device__ __forceinline__ void write_pair(const Arguments& params, const PairRows& pair,
                                           int vector, const PairOutputs& sum,
                                           const PairWeights& weights) {
  const int owned = rank_in_cluster() * kRankVectors + vector;
  const int step = owner_of(threadIdx.x / 32) * kOwnedSteps + owned / 8, pair_index = owned % 8;
  if (kSteps != kOwners * kOwnedSteps && step >= kSteps) {
    return;
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (e < pair.rows) {
      const FinalRow row(params, pair.targets[e], weights.columns[e]);
      write_out(row, step, pair_index, sum.values[e], sum.values[e + 2]);
      if (step == 0 && pair_index == 0) {
        row.write_lse(params);
      }
    }
  }
}

}  // namespace ostinato::decode
