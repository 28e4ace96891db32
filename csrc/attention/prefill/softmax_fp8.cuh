// The softmax of a warpgroup's rows with 8-bit weights: online, in two steps, between which
// products of the tile before go on.
//
// Weights are 2^(score - reference), and a row's reference lies 7 below its maximum, so that the
// greatest weight is 128 and those 2^-13 as great still have all bits of e4m3. It rises when a
// score is above the maximum by more than would still fit: a row that one key dominates has its
// weight exactly. That is seldom, and had better be: all warps of a warpgroup wait for one that
// does it. Sums are those of the weights before they are rounded.
#pragma once

#include "fp8_ptx.cuh"
#include "score_fragment.cuh"

namespace ostinato::prefill {

class Softmax {
 public:
  __device__ explicit Softmax(const Arguments& args) : args_(args) {}

  // The factor of a KV head's scores.
  __device__ __forceinline__ static float read_scale(const Arguments& args, int kv_head) {
    const Params& p = args.params;
    return p.q_scale[kv_head * p.q_scale_stride] * p.k_scale[kv_head * p.k_scale_stride];
  }

  // Starts anew, with that factor.
  __device__ __forceinline__ void begin(float scale) {
    scale_ = scale;
    // With a scale that is not above 0, or a cap, a greater score need not be a greater logit.
    const bool direct = args_.direct != 0 && scale_ > 0;
    // As a value of the warp where 128 outputs leave no register for a lane's own.
    direct_ = kOutputs > 64 ? __any_sync(0xffffffff, direct) : direct;
    factor_ = direct_ ? args_.logit_scale * scale_ : 1.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      reference_[half] = kNothing;
      sum_[half] = 0;
      fade_[half] = 1;
      limit_[half] = kNothing;
    }
  }
  __device__ __forceinline__ bool is_direct() const { return direct_; }

