// The sum of a segment's parts, by one warp of those that stored them.
//
// It runs once, alone, at the end of a kernel that may have taken four microseconds: every
// instruction of it is waited for. So the copy engine fetches all parts at once, which takes an
// instruction of each lane, and what follows is short loops over shared memory.
#pragma once

#include <cstddef>

#include "decode_copies.cuh"
#include "decode_output.cuh"

namespace ostinato::decode {

// What a warp has for it: its share of the rings, which nothing is copied to any more.
inline constexpr int kSumBytes = 2 * kStages * kBlockBytes;
static_assert(offsetof(SharedStorage, values) == sizeof(Blocks<Keys>) &&
                  kWarps * kSumBytes == 2 * sizeof(Blocks<Keys>),
              "the rings lie side by side");

// First notes: of each pair in each part, what brings both columns to the highest maximum of all
// parts, and their sums of weights brought there; and, last, the two maxima.
inline constexpr int kMostParts = 32;  // at a time: a lane for each
inline constexpr int kNotes = kMostParts + 1;

// Then the parts. An odd number of vectors apart, so that lanes that read the first ones of a part
// each meet in no bank.
__host__ __device__ constexpr int spread_part(int pairs) { return pairs * kPairStride | 1; }

__host__ __device__ constexpr int count_fitting_parts(int pairs) {
  constexpr int kVectors = kSumBytes / static_cast<int>(sizeof(float4));
  const int fitting = (kVectors - pairs * kNotes) / spread_part(pairs);
  return fitting < kMostParts ? fitting : kMostParts;
}

// So many pairs of columns at a time that some parts fit.
constexpr int choose_pairs() {
  constexpr int kWanted = 8;
  int pairs = kWarpPairs;
  while (pairs > 1 && count_fitting_parts(pairs) < kWanted) {
    pairs /= 2;
  }
  return pairs;
}
inline constexpr int kSumPairs = choose_pairs();
static_assert(count_fitting_parts(kSumPairs) >= 2, "one part, and the sum of those before");

// The highest of the lanes' numbers, none of which is NaN: as integers, negative ones turned round.
__device__ __forceinline__ float highest_of_lanes(float x) {
  const auto turned = [](int bits) { return bits < 0 ? bits ^ 0x7fffffff : bits; };
  return __int_as_float(turned(__reduce_max_sync(0xffffffff, turned(__float_as_int(x)))));
}

// Notes the weights of `count` parts, a lane for each.
__device__ __forceinline__ void note_weights(float4* notes, const float4* parts, int spread,
                                             int pairs, int count) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int pair = 0; pair < pairs; ++pair, notes += kNotes) {
    PairWeights part{{{kNothing, 0}, {kNothing, 0}}};
    if (lane < count) {
      part = PairWeights::of(parts[lane * spread + weights_at(pair)]);
    }
    float tops[2], factors[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      tops[e] = highest_of_lanes(part.columns[e].max);
      factors[e] = power_of_2(part.columns[e].max - tops[e]);
    }
    notes[lane] = make_float4(factors[0], factors[1], part.columns[0].sum * factors[0],
                              part.columns[1].sum * factors[1]);
    if (lane == 0) {
      notes[kMostParts] = make_float4(tops[0], tops[1], 0, 0);
    }
  }
  __syncwarp();
}

// Writes the rows of the segment that the parts at `at` are of: the first `first` vectors behind
// it, the others `stride` apart. `parity` is that of the warp's barrier.
__device__ __forceinline__ void sum_parts(SharedStorage& shared, const Arguments& params,
                                          const Rows& rows, const float4* at, int first, int stride,
                                          int count, uint32_t* parity) {
  const int lane = threadIdx.x % 32, warp = warp_index();
  const int first_step = team_of(warp) * kOwnedSteps;
  const int all_pairs = ceil_div(min(rows.count - Attention::first_column(), kWarpColumns), 2);
  uint64_t* const arrived = &shared.parts_arrived[warp];
  float4* const notes =
      reinterpret_cast<float4*>(reinterpret_cast<uint8_t*>(&shared) + warp * kSumBytes);
  fence_global_for_copies();
#pragma unroll 1
  for (int begin = 0; begin < all_pairs; begin += kSumPairs) {
    const int pairs = min(all_pairs - begin, kSumPairs);
    const bool few = 2 * pairs <= kSumPairs;
    const int fitting =
        few ? count_fitting_parts(ceil_div(kSumPairs, 2)) : count_fitting_parts(kSumPairs);
    const int spread = spread_part(pairs), bytes = pairs * kPairStride * sizeof(float4);
    float4* const parts = notes + pairs * kNotes;
    // If not all parts fit, the sum of some takes the place of the first.
#pragma unroll 1
    for (int done = 0, kept = 0; done < count; kept = 1) {
      const int some = min(count - done, fitting - kept), here = kept + some;
      if (lane == 0) {
        arrive_expecting(arrived, some * bytes);
      }
      __syncwarp();
      if (lane < some) {
        const int part = done + lane;
        copy_bytes(parts + (kept + lane) * spread,
                   at + (part == 0 ? first : part * stride) + weights_at(begin), bytes, arrived);
      }
      done += some;
      wait(arrived, *parity);
      *parity ^= 1;
      note_weights(notes, parts, spread, pairs, here);
#pragma unroll 1
      for (int item = lane; item < pairs * kPairVectors; item += 32) {
        const int pair = item / kPairVectors, vector = item % kPairVectors;
        float4* const own = parts + outputs_at(pair, 0, vector);
        const float4* const own_notes = notes + pair * kNotes;
        PairOutputs outputs;
        PairWeights weights{{{own_notes[kMostParts].x, 0}, {own_notes[kMostParts].y, 0}}};
#pragma unroll 4
        for (int i = 0; i < here; ++i) {
          const float4 note = own_notes[i];
          outputs.add(own[i * spread], note.x, note.y);
          weights.columns[0].sum += note.z;
          weights.columns[1].sum += note.w;
        }
        const float (&v)[4] = outputs.values;
        const int step = first_step + vector / 8;
        if (done < count) {
          *own = make_float4(v[0], v[1], v[2], v[3]);
          if (vector == 0) {
            parts[weights_at(pair)] = weights.raw();
          }
        } else if (kSteps == kTeams * kOwnedSteps || step < kSteps) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int column = Attention::first_column() + (begin + pair) * 2 + e;
            if (column < rows.count) {
              const FinalRow row(params, rows, column, weights.columns[e]);
              write_out(params, row, step, vector % 8, v[e], v[e + 2]);
              if (step == 0 && vector == 0) {
                row.write_lse(params);
              }
            }
          }
        }
      }
      __syncwarp();  // parts and notes have been read
    }
  }
}

}  // namespace ostinato::decode
