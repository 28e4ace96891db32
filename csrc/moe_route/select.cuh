// The experts of a token, by one warp: scores, groups, the best ones, their weights. Lane l has the
// experts l, l + 32, ...
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "params.h"

namespace ostinato::route {

namespace dtype {
using bf16 = __nv_bfloat16;
using fp16 = __half;
using fp32 = float;
}  // namespace dtype
using Logit = dtype::OSTINATO_DTYPE;

inline constexpr unsigned kAllLanes = 0xffffffff;
inline constexpr float kLeastSum = 1e-20F;  // added to the sum that weights are divided by

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// An integer that is larger for a larger number, and never 0; not of NaN.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(__fadd_rn(x, 0.0F));  // -0 becomes 0
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

// By a fixed tree, so that a token's sum has the same bits in every call.
__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x = __fadd_rn(x, __shfl_xor_sync(kAllLanes, x, distance));
  }
  return x;
}

__device__ __forceinline__ float max_of_warp(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, distance));
  }
  return x;
}

// The scores of a token, as functions of a logit.
struct Scores {
  bool sigmoid;
  float most, sum;  // of softmax

  __device__ __forceinline__ float of(float logit) const {
    return sigmoid ? 1.0F / __fadd_rn(1.0F, expf(-logit)) : expf(logit - most) / sum;
  }
};

template <int kPerLane>
class Selection {
 public:
  // `memory` has room for an element of each expert, and is needed with groups. `counts`: slots of
  // each expert, to which the token's are added. `ids`: null, or where to leave the ids of all
  // slots, too.
  __device__ Selection(const MoeRouteParams& params, float* memory, int* counts, int* ids)
      : params_(params),
        memory_(memory),
        counts_(counts),
        ids_(ids),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  // Writes ids and weights of a token.
  __device__ __forceinline__ void run(int token, bool real) {
    const int64_t first = int64_t(token) * params_.top_k;
    if (!real) {
      store(first, -1, 0.0F);
      return;
    }
    const Logit* const logits =
        static_cast<const Logit*>(params_.logits) + token * params_.logits_stride;
    float x[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int expert = lane_ + i * 32;
      x[i] = expert < params_.experts ? to_float(logits[expert]) : -INFINITY;
    }
    const Scores scores = scores_of(x);
    bool valid = scores.sigmoid || (scores.most > -INFINITY && scores.most < INFINITY);
    float compared[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int expert = lane_ + i * 32;
      const bool exists = expert < params_.experts;
      compared[i] = params_.correction_bias != nullptr && exists
                        ? __fadd_rn(scores.of(x[i]), params_.correction_bias[expert])
                        : x[i];
      valid = valid && !(exists && (x[i] != x[i] || compared[i] != compared[i]));
    }
    if (__any_sync(kAllLanes, !valid)) {
      store(first, -1, __int_as_float(0x7fc00000));
      return;
    }
    uint32_t keys[kPerLane];  // 0: not to be chosen
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int expert = lane_ + i * 32;
      keys[i] = expert < params_.experts ? ordered(compared[i]) : 0;
    }
    if (params_.groups > 1) {
      keep_groups(x, compared, scores, keys);
    }
    const int chosen = choose(keys);  // this lane's slot
    const bool has_slot = lane_ < params_.top_k;
    float weight = has_slot ? scores.of(to_float(logits[chosen])) : 0.0F;
    if (params_.renormalize != 0) {
      float total = __shfl_sync(kAllLanes, weight, 0);
      for (int slot = 1; slot < params_.top_k; ++slot) {
        total = __fadd_rn(total, __shfl_sync(kAllLanes, weight, slot));
      }
      weight = weight / __fadd_rn(total, kLeastSum);
    }
    store(first, chosen, __fmul_rn(weight, params_.routed_scale));
  }

 private:
  __device__ __forceinline__ void store(int64_t first, int id, float weight) const {
    if (lane_ < params_.top_k) {
      params_.ids[first + lane_] = id;
      if (ids_ != nullptr) {
        ids_[first + lane_] = id;
      }
      if (id >= 0) {
        atomicAdd(&counts_[id], 1);
      }
      params_.weights[first + lane_] = weight;
    }
  }

  __device__ __forceinline__ Scores scores_of(const float (&x)[kPerLane]) const {
    Scores scores = {params_.sigmoid != 0, 0.0F, 1.0F};
    if (scores.sigmoid) {
      return scores;
    }
    float most = -INFINITY, sum = 0.0F;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      most = fmaxf(most, x[i]);  // NaN is found apart
    }
    scores.most = max_of_warp(most);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      sum = __fadd_rn(sum, expf(x[i] - scores.most));
    }
    scores.sum = sum_of_warp(sum);
    return scores;
  }

  // The indices of the top_k largest keys, one for each lane; of equal ones the lowest come first.
  __device__ __forceinline__ int choose(uint32_t (&keys)[kPerLane]) const {
    int chosen = 0;
    for (int slot = 0; slot < params_.top_k; ++slot) {
      uint32_t best = 0;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        best = max(best, keys[i]);
      }
      best = __reduce_max_sync(kAllLanes, best);
      uint32_t index = UINT32_MAX;
#pragma unroll
      for (int i = kPerLane - 1; i >= 0; --i) {
        index = keys[i] == best ? lane_ + i * 32 : index;
      }
      index = __reduce_min_sync(kAllLanes, index);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        keys[i] = index == lane_ + i * 32 ? 0 : keys[i];
      }
      chosen = lane_ == slot ? static_cast<int>(index) : chosen;
    }
    return chosen;
  }

  // Sets the keys of experts to 0 whose group is not among the best.
  __device__ __forceinline__ void keep_groups(const float (&x)[kPerLane],
                                              const float (&compared)[kPerLane],
                                              const Scores& scores, uint32_t (&keys)[kPerLane]) {
    const bool of_scores = params_.correction_bias == nullptr && params_.top2 != 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int expert = lane_ + i * 32;
      if (expert < params_.experts) {
        memory_[expert] = of_scores ? scores.of(x[i]) : compared[i];
      }
    }
    __syncwarp();
    const int size = params_.experts / params_.groups;
    uint32_t key = 0;  // of this lane's group
    if (lane_ < params_.groups) {
      float best = -INFINITY, second = -INFINITY;
      for (int i = 0; i < size; ++i) {
        const float value = memory_[lane_ * size + i];
        second = fmaxf(second, fminf(best, value));
        best = fmaxf(best, value);
      }
      const bool adds = params_.top2 != 0 && size > 1;
      key = ordered(adds ? __fadd_rn(best, second) : best);
    }
    unsigned kept_groups = 0;
    for (int n = 0; n < params_.top_groups; ++n) {
      const bool kept = (kept_groups >> lane_ & 1U) != 0;
      const uint32_t best = __reduce_max_sync(kAllLanes, kept ? 0 : key);
      const unsigned equal = __ballot_sync(kAllLanes, !kept && key == best);
      kept_groups |= equal & (~equal + 1U);  // the lowest
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int expert = lane_ + i * 32;
      if (expert < params_.experts && (kept_groups >> expert / size & 1U) == 0) {
        keys[i] = 0;
      }
    }
    __syncwarp();  // the next token's values go to the same memory
  }

  const MoeRouteParams& params_;
  float* memory_;
  int* counts_;
  int* ids_;
  int lane_;
};

}  // namespace ostinato::route
