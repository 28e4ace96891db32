// Two-level accumulation (promotion) of 8-bit products in global memory, where registers have no
// room for a second set of accumulators.
//
// The tensor cores keep about 14 bits of a sum. So they sum at most kSumTiles tiles, and first the
// tiles with masked keys. With each tile a thread adds a slice of its accumulators in fp32 to its
// own addresses in global memory, slice after slice, and clears it. The L2 carries out the
// additions, and no thread waits for them: each address belongs to one thread, whose accesses take
// effect in order. At the end of a work tile the sums are read back. Work tiles of fewer tiles are
// not promoted.
#pragma once

#include "promote_gmem_ptx.cuh"
#include "promote_gmem_slices.cuh"
#include "score_fragment.cuh"
#include "wgmma.cuh"

namespace ostinato::prefill {

class Promotion {
 public:
  static constexpr int kFetched = kScores / 4 < kVectors ? kScores / 4 : kVectors;  // at once

  // So that 16 bytes of each lane lie side by side.
  __device__ __forceinline__ void find_sums(const Arguments& args) {
    sums_ = reinterpret_cast<float4*>(static_cast<uint8_t*>(args.params.workspace) + kCounterBytes +
                                      blockIdx.x * kPromotionBytes) +
            threadIdx.x;
  }

  // The first of an work tile's tiles, how many of them hide some key from some query, and all.
  // Those that do are repaired (nonfinite_repair.cuh) before anything is put aside, so that it need
  // not be.
  __device__ __forceinline__ void begin(int first, int hiding, int tiles) {
    begins_ = max(first, hiding) + 1;
    if (tiles - begins_ < kSumTiles) {
      begins_ = kNever;
    }
    next_ = 0;
    factor_[0] = factor_[1] = 1;
  }

  // The tile with which the first slice is put aside.
  __device__ __forceinline__ int begins() const { return begins_; }
  __device__ __forceinline__ bool is_due(int n) const { return n >= begins_; }
  __device__ __forceinline__ bool holds_some() const { return begins_ != kNever; }

  // The next slice. What lies there is relative to a row's reference when the first was put there.
  // What is sent has registers of its own: it is read later, and a register that is written again
  // before that waits for it.
  __device__ __forceinline__ void promote(float (&outputs)[kOutputs]) {
    const bool holds_it = next_ >= kSumTiles;
    const int slice = holds_it ? next_ - kSumTiles : next_;
    float taken[4 * kSliceVectors];
    take_slice(outputs, slice, factor_, taken);
#pragma unroll
    for (int i = 0; i < kSliceVectors; ++i) {
      float4* const to = sums_ + (slice * kSliceVectors + i) * kConsumerThreads;
      const float4 vector =
          make_float4(taken[4 * i], taken[4 * i + 1], taken[4 * i + 2], taken[4 * i + 3]);
      if (holds_it) {
        add_vector(to, vector);
      } else {
        store_vector(to, vector);
      }
    }
    next_ = next_ == 2 * kSumTiles - 1 ? kSumTiles : next_ + 1;
  }

