// Processes logits before sampling: a mask of allowed tokens, additions to single tokens, and the
// repetition, frequency and presence penalties, in one launch.
//
// The semantics are those of runtime/ops/sampling/process_logits.py.
#include <cuda_runtime.h>

#include <cstdint>

#include "common/check.h"
#include "common/launch.cuh"
#include "params.h"

namespace ostinato {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kEach = 16;  // logits of a thread
constexpr uint32_t kSlice = kThreads * kEach;
constexpr int32_t kMostRows = 65535;  // of a grid's second dimension

// What is done to the tokens of a slice, by their place in it.
struct SliceStorage {
  int32_t counts[kSlice];
  float additions[kSlice];
};

// What one row asks for.
struct Row {
  int64_t slot;
  int64_t counter;
  float repetition;
  float frequency;
  float presence;
  int32_t edits;
  bool is_masked;

  __device__ Row(const ProcessLogitsParams& p, int32_t row)
      : slot(p.slots[row]),
        counter(p.counters[row]),
        repetition(p.repetition_penalty[row]),
        frequency(p.frequency[slot]),
        presence(p.presence[slot]),
        edits(min(p.edits[slot], p.most_edits)),
        is_masked(p.masked[slot] != 0) {}

  __device__ bool counts() const { return frequency != 0.0f || presence != 0.0f; }
};

// Counts the generated tokens that lie in the slice. The last one comes from the step's input: only
// the first CTA of a row writes it to the history, and no CTA reads it there.
__device__ void count(const ProcessLogitsParams& p, const Row& row, int64_t last, uint32_t first,
                      int32_t (&counts)[kSlice]) {
  int32_t* const history = p.history + row.slot * p.history_size;
  const int64_t generated = min(row.counter, static_cast<int64_t>(p.history_size));
  for (int64_t i = threadIdx.x; i < generated; i += kThreads) {
    const uint32_t token = static_cast<uint32_t>(i == generated - 1 ? last : history[i]);
    if (token - first < kSlice) {
      atomicAdd(&counts[token - first], 1);
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0 && generated > 0) {
    history[generated - 1] = static_cast<int32_t>(last);
  }
}

// Adds up what is added to tokens of the slice: at most two numbers for a token, so that the order
// does not matter.
__device__ void edit(const ProcessLogitsParams& p, const Row& row, uint32_t first,
                     float (&additions)[kSlice]) {
  const int64_t begin = row.slot * p.most_edits;
  for (int64_t i = begin + threadIdx.x; i < begin + row.edits; i += kThreads) {
    const uint32_t place = static_cast<uint32_t>(p.edit_ids[i]) - first;
    if (place < kSlice && row.counter < p.edit_ends[i]) {
      atomicAdd(&additions[place], p.edit_values[i]);
    }
  }
}

// Every operation is rounded, as in torch's operators. NaN stays: a row that has it has no token.
__device__ __forceinline__ float added(float logit, float addition) {
  if (addition == 0.0f || isnan(logit)) {
    return logit;
  }
  return addition == -INFINITY ? addition : __fadd_rn(logit, addition);
}

__device__ __forceinline__ float penalized(float logit, float penalty) {
  return logit > 0.0f ? __fdiv_rn(logit, penalty) : __fmul_rn(logit, penalty);
}

__device__ __forceinline__ float counted(float logit, const Row& row, int32_t count) {
  const float less = __fsub_rn(logit, __fmul_rn(row.frequency, static_cast<float>(count)));
  return __fsub_rn(less, row.presence);
}

// A CTA has a slice of every gridDim.y-th row.
__global__ void __launch_bounds__(kThreads)
    process_logits(const __grid_constant__ ProcessLogitsParams p) {
  __shared__ SliceStorage shared;
  wait_for_predecessor();
  let_successor_start();
  const uint32_t vocabulary = static_cast<uint32_t>(p.vocabulary);
  const uint32_t first = blockIdx.x * kSlice;
  for (int32_t index = static_cast<int32_t>(blockIdx.y); index < p.rows;
       index += static_cast<int32_t>(gridDim.y)) {
    const Row row(p, index);
    const float* const logits = p.logits + index * p.logits_stride + first;
    float* const out = p.out + index * p.out_stride + first;
    float values[kEach];
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      const uint32_t place = i * kThreads + threadIdx.x;
      values[i] = first + place < vocabulary ? logits[place] : 0.0f;
    }
    if (row.is_masked) {
      const uint32_t* const mask = p.mask + row.slot * p.mask_words + first / 32;
#pragma unroll
      for (uint32_t i = 0; i < kEach; ++i) {
        const uint32_t place = i * kThreads + threadIdx.x;
        const bool inside = first + place < vocabulary;
        const uint32_t word = inside ? mask[place / 32] : ~0u;
        if ((word >> place % 32 & 1) == 0 && !isnan(values[i])) {
          values[i] = -INFINITY;
        }
      }
    }
    const bool is_sparse = row.counts() || row.edits > 0;  // the same in all threads
    if (is_sparse) {
      for (uint32_t place = threadIdx.x; place < kSlice; place += kThreads) {
        shared.counts[place] = 0;
        shared.additions[place] = 0.0f;
      }
      __syncthreads();
      edit(p, row, first, shared.additions);
      if (row.counts()) {
        count(p, row, p.tokens[index], first, shared.counts);
      }
      __syncthreads();
#pragma unroll
      for (uint32_t i = 0; i < kEach; ++i) {
        values[i] = added(values[i], shared.additions[i * kThreads + threadIdx.x]);
      }
    }
    if (row.repetition != 1.0f) {
      const uint8_t* const seen = p.seen + row.slot * p.seen_stride + first;
#pragma unroll
      for (uint32_t i = 0; i < kEach; ++i) {
        const uint32_t place = i * kThreads + threadIdx.x;
        if (first + place < vocabulary && seen[place] != 0) {
          values[i] = penalized(values[i], row.repetition);
        }
      }
    }
    if (is_sparse) {
#pragma unroll
      for (uint32_t i = 0; i < kEach; ++i) {
        const int32_t times = shared.counts[i * kThreads + threadIdx.x];
        values[i] = times == 0 ? values[i] : counted(values[i], row, times);
      }
      __syncthreads();  // the next row clears the counts
    }
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      const uint32_t place = i * kThreads + threadIdx.x;
      if (first + place < vocabulary) {
        out[place] = values[i];
      }
    }
  }
}