  // The first step of a tile: `hide_unseen` is called if it must be, and the references rise if
  // they must.
  template <class Hide>
  __device__ __forceinline__ void find_reference(float (&scores)[kScores], bool hiding,
                                                 const Hide& hide_unseen) {
    take_logits(scores);
    if (hiding) {
      hide_unseen();
    }
    float top[2];
    find_tops(scores, top);
    top[0] *= factor_;
    top[1] *= factor_;
    fade_[0] = fade_[1] = 1;
    if (__any_sync(0xffffffff, top[0] > reference_[0] + kMost || top[1] > reference_[1] + kMost)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float most = of_row(top[half]);
        raise(half, most > reference_[half] + kMost, most, fade_);
      }
    }
  }

  // Likewise where outputs are not multiplied with every tile: whether some row of the warp has
  // risen, by `fade`, which is set only then. Scores are compared before they are scaled. kExact:
  // nothing is hidden, and scores are direct.
  template <bool kExact, class Hide>
  __device__ __forceinline__ bool raise_reference(float (&scores)[kScores], bool hiding,
                                                  const Hide& hide_unseen, float (&fade)[2]) {
    if constexpr (!kExact) {
      take_logits(scores);
      if (__builtin_expect(hiding, false)) {
        hide_unseen();
      }
    }
    float top[2];
    find_tops(scores, top);
    const bool risen = __any_sync(0xffffffff, top[0] > limit_[0] || top[1] > limit_[1]);
    if (__builtin_expect(risen, false)) {
      const float inverse = __fdividef(1.0f, factor_);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float most = of_row(top[half]);
        const bool rises = most > limit_[half];
        raise(half, rises, most * factor_, fade);
        limit_[half] = rises ? (reference_[half] + kMost) * inverse : limit_[half];
      }
    }
    return risen;
  }

  // The second: scores become weights, and are summed.
  __device__ __forceinline__ void exponentiate(float (&scores)[kScores]) {
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      scores[i] = power_of_2(fmaf(scores[i], factor_, -reference_[row_of(i)]));
      sums[i % 4] += scores[i];
    }
    add_sums(sums);
  }

  // Likewise those from kFirst to kEnd - 1; add_sums() follows the last.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void exponentiate_some(float (&scores)[kScores],
                                                    float (&sums)[4]) const {
#pragma unroll
    for (int i = kFirst; i < kEnd; ++i) {
      scores[i] = power_of_2(fmaf(scores[i], factor_, -reference_[row_of(i)]));
      sums[i % 4] = i < 4 ? scores[i] : sums[i % 4] + scores[i];
    }
  }
  __device__ __forceinline__ void add_sums(const float (&sums)[4]) {
    sum_[0] += sums[0] + sums[1];
    sum_[1] += sums[2] + sums[3];
  }

  // What outputs before the tile are to be multiplied with: they are relative to the reference
  // before.
  __device__ __forceinline__ float fade(int half) const { return fade_[half]; }
  __device__ __forceinline__ void fade_now(float (&outputs)[kOutputs]) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      outputs[i] *= fade_[row_of(i)];
    }
    fade_[0] = fade_[1] = 1;
  }

  // Of the whole row: the sum of its weights, so far each thread's own.
  __device__ __forceinline__ void end() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum_[half] += __shfl_xor_sync(0xffffffff, sum_[half], 1);
      sum_[half] += __shfl_xor_sync(0xffffffff, sum_[half], 2);
    }
  }

  __device__ __forceinline__ float maximum(int half) const { return reference_[half]; }
  __device__ __forceinline__ float total(int half) const { return sum_[half]; }
  // The weight of one key.
  __device__ __forceinline__ float weight(int half, float score) const {
    return power_of_2(logit_of(args_, score * scale_) - reference_[half]);
  }

 private:
  static constexpr float kTop = 7;      // of a maximum above the reference: 2^7
  static constexpr float kMost = 8.75;  // of any score: 2^8.75 < 448

  __device__ __forceinline__ void take_logits(float (&scores)[kScores]) const {
    if (direct_) {
      return;
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      scores[i] = logit_of(args_, scores[i] * scale_);
      if (i % 4 == 3) {
        __syncwarp();  // more at a time would take registers
      }
    }
  }

  // The greatest of a thread's scores in each of its rows.
  __device__ __forceinline__ static void find_tops(const float (&scores)[kScores],
                                                   float (&top)[2]) {
    float tops[4] = {scores[0], scores[1], scores[2], scores[3]};
#pragma unroll
    for (int i = 4; i < kScores; ++i) {
      tops[i % 4] = fmaxf(tops[i % 4], scores[i]);
    }
    top[0] = fmaxf(tops[0], tops[1]);
    top[1] = fmaxf(tops[2], tops[3]);
  }

  __device__ __forceinline__ static float of_row(float top) {
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
    return fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
  }

  // Whether a row rises is told by the comparison by which its warp came here, not by another one
  // that may differ in the last bit: then its results would depend on other rows.
  __device__ __forceinline__ void raise(int half, bool rises, float top, float (&fade)[2]) {
    const float raised = rises ? top - kTop : reference_[half];
    fade[half] = power_of_2(reference_[half] - raised);
    sum_[half] *= fade[half];
    reference_[half] = raised;
  }

  const Arguments& args_;
  bool direct_;
  float scale_, factor_;
  float reference_[2], sum_[2], fade_[2];
  float limit_[2];  // of scores that are not scaled yet; above it a reference rises
};

// As the MMA takes them: of 32 keys, rows g and g + 8 of the first 16, then of the others. What it
// takes for keys 4c to 4c + 3 are keys 2c, 2c + 1, 2c + 8 and 2c + 9 (transpose_v.cuh).
__device__ __forceinline__ void pack_weights(const float (&scores)[kScores],
                                             uint32_t (&weights)[kKeySteps][4]) {
#pragma unroll
  for (int i = 0; i < kScores / 4; ++i) {
    const float* const first = &scores[i / 2 * 8 + i % 2 * 2];  // of two groups of 8 columns
    weights[i / 4][i % 4] = pack_four(first[0], first[1], first[4], first[5]);
  }
}

}  // namespace ostinato::prefill
