// A warp's attention to blocks of 16 tokens, online: S = K Q^T, P = 2^(S - max), O += V^T P.
#pragma once

#include <cmath>
#include <limits>

#include "common/pack_pair.cuh"
#include "decode_mma.cuh"
#include "decode_values.cuh"

namespace ostinato::decode {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kNothing = -std::numeric_limits<float>::max();  // the maximum of no scores

// Columns are queries times heads of the group, a lane's those of the MMA's accumulators:
// 8 t + 2 (lane % 4) and the next one.
class Attention {
 public:
  __device__ explicit Attention(const Arguments& params) : params_(params) {}

  static __device__ __forceinline__ int first_column() {
    return threadIdx.x / 32 % kTeamWarps * kWarpColumns;
  }

  // Whether the queries of a segment are fetched while those of the one before are in use.
  static constexpr bool kFetchesAhead = kColumnTiles == 1 && kDim <= 128;

  // Finds the queries of a segment.
  __device__ __forceinline__ void locate(const Arguments& params, int first_row, int queries,
                                         int head) {
    const int lane = threadIdx.x % 32;
    const int group = params.group;
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
      const int column = first_column() + t * 8 + lane / 4;
      // What is no row may be anything: a copy of the first.
      const int query = params.by.group.divide(column);
      const int row = query < queries ? query : 0;
      const int of_group = query < queries ? column - query * group : 0;
      located_[t] = static_cast<const Type*>(params.q.data) + lane % 4 * kQueryPairStride +
                    (first_row + row) * params.q.stride +
                    (head * group + of_group) * params.q.head_stride;
    }
  }

