// The epilogue: the teams of a CTA add up their accumulators, and write the output or a partial.
//
// Every warp owns some steps of the head dim (for its columns). It alone adds them up, stores them,
// increments the counter of the warps that own the same steps of the work tile, and, if it is the
// last one, combines the partials (combine.cuh). So the CTA needs one barrier. Partials are stored
// in the order in which lanes hold them.
#pragma once

#include "cluster_reduce.cuh"

namespace ostinato::decode {

// Hands the steps that other teams own to them, and keeps those of this warp's team.
template <int kTeam>
__device__ __forceinline__ void hand_over(SharedStorage& shared, const Mainloop& mainloop, int t,
                                          int member, float4 (&owned)[kOwnedSteps]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int s = 0; s < kHeldSteps; ++s) {
    const int owner = s / kOwnedSteps;
    if (owner == kTeam) {
      owned[s % kOwnedSteps] = mainloop.out(s, t);
    } else {
      shared.sums[owner][kTeam - (kTeam > owner)][member][s % kOwnedSteps][lane] =
          mainloop.out(s, t);
    }
  }
}

// Adds up the teams' outputs of a split; all threads of the CTA. They go to the cluster reduction,
// or, if nothing else is to be added, where `part` is, or out if that is null: at `places`, of this
// lane's columns, if they are known.
__device__ __forceinline__ void store_split(SharedStorage& shared, ClusterReduce& cluster_reduce,
                                            const Arguments& params, Mainloop& mainloop,
                                            const Rows& rows, float4* partial, bool first_split,
                                            const PairRows* targets) {
  const int warp = warp_index(), lane = threadIdx.x % 32;
  const int team = team_of(warp), member = warp % kTeamWarps;
  mainloop.end();
  cluster_reduce.wait_for_others();
#pragma unroll
  for (int t = 0; t < kColumnTiles; ++t) {
    const int pair = t * 4 + lane % 4;
    const int column = Queries::first_column() + pair * 2;
    const auto &max = mainloop.max(t).of, &sum = mainloop.sum(t).of;
    PairWeights weights{{{max[0], sum[0]}, {max[1], sum[1]}}};
    float4 owned[kOwnedSteps] = {};
    PairOutputs outputs[kOwnedSteps];
    if (!kChainPerCta && (t > 0 || !first_split)) {
      __syncthreads();  // what was handed over before has been added
    }
    switch (team) {
      case 0:
        hand_over<0>(shared, mainloop, t, member, owned);
        break;
      case 1:
        hand_over<1 % kTeams>(shared, mainloop, t, member, owned);
        break;
      case 2:
        hand_over<2 % kTeams>(shared, mainloop, t, member, owned);
        break;
      default:
        hand_over<3 % kTeams>(shared, mainloop, t, member, owned);
    }
    if constexpr (kTeams > 1) {
      if (lane < 4) {
        *reinterpret_cast<float4*>(&shared.weights[team][column]) = weights.raw();
      }
      OSTINATO_DELAY(decode_sums_store, warp == 1);
      __syncthreads();
      OSTINATO_DELAY(decode_sums_load, warp == 2);
      PairWeights others[kTeams];
      Combiner combiner;
#pragma unroll
      for (int w = 0; w < kTeams; ++w) {
        others[w] = PairWeights::of(*reinterpret_cast<const float4*>(&shared.weights[w][column]));
        combiner.see(others[w]);
      }
      const float own_factors[2] = {combiner.factor(weights, 0), combiner.factor(weights, 1)};
#pragma unroll
      for (int j = 0; j < kOwnedSteps; ++j) {
        outputs[j].add(owned[j], own_factors[0], own_factors[1]);
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        weights.columns[e] = {combiner.highest[e], 0};
#pragma unroll
        for (int w = 0; w < kTeams; ++w) {
          weights.columns[e].sum =
              fmaf(others[w].columns[e].sum, combiner.factor(others[w], e), weights.columns[e].sum);
        }
      }
#pragma unroll
      for (int source = 0; source < kTeams - 1; ++source) {
        const PairWeights source_weights = PairWeights::of(
            *reinterpret_cast<const float4*>(&shared.weights[source + (source >= team)][column]));
        const float factors[2] = {combiner.factor(source_weights, 0),
                                  combiner.factor(source_weights, 1)};
#pragma unroll
        for (int j = 0; j < kOwnedSteps; ++j) {
          outputs[j].add(shared.sums[team][source][member][j][lane], factors[0], factors[1]);
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < kOwnedSteps; ++j) {
        outputs[j].add(owned[j], 1, 1);
      }
    }
    if (column >= rows.count) {
      continue;
    }
    if constexpr (kClusterCtas > 1) {
      cluster_reduce.send_pair(pair, outputs, weights);
      continue;
    }
    const int first_step = team * kOwnedSteps;
    if (partial != nullptr) {
#pragma unroll
      for (int j = 0; j < kOwnedSteps; ++j) {
        const float (&v)[4] = outputs[j].values;
        partial[outputs_at(pair, j * 8 + lane / 4)] = make_float4(v[0], v[1], v[2], v[3]);
      }
      if (lane < 4) {
        partial[weights_at(pair)] = weights.raw();
      }
      continue;
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (column + e < rows.count) {
        const RowTarget target =
            targets != nullptr ? targets->targets[e] : RowTarget(params, rows, column + e);
        const FinalRow row(params, target, weights.columns[e]);
#pragma unroll
        for (int j = 0; j < kOwnedSteps; ++j) {
          if (first_step + j < kSteps) {
            write_out(row, first_step + j, lane / 4, outputs[j].values[e],
                      outputs[j].values[e + 2]);
          }
        }
        if (warp < kTeamWarps && lane < 4) {
          row.write_lse(params);
        }
      }
    }
  }
  if constexpr (kClusterCtas > 1) {
    OSTINATO_DELAY(decode_cluster_reduce_store, warp == 1);
    __syncwarp();
  }
}

}  // namespace ostinato::decode
