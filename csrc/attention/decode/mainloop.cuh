// The mainloop of one warp over blocks of 16 tokens, with online softmax: S = K Q^T, P = 2^(S -
// max), O += V^T P.
#pragma once

#include <cmath>

#include "nonfinite_values.cuh"
#include "q_fragments.cuh"
#include "score_fragment.cuh"

namespace ostinato::decode {

class Mainloop {
 public:
  __device__ explicit Mainloop(const Arguments& params) : params_(params) {}

  Queries queries;

  // Whether the next work tile's queries are fetched while the current ones are in use.
  static constexpr bool kFetchesAhead = kColumnTiles == 1 && kDim <= 128;

  // Starts a split with the fetched queries. `key_scale`: the common scale of all keys.
  __device__ __forceinline__ void begin(float key_scale) {
    const int lane = threadIdx.x % 32;
    // Offsets of this lane's ldmatrix rows in a block of K and of V: row and first vector.
    const int key_row = lane % 16, value_row = lane % 8 + lane / 16 * 8;
    key_offset_ = keep(key_row * kStripBytes + (lane / 16 ^ lane % 8) * 16);
    // load of the head dim
    const int first = kChainPerCta ? static_cast<int>(threadIdx.x) / 32 * kHeldLoads : 0;
    value_offset_ = keep(value_row * kStripBytes + first / 4 * (kStripBytes * kBlockTokens) +
                         ((lane / 8 % 2 ^ lane % 8) * 16 ^ first % 4 * 32));
    queries.take(params_, key_scale);
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
      max_[t] = {{kNothing, kNothing}};
      sum_[t] = {{0, 0}};
#pragma unroll
      for (int s = 0; s < kHeldSteps; ++s) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          out_[s][t][i] = 0;
        }
      }
    }
  }

  // Computes S of a block of keys.
  __device__ __forceinline__ void multiply_keys(const uint8_t* block) {
    const uint32_t base = shared_address(block) + key_offset_;
    // Several accumulators, since MMAs into the same one are serialised.
    constexpr int kChains = kColumnTiles == 1 ? 4 : kQuantized ? 1 : 2;
    float chains[kChains][kColumnTiles][4] = {};
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      uint32_t words[4], keys[4];
      load_matrices(words, vector_address(base, load));
#pragma unroll
      for (int half = 0; half < kStepsPerLoad; ++half) {
        const int s = load * kStepsPerLoad + half;
        if (s < kSteps) {
          key_operand(keys, words, half);
#pragma unroll
          for (int t = 0; t < kColumnTiles; ++t) {
            multiply_by_warp<Operand>(chains[s % kChains][t], keys, queries.words(s, t));
          }
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score_.values[t][i] = chains[0][t][i] + (kChains > 1 ? chains[kChains / 2][t][i] : 0.0f);
        if constexpr (kChains > 2) {
          score_.values[t][i] += chains[1][t][i] + chains[3][t][i];
        }
      }
    }
  }

  // The block's scores in base 2, with the exponents of the value scales. `hides_some`: whether the
  // mask hides any token of the block.
  __device__ __forceinline__ Scores scale(const Mask& mask, int token, bool hides_some,
                                          const TokenScales& scales) {
    scale_scores(scales);
    if (hides_some) {
      hide_scores(mask, token, mask.first_row(token) + static_cast<int>(threadIdx.x) % 32 / 4);
    }
    Scores shifted;
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        shifted.values[t][i] =
            score_.values[t][i] + (kQuantized ? scales.value_exponent[i / 2] : 0.0f);
      }
    }
    return shifted;
  }

  // Computes P of the block's scores, and updates the running maxima and sums.
  __device__ __forceinline__ void weigh(const Mask& mask, int token, bool hides_some,
                                        const TokenScales& scales) {
    const Scores shifted = scale(mask, token, hides_some, scales);
    bool rises = false;
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        rises |= fmaxf(shifted.values[t][e], shifted.values[t][e + 2]) > max_[t].of[e];
      }
    }
    if (__any_sync(0xffffffff, rises)) {
#pragma unroll
      for (int t = 0; t < kColumnTiles; ++t) {
        raise(t, highest(shifted.values[t]));
      }
    }
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
      add_sums(t, weigh_tile(t, max_[t], shifted.values[t], scales));
    }
  }

  // Computes P of a tile of columns, relative to the given maxima. Returns the sums of this lane's
  // weights.
  __device__ __forceinline__ Columns weigh_tile(int t, const Columns& tops,
                                                const float (&shifted)[4],
                                                const TokenScales& scales) {
    const float (&scores)[4] = score_.values[t];
    float weight[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      weight[i] = power_of_2(shifted[i] - tops.of[i % 2]);
    }
    Columns sums;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      sums.of[e] = kQuantized && scales.own
                       ? power_of_2(scores[e] - tops.of[e]) + power_of_2(scores[e + 2] - tops.of[e])
                       : weight[e] + weight[e + 2];
    }
    if (kQuantized && scales.nonfinite) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool visible = scores[i] != -INFINITY;
        weight[i] = visible && scales.value_exponent[i / 2] == kNoExponent ? NAN : weight[i];
      }
    }
    // Transposed: tokens become the k dimension of the next MMA.
    weight_[t][0] = transpose(pack_pair<Operand>(weight[0], weight[1]));
    weight_[t][1] = transpose(pack_pair<Operand>(weight[2], weight[3]));
    return sums;
  }

  // Rescales a tile's outputs and sums to new maxima, which are at least as high. Not skipped for
  // small increases: the largest weight must be exactly 1, since its rounding matters where one
  // token dominates. Sums are rounded after each operation, so that FMA contraction cannot make
  // kernels differ that must give the same bits.
  __device__ __forceinline__ void raise(int t, const Columns& tops) {
    float fade[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float top = fmaxf(tops.of[e], max_[t].of[e]);
      fade[e] = power_of_2(max_[t].of[e] - top);
      sum_[t].of[e] = __fmul_rn(sum_[t].of[e], fade[e]);
      max_[t].of[e] = top;
    }
#pragma unroll
    for (int s = 0; s < kHeldSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        out_[s][t][i] *= fade[i % 2];
      }
    }
  }
  __device__ __forceinline__ void add_sums(int t, const Columns& sums) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      sum_[t].of[e] = __fadd_rn(sum_[t].of[e], sums.of[e]);
    }
  }

  // `hides_some` as above. kSeveral: sequences may have several queries.
  template <bool kSeveral>
  __device__ __forceinline__ void multiply_values(const uint8_t* block, const Mask& mask, int token,
                                                  bool hides_some) {
    if (!hides_some) {
      add_values<Take::kAll>(block, {}, 0);
    } else if (kSeveral && mask.queries > 1 && holds_no_number(block, mask, token)) {
      add_values_by_query(block, mask, token);
    } else {
      // Values masked for all queries may be NaN, and 0 * NaN is NaN.
      add_values<Take::kMasked>(
          block, {mask.first_own(token, mask.begin()), mask.seqlen, mask.first_row(token)}, 0);
    }
  }

  // Reduces the sums of weights over the lanes.
  __device__ __forceinline__ void end() {
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          sum_[t].of[e] += __shfl_xor_sync(0xffffffff, sum_[t].of[e], step);
        }
      }
    }
  }

  __device__ __forceinline__ const Columns& max(int t) const { return max_[t]; }
  __device__ __forceinline__ const Columns& sum(int t) const { return sum_[t]; }
  // P of the first tile of columns. In a serial chain another warp may have computed it.
  __device__ __forceinline__ uint2 weights() const { return {weight_[0][0], weight_[0][1]}; }
  __device__ __forceinline__ void set_weights(const uint2& weights) {
    weight_[0][0] = weights.x;
    weight_[0][1] = weights.y;
  }
  // Two columns of tile t, two elements of step s of the head dim.
  __device__ __forceinline__ float4 out(int s, int t) const {
    return make_float4(out_[s][t][0], out_[s][t][1], out_[s][t][2], out_[s][t][3]);
  }
  // The element of a step that out() holds first and second (i = 0, 1) in lanes 4 row to 4 row + 3.
  static __device__ __forceinline__ int dim_of(int row, int i) {
    return kQuantized ? row * 2 + i : row + i * 8;
  }

 private:
  // Address of the two vectors of a step. XOR, as in the swizzle of the offset.
  static __device__ __forceinline__ uint32_t vector_address(uint32_t base, int step) {
    return (base ^ (step % 4 * 32)) + step / 4 * (kStripBytes * kBlockTokens);
  }

  // The query of a lane's column. Recomputed, since it is seldom needed.
  __device__ __forceinline__ int query_of(int t, int e) const {
    return params_.by.group.divide(Queries::first_column() + t * 8 + threadIdx.x % 4 * 2 + e);
  }

  __device__ __forceinline__ void scale_scores(const TokenScales& scales) {
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float factor =
            kQuantized ? queries.factor(t, i % 2) * scales.key[i / 2] : queries.factor(t, i % 2);
        score_.values[t][i] = __fmul_rn(score_.values[t][i], factor);
      }
    }
    if (params_.softcap > 0) {
#pragma unroll
      for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float capped = kLog2E * hyperbolic_tangent(score_.values[t][i]);
          score_.values[t][i] = __fmul_rn(params_.softcap, capped);
        }
      }
    }
  }

  // Masks the scores of a block; this lane has the tokens `own` and `own` + 8.
  __device__ __forceinline__ void hide_scores(const Mask& mask, int token, int own) {
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = own + i / 2 * 8, query = query_of(t, i % 2);
        const bool visible =
            row >= mask.first_own(token, mask.first(query)) && row < mask.stop(query);
        score_.values[t][i] = visible ? score_.values[t][i] : -INFINITY;
      }
    }
  }

  enum class Take { kAll, kMasked, kByOneQuery };

  // O += V^T P with all of V, or with the values that `value_mask` keeps, for the columns of one
  // query or of all.
  template <Take kTake>
  __device__ __forceinline__ void add_values(const uint8_t* block, const ValueMask& value_mask,
                                             int query) {
    const uint32_t base = shared_address(block) + value_offset_;
#pragma unroll
    for (int load = 0; load < kHeldLoads; ++load) {
      uint32_t words[4], values[4];
      if constexpr (kTake == Take::kByOneQuery) {
        // keeps the compiler from hoisting loads, whose registers the common path needs
        __syncwarp();
      }
      load_transposed(words, vector_address(base, load));
#pragma unroll
      for (int half = 0; half < kStepsPerLoad; ++half) {
        const int s = load * kStepsPerLoad + half;
        if (s < kHeldSteps) {
          value_operand(values, words, half);
          if constexpr (kTake != Take::kAll) {
            value_mask.apply(values);
          }
#pragma unroll
          for (int t = 0; t < kColumnTiles; ++t) {
            if constexpr (kTake == Take::kByOneQuery) {
              float sums[4] = {out_[s][t][0], out_[s][t][1], out_[s][t][2], out_[s][t][3]};
              multiply_by_warp<Operand>(sums, values, weight_[t]);
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                out_[s][t][i] = query_of(t, i % 2) == query ? sums[i] : out_[s][t][i];
              }
            } else {
              multiply_by_warp<Operand>(out_[s][t], values, weight_[t]);
            }
          }
        }
      }
    }
  }

  // For blocks with non-finite values: multiplies each query's columns with the values visible to
  // that query only. Other warps' queries change nothing. Finite values give the same bits as
  // add_values().
  __device__ __forceinline__ void add_values_by_query(const uint8_t* block, const Mask& mask,
                                                      int token) {
#pragma unroll 1
    for (int query = 0; query < mask.queries; ++query) {
      const ValueMask value_mask(mask.first_own(token, mask.first(query)), mask.stop(query),
                                 mask.first_row(token));
      add_values<Take::kByOneQuery>(block, value_mask, query);
    }
  }

  const Arguments& params_;
  uint32_t key_offset_, value_offset_;
  Scores score_;
  uint32_t weight_[kColumnTiles][2];
  float out_[kHeldSteps][kColumnTiles][4];
  Columns max_[kColumnTiles], sum_[kColumnTiles];  // maxima of scores in base 2
};

}  // namespace ostinato::decode
