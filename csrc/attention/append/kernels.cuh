// The append_kv kernels: for heads that fit into the registers of at most a warp, and for longer
// ones.
#pragma once

#include <cstdint>

#include "common/launch.cuh"
#include "head.cuh"
#include "params.h"

namespace ostinato {
namespace {

constexpr int kThreads = 128;
// Minimum CTAs per SM: 0 leaves it to the compiler, which for sm_100 and sm_120 would spill to have
// more.
constexpr int kLeastCtas = kTargets[0] < 1000 ? 0 : 1;
constexpr uint32_t kWholeWarp = 0xffffffffu;

// Over `lanes` adjacent lanes, a power of two; all lanes of the warp must call it.
__device__ __forceinline__ float sum_of_lanes(float x, uint32_t lanes) {
  for (uint32_t distance = 1; distance < lanes; distance *= 2) {
    x += __shfl_xor_sync(kWholeWarp, x, distance);
  }
  return x;
}

__device__ __forceinline__ float max_of_lanes(float x, uint32_t lanes) {
  for (uint32_t distance = 1; distance < lanes; distance *= 2) {
    x = max_magnitude(x, __shfl_xor_sync(kWholeWarp, x, distance));
  }
  return x;
}

__device__ __forceinline__ float load_scale(const Target& target) {
  return target.scale == nullptr || target.dynamic ? 1.0f : *target.scale;
}

// When heads are normalised. An instantiation for each: branches would slow the others.
enum class Norm { none, before_rotation, after_rotation };

// A CTA has heads of token blockIdx.x; 1 << log2_lanes lanes share a head.
template <bool kAligned, Norm kNorm>
__global__ void __launch_bounds__(kThreads, kLeastCtas)
    append_heads(const __grid_constant__ AppendKVParams p, const uint32_t log2_lanes,
                 const KnownDivisor count) {
  const uint32_t lanes = 1u << log2_lanes;
  const uint32_t lane = threadIdx.x & (lanes - 1);
  const Head head(p, blockIdx.x, (blockIdx.y * blockDim.x + threadIdx.x) >> log2_lanes);
  const Chunk chunk = head.chunk(lane, static_cast<uint32_t>(p.dim));
  // Only by one token's CTAs: requests of all CTAs for the same few lines would queue up in L2.
  if (blockIdx.x == 0) {
    if constexpr (kNorm != Norm::none) {
      head.prefetch_weights(chunk);
    }
    if constexpr (kQuantizes) {
      if (lane == 0) {
        head.prefetch_scale(p);
      }
    }
  }
  // Before the wait: decode attention plans its work while this kernel waits and works, from
  // speculative lengths that it verifies after its own wait.
  let_successor_start();
  wait_for_predecessor();

  const int32_t position = head.load_position(p);
  const int64_t slot = head.load_slot(p);
  Vector raw[2];
  head.load_values<kAligned>(chunk, raw);
  Vector weights[2];
  if constexpr (kNorm != Norm::none) {
    head.load_weights<kAligned>(chunk, weights);
  }
  Angles angles;
  head.load_angles<kAligned>(p, position, chunk, angles);
  const Target target(p, head, slot);
  const float fixed_scale = load_scale(target);

  Values x[2];
  raw[0].unpack(x[0]);
  raw[1].unpack(x[1]);
  if constexpr (kNorm == Norm::after_rotation) {
    head.rotate(chunk, angles, x);
  }
  if constexpr (kNorm != Norm::none) {
    const float sum = sum_of_lanes(sum_squares(x[0]) + sum_squares(x[1]), lanes);
    head.normalize<kAligned>(sum, count, p.norm_eps, chunk, weights, x);
  }
  if constexpr (kNorm != Norm::after_rotation) {
    head.rotate(chunk, angles, x);
  }
  float largest = 0.0f;
  if constexpr (kQuantizes) {
    if (p.k_scale_per_token != 0 || p.v_scale_per_token != 0 || p.k_scale_out.data != nullptr ||
        p.v_scale_out.data != nullptr) {
      largest = max_of_lanes(max_magnitude_of(max_magnitude_of(0.0f, x[0]), x[1]), lanes);
    }
  }
  store_head<kAligned>(target, chunk, largest, fixed_scale, lane == 0, x);
}

// Heads of any length, each by one warp, which reads it once each for the sum of squares, the
// largest magnitude and the result. Every element is read and written by one lane, and no lane
// writes before all have read for the sum: q_out may be q.
template <bool kAligned>
__global__ void __launch_bounds__(kThreads, kLeastCtas)
    append_long_heads(const __grid_constant__ AppendKVParams p, const uint32_t chunks,
                      const KnownDivisor count) {
  const uint32_t lane = threadIdx.x % 32;
  const Head head(p, blockIdx.x, (blockIdx.y * blockDim.x + threadIdx.x) / 32);
  let_successor_start();
  wait_for_predecessor();
  const int32_t position = head.load_position(p);
  const Target target(p, head, head.load_slot(p));
  if (target.row == nullptr) {
    return;
  }
  const bool rotates_first = p.norm_after_rotation != 0;
  const float fixed_scale = load_scale(target);
  float sum = 0.0f;
  if (head.norm_weight != nullptr) {
    for (uint32_t index = lane; index < chunks; index += 32) {
      const Chunk chunk = head.chunk(index, static_cast<uint32_t>(p.dim));
      Vector raw[2];
      head.load_values<kAligned>(chunk, raw);
      Values x[2];
      raw[0].unpack(x[0]);
      raw[1].unpack(x[1]);
      if (rotates_first) {
        Angles angles;
        head.load_angles<kAligned>(p, position, chunk, angles);
        head.rotate(chunk, angles, x);
      }
      sum += sum_squares(x[0]) + sum_squares(x[1]);
    }
    sum = sum_of_lanes(sum, 32);
  }
  const auto result_at = [&](const Chunk& chunk, Values(&x)[2]) {
    Vector raw[2];
    Vector weights[2];
    Angles angles;
    head.load_values<kAligned>(chunk, raw);
    head.load_weights<kAligned>(chunk, weights);
    head.load_angles<kAligned>(p, position, chunk, angles);
    raw[0].unpack(x[0]);
    raw[1].unpack(x[1]);
    if (rotates_first) {
      head.rotate(chunk, angles, x);
    }
    head.normalize<kAligned>(sum, count, p.norm_eps, chunk, weights, x);
    if (!rotates_first) {
      head.rotate(chunk, angles, x);
    }
  };
  float largest = 0.0f;
  if (target.writes_scale()) {
    for (uint32_t index = lane; index < chunks; index += 32) {
      Values x[2];
      result_at(head.chunk(index, static_cast<uint32_t>(p.dim)), x);
      largest = max_magnitude_of(max_magnitude_of(largest, x[0]), x[1]);
    }
    largest = max_of_lanes(largest, 32);
  }
  for (uint32_t index = lane; index < chunks; index += 32) {
    const Chunk chunk = head.chunk(index, static_cast<uint32_t>(p.dim));
    Values x[2];
    result_at(chunk, x);
    store_head<kAligned>(target, chunk, largest, fixed_scale, index == 0, x);
  }
}

}  // namespace
}  // namespace ostinato
