// The throttle: delays warps that are ahead, where each CTA has equally many tiles, and many of
// them.
//
// SMs read at speeds that differ by a fifth, by their position on the chip and by the load of their
// neighbours, and with equal shares the slowest SMs end a launch alone. Memory bandwidth is shared
// and its queues are long: a request that a fast warp delays lets a slow warp's request complete
// earlier. So warps count their tiles in a common counter, every few tiles, and a warp ahead of the
// mean waits. That changes when a block is requested, and nothing else.
#pragma once

#include "split_kv.cuh"

namespace ostinato::decode {

template <bool kUsed>
class ThrottleOf {
 public:
  // By whole warps, once the lengths are known.
  template <class Shares>
  __device__ ThrottleOf(const Arguments& params, const Seqlens& seqlens, const Shares& shares)
      : counter_(params.scheduler_counters) {
    const int share = shares.quota, line_length = seqlens.start(params.batch);  // of one KV head
    if (share < kLeastTiles || !are_filled(params, seqlens, line_length)) {
      return;
    }
    const int grid = gridDim.x;
    // CTAs that have work; the others count as those that have ended.
    const int clusters = divide_up(line_length * params.line_heads, share) * params.lines;
    const int ctas = min(clusters * kClusterCtas, grid);
    const int idle = (grid - ctas) * kWarps;
    counts_ = share / kEvery;
    last_ = grid * kWarps * counts_ - 1;
    by_count_ = __fdividef(kEvery * kClocks, static_cast<float>(ctas * kWarps));
    head_start_ = static_cast<float>(idle * counts_) * by_count_ - kAllowed * kClocks;
  }

  __device__ __forceinline__ bool used() const { return counts_ > 0; }

  // After a tile, before its stage is loaded again. By whole warps.
  __device__ __forceinline__ void pass() {
    ++passed_;
    const int after = passed_ % kEvery;
    if ((after != 0 && after != kAwaited) || passed_ < kEvery ||
        made() * kEvery + after != passed_) {
      return;
    }
    if (threadIdx.x % 32 == 0) {
      if (after == 0) {
        counted_ = atomicInc(counter_, last_);
      } else {
        hold();
      }
    }
    __syncwarp();
  }

  // At the end: counts what the warp has not counted. All count as often, idle ones too, so that
  // the counter wraps to zero.
  __device__ __forceinline__ void end() const {
    if (!used()) {
      return;
    }
#pragma unroll 1
    for (int i = made() + static_cast<int>(threadIdx.x) % 32; i < counts_; i += 32) {
      atomicInc(counter_, last_);
    }
  }

 private:
  static constexpr int kLeastTiles = 48;  // of a CTA, or a launch ends before it has an effect
  static constexpr int kEvery = 8;        // tiles
  static constexpr int kAwaited = 2;      // tiles: until the number has come back
  // What is waited for: each tile before the mean but a few. Those who are abreast count as a few
  // tiles before it, since the mean is that of whole counts.
  static constexpr int kAllowed = 4;
  static constexpr float kClocks = 5700, kMostClocks = 22800;  // for a tile, and at a time

  // Whether nearly all places are tiles. Or else some have less to do, and are not ahead.
  static __device__ __forceinline__ bool are_filled(const Arguments& params, const Seqlens& seqlens,
                                                    int line_length) {
    int tiles = 0;
#pragma unroll 1
    for (int b = threadIdx.x % 32; b < params.batch; b += 32) {
      tiles += seqlens.tiles(b);
    }
    return line_length - __reduce_add_sync(0xffffffff, tiles) <= line_length / 16;
  }

  // Counts, so far. The last is left to the end, where nobody is to wait.
  __device__ __forceinline__ int made() const { return min(passed_ / kEvery, counts_ - 1); }

  // By one lane.
  __device__ __forceinline__ void hold() const {
    const float ahead = static_cast<float>(passed_ - kAwaited) * kClocks -
                        static_cast<float>(static_cast<int>(counted_)) * by_count_;
    const int clocks = static_cast<int>(fminf(ahead + head_start_, kMostClocks));
    const int begin = static_cast<int>(clock());
    while (static_cast<int>(clock()) - begin < clocks) {
      __nanosleep(40);
    }
  }

  uint32_t* counter_;
  int counts_ = 0;  // of each warp, in a launch
  int passed_ = 0;  // tiles
  uint32_t last_ = 0, counted_ = 0;
  float by_count_ = 0, head_start_ = 0;  // clocks
};

template <>
class ThrottleOf<false> {
 public:
  template <class Shares>
  __device__ ThrottleOf(const Arguments& /*params*/, const Seqlens& /*seqlens*/,
                        const Shares& /*shares*/) {}
  __device__ __forceinline__ bool used() const { return false; }
  __device__ __forceinline__ void pass() {}
  __device__ __forceinline__ void end() const {}
};

using Throttle = ThrottleOf<kMayThrottle>;

}  // namespace ostinato::decode
