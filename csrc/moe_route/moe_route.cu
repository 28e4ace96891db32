// Routing of a mixture of experts: the experts of each token (select.cuh), and the rows of each
// expert (plan.cuh).
//
// Compiled with
//   OSTINATO_DTYPE  bf16, fp16 or fp32, of the logits
//
// A warp selects for a token. For few tokens one CTA does all. Of more, CTAs have segments: they
// select, count the slots of each expert, and plan once all have counted. A cluster does that in
// one launch, any number of CTAs in two. Nothing of a row depends on which.
#include <cuda_runtime.h>

#include <cstdint>

#include "common/check.h"
#include "common/cluster.cuh"
#include "common/launch.cuh"
#include "params.h"
#include "plan.cuh"
#include "select.cuh"

namespace ostinato::route {
namespace {

constexpr int kMostExperts = 512;
constexpr int kMostGroups = 32;
constexpr int kMostTopK = 32;
constexpr int kMostSegmentTokens = 65535;
constexpr int kSelectWarps = 16;  // of a CTA that selects for a segment
constexpr int kPlanWarps = 32;    // of one that plans it
constexpr int kFewTokens = 32;    // that one CTA routes
constexpr int kRoundSlots = 4096;
constexpr int kMostClusterSlots = kSelectWarps * kMostTopK;  // of a CTA, whose warps have a token

// Warps of the CTA that routes few tokens: as many as registers allow.
template <int kPerLane>
constexpr int kFewWarps = kPerLane <= 8 ? 32 : 16;

template <int kPerLane>
using FewPlanner = Planner<kFewWarps<kPerLane>, kFewTokens * kMostTopK>;
using SegmentPlanner = Planner<kPlanWarps, kRoundSlots>;
using ClusterPlanner = Planner<kSelectWarps, kMostClusterSlots>;

// Elements of 4 bytes, rounded up so that vectors can follow.
__host__ __device__ inline int even(int elements) { return (elements + 1) / 2 * 2; }

// Bytes of the memory that warps need for groups.
__host__ __device__ inline int selection_bytes(const MoeRouteParams& p, int warps) {
  return p.groups > 1 ? warps * even(p.experts) * static_cast<int>(sizeof(float)) : 0;
}

// Selects for the tokens from `first` to `stop`, by all warps of a CTA.
template <int kPerLane>
__device__ __forceinline__ void select_tokens(const MoeRouteParams& p, uint8_t* storage,
                                              int* counts, int* ids, int first, int stop,
                                              int warps) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  float* const memory = reinterpret_cast<float*>(storage) + warp * p.experts;
  Selection<kPerLane> selection(p, memory, counts, ids);
  const int active = p.n_active == nullptr ? p.tokens : *p.n_active;
  for (int token = first + warp; token < stop; token += warps) {
    selection.run(token, token < active);
  }
}

template <int kPerLane>
__global__ void __launch_bounds__(kFewWarps<kPerLane> * 32, 1)
    route_few(const __grid_constant__ MoeRouteParams p) {
  extern __shared__ __align__(1024) uint8_t storage[];
  constexpr int kWarps = kFewWarps<kPerLane>;
  int* const ids = reinterpret_cast<int*>(storage + selection_bytes(p, kWarps));
  FewPlanner<kPerLane> planner(p, 0, ids,
                               reinterpret_cast<uint8_t*>(ids + even(p.tokens * p.top_k)));
  planner.begin();
  wait_for_predecessor();
  // Not before the wait: see csrc/embed.
  let_successor_start();
  __syncthreads();
  select_tokens<kPerLane>(p, storage, planner.counts(), ids, 0, p.tokens, kWarps);
  planner.run();
}

__device__ __forceinline__ void clear_counts(const MoeRouteParams& p, int* counts) {
  for (int i = static_cast<int>(threadIdx.x); i < even(p.experts); i += kSelectWarps * 32) {
    counts[i] = 0;
  }
}

// Selects for the tokens of this CTA's segment, and writes how many slots of it each expert has.
// `counts` is shared memory, cleared.
template <int kPerLane>
__device__ __forceinline__ void select_and_count(const MoeRouteParams& p, uint8_t* storage,
                                                 int* counts) {
  const int segment = static_cast<int>(blockIdx.x), words = even(p.experts) / 2;
  const int tokens = segment_tokens(p), first = segment * tokens;
  select_tokens<kPerLane>(p, storage, counts, nullptr, first, min(first + tokens, p.tokens),
                          kSelectWarps);
  __syncthreads();
  uint32_t* const of_segment = reinterpret_cast<uint32_t*>(p.counts) + int64_t(segment) * words;
  for (int i = static_cast<int>(threadIdx.x); i < words; i += kSelectWarps * 32) {
    of_segment[i] = static_cast<uint32_t>(counts[2 * i]) | static_cast<uint32_t>(counts[2 * i + 1])
                                                               << 16;
  }
}

template <int kPerLane>
__global__ void __launch_bounds__(kSelectWarps * 32)
    select_segment(const __grid_constant__ MoeRouteParams p) {
  extern __shared__ __align__(1024) uint8_t storage[];
  int* const counts = reinterpret_cast<int*>(storage + selection_bytes(p, kSelectWarps));
  clear_counts(p, counts);
  wait_for_predecessor();
  let_successor_start();
  __syncthreads();
  select_and_count<kPerLane>(p, storage, counts);
}

__global__ void __launch_bounds__(kPlanWarps * 32, 1)
    plan_segment(const __grid_constant__ MoeRouteParams p) {
  extern __shared__ __align__(1024) uint8_t storage[];
  const int segment = static_cast<int>(blockIdx.x);
  SegmentPlanner planner(p, segment, p.ids + int64_t(segment) * segment_slots(p), storage);
  planner.begin();
  wait_for_predecessor();
  let_successor_start();
  planner.run();
}

// Both, by a cluster of as many CTAs as segments.
template <int kPerLane>
__global__ void __launch_bounds__(kSelectWarps * 32, 1)
    route_cluster(const __grid_constant__ MoeRouteParams p) {
  extern __shared__ __align__(1024) uint8_t storage[];
  const int segment = static_cast<int>(blockIdx.x);
  int* const counts = reinterpret_cast<int*>(storage + selection_bytes(p, kSelectWarps));
  ClusterPlanner planner(p, segment, p.ids + int64_t(segment) * segment_slots(p),
                         reinterpret_cast<uint8_t*>(counts + even(p.experts)));
  clear_counts(p, counts);
  planner.begin();
  wait_for_predecessor();
  let_successor_start();
  __syncthreads();
  select_and_count<kPerLane>(p, storage, counts);
  if constexpr (kHasClusters) {
    sync_cluster();
  }
  planner.run();
}

// Whether a cluster routes: of sizes that every GPU with clusters has, a token for each warp.
bool suits_cluster(const MoeRouteParams& p) {
  return kHasClusters && (p.segments == 2 || p.segments == 4 || p.segments == 8) &&
         segment_tokens(p) <= kSelectWarps;
}

bool is_valid(const MoeRouteParams& p) {
  const int64_t slots = int64_t(p.tokens) * p.top_k;
  const auto aligned = [](const void* pointer, uintptr_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
  };
  const bool segments = p.segments == 1
                            ? p.tokens <= kFewTokens
                            : p.segments > 1 && p.segments <= p.tokens && p.counts != nullptr &&
                                  aligned(p.counts, sizeof(uint32_t)) &&
                                  segment_tokens(p) <= kMostSegmentTokens &&
                                  int64_t(segment_tokens(p)) * (p.segments - 1) < p.tokens;
  return p.experts > 0 && p.experts <= kMostExperts && p.top_k > 0 && p.top_k <= kMostTopK &&
         p.groups > 0 && p.groups <= kMostGroups && p.experts % p.groups == 0 && p.top_groups > 0 &&
         p.top_groups <= p.groups && p.top_k <= p.experts / p.groups * p.top_groups &&
         p.tile_tokens > 0 && slots <= INT32_MAX - 1024 && p.tokens >= 0 && segments &&
         p.offsets != nullptr && p.n_tiles != nullptr && aligned(p.tiles, sizeof(int4)) &&
         (p.tokens == 0 || (p.logits != nullptr && p.ids != nullptr && p.weights != nullptr &&
                            p.rows != nullptr && p.tiles != nullptr));
}

template <int kPerLane>
cudaError_t route(const MoeRouteParams& p, cudaStream_t stream) {
  constexpr int kElement = static_cast<int>(sizeof(int));
  LaunchConfig config;
  config.pdl = p.pdl != 0;
  config.grid = dim3(static_cast<uint32_t>(p.segments));
  const int slots = segment_slots(p);
  if (p.segments == 1) {
    constexpr int kWarps = kFewWarps<kPerLane>;
    config.block = dim3(kWarps * 32);
    config.dynamic_smem = selection_bytes(p, kWarps) + even(slots) * kElement +
                          PlanMemory::bytes(p.experts, kWarps, slots);
    return launch(route_few<kPerLane>, config, stream, p);
  }
  config.block = dim3(kSelectWarps * 32);
  config.dynamic_smem = selection_bytes(p, kSelectWarps) + even(p.experts) * kElement;
  if (suits_cluster(p)) {
    config.cluster = config.grid;
    config.dynamic_smem += PlanMemory::bytes(p.experts, kSelectWarps, slots);
    return launch(route_cluster<kPerLane>, config, stream, p);
  }
  OSTINATO_RETURN_IF_ERROR(launch(select_segment<kPerLane>, config, stream, p));
  config.block = dim3(kPlanWarps * 32);
  config.dynamic_smem =
      PlanMemory::bytes(p.experts, kPlanWarps, slots < kRoundSlots ? slots : kRoundSlots);
  return launch(plan_segment, config, stream, p);
}

// kPerLane: the experts that a warp can have, over 32.
template <int kPerLane>
cudaError_t allow_smem() {
  constexpr int kExperts = kPerLane * 32, kWarps = kFewWarps<kPerLane>;
  constexpr int kMostSlots = kFewTokens * kMostTopK, kElement = static_cast<int>(sizeof(int));
  const int few = kWarps * kExperts * kElement + kMostSlots * kElement +
                  PlanMemory::bytes(kExperts, kWarps, kMostSlots);
  const int select = (kSelectWarps + 1) * kExperts * kElement;
  OSTINATO_RETURN_IF_ERROR(allow_dynamic_smem(route_few<kPerLane>, few));
  OSTINATO_RETURN_IF_ERROR(
      allow_dynamic_smem(route_cluster<kPerLane>,
                         select + PlanMemory::bytes(kExperts, kSelectWarps, kMostClusterSlots)));
  return allow_dynamic_smem(select_segment<kPerLane>, select);
}

}  // namespace
}  // namespace ostinato::route

OSTINATO_EXPORT int ostinato_prepare(void) {
  using namespace ostinato::route;
  OSTINATO_RETURN_IF_ERROR(ostinato::allow_dynamic_smem(
      plan_segment, PlanMemory::bytes(kMostExperts, kPlanWarps, kRoundSlots)));
  OSTINATO_RETURN_IF_ERROR(allow_smem<4>());
  OSTINATO_RETURN_IF_ERROR(allow_smem<8>());
  return allow_smem<16>();
}

OSTINATO_LAUNCH(ostinato::MoeRouteParams) {
  using namespace ostinato::route;
  const ostinato::MoeRouteParams& p = *params;
  if (!is_valid(p)) {
    return cudaErrorInvalidValue;
  }
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  return p.experts <= 128 ? route<4>(p, on) : p.experts <= 256 ? route<8>(p, on) : route<16>(p, on);
}
