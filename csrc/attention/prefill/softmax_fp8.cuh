// Online softmax of a warpgroup's rows with 8-bit weights, in two steps between which the MMAs of
// the previous tile run.
//
// Weights are 2^(score - reference), and a row's reference is 7 below its maximum, so that the
// largest weight is 128, and weights down to 2^-13 of it keep all bits of e4m3. The reference rises
// only if a score would not fit: then the weight of a dominating key is exact. That is rare and
// must be, since all warps of a warpgroup wait for a warp that rescales. Sums are taken before the
// weights are rounded.
#pragma once

#include "fp8_ptx.cuh"
#include "score_fragment.cuh"

namespace ostinato::prefill {

class Softmax {
 public:
  __device__ explicit Softmax(const Arguments& args) : args_(args) {}

  // The scale of a KV head's scores.
  __device__ __forceinline__ static float read_scale(const Arguments& args, int kv_head) {
    const Params& p = args.params;
    return p.q_scale[kv_head * p.q_scale_stride] * p.k_scale[kv_head * p.k_scale_stride];
  }

  // Starts a work tile with that scale.
  __device__ __forceinline__ void begin(float scale) {
    scale_ = scale;
    // With a cap, or a scale that is not positive, a greater score need not be a greater logit.
    const bool direct = args_.direct != 0 && scale_ > 0;
    // Warp-uniform where 128 outputs leave no register per lane.
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

  // Step 1 of a tile: calls `apply_mask` if keys are masked, and raises references if needed.
  template <class ApplyMask>
  __device__ __forceinline__ void find_reference(float (&scores)[kScores], bool masked,
                                                 const ApplyMask& apply_mask) {
    take_logits(scores);
    if (masked) {
      apply_mask();
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

  // Step 1 where outputs are not rescaled with every tile: returns whether the reference of some
  // row of the warp has risen, and only then sets `fade`. Compares unscaled scores. kExact: nothing
  // is masked, and scores are direct.
  template <bool kExact, class ApplyMask>
  __device__ __forceinline__ bool raise_reference(float (&scores)[kScores], bool masked,
                                                  const ApplyMask& apply_mask, float (&fade)[2]) {
    if constexpr (!kExact) {
      take_logits(scores);
      if (__builtin_expect(masked, false)) {
        apply_mask();
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

  // Step 2: converts scores to weights, and sums them.
  __device__ __forceinline__ void exponentiate(float (&scores)[kScores]) {
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      scores[i] = power_of_2(fmaf(scores[i], factor_, -reference_[row_of(i)]));
      sums[i % 4] += scores[i];
    }
    add_sums(sums);
  }

  // Step 2 for scores kFirst to kEnd - 1; add_sums() follows the last part.
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

  // Factor of the outputs before this tile, which are relative to the previous reference.
  __device__ __forceinline__ float fade(int half) const { return fade_[half]; }
  __device__ __forceinline__ void fade_now(float (&outputs)[kOutputs]) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      outputs[i] *= fade_[row_of(i)];
    }
    fade_[0] = fade_[1] = 1;
  }

  // Reduces the sums of weights from threads to rows.
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
  static constexpr float kTop = 7;      // a new maximum's distance above the reference: 2^7
  static constexpr float kMost = 8.75;  // largest distance of any score: 2^8.75 < 448

  __device__ __forceinline__ void take_logits(float (&scores)[kScores]) const {
    if (direct_) {
      return;
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      scores[i] = logit_of(args_, scores[i] * scale_);
      if (i % 4 == 3) {
        __syncwarp();  // more at a time would need registers
      }
    }
  }

  // The thread's maximum score in each of its rows.
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

  // `rises` is the result of the comparison that brought the warp here. Another comparison might
  // differ in the last bit, and a row's result would depend on other rows.
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
  float limit_[2];  // in unscaled scores: above it the reference rises
};

// A operand of the PV MMA: of 32 keys, rows g and g + 8 of the first 16, then of the others. Its
// elements 4c to 4c + 3 are keys 2c, 2c + 1, 2c + 8 and 2c + 9 (transpose_v.cuh).
__device__ __forceinline__ void pack_weights(const float (&scores)[kScores],
                                             uint32_t (&weights)[kKeySteps][4]) {
#pragma unroll
  for (int i = 0; i < kScores / 4; ++i) {
    const float* const first = &scores[i / 2 * 8 + i % 2 * 2];  // of two groups of 8 columns
    weights[i / 4][i % 4] = pack_four(first[0], first[1], first[4], first[5]);
  }
}

}  // namespace ostinato::prefill
