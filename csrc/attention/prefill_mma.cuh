// Tiles in shared memory as operands of wgmma.
#pragma once

#include "prefill_storage.cuh"
#include "prefill_wgmma.cuh"

namespace ostinato::prefill {

// How wgmma finds an operand in strips of 128-byte rows, swizzled by TMA (PTX ISA, "matrix
// descriptor"): the address, the distance of groups of 8 rows, that of strips, and the swizzle.
class Operand {
  static constexpr int kUnit = 16;  // bytes in which a descriptor counts
  static constexpr uint32_t kGroup = 8 * kStripBytes / kUnit;
  static constexpr uint32_t kHigh = kGroup | 1u << 30;

 public:
  // `strip` is the distance of strips, where strips are columns of the MMA; otherwise it is not
  // read. The address is the same in all lanes: wgmma takes descriptors from uniform registers, and
  // the compiler computes them there only where it sees that they are uniform.
  __device__ __forceinline__ explicit Operand(const uint8_t* tile, int strip = kUnit)
      : low_(__shfl_sync(0xffffffff, shared_address(tile) / kUnit, 0) |
             static_cast<uint32_t>(strip / kUnit) << 16) {}

  __device__ __forceinline__ uint64_t descriptor(uint32_t offset) const {
    return uint64_t{kHigh} << 32 | (low_ + offset / kUnit);
  }

 private:
  uint32_t low_;
};

// Where 16 elements of the head dim begin, in rows of strips.
__device__ __forceinline__ constexpr uint32_t dim_offset(int step, int strip_bytes) {
  constexpr int kStepBytes = 16 * kElement;
  constexpr int kStepsOfStrip = kStripBytes / kStepBytes;
  return step / kStepsOfStrip * strip_bytes + step % kStepsOfStrip * kStepBytes;
}

// Enqueues scores = queries · keysᵀ.
__device__ __forceinline__ void multiply_keys(const Operand& queries, const Operand& keys,
                                              float (&scores)[kScores]) {
#pragma unroll
  for (int step = 0; step < kDimSteps; ++step) {
    multiply_keys_step(queries.descriptor(dim_offset(step, kRowStrip)),
                       keys.descriptor(dim_offset(step, kKeyStrip)), scores, step > 0);
  }
  commit_multiplication();
}

// Enqueues outputs (+)= weights · values.
__device__ __forceinline__ void multiply_values(const uint32_t (&weights)[kKeySteps][4],
                                                const Operand& values, float (&outputs)[kOutputs],
                                                bool accumulate) {
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step) {
    multiply_values_step(weights[step], values.descriptor(step * 16 * kStripBytes), outputs,
                         accumulate || step > 0);
  }
  commit_multiplication();
}

}  // namespace ostinato::prefill
