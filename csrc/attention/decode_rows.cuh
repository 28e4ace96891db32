// The rows of the output: results relative to a maximum, what becomes of them, and where parts of
// them lie in the workspace.
#pragma once

#include "decode_attend.cuh"
#include "decode_loader.cuh"

namespace ostinato::decode {

inline constexpr float kLn2 = 0.6931471805599453f;

// The rows of q and out that belong to a segment.
struct Rows {
  int first, head, group, count;

  Rows() = default;
  __device__ Rows(const Arguments& params, const Lengths& lengths, int sequence, int head)
      : first(lengths.first_row(sequence)),
        head(head),
        group(params.group),
        count(lengths.queries(sequence) * group) {}
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
struct Merger {
  float highest[2] = {kNothing, kNothing};

  __device__ __forceinline__ void see(const PairWeights& weights) {
    highest[0] = fmaxf(highest[0], weights.columns[0].max);
    highest[1] = fmaxf(highest[1], weights.columns[1].max);
  }
  __device__ __forceinline__ float factor(const PairWeights& weights, int e) const {
    return power_of_2(weights.columns[e].max - highest[e]);
  }
};

// Of all keys or values that a segment reads; what tokens have of their own is applied before.
__device__ __forceinline__ float segment_scale(const Arguments& params, const Slots& scale,
                                               int head) {
  const float* const scales = static_cast<const float*>(scale.data);
  const int64_t offset = head * scale.head_stride;
  return !kQuantized || scales == nullptr || has_token_scales(params) ? 1.0f : scales[offset];
}

// What a row becomes: its outputs times `factor`, and its LSE.
struct FinalRow {
  int64_t token;
  int head;
  float factor;
  Weight weight;  // with the sink

  __device__ __forceinline__ FinalRow(const Arguments& params, const Rows& rows, int row,
                                      const Weight& raw)
      : weight(raw) {
    const int query = params.by.group.divide(row);
    head = rows.head * rows.group + row - query * rows.group;
    token = rows.first + query;
    factor = 1;
    if (params.sinks != nullptr && weight.sum != 0) {
      const float sink = params.sinks[head] * kLog2E;
      const float top = fmaxf(weight.max, sink);
      factor = power_of_2(weight.max - top);
      weight = {top, weight.sum * factor + power_of_2(sink - top)};
    }
    factor = weight.sum == 0 ? 0.0f : __fdividef(factor, weight.sum);
    if constexpr (kQuantized) {
      factor *= segment_scale(params, params.v_scale, rows.head);
    }
  }

  __device__ __forceinline__ Type* out(const Arguments& params) const {
    return static_cast<Type*>(params.out.data) + token * params.out.stride +
           head * params.out.head_stride;
  }
  __device__ __forceinline__ void write_lse(const Arguments& params) const {
    if (params.lse.data != nullptr) {
      static_cast<float*>(
          params.lse.data)[token * params.lse.stride + head * params.lse.head_stride] =
          weight.sum == 0 ? -INFINITY : (weight.max + log2f(weight.sum)) * kLn2;
    }
  }
};

// Writes what is at `part` (0 to 7) of a step of the head dim, of one of two columns.
__device__ __forceinline__ void write_out(const Arguments& params, const FinalRow& row, int step,
                                          int part, float first, float second) {
  Type* const out = row.out(params) + step * 16;
  const uint32_t pair = pack_pair<Type>(first * row.factor, second * row.factor);
  if constexpr (kQuantized) {
    *reinterpret_cast<uint32_t*>(out + Attention::dim_of(part, 0)) = pair;
  } else {
    uint16_t* const words = reinterpret_cast<uint16_t*>(out);
    words[Attention::dim_of(part, 0)] = static_cast<uint16_t>(pair);
    words[Attention::dim_of(part, 1)] = static_cast<uint16_t>(pair >> 16);
  }
}

}  // namespace ostinato::decode
