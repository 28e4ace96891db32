// Tiles in shared memory as operands of wgmma.
#pragma once

#include "shared_storage.cuh"
#include "wgmma.cuh"

namespace ostinato::prefill {

// How wgmma finds an operand in strips of rows of 128 (or 64) bytes, swizzled as by TMA (PTX ISA,
// "matrix descriptor"): the address, the distance of groups of 8 rows, that of strips, and the
// swizzle.
template <int kRowBytes, int kGroupStep = 8 * kRowBytes>
class OperandOf {
  static constexpr int kUnit = 16;  // bytes in which a descriptor counts
  static constexpr uint32_t kHigh = kGroupStep / kUnit | (kRowBytes == 128 ? 1u : 2u) << 30;
  static_assert(kRowBytes == 128 || kRowBytes == 64, "two swizzles");

 public:
  // `strip` is the distance of strips, where strips are columns of the MMA; otherwise it is not
  // read. The address is the same in all lanes: wgmma takes descriptors from uniform registers, and
  // the compiler computes them there only where it sees that they are uniform.
  __device__ __forceinline__ explicit OperandOf(const uint8_t* tile, int strip = kUnit)
      : low_(__shfl_sync(0xffffffff, shared_address(tile) / kUnit, 0) |
             static_cast<uint32_t>(strip / kUnit) << 16) {}

  __device__ __forceinline__ uint64_t descriptor(uint32_t offset) const {
    return uint64_t{kHigh} << 32 | (low_ + offset / kUnit);
  }

 private:
  uint32_t low_;
};
using Operand = OperandOf<kStripBytes>;
using KeysOperand = OperandOf<kStripBytes, kKeyGroupStep>;

// Where the elements of the head dim that one MMA sums begin, in rows of strips.
__device__ __forceinline__ constexpr uint32_t dim_offset(int step, int strip_bytes) {
  constexpr int kStepBytes = kMmaDepth * kElement;
  constexpr int kStepsOfStrip = kStripBytes / kStepBytes;
  return step / kStepsOfStrip * strip_bytes + step % kStepsOfStrip * kStepBytes;
}

// Enqueues scores = queries · keysᵀ.
__device__ __forceinline__ void multiply_keys(const Operand& queries, const KeysOperand& keys,
                                              float (&scores)[kScores]) {
#pragma unroll
  for (int step = 0; step < kDimSteps; ++step) {
    multiply_keys_step(queries.descriptor(dim_offset(step, kRowStrip)),
                       keys.descriptor(dim_offset(step, kStripStep)), scores, step > 0);
  }
  commit_multiplication();
}

// Enqueues products (+)= weights · values. Values have keys along the columns of their rows where
// they have been transposed, otherwise a row for each key.
using ValuesOperand =
    std::conditional_t<kFp8, OperandOf<kValueRowBytes>, OperandOf<kStripBytes, kValueGroupStep>>;
__device__ __forceinline__ void multiply_values(const uint32_t (&weights)[kKeySteps][4],
                                                const ValuesOperand& values,
                                                float (&products)[kOutputs], bool accumulate) {
  constexpr uint32_t kStep = kFp8 ? kMmaDepth * kElement : kMmaDepth / kGroup * kValueGroupStep;
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step) {
    multiply_values_step(weights[step], values.descriptor(step * kStep), products,
                         accumulate || step > 0);
  }
  commit_multiplication();
}

}  // namespace ostinato::prefill
