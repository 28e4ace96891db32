// Cluster reduction: the CTAs of a cluster add up their outputs of a split through distributed
// shared memory.
//
// Each CTA owns a slice of what every warp owns of the head dim. It receives that slice from all
// CTAs, warp by warp, and adds it up; a warp waits for its own slice only. No CTA sends before all
// CTAs have begun, and have read what they received for the split before.
#pragma once

#include "cluster_ops.cuh"
#include "common/debug.cuh"
#include "output_rows.cuh"
#include "partials.cuh"

namespace ostinato::decode {

template <int kCtas>
class ClusterReduceOf {
 public:
  // By all threads, once.
  __device__ explicit ClusterReduceOf(SharedStorage& shared) : storage_(shared.cluster_reduce) {
    const int warp = warp_index();
    if (elect_lane()) {
      init_barrier(&storage_.arrived[warp], 1);
      fence_barrier_init();
    }
    __syncwarp();
  }

  // Lets others send what they have of the next split. By whole warps, after all reads of the last
  // one have come back: what they read has been used.
  __device__ __forceinline__ void open() const { arrive_in_cluster(); }
  // Waits until all are open.
  __device__ __forceinline__ void wait_for_others() const { wait_for_cluster(); }

  // Sends what this lane has of a pair of columns: a part of each owned step, and the weights.
  __device__ __forceinline__ void send_pair(int pair, const PairOutputs (&outputs)[kOwnedSteps],
                                            const PairWeights& weights) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = rank_in_cluster();
    uint64_t* const arrived = &storage_.arrived[warp];
#pragma unroll
    for (int j = 0; j < kOwnedSteps; ++j) {
      const int vector = j * 8 + lane / 4;
      const float (&v)[4] = outputs[j].values;
      send(&storage_.outputs[warp][own][pair][vector % kRankVectors], arrived,
           vector / kRankVectors, make_float4(v[0], v[1], v[2], v[3]));
    }
    if (lane / 4 < kCtas) {
      send(&storage_.weights[warp][own][pair], arrived, lane / 4, weights.raw());
    }
  }

  // Adds up what this warp owns, and writes it out, or as a part if that is not null.
  __device__ __forceinline__ void receive(const Arguments& params, const Rows& rows,
                                          float4* partial) {
    const int warp = warp_index(), lane = threadIdx.x % 32;
    const int pairs = count_pairs(rows);
    if (pairs == 0) {
      return;
    }
    PairRows targets;
    if (partial == nullptr && lane < pairs * kRankVectors) {
      targets = PairRows(params, rows, lane / kRankVectors);
    }
    if (lane == 0) {
      arrive_expecting(&storage_.arrived[warp],
                       kCtas * pairs * (kRankVectors + 1) * static_cast<uint32_t>(sizeof(float4)));
    }
    wait(&storage_.arrived[warp], parity_);
    parity_ ^= 1;
    OSTINATO_DELAY(decode_cluster_reduce_load, warp == 2);
#pragma unroll 1
    for (int i = lane; i < pairs * kRankVectors; i += 32) {
      const int pair = i / kRankVectors, vector = i % kRankVectors;
      PairWeights others[kCtas];
      float4 values[kCtas];
#pragma unroll
      for (int cta = 0; cta < kCtas; ++cta) {
        others[cta] = PairWeights::of(storage_.weights[warp][cta][pair]);
        values[cta] = storage_.outputs[warp][source(cta)][pair][vector];
      }
      Combiner combiner;
#pragma unroll
      for (int cta = 0; cta < kCtas; ++cta) {
        combiner.see(others[cta]);
      }
      PairOutputs sum;
      PairWeights weights{{{combiner.highest[0], 0}, {combiner.highest[1], 0}}};
#pragma unroll
      for (int cta = 0; cta < kCtas; ++cta) {
        const float factors[2] = {combiner.factor(others[cta], 0), combiner.factor(others[cta], 1)};
        weights.add(others[cta], factors);
        const PairWeights of_value =
            kChainPerCta ? PairWeights::of(storage_.weights[warp][source(cta)][pair]) : others[cta];
        sum.add(values[cta], combiner.factor(of_value, 0), combiner.factor(of_value, 1));
      }
      if (partial == nullptr) {
        if (i >= 32) {
          targets = PairRows(params, rows, pair);
        }
        write_pair(params, targets, vector, sum, weights);
        continue;
      }
      const float (&v)[4] = sum.values;
      partial[outputs_at(pair, vector)] = make_float4(v[0], v[1], v[2], v[3]);
      if (vector == 0) {
        partial[weights_at(pair)] = weights.raw();
      }
    }
  }

 private:
  // Whose outputs are added i-th. In a lone CTA a warp begins with its own (epilogue.cuh).
  static __device__ __forceinline__ int source(int i) {
    const int warp = threadIdx.x / 32;
    return !kChainPerCta ? i : i == 0 ? warp : i - (i <= warp);
  }

  ClusterReduceStorage<kCtas>& storage_;
  uint32_t parity_ = 0;
};

// Where a CTA has its splits for itself.
template <>
class ClusterReduceOf<1> {
 public:
  __device__ explicit ClusterReduceOf(SharedStorage& /*shared*/) {}
  __device__ __forceinline__ void open() const {}
  __device__ __forceinline__ void wait_for_others() const {}
  __device__ __forceinline__ void send_pair(int /*pair*/,
                                            const PairOutputs (& /*outputs*/)[kOwnedSteps],
                                            const PairWeights& /*weights*/) const {}
  __device__ __forceinline__ void receive(const Arguments& /*params*/, const Rows& /*rows*/,
                                          float4* /*partial*/) const {}
};

using ClusterReduce = ClusterReduceOf<kClusterCtas>;

}  // namespace ostinato::decode