bool is_valid(const ProcessLogitsParams& p) {
  return p.logits != nullptr && p.slots != nullptr && p.counters != nullptr &&
         p.tokens != nullptr && p.repetition_penalty != nullptr && p.seen != nullptr &&
         p.frequency != nullptr && p.presence != nullptr && p.history != nullptr &&
         p.edits != nullptr && p.edit_ids != nullptr && p.edit_values != nullptr &&
         p.edit_ends != nullptr && p.masked != nullptr && p.mask != nullptr && p.out != nullptr &&
         p.history_size > 0 && p.most_edits > 0 && p.mask_words == (p.vocabulary - 1) / 32 + 1;
}

}  // namespace
}  // namespace ostinato

OSTINATO_EXPORT int ostinato_prepare(void) { return cudaSuccess; }

OSTINATO_LAUNCH(ostinato::ProcessLogitsParams) {
  using namespace ostinato;
  const ProcessLogitsParams& p = *params;
  if (p.rows == 0) {  // tensors without elements have no address
    return cudaSuccess;
  }
  if (p.rows < 0 || p.vocabulary < 1 || !is_valid(p)) {
    return cudaErrorInvalidValue;
  }
  LaunchConfig config;
  config.block = dim3(kThreads);
  config.grid = dim3((static_cast<uint32_t>(p.vocabulary) - 1) / kSlice + 1,
                     static_cast<uint32_t>(p.rows < kMostRows ? p.rows : kMostRows));
  config.pdl = p.pdl != 0;
  return launch(process_logits, config, static_cast<cudaStream_t>(stream), p);
}
