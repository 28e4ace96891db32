// Routing of a mixture of experts: the experts of each token (select.cuh), and the rows of each
// expert (plan.cuh).
//
// Compiled with
//   OSTINATO_DTYPE  bf16, fp16 or fp32, of the logits
//
// A warp selects for a token. For few tokens one CTA does all in one launch; for more a second
// launch plans, with one CTA (plan_few.cuh) or, of many slots, with a CTA for each expert
// (plan.cuh). Nothing of a row depends on which.
#include <cuda_runtime.h>

#include <cstdint>

#include "common/check.h"
#include "common/launch.cuh"
#include "params.h"
#include "plan.cuh"
#include "plan_few.cuh"
#include "select.cuh"

namespace ostinato::route {
namespace {

constexpr int kWarps = 16;
constexpr int kThreads = kWarps * 32;
constexpr int kMostExperts = 512;
constexpr int kMostGroups = 32;
constexpr int kMostTopK = 32;
constexpr int kPlanWarps = 32;        // of a CTA that plans all slots
constexpr int kFewTokens = 32;        // that one CTA routes
constexpr int kFewSlots = 4096;       // that one CTA plans
constexpr int kMostCopies = 1 << 16;  // slots whose ids a CTA of `plan_many` copies

// Warps of the CTA that routes few tokens: as many as registers allow.
template <int kPerLane>
constexpr int kFewWarps = kPerLane <= 8 ? 32 : kWarps;

// Bytes of the memory that warps need for groups.
__host__ __device__ inline int selection_bytes(const MoeRouteParams& p, int warps) {
  return p.groups > 1 ? warps * p.experts * static_cast<int>(sizeof(float)) : 0;
}

// `ids`: of all slots in shared memory, or null.
template <int kPerLane>
__device__ __forceinline__ void select_tokens(const MoeRouteParams& p, uint8_t* storage, int* ids,
                                              int first, int step) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  float* const memory = reinterpret_cast<float*>(storage) + warp * p.experts;
  Selection<kPerLane> selection(p, memory, ids);
  const int active = p.n_active == nullptr ? p.tokens : *p.n_active;
  for (int token = first + warp; token < p.tokens; token += step) {
    selection.run(token, token < active);
  }
}

// Elements that the ids of all slots take in shared memory, whole vectors.
__host__ __device__ inline int ids_of_few(int slots) { return (slots + 1) / 2 * 2; }

template <int kPerLane>
__global__ void __launch_bounds__(kFewWarps<kPerLane> * 32, 1)
    route_few(const __grid_constant__ MoeRouteParams p) {
  extern __shared__ __align__(1024) uint8_t storage[];
  constexpr int kWarpsOfCta = kFewWarps<kPerLane>;
  int* const ids = reinterpret_cast<int*>(storage + selection_bytes(p, kWarpsOfCta));
  FewPlanner<kWarpsOfCta, kFewTokens * kMostTopK> planner(
      p, ids, reinterpret_cast<uint8_t*>(ids + ids_of_few(p.tokens * p.top_k)));
  planner.begin();
  wait_for_predecessor();
  // Not before the wait: see csrc/embed.
  let_successor_start();
  select_tokens<kPerLane>(p, storage, ids, 0, kWarpsOfCta);
  planner.run();
}

template <int kPerLane>
__global__ void __launch_bounds__(kThreads) select_many(const __grid_constant__ MoeRouteParams p) {
  extern __shared__ __align__(1024) uint8_t storage[];
  wait_for_predecessor();
  let_successor_start();
  select_tokens<kPerLane>(p, storage, nullptr, static_cast<int>(blockIdx.x) * kWarps,
                          static_cast<int>(gridDim.x) * kWarps);
}

__global__ void __launch_bounds__(kPlanWarps * 32, 1)
    plan_few(const __grid_constant__ MoeRouteParams p) {
  extern __shared__ __align__(1024) uint8_t storage[];
  FewPlanner<kPlanWarps, kFewSlots> planner(p, p.ids, storage);
  planner.begin();
  wait_for_predecessor();
  let_successor_start();
  planner.run();
}

// A CTA has an expert, and the last those slots without one.
__global__ void __launch_bounds__(kThreads) plan_many(const __grid_constant__ MoeRouteParams p) {
  extern __shared__ __align__(1024) uint8_t storage[];
  wait_for_predecessor();
  let_successor_start();
  Planner planner(p, storage, kWarps, p.tokens * p.top_k <= kMostCopies);
  planner.count(kThreads);
  const int expert = static_cast<int>(blockIdx.x);
  if (expert == 0) {
    planner.store_sizes(kThreads);
  }
  planner.list_by_cta(expert, kWarps);
}

bool is_valid(const MoeRouteParams& p) {
  const int64_t slots = int64_t(p.tokens) * p.top_k;
  return p.experts > 0 && p.experts <= kMostExperts && p.top_k > 0 && p.top_k <= kMostTopK &&
         p.groups > 0 && p.groups <= kMostGroups && p.experts % p.groups == 0 && p.top_groups > 0 &&
         p.top_groups <= p.groups && p.top_k <= p.experts / p.groups * p.top_groups &&
         p.tile_tokens > 0 && slots <= INT32_MAX - 1024 && p.tokens >= 0 && p.offsets != nullptr &&
         reinterpret_cast<uintptr_t>(p.tiles) % sizeof(int4) == 0 &&
         reinterpret_cast<uintptr_t>(p.ids) % sizeof(int4) == 0 && p.n_tiles != nullptr &&
         (p.tokens == 0 || (p.logits != nullptr && p.ids != nullptr && p.weights != nullptr &&
                            p.rows != nullptr && p.tiles != nullptr));
}

template <int kPerLane>
cudaError_t route(const MoeRouteParams& p, cudaStream_t stream) {
  LaunchConfig config;
  config.pdl = p.pdl != 0;
  if (p.tokens <= kFewTokens) {
    constexpr int kWarpsOfCta = kFewWarps<kPerLane>;
    config.grid = dim3(1);
    config.block = dim3(kWarpsOfCta * 32);
    const int slots = p.tokens * p.top_k;
    config.dynamic_smem = selection_bytes(p, kWarpsOfCta) +
                          ids_of_few(slots) * static_cast<int>(sizeof(int)) +
                          FewMemory::bytes(p.experts, kWarpsOfCta, slots);
    return launch(route_few<kPerLane>, config, stream, p);
  }
  config.block = dim3(kThreads);
  constexpr int kMostCtas = 1 << 16;
  const int ctas = (p.tokens + kWarps - 1) / kWarps;
  config.grid = dim3(static_cast<uint32_t>(ctas < kMostCtas ? ctas : kMostCtas));
  config.dynamic_smem = selection_bytes(p, kWarps);
  OSTINATO_RETURN_IF_ERROR(launch(select_many<kPerLane>, config, stream, p));
  const int slots = p.tokens * p.top_k;
  if (slots <= kFewSlots) {
    config.grid = dim3(1);
    config.block = dim3(kPlanWarps * 32);
    config.dynamic_smem = FewMemory::bytes(p.experts, kPlanWarps, slots);
    return launch(plan_few, config, stream, p);
  }
  config.grid = dim3(static_cast<uint32_t>(p.experts + 1));
  config.dynamic_smem = PlanMemory::bytes(p.experts, kWarps, slots <= kMostCopies ? slots : 0);
  return launch(plan_many, config, stream, p);
}

// kPerLane: the experts that a warp can have, over 32.
template <int kPerLane>
cudaError_t allow_smem() {
  constexpr int kExperts = kPerLane * 32, kWarpsOfCta = kFewWarps<kPerLane>;
  const auto groups = [](int warps) { return warps * kExperts * static_cast<int>(sizeof(float)); };
  constexpr int kMostSlots = kFewTokens * kMostTopK;
  const int few = groups(kWarpsOfCta) + kMostSlots * static_cast<int>(sizeof(int)) +
                  FewMemory::bytes(kExperts, kWarpsOfCta, kMostSlots);
  OSTINATO_RETURN_IF_ERROR(allow_dynamic_smem(route_few<kPerLane>, few));
  return allow_dynamic_smem(select_many<kPerLane>, groups(kWarps));
}

}  // namespace
}  // namespace ostinato::route

OSTINATO_EXPORT int ostinato_prepare(void) {
  using namespace ostinato::route;
  OSTINATO_RETURN_IF_ERROR(ostinato::allow_dynamic_smem(
      plan_few, FewMemory::bytes(kMostExperts, kPlanWarps, kFewSlots)));
  OSTINATO_RETURN_IF_ERROR(ostinato::allow_dynamic_smem(
      plan_many, PlanMemory::bytes(kMostExperts, kWarps, kMostCopies)));
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
