// Log-probabilities of one token a row, and of the row's best tokens, in one launch.
//
// The semantics are those of runtime/ops/sampling/token_logprobs.py. A CTA has a row, so that the
// order of a row's additions depends on nothing but the vocabulary.
//
// Nothing is sorted but a few candidates. Each thread's best token is known after one pass; the
// k-th best of these bounds the k best of the row from below. A second pass collects the tokens
// that reach the bound: about k of them, unless a few threads have most of the best. Then there is
// one pass for each of the k.
#include <cuda_runtime.h>

#include <cstdint>

#include "common/argmax_key.cuh"
#include "common/check.h"
#include "common/launch.cuh"
#include "params.h"

namespace ostinato {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr uint32_t kCandidates = kThreads;
constexpr int kEach = 8;  // logits of a thread in flight
constexpr ArgmaxKey kNoKey = ~ArgmaxKey{0};

struct SharedStorage {
  ArgmaxKey keys[kThreads];  // of threads, then of candidates
  ArgmaxKey of_warps[kWarps];
  double sums[kWarps];
  ArgmaxKey bound;
  uint32_t found;
};

// Calls visit(logit, id) for every logit of the row that is this thread's.
template <typename Visit>
__device__ __forceinline__ void for_each(const float* logits, uint32_t vocabulary, Visit&& visit) {
#pragma unroll 1
  for (uint32_t base = threadIdx.x; base < vocabulary; base += kThreads * kEach) {
    float values[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint32_t id = base + i * kThreads;
      values[i] = id < vocabulary ? logits[id] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint32_t id = base + i * kThreads;
      if (id < vocabulary) {
        visit(values[i], id);
      }
    }
  }
}

__device__ ArgmaxKey smallest_of_cta(ArgmaxKey key, SharedStorage& shared) {
  key = smallest_of_lanes<32>(key);
  __syncthreads();  // the last call's keys have been read
  if (threadIdx.x % 32 == 0) {
    shared.of_warps[threadIdx.x / 32] = key;
  }
  __syncthreads();
  return smallest_of_lanes<kWarps>(shared.of_warps[threadIdx.x % kWarps]);
}

__device__ double sum_of_cta(double value, SharedStorage& shared) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(~0u, value, distance);
  }
  if (threadIdx.x % 32 == 0) {
    shared.sums[threadIdx.x / 32] = value;
  }
  __syncthreads();
  double all = 0.0;
  for (int warp = 0; warp < kWarps; ++warp) {
    all += shared.sums[warp];
  }
  return all;
}

// How many of the first `count` keys come before this one.
__device__ uint32_t rank_of(ArgmaxKey key, const ArgmaxKey* keys, uint32_t count) {
  uint32_t rank = 0;
  for (uint32_t i = 0; i < count; ++i) {
    rank += keys[i] < key ? 1 : 0;
  }
  return rank;
}

// A row's log-probabilities, once its normaliser is known.
struct Output {
  float* logprobs;
  int32_t* ids;
  float best;
  float log_sum;

  __device__ float logprob(float logit) const { return (logit - best) - log_sum; }
  __device__ void set(uint32_t rank, ArgmaxKey key) const {
    logprobs[1 + rank] = logprob(logit_of(key));
    ids[rank] = static_cast<int32_t>(id_of(key));
  }
};