  // References have risen: the outputs are to be relative to the new ones.
  __device__ __forceinline__ void fade(const float (&fade)[2], float (&outputs)[kOutputs]) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      outputs[i] *= fade[row_of(i)];
    }
    if (next_ == 0) {
      return;
    }
    const float factor[2] = {__fdividef(factor_[0], fade[0]), __fdividef(factor_[1], fade[1])};
    const bool near[2] = {factor[0] < kFarthest && fade[0] > 1 / kFarthest,
                          factor[1] < kFarthest && fade[1] > 1 / kFarthest};
    if (__any_sync(0xffffffff, !near[0] || !near[1])) {
      rebase({near[0] ? 1.0f : __fdividef(fade[0], factor_[0]),
              near[1] ? 1.0f : __fdividef(fade[1], factor_[1])});
    }
    factor_[0] = near[0] ? factor[0] : 1.0f;
    factor_[1] = near[1] ? factor[1] : 1.0f;
  }

  // What lies there is read while the last products go on, as far as there is room: in place of the
  // scores, which are needed no more.
  __device__ __forceinline__ void fetch(float (&scores)[kScores]) const {
    load<0, kFetched>(scores);
  }

  // When the products have ended: that and the rest are added to the outputs.
  __device__ __forceinline__ void add(float (&scores)[kScores], float (&outputs)[kOutputs]) const {
    const float factor[2] = {__fdividef(1.0f, factor_[0]), __fdividef(1.0f, factor_[1])};
    add_from<0>(scores, factor, outputs);
  }

 private:
  static constexpr int kNever = 0x7fffffff;
  // Of what is put there, since a reference has risen: with it what a sum of all keys may be is far
  // from overflow.
  static constexpr float kFarthest = 18446744073709551616.0f;  // 2^64

  // The vectors from kFirst on, of which as many as the scores have room for have been loaded. What
  // is added makes room for the next, which are read while the others are added.
  template <int kFirst>
  __device__ __forceinline__ void add_from(float (&scores)[kScores], const float (&factor)[2],
                                           float (&outputs)[kOutputs]) const {
    constexpr int kLoaded = kVectors - kFirst < kFetched ? kVectors - kFirst : kFetched;
    constexpr int kNext = kFirst + kLoaded;
    constexpr int kRest = kVectors - kNext < kFetched ? kVectors - kNext : kFetched;
    if constexpr (kRest == 0) {
      add_some<0, kLoaded, kFirst>(scores, factor, outputs);
    } else {
      add_some<0, kRest, kFirst>(scores, factor, outputs);
      pin(outputs);
      load<kNext, kRest>(scores);
      add_some<kRest, kLoaded - kRest, kFirst>(scores, factor, outputs);
      add_from<kNext>(scores, factor, outputs);
    }
  }
  // kCount vectors from kFirst on, to the scores' first places.
  template <int kFirst, int kCount>
  __device__ __forceinline__ void load(float (&scores)[kScores]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float4 v = load_vector(sums_ + (kFirst + i) * kConsumerThreads);
      scores[4 * i] = v.x;
      scores[4 * i + 1] = v.y;
      scores[4 * i + 2] = v.z;
      scores[4 * i + 3] = v.w;
    }
  }
  // The scores' vectors from kFirst on, to outputs that lie kBehind vectors behind.
  template <int kFirst, int kCount, int kBehind>
  __device__ __forceinline__ static void add_some(const float (&scores)[kScores],
                                                  const float (&factor)[2],
                                                  float (&outputs)[kOutputs]) {
#pragma unroll
    for (int i = 4 * kFirst; i < 4 * (kFirst + kCount); ++i) {
      float& output = outputs[4 * kBehind + i];
      output = fmaf(scores[i], factor[row_of(i)], output);
    }
  }

  // Seldom: makes what lies there relative to the references of now, where these are so far above
  // that sums could overflow. Rows of which they are not keep their bits. (What was not put there
  // yet is not read later either.)
  __device__ __forceinline__ void rebase(const float (&factor)[2]) const {
#pragma unroll 1
    for (int i = 0; i < kVectors; ++i) {
      const float4 v = load_vector(sums_ + i * kConsumerThreads);
      store_vector(sums_ + i * kConsumerThreads,
                   make_float4(v.x * factor[0], v.y * factor[0], v.z * factor[1], v.w * factor[1]));
    }
  }

  int begins_;
  int next_;         // slice; from kSumTiles on those that have been put there before
  float factor_[2];  // what is put there is multiplied with
  float4* sums_;
};

// What puts nothing aside.
struct NoPromotion {
  __device__ __forceinline__ void begin(int, int, int) {}
  __device__ __forceinline__ void find_sums(const Arguments&) {}
  __device__ __forceinline__ int begins() const { return 0; }
  __device__ __forceinline__ bool is_due(int) const { return false; }
  __device__ __forceinline__ bool holds_some() const { return false; }
  __device__ __forceinline__ void promote(float (&)[kOutputs]) {}
  __device__ __forceinline__ void fade(const float (&)[2], float (&)[kOutputs]) {}
  __device__ __forceinline__ void fetch(float (&)[kScores]) const {}
  __device__ __forceinline__ void add(float (&)[kScores], float (&)[kOutputs]) const {}
};

}  // namespace ostinato::prefill
