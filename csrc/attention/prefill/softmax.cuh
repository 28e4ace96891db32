// The softmax of a warpgroup's rows, online: weights 2^(score - max), relative to a maximum that
// rises only when a score is far above it.
#pragma once

#include "common/pack_pair.cuh"
#include "score_fragment.cuh"

namespace ostinato::prefill {

class Softmax {
 public:
  __device__ explicit Softmax(const Arguments& args) : args_(args) {}

  // Starts anew.
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      max_[half] = kNothing;
      sum_[half] = 0;
    }
  }

  // Scores of the work tile's n-th tile become weights. Whether outputs so far must be faded
  // (fade()).
  template <class Find>
  __device__ __forceinline__ bool weigh(float (&scores)[kScores], int key, bool hiding,
                                        const Find& find_seen) {
    take_logits(scores);
    if (hiding) {
      hide(scores, key, find_seen());
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
    settled_ = !hiding;
    float sum[2];
    exponentiate(scores, sum);
    sum_[0] += sum[0];
    sum_[1] += sum[1];
    return raised;
  }

  // Whether each row has a maximum of many keys, so that weigh_blindly() may follow.
  __device__ __forceinline__ bool is_settled() const { return settled_; }

  // As weigh(), for a tile of which all keys are seen, and without looking for its maximum: a sum
  // that is high beside those before tells that there was a far higher score. A sum is needed
  // anyway, a maximum takes a third of the instructions. `again` says scores again
  // (recompute_scores.cuh), for weights that are infinite.
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

  // Outputs that are relative to the maximum before.
  __device__ __forceinline__ void fade(float (&outputs)[kOutputs]) const {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      outputs[i] *= fade_[row_of(i)];
    }
  }

  // Of the whole row: the sum of its weights, so far each thread's own.
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
  // Results are as exact relative to any maximum that is not far below the row's, and to raise it
  // is seldom needed.
  static constexpr float kSlack = 2;
  // Of a thread's weights of a row and tile, beside those of all tiles before. Where one weight
  // outdoes the others it should be 1, which is not rounded.
  static constexpr float kHighRatio = 4;
  static constexpr float kHighSum = 2;
  static constexpr float kMostSum = 16384;  // finite in 16 bits
  static constexpr float kLost = 0x1p120f;  // weights from here on may have been anything

  __device__ __forceinline__ void take_logits(float (&scores)[kScores]) const {
    if (args_.direct != 0) {
      return;
    }
    if (args_.params.softcap > 0) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        scores[i] = capped_logit(args_, scores[i]);
        if (i % 4 == 3) {
          __syncwarp();  // more at a time would take registers
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        scores[i] *= args_.logit_scale;
      }
    }
  }

  // Scores become weights; their sums of the thread.
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
      // A row's results depend on no other row.
      const bool rises = top[half] * args_.factor > max_[half] + kSlack;
      const float raised = rises ? top[half] * args_.factor : max_[half];
      fade_[half] = power_of_2(max_[half] - raised);
      sum_[half] *= fade_[half];
      max_[half] = raised;
    }
  }

  // Where a row's weights are too great: a greater maximum, and weights relative to it. Those that
  // are infinite are found again from the scores.
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
      // A row's results depend on no other row.
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

  // Rows behind the work tile's last query may hold anything, whose weights would be lost tile by
  // tile: beside an infinite maximum they are never great again, and nobody asks what becomes of
  // them.
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

  // For rows that have lost their scores.
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

// As the MMA takes them: of 16 keys, rows g and g + 8 of the first 8, then of the others.
__device__ __forceinline__ void pack_weights(const float (&scores)[kScores],
                                             uint32_t (&weights)[kKeySteps][4]) {
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) {
    weights[i / 4][i % 4] = pack_pair<Type>(scores[2 * i], scores[2 * i + 1]);
  }
}

}  // namespace ostinato::prefill