  // Begins to load them.
  __device__ __forceinline__ void fetch() {
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          fetched_[s][t][i] =
              *reinterpret_cast<const uint32_t*>(located_[t] + s * 16 + i * kNextPair);
        }
      }
    }
  }

  // Starts anew, with the fetched queries. `key_scale` is that of all keys.
  __device__ __forceinline__ void begin(float key_scale) {
    const int lane = threadIdx.x % 32;
    // Of the fragments of K and V in a block: the row that this lane names, and its first vector.
    const int key_row = lane % 16, value_row = lane % 8 + lane / 16 * 8;
    key_offset_ = keep(key_row * kStripBytes + (lane / 16 ^ lane % 8) * 16);
    value_offset_ = keep(value_row * kStripBytes + (lane / 8 % 2 ^ lane % 8) * 16);
    const float scale =
        params_.softcap > 0 ? params_.scale / params_.softcap : params_.scale * kLog2E;
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        q_[s][t][0] = fetched_[s][t][0];
        q_[s][t][1] = fetched_[s][t][1];
      }
      factor_[t][0] = factor_[t][1] = scale * key_scale;
      if constexpr (!std::is_same_v<Operand, Type>) {
        convert_queries(t);
      }
    }
    restart();
  }

  // Once more, with the same queries.
  __device__ __forceinline__ void restart() {
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
      max_[t][0] = max_[t][1] = kNothing;
      sum_[t][0] = sum_[t][1] = 0;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          out_[s][t][i] = 0;
        }
      }
    }
  }

  // S of a block of keys.
  __device__ __forceinline__ void multiply_keys(const uint8_t* block) {
    const uint32_t base = shared_address(block) + key_offset_;
    // Products into one accumulator wait for each other, so there are some.
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
            multiply_by_warp<Operand>(chains[s % kChains][t], keys, q_[s][t]);
          }
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score_[t][i] = chains[0][t][i] + (kChains > 1 ? chains[kChains / 2][t][i] : 0.0f);
        if constexpr (kChains > 2) {
          score_[t][i] += chains[1][t][i] + chains[3][t][i];
        }
      }
    }
  }

  // P of the scores. `hides_some`: of the block.
  __device__ __forceinline__ void weigh(const Sight& sight, int token, bool hides_some,
                                        const TokenScales& scales) {
    scale_scores(scales);
    if (hides_some) {
      hide_scores(sight, token + static_cast<int>(threadIdx.x) % 32 / 4);
    }
    float shifted[kColumnTiles][4];  // with the exponents of the values' scales
    bool rises = false;
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        shifted[t][i] = score_[t][i] + (kQuantized ? scales.value_exponent[i / 2] : 0.0f);
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        rises |= fmaxf(shifted[t][e], shifted[t][e + 2]) > max_[t][e];
      }
    }
    if (__any_sync(0xffffffff, rises)) {
      raise(shifted);
    }
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
      float weight[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weight[i] = power_of_2(shifted[t][i] - max_[t][i % 2]);
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (kQuantized && scales.own) {
          sum_[t][e] +=
              power_of_2(score_[t][e] - max_[t][e]) + power_of_2(score_[t][e + 2] - max_[t][e]);
        } else {
          sum_[t][e] += weight[e] + weight[e + 2];
        }
      }
      if (kQuantized && scales.spoilt) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const bool seen = score_[t][i] != -INFINITY;
          weight[i] = seen && scales.value_exponent[i / 2] == kNoExponent ? NAN : weight[i];
        }
      }
      // The tokens become the MMA's depth.
      weight_[t][0] = transpose(pack_pair<Operand>(weight[0], weight[1]));
      weight_[t][1] = transpose(pack_pair<Operand>(weight[2], weight[3]));
    }
  }

  // `hides_some` as above. kSeveral: sequences may have several queries.
  template <bool kSeveral>
  __device__ __forceinline__ void multiply_values(const uint8_t* block, const Sight& sight,
                                                  int token, bool hides_some) {
    if (!hides_some) {
      add_values<Take::kAll>(block, {}, 0);
    } else if (kSeveral && sight.queries > 1 && holds_no_number(block, sight, token)) {
      add_values_by_query(block, sight, token);
    } else {
      // What no query sees may be NaN, and 0 * NaN is no 0.
      add_values<Take::kMasked>(block, {sight.begin(), sight.length, token}, 0);
    }
  }

  // Adds up the sums of weights, so far each lane's own.
  __device__ __forceinline__ void end() {
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          sum_[t][e] += __shfl_xor_sync(0xffffffff, sum_[t][e], step);
        }
      }
    }
  }

  __device__ __forceinline__ float max(int t, int e) const { return max_[t][e]; }
  __device__ __forceinline__ float sum(int t, int e) const { return sum_[t][e]; }
  // Two columns of tile t, two elements of step s of the head dim.
  __device__ __forceinline__ float4 out(int s, int t) const {
    return make_float4(out_[s][t][0], out_[s][t][1], out_[s][t][2], out_[s][t][3]);
  }
  // Which of a step's those are, the first and the second (i = 0, 1), in lanes 4 row to 4 row + 3.
  static __device__ __forceinline__ int dim_of(int row, int i) {
    return kQuantized ? row * 2 + i : row + i * 8;
  }

 private:
  // Where a lane's two pairs of a step begin: see decode_widen.cuh.
  static constexpr int kQueryPairStride = kQuantized ? 4 : 2, kNextPair = kQuantized ? 2 : 8;

  // Of the two vectors of a step; offset's swizzle is a xor, so is this one.
  static __device__ __forceinline__ uint32_t vector_address(uint32_t base, int step) {
    return (base ^ (step % 4 * 32)) + step / 4 * (kStripBytes * kBlockTokens);
  }

  // The query of a lane's column. Seldom asked for.
  __device__ __forceinline__ int query_of(int t, int e) const {
    return params_.by.group.divide(first_column() + t * 8 + threadIdx.x % 4 * 2 + e);
  }

  __device__ __forceinline__ void scale_scores(const TokenScales& scales) {
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score_[t][i] *= kQuantized ? factor_[t][i % 2] * scales.key[i / 2] : factor_[t][i % 2];
      }
    }
    if (params_.softcap > 0) {
#pragma unroll
      for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          // tanh(x) = 1 - 2 / (1 + e^2x), exact at both ends
          const float e = power_of_2(2 * kLog2E * score_[t][i]);
          score_[t][i] = params_.softcap * (kLog2E - __fdividef(2 * kLog2E, 1.0f + e));
        }
      }
    }
  }

  // Brings outputs and sums to new maxima. It must not wait until a score is far above the old one:
  // the largest weight is to be exactly 1, since its rounding is felt where one token outweighs
  // all.
  __device__ __forceinline__ void raise(const float (&scores)[kColumnTiles][4]) {
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
      float fade[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float top = fmaxf(scores[t][e], scores[t][e + 2]);
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, step));
        }
        top = fmaxf(top, max_[t][e]);
        fade[e] = power_of_2(max_[t][e] - top);
        sum_[t][e] *= fade[e];
        max_[t][e] = top;
      }
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          out_[s][t][i] *= fade[i % 2];
        }
      }
    }
  }

  __device__ __forceinline__ void hide_scores(const Sight& sight, int token) {
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = token + i / 2 * 8, query = query_of(t, i % 2);
        const bool seen = row >= sight.first(query) && row < sight.stop(query);
        score_[t][i] = seen ? score_[t][i] : -INFINITY;
      }
    }
  }

  enum class Take { kAll, kMasked, kByOneQuery };

  // O += V^T P: all of V, or what `mask` leaves, and that for the columns of one query or of all.
  template <Take kTake>
  __device__ __forceinline__ void add_values(const uint8_t* block, const ValueMask& mask,
                                             int query) {
    const uint32_t base = shared_address(block) + value_offset_;
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      uint32_t words[4], values[4];
      if constexpr (kTake == Take::kByOneQuery) {
        __syncwarp();  // the compiler is to keep registers for the ordinary path: no loads ahead
      }
      load_transposed(words, vector_address(base, load));
#pragma unroll
      for (int half = 0; half < kStepsPerLoad; ++half) {
        const int s = load * kStepsPerLoad + half;
        if (s < kSteps) {
          value_operand(values, words, half);
          if constexpr (kTake != Take::kAll) {
            mask.apply(values);
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

  // Where weights of 0 do not make up for what a query does not see: each query's columns with the
  // values that it sees (other warps' queries change nothing). Finite values give the usual bits.
  __device__ __forceinline__ void add_values_by_query(const uint8_t* block, const Sight& sight,
                                                      int token) {
#pragma unroll 1
    for (int query = 0; query < sight.queries; ++query) {
      add_values<Take::kByOneQuery>(block, {sight.first(query), sight.stop(query), token}, query);
    }
  }

  // BF16 queries as FP16: each row brought near 1, which its scores make up for. What then is below
  // FP16's range adds less to a score than the rounding of the sum.
  __device__ __forceinline__ void convert_queries(int t) {
    const auto low = [](uint32_t pair) { return __uint_as_float(pair << 16); };
    const auto high = [](uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); };
    float magnitude = 0;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        magnitude = fmaxf(magnitude, fmaxf(fabsf(low(q_[s][t][i])), fabsf(high(q_[s][t][i]))));
      }
    }
    magnitude = fmaxf(magnitude, __shfl_xor_sync(0xffffffff, magnitude, 1));
    magnitude = fmaxf(magnitude, __shfl_xor_sync(0xffffffff, magnitude, 2));
    const float exponent = exponent_of(magnitude);
    const float inverse = 1.0f / exponent;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        q_[s][t][i] = pack_pair<Operand>(low(q_[s][t][i]) * inverse, high(q_[s][t][i]) * inverse);
      }
    }
    // From the lanes of a column of Q to those of the column of S.
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = threadIdx.x % 4 * 2 + e;
      factor_[t][e] *= __shfl_sync(0xffffffff, exponent, column * 4);
    }
  }

  const Arguments& params_;
  const Type* located_[kColumnTiles];
  float factor_[kColumnTiles][2];  // of the scores
  uint32_t key_offset_, value_offset_;
  uint32_t q_[kSteps][kColumnTiles][2], fetched_[kSteps][kColumnTiles][2];
  float score_[kColumnTiles][4];
  uint32_t weight_[kColumnTiles][2];
  float out_[kSteps][kColumnTiles][4];
  float max_[kColumnTiles][2], sum_[kColumnTiles][2];  // of scores as powers of 2
};

}  // namespace ostinato::decode
