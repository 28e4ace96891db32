// The second level of sums of 8-bit products where registers have no room for it.
//
// The tensor cores keep about 14 bits of a sum. So they add up no more than some tiles; then a
// thread adds its part of the outputs to a place of its own in global memory, in fp32, and they
// start anew from 0. Nothing waits for these additions, which the L2 carries out: each place is one
// thread's, whose accesses of it take effect in their order. At an item's end what lies there is
// read back. Items of fewer tiles put nothing aside.
#pragma once

#include "prefill_aside_instructions.cuh"
#include "prefill_rows.cuh"
#include "prefill_wgmma.cuh"

namespace ostinato::prefill {

class Aside {
 public:
  static constexpr int kVectors = kOutputs / 4;  // of a thread, 16 bytes each
  static constexpr int kFetched = kScores / 4 < kVectors ? kScores / 4 : kVectors;  // at once

  // The first tile of an item, and how many of them hide some key from some query: these are mended
  // (prefill_mend.cuh) before anything is put aside, so that it need not be.
  __device__ __forceinline__ void begin(int first, int hiding) {
    due_ = max(first + kSumTiles, hiding);
    holds_ = false;
  }

  __device__ __forceinline__ bool is_due(int n) const { return n >= due_; }
  __device__ __forceinline__ bool holds_some() const { return holds_; }

  // Before tile n's products are added. What lies there is relative to `base_`, a row's reference
  // when it was put there first.
  template <class Softmax>
  __device__ __forceinline__ void put(const Arguments& args, const Softmax& softmax, int n,
                                      float (&outputs)[kOutputs]) {
    float4* const place = find_place(args);
    if (!holds_) {
      base_[0] = softmax.maximum(0);
      base_[1] = softmax.maximum(1);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        store_vector(place + i * kConsumerThreads, vector_of(outputs, i));
      }
    } else {
      const float risen[2] = {softmax.maximum(0) - base_[0], softmax.maximum(1) - base_[1]};
      if (__any_sync(0xffffffff, risen[0] > kFarthest || risen[1] > kFarthest)) {
        rebase(place, softmax, risen);
      }
      const float factor[2] = {power_of_2(softmax.maximum(0) - base_[0]),
                               power_of_2(softmax.maximum(1) - base_[1])};
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const float4 v = vector_of(outputs, i);
        add_vector(place + i * kConsumerThreads,
                   make_float4(v.x * factor[0], v.y * factor[0], v.z * factor[1], v.w * factor[1]));
      }
    }
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      outputs[i] = 0;
    }
    holds_ = true;
    due_ = n + kSumTiles;
  }

  // What lies there is read while the last products go on, as far as there is room: in place of the
  // scores, which are needed no more.
  __device__ __forceinline__ void fetch(const Arguments& args, float (&scores)[kScores]) const {
    load<0, kFetched>(find_place(args), scores);
  }

  // When the products have ended: that and the rest are added to the outputs.
  template <class Softmax>
  __device__ __forceinline__ void add(const Arguments& args, const Softmax& softmax,
                                      float (&scores)[kScores], float (&outputs)[kOutputs]) const {
    const float factor[2] = {power_of_2(base_[0] - softmax.maximum(0)),
                             power_of_2(base_[1] - softmax.maximum(1))};
    constexpr int kRest = kVectors - kFetched;
    add_some<0, kRest>(scores, factor, outputs);
    pin(outputs);  // what was added makes room
    load<kFetched, kRest>(find_place(args), scores);
    add_some<kRest, kFetched - kRest>(scores, factor, outputs);
    add_some<0, kRest, kFetched>(scores, factor, outputs);
  }

 private:
  // Of references, in powers of 2: with it what a sum of kSumTiles tiles may be, 2^28, is far from
  // overflow.
  static constexpr float kFarthest = 64;

  // So that 16 bytes of each lane lie side by side.
  __device__ __forceinline__ static float4* find_place(const Arguments& args) {
    return reinterpret_cast<float4*>(static_cast<uint8_t*>(args.params.workspace) + kCounterBytes +
                                     blockIdx.x * kAsideBytes) +
           threadIdx.x;
  }
  __device__ __forceinline__ static float4 vector_of(const float (&outputs)[kOutputs], int i) {
    return make_float4(outputs[4 * i], outputs[4 * i + 1], outputs[4 * i + 2], outputs[4 * i + 3]);
  }

  // kCount vectors from kFirst on, to the scores' first places.
  template <int kFirst, int kCount>
  __device__ __forceinline__ static void load(const float4* place, float (&scores)[kScores]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float4 v = load_vector(place + (kFirst + i) * kConsumerThreads);
      scores[4 * i] = v.x;
      scores[4 * i + 1] = v.y;
      scores[4 * i + 2] = v.z;
      scores[4 * i + 3] = v.w;
    }
  }
  // The scores' vectors from kFirst on, to outputs that lie kBehind vectors behind.
  template <int kFirst, int kCount, int kBehind = 0>
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
  // that sums could overflow. Rows of which they are not keep their bits.
  template <class Softmax>
  __device__ __forceinline__ void rebase(float4* place, const Softmax& softmax,
                                         const float (&risen)[2]) {
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool far = risen[half] > kFarthest;
      factor[half] = far ? power_of_2(-risen[half]) : 1.0f;
      base_[half] = far ? softmax.maximum(half) : base_[half];
    }
#pragma unroll 1
    for (int i = 0; i < kVectors; ++i) {
      const float4 v = load_vector(place + i * kConsumerThreads);
      store_vector(place + i * kConsumerThreads,
                   make_float4(v.x * factor[0], v.y * factor[0], v.z * factor[1], v.w * factor[1]));
    }
  }

  int due_;
  bool holds_;
  float base_[2];
};

// What puts nothing aside.
struct NoAside {
  __device__ __forceinline__ void begin(int, int) {}
  __device__ __forceinline__ bool is_due(int) const { return false; }
  __device__ __forceinline__ bool holds_some() const { return false; }
  template <class Softmax>
  __device__ __forceinline__ void put(const Arguments&, const Softmax&, int, float (&)[kOutputs]) {}
  __device__ __forceinline__ void fetch(const Arguments&, float (&)[kScores]) const {}
  template <class Softmax>
  __device__ __forceinline__ void add(const Arguments&, const Softmax&, float (&)[kScores],
                                      float (&)[kOutputs]) const {}
};

}  // namespace ostinato::prefill
