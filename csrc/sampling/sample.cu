// Samples one token for each row of logits: greedy, or by temperature, top-k, top-p and min-p after
// the repetition penalty, in one launch.
//
// Compiled with
//   OSTINATO_DTYPE  bf16, fp16 or fp32, of the logits
//
// The semantics are those of runtime/ops/sampling/sample.py. Probabilities are summed as integers,
// so that a row's token depends on the row alone: not on the batch, nor on how many CTAs share the
// row.
#include <cuda_runtime.h>

#include <cstdint>

#include "common/argmax_key.cuh"
#include "common/check.h"
#include "common/cluster_group.cuh"
#include "common/launch.cuh"
#include "params.h"
#include "philox.cuh"
#include "sample_row.cuh"
#include "sample_select.cuh"

namespace ostinato {
namespace {

using namespace sampling;

constexpr int kMaxCtas = 8;  // CTAs per row: the largest portable cluster
// logits per CTA; with fewer, sharing a row costs more than it gains
constexpr int kLeastLogits = 8192;

__device__ int64_t top_k_of(const SampleParams& p, int row) {
  return p.top_k_is_int64 != 0 ? static_cast<const int64_t*>(p.top_k)[row]
                               : static_cast<const int32_t*>(p.top_k)[row];
}

// Samples a token. Every filter keeps a prefix of the ordered tokens, and the random number picks a
// token by the mass before it.
template <bool kAligned>
__device__ uint32_t draw(const SampleParams& p, int row, Selector<kAligned>& selector,
                         const Scale& scale, float last) {
  const float min_p = p.min_p[row];
  const double top_p = p.top_p[row];
  const int64_t top_k = top_k_of(p, row);
  Mass least;
  const Amount all = selector.count(scale, last, min_p, least);
  Choice choice = {all.mass, 0};
  enum { kTopK, kTopP, kRandom };
#pragma unroll 1  // a large body
  for (int end = kTopK; end <= kRandom; ++end) {
    Target target = {false, 0};
    if (end == kTopK) {
      if (top_k <= 0 || top_k >= all.count) {
        continue;
      }
      target = {true, static_cast<uint64_t>(top_k - 1)};
    } else if (end == kTopP) {
      if (top_p >= 1.0) {
        continue;
      }
      // The last token kept is the first at which the cumulative mass reaches top_p.
      const double enough = ceil(top_p * static_cast<double>(choice.mass));
      target.value = enough > 1.0 ? static_cast<Mass>(enough) - 1 : 0;
    } else {
      const Mass kept = min_p <= 0.0f ? choice.mass : min(choice.mass, least);
      const uint64_t random = random_bits(p.seeds[row], p.counters[row]);  // 53 bits
      target.value = __umul64hi(random << 11, kept);
    }
    choice = selector.choose(target);
  }
  return choice.id;
}

// This thread's best argmax key of a row whose slices an epilogue has reduced.
__device__ __forceinline__ ArgmaxKey best_of_thread(const SampleParams& p, int row) {
  const uint64_t* const parts = p.best + row * p.best_stride;
  ArgmaxKey best = ~ArgmaxKey{0};
#pragma unroll 4
  for (int part = threadIdx.x; part < p.parts; part += kThreads) {
    best = min(best, ArgmaxKey{parts[part]});
  }
  return best;
}

// The smallest key of all threads of a CTA.
__device__ __forceinline__ ArgmaxKey smallest_of_cta(ArgmaxKey key, ArgmaxKey (&of_warps)[kWarps]) {
  key = smallest_of_lanes<32>(key);
  if (threadIdx.x % 32 == 0) {
    of_warps[threadIdx.x / 32] = key;
  }
  __syncthreads();
  return smallest_of_lanes<kWarps>(of_warps[threadIdx.x % kWarps]);
}

// The token of a row's best key; -1 if the row has NaN, whose keys are the smallest.
__device__ __forceinline__ int64_t token_of(ArgmaxKey best) {
  return best >> 32 == 0 ? int64_t{-1} : int64_t{id_of(best)};
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads, 1) sample_rows(const __grid_constant__ SampleParams p) {
  __shared__ SharedStorage shared;
  wait_for_predecessor();
  let_successor_start();
  const ClusterGroup cluster = this_cluster();
  const int ctas = static_cast<int>(cluster.num_blocks());
  const int row = static_cast<int>(blockIdx.x) / ctas;
  const float temperature = p.temperature[row];
  if (p.best != nullptr) {
    const float penalty = p.repetition_penalty == nullptr ? 1.0f : p.repetition_penalty[row];
    const ArgmaxKey mine = best_of_thread(p, row);  // loaded before it is known to be needed
    if (is_greedy(temperature, penalty)) {
      const ArgmaxKey best = smallest_of_cta(mine, shared.warp_values[0]);
      if (cluster.block_rank() == 0 && threadIdx.x == 0) {
        p.out[row] = token_of(best);
      }
      return;
    }
  }
  const RowShare<kAligned> part(p, row, static_cast<int>(cluster.block_rank()), ctas);
  Selector<kAligned> selector(part, shared);
  const Selection all = selector.all();
  int64_t token = token_of(all.low);
  // If the best logit is NaN or infinite, the distribution is undefined.
  const float best = logit_of(all.low);
  if (temperature > 0.0f && isfinite(best)) {
    const Scale scale = {best, 1.0 / static_cast<double>(temperature)};
    token = draw(p, row, selector, scale, logit_of(all.high));
  }
  if (cluster.block_rank() == 0 && threadIdx.x == 0) {
    p.out[row] = token;
  }
}

// Rows that fill the GPU have one CTA each. Clusters of more than two do not fit on all SMs, since
// each lies within a GPC of 16 or 18 SMs: a second wave would cost more than sharing a row gains.
int ctas_for(int rows, int vocabulary, int sms) {
  int ctas = 1;
  while (kHasClusters && ctas < kMaxCtas && 2 * ctas * rows <= (ctas == 1 ? sms : sms - sms / 8) &&
         vocabulary / (2 * ctas) >= kLeastLogits) {
    ctas *= 2;
  }
  return ctas;
}

bool is_valid(const SampleParams& p) {
  return p.logits != nullptr && p.temperature != nullptr && p.top_k != nullptr &&
         p.top_p != nullptr && p.min_p != nullptr && p.seeds != nullptr && p.counters != nullptr &&
         p.out != nullptr && (p.seen == nullptr) == (p.repetition_penalty == nullptr) &&
         (p.best == nullptr || p.parts > 0);
}

bool is_aligned(const SampleParams& p) {
  return reinterpret_cast<uintptr_t>(p.logits) % 16 == 0 && p.vocabulary % kVector == 0 &&
         (p.rows == 1 || p.logits_stride % kVector == 0);
}

}  // namespace
}  // namespace ostinato

OSTINATO_EXPORT int ostinato_prepare(void) { return cudaSuccess; }

OSTINATO_LAUNCH(ostinato::SampleParams) {
  using namespace ostinato;
  if (params->rows < 0 || params->vocabulary <= 0 ||
      params->vocabulary > sampling::kMaxVocabulary) {
    return cudaErrorInvalidValue;
  }
  if (params->rows == 0) {  // tensors without elements have no address
    return cudaSuccess;
  }
  if (!is_valid(*params)) {
    return cudaErrorInvalidValue;
  }
  int sms = 0;
  OSTINATO_RETURN_IF_ERROR(count_sms(&sms));
  const int ctas = ctas_for(params->rows, params->vocabulary, sms);
  LaunchConfig config;
  config.grid = dim3(static_cast<uint32_t>(params->rows) * ctas);
  config.block = dim3(sampling::kThreads);
  config.cluster = dim3(ctas);
  config.pdl = params->pdl != 0;
  return launch(is_aligned(*params) ? sample_rows<true> : sample_rows<false>, config,
                static_cast<cudaStream_t>(stream), *params);
}
