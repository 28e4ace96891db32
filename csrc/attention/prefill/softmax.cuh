// Online softmax of a warpgroup's rows: weights 2^(score - max), relative to a maximum that rises
// only if a score is far above it.
#pragma once

#include "common/pack_pair.cuh"
#include "score_fragment.cuh"

namespace ostinato::prefill {

class Softmax {
 public:
  __device__ explicit Softmax(const Arguments& args) : args_(args) {}

  // Starts a work tile.
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      max_[half] = kNothing;
      sum_[half] = 0;
    }
  }

  // Converts a tile's scores to weights. `key`: its first key. Returns whether the outputs so far
  // must be rescaled (fade()).
  template <class Find>
  __device__ __forceinline__ bool weigh(float (&scores)[kScores], int key, bool masked,
                                        const Find& find_visible_keys) {
    take_logits(scores);
    if (masked) {
      apply_mask(scores, key, find_visible_keys());
    }
    float tops[4] = {scores[0], scores[1], scores[2], scores[3]};
#pragma unroll
    for (int i = 4; i < kScores; ++i) {
      tops[i % 4] = fmaxf(tops[i % 4], scores[i]);
    }
    float top[2] = {fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3])};
    const bool rises =
        top[0] * args_.factor > max_[0] + kSlack || top[1] * args_.factor > max_[1] + kSlack;
    const bool raised = __any_sync(0xffffffff, rises);
    if (raised) {
      raise(top);
    }
    settled_ = !masked;
    float sum[2];
    exponentiate(scores, sum);
    sum_[0] += sum[0];
    sum_[1] += sum[1];
    return raised;
  }

  // Whether every row's maximum covers many keys, so that weigh_blindly() may be used.
  __device__ __forceinline__ bool is_settled() const { return settled_; }

  // Like weigh(), for a tile without masked keys, and without computing its maximum: a sum that is
  // large compared to previous ones reveals a far higher score. The sum is needed anyway, while a
  // maximum takes a third of the instructions. `recompute` provides the scores again
  // (recompute_scores.cuh) if weights overflow.
  template <class Recompute>
  __device__ __forceinline__ bool weigh_blindly(float (&scores)[kScores],
                                                const Recompute& recompute) {
    take_logits(scores);
    float sum[2];
    exponentiate(scores, sum);
    bool high[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      high[half] = sum[half] > fminf(fmaf(kHighRatio, sum_[half], kHighSum), kMostSum);
    }
    const bool raised = __any_sync(0xffffffff, high[0] || high[1]);
    if (raised) {
      lower(scores, sum, high, recompute);
    }
    sum_[0] += sum[0];
    sum_[1] += sum[1];
    return raised;
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
    return power_of_2(logit_of(args_, score) - max_[half]);
  }

 private:
  // The precision is the same relative to any maximum not far below the row's, so that rescaling is
  // rarely needed.
  static constexpr float kSlack = 2;
  // Thresholds for a thread's sum of weights of a row and tile, relative to the sum of all previous
  // tiles. A weight that dominates the others should be 1, which is exact.
  static constexpr float kHighRatio = 4;
  static constexpr float kHighSum = 2;
  static constexpr float kMostSum = 16384;  // finite in 16 bits
  static constexpr float kLost = 0x1p120f;  // larger weights may have overflowed

  __device__ __forceinline__ void take_logits(float (&scores)[kScores]) const {
    if (args_.direct != 0) {
      return;
    }
    if (args_.params.softcap > 0) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        scores[i] = capped_logit(args_, scores[i]);
        if (i % 4 == 3) {
          __syncwarp();  // more at a time would need registers
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        scores[i] *= args_.logit_scale;
      }
    }
  }

  // Converts scores to weights, and computes the thread's sums.
  __device__ __forceinline__ void exponentiate(float (&scores)[kScores], float (&sum)[2]) const {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      scores[i] = power_of_2(fmaf(scores[i], args_.factor, -max_[row_of(i)]));
    }
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
      const bool rises = top[half] * args_.factor > max_[half] + kSlack;
      const float raised = rises ? top[half] * args_.factor : max_[half];
      fade_[half] = power_of_2(max_[half] - raised);
      sum_[half] *= fade_[half];
      max_[half] = raised;
    }
  }

  // Raises the maximum of rows whose weights are too large, and rescales their weights. Infinite
  // weights are recomputed from the scores.
  template <class Recompute>
  __device__ __forceinline__ void lower(float (&scores)[kScores], float (&sum)[2],
                                        const bool (&high)[2], const Recompute& recompute) {
    const int quad = threadIdx.x % 32 / 4 * 4;
    bool lost[2];
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
      const bool rises = (quads >> quad & 0xf) != 0 && top > 1;
      lost[half] = rises && top >= kLost;
      const bool known = rises && !lost[half];
      fade_[half] = known ? __fdividef(1.0f, top) : 1.0f;
      max_[half] += known ? log2f(top) : 0.0f;
      sum_[half] *= fade_[half];
      sum[half] *= fade_[half];
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      scores[i] *= fade_[row_of(i)];
    }
    find_lost(scores, sum[0], lost[0], recompute.template rows<0>());
    find_lost(scores, sum[1], lost[1], recompute.template rows<1>());
  }

  // Rows past the work tile's last query hold arbitrary data, whose weights might overflow in every
  // tile. With an infinite maximum their weights are 0 or NaN, never large, and they are not
  // stored.
  template <class Rows>
  __device__ __forceinline__ void find_lost(float (&scores)[kScores], float& sum, bool lost,
                                            const Rows& rows) {
    if (lost && !rows.is_query()) {
      max_[Rows::kRow] = INFINITY;
      lost = false;
    }
    if (__any_sync(0xffffffff, lost)) {
      recompute_weights<Rows::kRow>(scores, sum, lost, rows);
    }
  }

  // For rows whose scores have been lost to overflow.
  template <int kHalf, class Rows>
  __device__ __forceinline__ void recompute_weights(float (&scores)[kScores], float& sum, bool lost,
                                                    const Rows& rows) {
    float top = kNothing;
#pragma unroll 1
    for (int group = 0; group < kScores / 4; ++group) {
      const float2 pair = rows.scores(group);
      top = fmaxf(top, fmaxf(logit_of(args_, pair.x), logit_of(args_, pair.y)));
    }
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
    if (lost) {
      fade_[kHalf] = power_of_2(max_[kHalf] - top);
      sum_[kHalf] *= fade_[kHalf];
      max_[kHalf] = top;
      sum = 0;
    }
#pragma unroll 1
    for (int group = 0; group < kScores / 4; ++group) {
      const float2 pair = rows.scores(group);
      const float weights[2] = {power_of_2(logit_of(args_, pair.x) - max_[kHalf]),
                                power_of_2(logit_of(args_, pair.y) - max_[kHalf])};
      sum += lost ? weights[0] + weights[1] : 0.0f;
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const bool is_its = lost && row_of(i) == kHalf && i / 4 == group;
        scores[i] = is_its ? weights[i % 2] : scores[i];
      }
    }
  }

  const Arguments& args_;
  bool settled_ = false;
  float max_[2], sum_[2], fade_[2];
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
