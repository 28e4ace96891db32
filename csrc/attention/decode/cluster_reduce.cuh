// The CTAs of a cluster add up their outputs of a piece, through each other's shared memory.
//
// Each owns some of what every warp owns of the head dim: it gets that of all CTAs, warp by warp,
// and adds it up. A warp waits for its own only. Nobody sends before all have read what they got of
// the piece before, nor before all have begun.
#pragma once

#include "cluster_ops.cuh"
#include "common/debug.cuh"
#include "output_rows.cuh"
#include "partials.cuh"

namespace ostinato::decode {

template <int kCtas>
class ExchangerOf {
 public:
  // By all threads, once.
  __device__ explicit ExchangerOf(SharedStorage& shared) : exchange_(shared.exchange) {
    const int warp = warp_index();
    if (elect_lane()) {
      init_barrier(&exchange_.arrived[warp], 1);
      fence_barrier_init();
    }
    __syncwarp();
  }

  // Lets others send what they have of the next piece. By whole warps, after all reads of the last
  // one have come back: what they read has been used.
  __device__ __forceinline__ void open() const { arrive_in_cluster(); }
  // Waits until all are open.
  __device__ __forceinline__ void wait_for_others() const { wait_for_cluster(); }

  // Sends what this lane has of a pair of columns: a part of each owned step, and the weights.
  __device__ __forceinline__ void send_pair(int pair, const PairOutputs (&outputs)[kOwnedSteps],
                                            const PairWeights& weights) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = rank_in_cluster();
    uint64_t* const arrived = &exchange_.arrived[warp];
#pragma unroll
    for (int j = 0; j < kOwnedSteps; ++j) {
      const int vector = j * 8 + lane / 4;
      const float (&v)[4] = outputs[j].values;
      send(&exchange_.outputs[warp][own][pair][vector % kRankVectors], arrived,
           vector / kRankVectors, make_float4(v[0], v[1], v[2], v[3]));
    }
    if (lane / 4 < kCtas) {
      send(&exchange_.weights[warp][own][pair], arrived, lane / 4, weights.raw());
    }
  }

  // Adds up what this warp owns, and writes it out, or as a part if that is not null.
  __device__ __forceinline__ void receive(const Arguments& params, const Rows& rows, float4* part) {
    const int warp = warp_index(), lane = threadIdx.x % 32;
    const int pairs = count_pairs(rows);
    if (pairs == 0) {
      return;
    }
    PairPlaces places;
    if (part == nullptr && lane < pairs * kRankVectors) {
      places = PairPlaces(params, rows, lane / kRankVectors);
    }
    if (lane == 0) {
      arrive_expecting(&exchange_.arrived[warp],
                       kCtas * pairs * (kRankVectors + 1) * static_cast<uint32_t>(sizeof(float4)));
    }
    wait(&exchange_.arrived[warp], parity_);
    parity_ ^= 1;
    OSTINATO_DELAY(decode_shares_load, warp == 2);
#pragma unroll 1
    for (int i = lane; i < pairs * kRankVectors; i += 32) {
      const int pair = i / kRankVectors, vector = i % kRankVectors;
      PairWeights others[kCtas];
      float4 values[kCtas];
#pragma unroll
      for (int cta = 0; cta < kCtas; ++cta) {
        others[cta] = PairWeights::of(exchange_.weights[warp][cta][pair]);
        values[cta] = exchange_.outputs[warp][turn(cta)][pair][vector];
      }
      Merger merger;
#pragma unroll
      for (int cta = 0; cta < kCtas; ++cta) {
        merger.see(others[cta]);
      }
      PairOutputs sum;
      PairWeights weights{{{merger.highest[0], 0}, {merger.highest[1], 0}}};
#pragma unroll
      for (int cta = 0; cta < kCtas; ++cta) {
        const float factors[2] = {merger.factor(others[cta], 0), merger.factor(others[cta], 1)};
        weights.add(others[cta], factors);
        const PairWeights of_value =
            kChainPerCta ? PairWeights::of(exchange_.weights[warp][turn(cta)][pair]) : others[cta];
        sum.add(values[cta], merger.factor(of_value, 0), merger.factor(of_value, 1));
      }
      if (part == nullptr) {
        if (i >= 32) {
          places = PairPlaces(params, rows, pair);
        }
        write_pair(params, places, vector, sum, weights);
        continue;
      }
      const float (&v)[4] = sum.values;
      part[outputs_at(pair, vector)] = make_float4(v[0], v[1], v[2], v[3]);
      if (vector == 0) {
        part[weights_at(pair)] = weights.raw();
      }
    }
  }

 private:
  // Whose outputs are added i-th. In a lone CTA a warp begins with its own (epilogue.cuh).
  static __device__ __forceinline__ int turn(int i) {
    const int warp = threadIdx.x / 32;
    return !kChainPerCta ? i : i == 0 ? warp : i - (i <= warp);
  }

  Exchange<kCtas>& exchange_;
  uint32_t parity_ = 0;
};

// Where a CTA has its pieces for itself.
template <>
class ExchangerOf<1> {
 public:
  __device__ explicit ExchangerOf(SharedStorage& /*shared*/) {}
  __device__ __forceinline__ void open() const {}
  __device__ __forceinline__ void wait_for_others() const {}
  __device__ __forceinline__ void send_pair(int /*pair*/,
                                            const PairOutputs (& /*outputs*/)[kOwnedSteps],
                                            const PairWeights& /*weights*/) const {}
  __device__ __forceinline__ void receive(const Arguments& /*params*/, const Rows& /*rows*/,
                                          float4* /*part*/) const {}
};

using Exchanger = ExchangerOf<kClusterCtas>;

}  // namespace ostinato::decode
