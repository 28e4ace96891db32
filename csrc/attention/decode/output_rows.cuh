// Rows of the output: accumulators relative to a maximum, how they become final rows, and where
// they are written.
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

// Of a row: outputs and sums are relative to 2^max.
struct Weight {
  float max, sum;
};

// Those of two neighbouring columns.
struct PairWeights {
  Weight columns[2];

  static __device__ __forceinline__ PairWeights of(const float4& raw) {
    return {{{raw.x, raw.y}, {raw.z, raw.w}}};
  }
  // The sums of results of other maxima, times factors.
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

// Two columns by two elements of the head dim, as an MMA accumulates them: those of the first
// element, then those of the second.
struct PairOutputs {
  float values[4] = {};

  __device__ __forceinline__ void add(const float4& other, float first, float second) {
    values[0] = fmaf(other.x, first, values[0]);
    values[1] = fmaf(other.y, second, values[1]);
    values[2] = fmaf(other.z, first, values[2]);
    values[3] = fmaf(other.w, second, values[3]);
  }
};

// Adds up results that are relative to different maxima.
struct Combiner {
  float highest[2] = {kNothing, kNothing};

  __device__ __forceinline__ void see(const PairWeights& weights) {
    highest[0] = fmaxf(highest[0], weights.columns[0].max);
    highest[1] = fmaxf(highest[1], weights.columns[1].max);
  }
  __device__ __forceinline__ float factor(const PairWeights& weights, int e) const {
    return power_of_2(weights.columns[e].max - highest[e]);
  }
};

// Of all keys or values that a work tile reads; what tokens have of their own is applied before.
__device__ __forceinline__ float kv_scale(const Arguments& params, const Slots& scale, int head) {
  const float* const scales = static_cast<const float*>(scale.data);
  const int64_t offset = head * scale.head_stride;
  return !kQuantized || scales == nullptr || has_token_scales(params) ? 1.0f : scales[offset];
}

// Where a row's output goes, and what is known of it before its weights are.
struct RowTarget {
  int64_t token;
  int head;
  Type* out;
  float sink;   // as a power of 2, where there are sinks
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

// What a row becomes: its outputs times `factor`, and its LSE.
struct FinalRow {
  const RowTarget& target;
  float factor;
  Weight weight;  // with the sink

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

// Writes what is at `part` (0 to 7) of a step of the head dim, of one of two columns.
__device__ __forceinline__ void write_out(const FinalRow& row, int step, int part, float first,
                                          float second) {
  Type* const out = row.target.out + step * 16;
  const uint32_t pair = pack_pair<Type>(first * row.factor, second * row.factor);
  if constexpr (kQuantized) {
    *reinterpret_cast<uint32_t*>(out + Mainloop::dim_of(part, 0)) = pair;
  } else {
    uint16_t* const words = reinterpret_cast<uint16_t*>(out);
    words[Mainloop::dim_of(part, 0)] = static_cast<uint16_t>(pair);
    words[Mainloop::dim_of(part, 1)] = static_cast<uint16_t>(pair >> 16);
  }
}

// How many of this warp's pairs of columns have rows.
__device__ __forceinline__ int count_pairs(const Rows& rows) {
  const int columns = min(rows.count - Queries::first_column(), kWarpColumns);
  return columns > 0 ? ceil_div(columns, 2) : 0;
}

// Of the rows of one of this warp's pairs of columns.
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

// Writes what is at `vector` of what this CTA owns of a pair, and once the LSE.
__device__ __forceinline__ void write_pair(const Arguments& params, const PairRows& pair,
                                           int vector, const PairOutputs& sum,
                                           const PairWeights& weights) {
  const int owned = rank_in_cluster() * kRankVectors + vector;
  const int step = owner_of(threadIdx.x / 32) * kOwnedSteps + owned / 8, part = owned % 8;
  if (kSteps != kOwners * kOwnedSteps && step >= kSteps) {
    return;
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (e < pair.rows) {
      const FinalRow row(params, pair.targets[e], weights.columns[e]);
      write_out(row, step, part, sum.values[e], sum.values[e + 2]);
      if (step == 0 && part == 0) {
        row.write_lse(params);
      }
    }
  }
}

}  // namespace ostinato::decode
