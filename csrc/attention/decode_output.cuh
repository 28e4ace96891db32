// From accumulators to the output: the teams of a CTA add up theirs, and where CTAs share a
// segment, the last one to arrive adds up the parts, in the order of the CTAs.
#pragma once

#include "common/debug.cuh"
#include "decode_attend.cuh"
#include "decode_loader.cuh"

namespace ostinato::decode {

inline constexpr float kLn2 = 0.6931471805599453f;

// The rows of q and out that belong to a segment.
struct Rows {
  int first, head, group, count;

  __device__ Rows(const Arguments& params, const Lengths& lengths, int sequence, int head)
      : first(lengths.first_row(sequence)),
        head(head),
        group(params.group),
        count(lengths.queries(sequence) * group) {}
};

// Of all keys or values that a segment reads; what tokens have of their own is applied before.
__device__ __forceinline__ float segment_scale(const Arguments& params, const float* scale,
                                               int64_t offset) {
  return !kQuantized || scale == nullptr || has_token_scales(params) ? 1.0f : scale[offset];
}

// Four elements of the head dim, from `dim` on, of what a row has come to: `value` / `weight.y`,
// both relative to 2^weight.x.
__device__ __forceinline__ void write_out(const Arguments& params, const Rows& rows, int row,
                                          int dim, float4 value, float2 weight) {
  const int query = params.by.group.divide(row);
  const int head = rows.head * rows.group + row - query * rows.group;
  const int64_t token = rows.first + query;
  float top = weight.x, sum = weight.y;
  if (params.sinks != nullptr && top > -INFINITY) {
    const float sink = params.sinks[head] * kLog2E;
    const float raised = fmaxf(top, sink);
    const float fade = power_of_2(top - raised);
    sum = sum * fade + power_of_2(sink - raised);
    top = raised;
    value = make_float4(value.x * fade, value.y * fade, value.z * fade, value.w * fade);
  }
  float inverse = top == -INFINITY ? 0.0f : 1.0f / sum;
  if constexpr (kQuantized) {
    inverse *= segment_scale(params, params.v_scale, rows.head * params.v_scale_head_stride);
  }
  Type* const out = static_cast<Type*>(params.out) + token * params.out_token_stride +
                    head * params.out_head_stride + dim;
  *reinterpret_cast<uint2*>(out) =
      make_uint2(pack_pair<Type>(value.x * inverse, value.y * inverse),
                 pack_pair<Type>(value.z * inverse, value.w * inverse));
  if (params.lse != nullptr && dim == 0) {
    params.lse[token * params.lse_token_stride + head * params.lse_head_stride] =
        top == -INFINITY ? -INFINITY : (top + log2f(sum)) * kLn2;
  }
}

// A CTA has two places for parts: one of a segment that it ends or passes, one of a segment that it
// begins.
__device__ __forceinline__ float* part_of(const Arguments& params, int cta, bool begins) {
  uint8_t* const parts = static_cast<uint8_t*>(params.workspace) + counter_bytes(gridDim.x);
  return reinterpret_cast<float*>(parts) +
         (2 * static_cast<int64_t>(cta) + begins) * partial_floats(max_rows(params));
}

// The weight of what is relative to 2^top when all is relative to 2^highest.
__device__ __forceinline__ float weight_of(float top, float highest) {
  return power_of_2(top - (highest == -INFINITY ? 0.0f : highest));
}

// Adds up the teams' outputs; all threads of the CTA. `part` is null if the segment is whole.
__device__ __forceinline__ void store_piece(SharedStorage& shared, const Arguments& params,
                                            Attention& attention, const Rows& rows, float* part) {
  constexpr int kPassSteps = kPassDim / 16;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = team_of(warp);
  attention.end();
#pragma unroll
  for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = Attention::first_column() + t * 8 + lane % 4 * 2 + e;
      if (lane < 4) {
        shared.weights[team][column] = make_float2(attention.max(t, e), attention.sum(t, e));
      }
    }
  }
#pragma unroll 1
  for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (s / kPassSteps == pass) {
#pragma unroll
        for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int column = Attention::first_column() + t * 8 + lane % 4 * 2 + i % 2;
            shared.sums[team][column][s % kPassSteps * 16 + Attention::dim_of(i)] =
                attention.out(s, t, i);
          }
        }
      }
    }
    OSTINATO_DELAY(decode_sums_store, warp == 1);
    __syncthreads();
    OSTINATO_DELAY(decode_sums_load, warp == 2);
    constexpr int kVectors = kPassDim / 4;
    for (int i = threadIdx.x; i < rows.count * kVectors; i += kThreads) {
      const int row = i / kVectors, dim = i % kVectors * 4;
      float highest = shared.weights[0][row].x;
#pragma unroll
      for (int w = 1; w < kTeams; ++w) {
        highest = fmaxf(highest, shared.weights[w][row].x);
      }
      float4 value = make_float4(0, 0, 0, 0);
      float2 weight = make_float2(highest, 0);
#pragma unroll
      for (int w = 0; w < kTeams; ++w) {
        const float factor = weight_of(shared.weights[w][row].x, highest);
        const float4 sums = *reinterpret_cast<const float4*>(&shared.sums[w][row][dim]);
        value.x = fmaf(sums.x, factor, value.x);
        value.y = fmaf(sums.y, factor, value.y);
        value.z = fmaf(sums.z, factor, value.z);
        value.w = fmaf(sums.w, factor, value.w);
        weight.y = fmaf(shared.weights[w][row].y, factor, weight.y);
      }
      if (part == nullptr) {
        write_out(params, rows, row, pass * kPassDim + dim, value, weight);
      } else {
        *reinterpret_cast<float4*>(part + row * kDim + pass * kPassDim + dim) = value;
        if (pass == 0 && dim == 0) {
          *reinterpret_cast<float2*>(part + max_rows(params) * kDim + row * 2) = weight;
        }
      }
    }
    OSTINATO_DELAY(decode_part_store, warp == 3);
    __syncthreads();  // before the next outputs overwrite these, or the CTA arrives with its parts
  }
}

