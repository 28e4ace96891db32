// The logits of online softmax (softmax.cuh): scores times scales, and the maxima of rows so far.
#pragma once

#include "score_fragment.cuh"
#include "token_scales.cuh"

namespace ostinato::prefill {

class SoftmaxLogits {
 public:
  __device__ explicit SoftmaxLogits(const Arguments& args) : args_(args) {}

  // Starts a work tile. `units`: of the thread's rows, if queries have been converted.
  template <class... Units>
  __device__ __forceinline__ void begin(int kv_head, Units... units) {
    if constexpr (kTokenScales) {
      shift_ = kLeastShift;
      scale_ = 1;  // scores are multiplied one by one
    } else if constexpr (kDequantizes) {
      scale_ = args_.params.k_scale[kv_head * args_.params.k_scale_stride];
    }
    if constexpr (kConvertsQueries) {
      const float of_rows[2] = {units...};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_scale_[half] = scale_ * of_rows[half];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      max_[half] = kNothing;
      sum_[half] = 0;
    }
  }

  // Reads the scales of a tile's keys, if tokens have their own: before their scores are known,
  // since that takes long while tensor cores read operands.
  __device__ __forceinline__ void read_key_scales(const TileScales* scales) {
    if constexpr (kTokenScales) {
      greatest_ = fmaxf(scales->greatest[0], scales->greatest[1]);
    }
    if constexpr (kReadsScalesEarly) {
      read_scales(scales->key);
    }
  }

 protected:
  // Three warpgroups have no registers for it.
  static constexpr bool kReadsScalesEarly = kTokenScales && kConsumers == 2;

  // The precision is the same relative to any maximum not far below the row's, so that rescaling is
  // rarely needed.
  static constexpr float kSlack = 2;

  // With scales of tokens, maxima are `shift_` above the logits, so that weights, multiplied by the
  // scales of values, are as finite in 16 bits as without: the exponent of the greatest of these
  // scales so far, since outputs must be rescaled when it rises. It is the same in all threads.
  static constexpr float kLeastShift = -60, kMostShift = 100;
  __device__ __forceinline__ bool raise_shift() {
    if constexpr (!kTokenScales) {
      return false;
    } else {
      const float exponent =
          static_cast<float>(static_cast<int>(__float_as_uint(greatest_) >> 23)) - 127.0f;
      const float raised = fmaxf(shift_, fminf(exponent, kMostShift));
      const float rise = raised - shift_;
      shift_ = raised;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        fade_[half] = 1;
        if (rise > 0) {
          max_[half] += rise;
          fade_by(half, power_of_2(-rise));
        }
      }
      return rise > 0;
    }
  }
  // The weight of a key whose logit is the row's maximum.
  __device__ __forceinline__ float one() const { return kTokenScales ? power_of_2(-shift_) : 1.0f; }
  // The maximum that has a weight of one().
  __device__ __forceinline__ float maximum_of(float logit) const {
    return kTokenScales ? logit + shift_ : logit;
  }
  __device__ __forceinline__ bool is_far_above(float logit, int half) const {
    return maximum_of(logit) > max_[half] + kSlack;
  }
  // Rescales a row's sums and, later, its outputs.
  __device__ __forceinline__ void fade_by(int half, float factor) {
    fade_[half] = kTokenScales ? fade_[half] * factor : factor;
    sum_[half] *= factor;
  }

  // Multiplies maxima of a row's scores.
  __device__ __forceinline__ float factor(int half) const {
    if constexpr (kTokenScales) {
      return 1;  // take_logits() has multiplied the scores
    } else if constexpr (kDequantizes) {
      return is_direct() ? args_.logit_scale * scale_of_row(half) : 1.0f;
    } else {
      return args_.factor;
    }
  }
  // Multiplies scores of dequantised keys.
  __device__ __forceinline__ float scale_of_row(int half) const {
    return kConvertsQueries ? row_scale_[half] : scale_;
  }
  // Whether a greater score is a greater logit.
  __device__ __forceinline__ bool is_direct() const {
    if constexpr (kDequantizes) {
      return args_.direct != 0 && scale_ > 0;
    } else {
      return args_.direct != 0;
    }
  }
  // Of a score of a query that is not converted.
  __device__ __forceinline__ float logit(float score) const {
    if constexpr (kDequantizes) {
      score *= scale_;
    }
    return logit_of(args_, score);
  }

  // With scales of tokens.
  __device__ __forceinline__ void take_token_logits(float (&scores)[kScores],
                                                    const TileScales& scales) const {
    const float softcap = args_.params.softcap;
#pragma unroll
    for (int i = 0; i < kScores; i += 8) {
      const float4 factors = key_scales(scales, i);
#pragma unroll
      for (int j = i; j < i + 8; ++j) {
        scores[j] = in_units(scores[j], j) * factor_of(factors, j);
      }
    }
    if (softcap > 0) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        scores[i] = softcap * (kLog2E * hyperbolic_tangent(scores[i]));
        if (i % 4 == 3) {
          __syncwarp();  // more at a time would need registers
        }
      }
    }
  }
  // Score i of a converted query, as of the query.
  __device__ __forceinline__ float in_units(float score, int i) const {
    return kConvertsQueries ? score * row_scale_[row_of(i)] : score;
  }

  // The scales of the keys of scores i to i + 7, i a multiple of 8.
  __device__ __forceinline__ float4 key_scales(const TileScales& scales, int i) const {
    return kReadsScalesEarly ? scales_[i / 8] : scales.key.columns(i / 2);
  }
  // That of one of them.
  __device__ __forceinline__ static float factor_of(const float4& factors, int i) {
    const float first = i % 2 == 0 ? factors.x : factors.y;
    return i % 8 < 4 ? first : i % 2 == 0 ? factors.z : factors.w;
  }

  __device__ __forceinline__ void read_scales(const TileFactors& factors) {
#pragma unroll
    for (int i = 0; i < kScores; i += 8) {
      scales_[i / 8] = factors.columns(i / 2);
    }
  }
  // Reads those of a tile's values, once those of its keys have been used.
  __device__ __forceinline__ void read_value_scales(const TileScales* scales) {
    if constexpr (kReadsScalesEarly) {
      read_scales(scales->value);
    }
  }

  // Multiplies a tile's weights by the scales of its values.
  __device__ __forceinline__ void apply_value_scales(float (&scores)[kScores],
                                                     const TileScales* scales) {
    if constexpr (kTokenScales) {
#pragma unroll
      for (int i = 0; i < kScores; i += 8) {
        const float4 factors = kReadsScalesEarly ? scales_[i / 8] : scales->value.columns(i / 2);
#pragma unroll
        for (int j = i; j < i + 8; ++j) {
          scores[j] *= factor_of(factors, j);
        }
      }
    }
  }

  __device__ __forceinline__ void take_logits(float (&scores)[kScores],
                                              const TileScales* scales) const {
    if constexpr (kTokenScales) {
      take_token_logits(scores, *scales);
      return;
    }
    if constexpr (kDequantizes) {
      if (is_direct()) {
        return;
      }
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        scores[i] *= scale_of_row(row_of(i));
      }
    } else if (args_.direct != 0) {
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

  const Arguments& args_;
  float scale_;                          // of dequantised keys
  float row_scale_[2];                   // the same with the units of converted queries
  float4 scales_[ceil_div(kScores, 8)];  // of a tile's keys, then values
  float greatest_;                       // of the scales of a tile's values
  float shift_;                          // with scales of tokens, of the maxima
  float max_[2], sum_[2], fade_[2];
};

}  // namespace ostinato::prefill