// Writes the `wanted` best tokens of a row without NaN.
__device__ void write_best(const float* logits, uint32_t vocabulary, uint32_t wanted,
                           ArgmaxKey mine, const Output& out, SharedStorage& shared) {
  shared.keys[threadIdx.x] = mine;
  if (threadIdx.x == 0) {
    shared.bound = kNoKey;
    shared.found = 0;
  }
  __syncthreads();
  if (mine != kNoKey && rank_of(mine, shared.keys, kThreads) == wanted - 1) {
    shared.bound = mine;
  }
  __syncthreads();
  const ArgmaxKey bound = shared.bound;
  for_each(logits, vocabulary, [&](float logit, uint32_t id) {
    const ArgmaxKey key = argmax_key_of(logit, id);
    if (key <= bound) {
      const uint32_t place = atomicAdd(&shared.found, 1u);
      if (place < kCandidates) {
        shared.keys[place] = key;
      }
    }
  });
  __syncthreads();
  const uint32_t found = shared.found;
  if (found <= kCandidates) {
    if (threadIdx.x < found) {
      const ArgmaxKey key = shared.keys[threadIdx.x];
      const uint32_t rank = rank_of(key, shared.keys, found);
      if (rank < wanted) {
        out.set(rank, key);
      }
    }
    return;
  }
  ArgmaxKey last = 0;  // no key of a number is 0
#pragma unroll 1
  for (uint32_t rank = 0; rank < wanted; ++rank) {
    ArgmaxKey next = kNoKey;
    for_each(logits, vocabulary, [&](float logit, uint32_t id) {
      const ArgmaxKey key = argmax_key_of(logit, id);
      next = key > last && key < next ? key : next;
    });
    last = smallest_of_cta(next, shared);
    if (threadIdx.x == 0) {
      out.set(rank, last);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    token_logprobs(const __grid_constant__ TokenLogprobsParams p) {
  __shared__ SharedStorage shared;
  wait_for_predecessor();
  let_successor_start();
  const int64_t row = blockIdx.x;
  const uint32_t vocabulary = static_cast<uint32_t>(p.vocabulary);
  const float* const logits = p.logits + row * p.logits_stride;
  Output out = {p.logprobs + row * (1 + p.most), p.ids + row * p.most, 0.0f, 0.0f};
  const int32_t asked = p.wanted[p.slots[row]];
  const uint32_t wanted = min(static_cast<uint32_t>(max(min(asked, p.most), 0)), vocabulary);
  for (int i = static_cast<int>(threadIdx.x); i < p.most; i += kThreads) {
    if (asked < 0 || i >= static_cast<int>(wanted)) {
      out.logprobs[1 + i] = 0.0f;
      out.ids[i] = -1;
    }
  }
  if (asked < 0) {
    if (threadIdx.x == 0) {
      out.logprobs[0] = 0.0f;
    }
    return;
  }
  // This thread's best token, and its sum relative to that.
  ArgmaxKey mine = kNoKey;
  float most = -INFINITY;
  float sum = 0.0f;
  for_each(logits, vocabulary, [&](float logit, uint32_t id) {
    const ArgmaxKey key = argmax_key_of(logit, id);
    mine = key < mine ? key : mine;
    if (logit > most) {
      sum = sum * expf(most - logit) + 1.0f;
      most = logit;
    } else if (logit > -INFINITY) {
      sum += expf(logit - most);
    }
  });
  const ArgmaxKey first = smallest_of_cta(mine, shared);
  const bool is_nan = first >> 32 == 0;
  const int64_t token = p.tokens[row];
  out.best = logit_of(first);
  const double scaled =
      sum > 0.0f ? static_cast<double>(sum) * exp(static_cast<double>(most) - out.best) : 0.0;
  out.log_sum = static_cast<float>(log(sum_of_cta(scaled, shared)));
  if (threadIdx.x == 0) {
    const bool is_token = token >= 0 && token < p.vocabulary && !is_nan;
    out.logprobs[0] = is_token ? out.logprob(logits[token]) : NAN;
  }
  if (is_nan) {
    for (uint32_t i = threadIdx.x; i < wanted; i += kThreads) {
      out.logprobs[1 + i] = NAN;
      out.ids[i] = -1;
    }
  } else if (wanted > 0) {
    write_best(logits, vocabulary, wanted, mine, out, shared);
  }
}

}  // namespace
}  // namespace ostinato

OSTINATO_EXPORT int ostinato_prepare(void) { return cudaSuccess; }

OSTINATO_LAUNCH(ostinato::TokenLogprobsParams) {
  using namespace ostinato;
  const TokenLogprobsParams& p = *params;
  if (p.rows == 0) {  // tensors without elements have no address
    return cudaSuccess;
  }
  if (p.rows < 0 || p.vocabulary < 1 || p.most < 0 || p.logits == nullptr || p.tokens == nullptr ||
      p.wanted == nullptr || p.slots == nullptr || p.logprobs == nullptr ||
      (p.ids == nullptr && p.most > 0)) {
    return cudaErrorInvalidValue;
  }
  LaunchConfig config;
  config.block = dim3(kThreads);
  config.grid = dim3(static_cast<uint32_t>(p.rows));
  config.pdl = p.pdl != 0;
  return launch(token_logprobs, config, static_cast<cudaStream_t>(stream), p);
}