// A segment that this CTA shares with others, and whether this one begins it.
struct SharedSegment {
  int sequence, head;
  int first_cta, ctas = 0;
};

// Adds up the parts of a segment; all threads of the CTA that arrived last.
__device__ __forceinline__ void merge_parts(const Arguments& params, const Rows& rows,
                                            const SharedSegment& segment) {
  constexpr int kVectors = kDim / 4;
  constexpr int kBatch = 16;  // parts read at a time
  const int weights = max_rows(params) * kDim;
  for (int i = threadIdx.x; i < rows.count * kVectors; i += kThreads) {
    const int row = i / kVectors, dim = i % kVectors * 4;
    float4 value = make_float4(0, 0, 0, 0);
    float2 weight = make_float2(-INFINITY, 0);
    for (int first = 0; first < segment.ctas; first += kBatch) {
      float4 values[kBatch];
      float2 others[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        values[j] = make_float4(0, 0, 0, 0);
        others[j] = make_float2(-INFINITY, 0);
        if (first + j < segment.ctas) {
          const float* const part = part_of(params, segment.first_cta + first + j, first + j == 0);
          // Past the L1 cache, which other SMs' stores do not reach.
          values[j] = __ldcg(reinterpret_cast<const float4*>(part + row * kDim + dim));
          others[j] = __ldcg(reinterpret_cast<const float2*>(part + weights + row * 2));
        }
      }
      float highest = weight.x;
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        highest = fmaxf(highest, others[j].x);
      }
      const float fade = weight_of(weight.x, highest);
      value = make_float4(value.x * fade, value.y * fade, value.z * fade, value.w * fade);
      weight = make_float2(highest, weight.y * fade);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const float factor = weight_of(others[j].x, highest);
        value.x = fmaf(values[j].x, factor, value.x);
        value.y = fmaf(values[j].y, factor, value.y);
        value.z = fmaf(values[j].z, factor, value.z);
        value.w = fmaf(values[j].w, factor, value.w);
        weight.y = fmaf(others[j].y, factor, weight.y);
      }
    }
    write_out(params, rows, row, dim, value, weight);
  }
}

// Counts this CTA among the segment's, and returns whether it is the last. The count goes back to
// zero by itself.
__device__ __forceinline__ bool arrive_last(const Arguments& params, const SharedSegment& segment) {
  uint32_t* const counter = static_cast<uint32_t*>(params.workspace) + segment.first_cta;
  const uint32_t last = segment.ctas - 1;
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(last)
               : "memory");
  return before == last;
}

// At the CTA's end, after the barrier at the end of store_piece(): merges the segments that it is
// the last to leave.
__device__ __forceinline__ void merge_segments(SharedStorage& shared, const Arguments& params,
                                               const Lengths& lengths,
                                               const SharedSegment (&segments)[2]) {
  if (segments[0].ctas == 0 && segments[1].ctas == 0) {
    return;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (threadIdx.x == i && segments[i].ctas > 0) {
      __threadfence();
      shared.last[i] = arrive_last(params, segments[i]);
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const SharedSegment segment = i == 0 ? segments[0] : segments[1];
    if (segment.ctas > 0 && shared.last[i]) {
      const Rows rows(params, lengths, segment.sequence, segment.head);
      merge_parts(params, rows, segment);
    }
  }
}

// The outputs of sequences without a token to see, by all CTAs.
__device__ __forceinline__ void write_empty(const Arguments& params, const Lengths& lengths) {
  constexpr int kVectors = kDim / 4;
  for (int b = blockIdx.x; b < params.batch; b += gridDim.x) {
    if (lengths.length(b) > 0) {
      continue;
    }
    for (int head = 0; head < params.heads_kv; ++head) {
      const Rows rows(params, lengths, b, head);
      for (int i = threadIdx.x; i < rows.count * kVectors; i += kThreads) {
        write_out(params, rows, i / kVectors, i % kVectors * 4, make_float4(0, 0, 0, 0),
                  make_float2(-INFINITY, 0));
      }
    }
  }
}

}  // namespace ostinato::decode
