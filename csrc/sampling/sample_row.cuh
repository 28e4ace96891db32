// A row of logits for sampling: with penalty, as ordered keys, and as integer masses.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/argmax_key.cuh"
#include "common/quantize_math.cuh"
#include "common/vector.cuh"
#include "params.h"

namespace ostinato::sampling {

using Logit = dtype::OSTINATO_DTYPE;

constexpr int kThreads = 512;
constexpr int kVector = 16 / sizeof(Logit);  // logits that a thread loads at once

// The larger number; NaN if either is NaN.
__device__ __forceinline__ float max_or_nan(float x, float y) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
  return larger;
}

// Masses are probabilities relative to the largest, as integers: their sums do not depend on the
// order. Probabilities below 2^-45 become 0.
constexpr int kMassBits = 44;
constexpr int kMaxVocabulary = 1 << 19;  // a sum of so many masses is less than 2^63
using Mass = uint64_t;

// Maps logits to depths below the best, in units of the temperature, and depths to masses.
struct Scale {
  static constexpr double kDeepest = (kMassBits + 1) * 0.6931471805599453;

  double best;
  double inverse_temperature;

  __device__ __forceinline__ double depth(float logit) const {
    return (best - static_cast<double>(logit)) * inverse_temperature;
  }
  // Whether a token can be drawn: false for a NaN logit, too.
  __device__ static __forceinline__ bool is_some(double depth) { return depth < kDeepest; }
  __device__ static __forceinline__ Mass mass(double depth) {
    return __double2ull_rn(exp(-depth) * (Mass{1} << kMassBits));
  }
};

// The share of a row that one CTA reads.
template <bool kAligned>
class RowShare {
 public:
  __device__ RowShare(const SampleParams& p, int row, int part, int parts)
      : logits_(static_cast<const Logit*>(p.logits) + row * p.logits_stride), seen_(nullptr) {
    const uint32_t vocabulary = static_cast<uint32_t>(p.vocabulary);
    const uint32_t vectors = (vocabulary + kVector - 1) / kVector;
    const uint32_t share = (vectors + parts - 1) / parts * kVector;
    first_ = min(part * share, vocabulary);
    end_ = min(first_ + share, vocabulary);
    if (p.seen != nullptr && p.repetition_penalty[row] != 1.0f) {
      penalty_ = p.repetition_penalty[row];
      seen_ = p.seen + (p.seen_rows == nullptr ? row : p.seen_rows[row]) * p.seen_stride;
    }
  }

  // Calls visit(logits, first id) for every vector of the share. An incomplete vector is padded
  // with its first logit. A thread loads its next kTokens tokens before it processes the current
  // ones. It starts at the end: the last logits were written last and may still be in L2, and
  // reading from the start would evict them.
  template <int kTokens, typename Visit>
  __device__ __forceinline__ void for_each_vector(Visit&& visit) const {
    constexpr int kVectors = kAligned ? kTokens / kVector : 1;
    constexpr uint32_t kStep = kThreads * kVectors * kVector;
    const uint32_t steps = (end_ - first_ + kStep - 1) / kStep;
    Packed<Logit, kVector> packed[kVectors], next[kVectors];
    load_vectors(first_ + (steps - 1) * kStep, next);
#pragma unroll 1
    for (uint32_t step = steps; step-- > 0;) {
      const uint32_t base = first_ + step * kStep;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        packed[v] = next[v];
      }
      if (step > 0) {
        load_vectors(base - kStep, next);
      }
#pragma unroll
      for (int v = kVectors - 1; v >= 0; --v) {
        const uint32_t id = place(base, v);
        if (id < end_) {
          float values[kVector];
          packed[v].unpack(values);
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            values[i] = i == 0 || id + i < end_ ? penalized(values[i], id + i) : values[0];
          }
          visit(values, id);
        }
      }
    }
  }

  // Calls visit(logit, id) for every token of the share. A thread loads kTokens tokens at a time.
  template <int kTokens, typename Visit>
  __device__ __forceinline__ void for_each(Visit&& visit) const {
    constexpr int kVectors = kAligned ? kTokens / kVector : 1;
#pragma unroll 1
    for (uint32_t base = first_; base < end_; base += kThreads * kVectors * kVector) {
      Packed<Logit, kVector> packed[kVectors];
      load_vectors(base, packed);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float values[kVector];
        packed[v].unpack(values);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          const uint32_t id = place(base, v) + i;
          if (id < end_) {
            visit(penalized(values[i], id), id);
          }
        }
      }
    }
  }

 private:
  __device__ static __forceinline__ uint32_t place(uint32_t base, int vector) {
    return base + (vector * kThreads + threadIdx.x) * kVector;
  }

  template <int kVectors>
  __device__ __forceinline__ void load_vectors(uint32_t base,
                                               Packed<Logit, kVector> (&packed)[kVectors]) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      load<kAligned, Reuse::kEveryRow>(logits_, place(base, v), end_, packed[v]);
    }
  }

  __device__ __forceinline__ float penalized(float logit, uint32_t id) const {
    if (seen_ == nullptr || seen_[id] == 0) {
      return logit;
    }
    return logit > 0.0f ? logit / penalty_ : logit * penalty_;
  }

  const Logit* logits_;
  const uint8_t* seen_;
  float penalty_ = 1.0f;
  uint32_t first_;
  uint32_t end_;
};

}  // namespace ostinato::sampling
