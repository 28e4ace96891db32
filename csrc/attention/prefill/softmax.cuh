// Online softmax of a warpgroup's rows: weights 2^(score - max), relative to a maximum that rises
// only if a score is far above it.
#pragma once

#include "common/pack_pair.cuh"
#include "softmax_logits.cuh"

namespace ostinato::prefill {

class Softmax : public SoftmaxLogits {
 public:
  using SoftmaxLogits::SoftmaxLogits;

  // Converts a tile's scores to weights. `key`: its first key. Returns whether the outputs so far
  // must be rescaled (fade()). `scales`: those of the tokens, if they have their own.
  template <class Find>
  __device__ __forceinline__ bool weigh(float (&scores)[kScores], const TileScales* scales, int key,
                                        bool masked, const Find& find_visible_keys) {
    const bool shifted = raise_shift();
    take_logits(scores, scales);
    if (masked) {
      apply_mask(scores, key, find_visible_keys());
    }
    float tops[4] = {scores[0], scores[1], scores[2], scores[3]};
#pragma unroll
    for (int i = 4; i < kScores; ++i) {
      tops[i % 4] = fmaxf(tops[i % 4], scores[i]);
    }
    float top[2] = {fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3])};
    const bool rises = is_far_above(top[0] * factor(0), 0) || is_far_above(top[1] * factor(1), 1);
    const bool raised = __any_sync(0xffffffff, rises);
    if (raised) {
      raise(top);
    }
    float sum[2];
    exponentiate(scores, sum);
    read_value_scales(scales);
    sum_[0] += sum[0];
    sum_[1] += sum[1];
    apply_value_scales(scores, scales);
    return raised || shifted;
  }

  // Like weigh(), for a tile without masked keys, and without computing its maximum: a sum that is
  // large compared to previous ones reveals a far higher score. The sum is needed anyway, while a
  // maximum takes a third of the instructions. `recompute` provides the scores again
  // (recompute_scores.cuh) if weights overflow.
  template <class Recompute>
  __device__ __forceinline__ bool weigh_blindly(float (&scores)[kScores], const TileScales* scales,
                                                const Recompute& recompute) {
    const bool shifted = raise_shift();
    float sum[2];
    if (kTokenScales && args_.params.softcap <= 0) {
      exponentiate_scaled(scores, *scales, sum);
    } else {
      take_logits(scores, scales);
      exponentiate(scores, sum);
    }
    read_value_scales(scales);
    bool high[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      high[half] =
          sum[half] > fminf(fmaf(kHighRatio, sum_[half], kHighSum * one()), kMostSum * one());
    }
    const bool raised = __any_sync(0xffffffff, high[0] || high[1]);
    if (raised) {
      lower(scores, scales, sum, high, recompute);
      read_value_scales(scales);  // again: registers are few meanwhile
    }
    sum_[0] += sum[0];
    sum_[1] += sum[1];
    apply_value_scales(scores, scales);
    return raised || shifted;
  }

  // Rescales outputs that are relative to the previous maximum.
  __device__ __forceinline__ void fade(float (&outputs)[kOutputs]) const {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      outputs[i] *= fade_[row_of(i)];
    }
  }

  // Reduces the sums of weights from threads to rows.
  __device__ __forceinline__ void end() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum_[half] += __shfl_xor_sync(0xffffffff, sum_[half], 1);
      sum_[half] += __shfl_xor_sync(0xffffffff, sum_[half], 2);
    }
  }

  __device__ __forceinline__ float maximum(int half) const { return max_[half]; }
  __device__ __forceinline__ float total(int half) const { return sum_[half]; }
  // The weight of one key.
  __device__ __forceinline__ float weight(int half, float score) const {
    return power_of_2(logit(score) - max_[half]);
  }
  // The weight of one key with scales of its own, that of its value applied.
  __device__ __forceinline__ float weight(int half, float score, const TokenScale& scale) const {
    return power_of_2(scale.logit(args_, score) - max_[half]) * scale.value;
  }

 private:
  // Thresholds for a thread's sum of weights of a row and tile, relative to the sum of all previous
  // tiles. A weight that dominates the others should be 1, which is exact.
  static constexpr float kHighRatio = 4;
  static constexpr float kHighSum = 2;
  static constexpr float kMostSum = 16384;  // finite in 16 bits
  static constexpr float kLost = 0x1p120f;  // larger weights may have overflowed

  // Converts scores to weights, and computes the thread's sums.
  __device__ __forceinline__ void exponentiate(float (&scores)[kScores], float (&sum)[2]) const {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      scores[i] = power_of_2(fmaf(scores[i], factor(row_of(i)), -max_[row_of(i)]));
    }
    add_up(scores, sum);
  }
  // The same with scales of tokens that have not been applied to the scores.
  __device__ __forceinline__ void exponentiate_scaled(float (&scores)[kScores],
                                                      const TileScales& scales,
                                                      float (&sum)[2]) const {
#pragma unroll
    for (int i = 0; i < kScores; i += 8) {
      const float4 factors = key_scales(scales, i);
#pragma unroll
      for (int j = i; j < i + 8; ++j) {
        scores[j] =
            power_of_2(fmaf(in_units(scores[j], j), factor_of(factors, j), -max_[row_of(j)]));
      }
    }
    add_up(scores, sum);
  }
  __device__ __forceinline__ static void add_up(const float (&scores)[kScores], float (&sum)[2]) {
    sum[0] = scores[0];
    sum[1] = scores[2];
#pragma unroll
    for (int i = 1; i < kScores; ++i) {
      if (i != 2) {
        sum[row_of(i)] += scores[i];
      }
    }
  }

  __device__ __forceinline__ void raise(float (&top)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffff, top[half], 1));
      top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffff, top[half], 2));
      // Decided per row: a row's results must not depend on other rows.
      const float logit = top[half] * factor(half);
      const float raised = is_far_above(logit, half) ? maximum_of(logit) : max_[half];
      fade_by(half, power_of_2(max_[half] - raised));
      max_[half] = raised;
    }
  }

  // Raises the maximum of rows whose weights are too large, and rescales their weights. Infinite
  // weights are recomputed from the scores.
  template <class Recompute>
  __device__ __forceinline__ void lower(float (&scores)[kScores], const TileScales* scales,
                                        float (&sum)[2], const bool (&high)[2],
                                        const Recompute& recompute) {
    const int quad = threadIdx.x % 32 / 4 * 4;
    bool lost[2];
    float fade[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = 0;
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        top = row_of(i) == half ? fmaxf(top, scores[i]) : top;
      }
      top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
      // Decided per row: a row's results must not depend on other rows.
      const uint32_t quads = __ballot_sync(0xffffffff, high[half]);
      const bool rises = (quads >> quad & 0xf) != 0 && top > one();
      lost[half] = rises && top >= kLost;
      const bool known = rises && !lost[half];
      fade[half] = known ? __fdividef(one(), top) : 1.0f;
      max_[half] += known ? maximum_of(log2f(top)) : 0.0f;
      fade_by(half, fade[half]);
      sum[half] *= fade[half];
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      scores[i] *= fade[row_of(i)];
    }
    find_lost(scores, scales, sum[0], lost[0], recompute.template rows<0>());
    find_lost(scores, scales, sum[1], lost[1], recompute.template rows<1>());
  }

  // Rows past the work tile's last query hold arbitrary data, whose weights might overflow in every
  // tile. With an infinite maximum their weights are 0 or NaN, never large, and they are not
  // stored.
  template <class Rows>
  __device__ __forceinline__ void find_lost(float (&scores)[kScores], const TileScales* scales,
                                            float& sum, bool lost, const Rows& rows) {
    if (lost && !rows.is_query()) {
      max_[Rows::kRow] = INFINITY;
      lost = false;
    }
    if (__any_sync(0xffffffff, lost)) {
      recompute_weights<Rows::kRow>(scores, scales, sum, lost, rows);
    }
  }

  // For rows whose scores have been lost to overflow.
  template <int kHalf, class Rows>
  __device__ __forceinline__ void recompute_weights(float (&scores)[kScores],
                                                    const TileScales* scales, float& sum, bool lost,
                                                    const Rows& rows) {
    const auto logit_at = [&](int group, int i, float score) {
      if constexpr (kTokenScales) {
        const int column = TileFactors::index(group * 8 + first_column() + i);
        const TokenScale scale = {scales->key.of[column], scales->value.of[column]};
        return scale.logit(args_, score);
      } else {
        return logit(score);
      }
    };
    float top = kNothing;
#pragma unroll 1
    for (int group = 0; group < kScores / 4; ++group) {
      const float2 pair = rows.scores(group);
      top = fmaxf(top, fmaxf(logit_at(group, 0, pair.x), logit_at(group, 1, pair.y)));
    }
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
    if (lost) {
      fade_by(kHalf, power_of_2(max_[kHalf] - maximum_of(top)));
      max_[kHalf] = maximum_of(top);
      sum = 0;
    }
#pragma unroll 1
    for (int group = 0; group < kScores / 4; ++group) {
      const float2 pair = rows.scores(group);
      const float weights[2] = {power_of_2(logit_at(group, 0, pair.x) - max_[kHalf]),
                                power_of_2(logit_at(group, 1, pair.y) - max_[kHalf])};
      sum += lost ? weights[0] + weights[1] : 0.0f;
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const bool is_its = lost && row_of(i) == kHalf && i / 4 == group;
        scores[i] = is_its ? weights[i % 2] : scores[i];
      }
    }
  }
};

// A operand of the PV MMA: of 16 keys, rows g and g + 8 of the first 8, then of the others.
__device__ __forceinline__ void pack_weights(const float (&scores)[kScores],
                                             uint32_t (&weights)[kKeySteps][4]) {
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) {
    weights[i / 4][i % 4] = pack_pair<Type>(scores[2 * i], scores[2 * i + 1]);
  }
}

}  // namespace ostinato::prefill
