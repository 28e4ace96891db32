// From accumulators to the output: the teams of a CTA add up theirs.
//
// Every warp owns some steps of the head dim (for its columns): it alone adds them up, stores them,
// counts itself among the segment's warps that own the same, and, if it is the last of them, merges
// the parts (combine.cuh). So the CTA meets at one barrier. What is stored between is as lanes
// hold it.
#pragma once

#include "cluster_reduce.cuh"

namespace ostinato::decode {

// Hands the steps that other teams own to them, and keeps those of this warp's team.
template <int kTeam>
__device__ __forceinline__ void hand_over(SharedStorage& shared, const Attention& attention, int t,
                                          int member, float4 (&owned)[kOwnedSteps]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int s = 0; s < kHeldSteps; ++s) {
    const int owner = s / kOwnedSteps;
    if (owner == kTeam) {
      owned[s % kOwnedSteps] = attention.out(s, t);
    } else {
      shared.sums[owner][kTeam - (kTeam > owner)][member][s % kOwnedSteps][lane] =
          attention.out(s, t);
    }
  }
}

// Adds up the teams' outputs of a piece; all threads of the CTA. They go to the exchange, or, if
// nothing else is to be added, where `part` is, or out if that is null: at `places`, of this lane's
// columns, if they are known.
__device__ __forceinline__ void store_piece(SharedStorage& shared, Exchanger& exchanger,
                                            const Arguments& params, Attention& attention,
                                            const Rows& rows, float4* part, bool first_piece,
                                            const PairPlaces* places) {
  const int warp = warp_index(), lane = threadIdx.x % 32;
  const int team = team_of(warp), member = warp % kTeamWarps;
  attention.end();
  exchanger.wait_for_others();
#pragma unroll
  for (int t = 0; t < kColumnTiles; ++t) {
    const int pair = t * 4 + lane % 4;
    const int column = Queries::first_column() + pair * 2;
    const auto &max = attention.max(t).of, &sum = attention.sum(t).of;
    PairWeights weights{{{max[0], sum[0]}, {max[1], sum[1]}}};
    float4 owned[kOwnedSteps] = {};
    PairOutputs outputs[kOwnedSteps];
    if (!kChainPerCta && (t > 0 || !first_piece)) {
      __syncthreads();  // what was handed over before has been added
    }
    switch (team) {
      case 0:
        hand_over<0>(shared, attention, t, member, owned);
        break;
      case 1:
        hand_over<1 % kTeams>(shared, attention, t, member, owned);
        break;
      case 2:
        hand_over<2 % kTeams>(shared, attention, t, member, owned);
        break;
      default:
        hand_over<3 % kTeams>(shared, attention, t, member, owned);
    }
    if constexpr (kTeams > 1) {
      if (lane < 4) {
        *reinterpret_cast<float4*>(&shared.weights[team][column]) = weights.raw();
      }
      OSTINATO_DELAY(decode_sums_store, warp == 1);
      __syncthreads();
      OSTINATO_DELAY(decode_sums_load, warp == 2);
      PairWeights others[kTeams];
      Merger merger;
#pragma unroll
      for (int w = 0; w < kTeams; ++w) {
        others[w] = PairWeights::of(*reinterpret_cast<const float4*>(&shared.weights[w][column]));
        merger.see(others[w]);
      }
      const float own_factors[2] = {merger.factor(weights, 0), merger.factor(weights, 1)};
#pragma unroll
      for (int j = 0; j < kOwnedSteps; ++j) {
        outputs[j].add(owned[j], own_factors[0], own_factors[1]);
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        weights.columns[e] = {merger.highest[e], 0};
#pragma unroll
        for (int w = 0; w < kTeams; ++w) {
          weights.columns[e].sum =
              fmaf(others[w].columns[e].sum, merger.factor(others[w], e), weights.columns[e].sum);
        }
      }
#pragma unroll
      for (int source = 0; source < kTeams - 1; ++source) {
        const PairWeights source_weights = PairWeights::of(
            *reinterpret_cast<const float4*>(&shared.weights[source + (source >= team)][column]));
        const float factors[2] = {merger.factor(source_weights, 0),
                                  merger.factor(source_weights, 1)};
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
      exchanger.send_pair(pair, outputs, weights);
      continue;
    }
    const int first_step = team * kOwnedSteps;
    if (part != nullptr) {
#pragma unroll
      for (int j = 0; j < kOwnedSteps; ++j) {
        const float (&v)[4] = outputs[j].values;
        part[outputs_at(pair, j * 8 + lane / 4)] = make_float4(v[0], v[1], v[2], v[3]);
      }
      if (lane < 4) {
        part[weights_at(pair)] = weights.raw();
      }
      continue;
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (column + e < rows.count) {
        const RowPlace place =
            places != nullptr ? places->places[e] : RowPlace(params, rows, column + e);
        const FinalRow row(params, place, weights.columns[e]);
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
    OSTINATO_DELAY(decode_shares_store, warp == 1);
    __syncwarp();
  }
}

}  // namespace ostinato::decode
