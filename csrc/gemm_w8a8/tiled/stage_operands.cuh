// Where a consumer warpgroup finds its operands in the ring, and the MMAs of a unit of them.
#pragma once

#include "common/mbarrier.cuh"
#include "wgmma.cuh"

namespace ostinato::tiled {

// `Plan` says how large a stage and its parts are.
template <class Plan>
class StageOperands {
 public:
  __device__ StageOperands(const Plan& plan, uint8_t* ring)
      : plan_(plan),
        ring_(uniform(shared_address(ring))),
        warpgroup_(uniform(threadIdx.x / kWarpgroup)) {}

 protected:
  // With block scales every step waits for its MMAs, so that addresses must not take long: what is
  // from one lane is in uniform registers from here on.
  template <class Value>
  static __device__ __forceinline__ Value uniform(Value value) {
    return kBlockScales ? __shfl_sync(0xffffffff, value, 0) : value;
  }

  __device__ __forceinline__ Channels channels_of(int slot) const {
    return operand<Channels>(
        ring_ + slot * plan_.stage_bytes +
        (kTokenRows ? 0 : warpgroup_in_tile(warpgroup_) * kBlocks * kMmaRows * kPackedDepth));
  }
  __device__ __forceinline__ uint32_t tokens_address(int slot) const {
    return ring_ + slot * plan_.stage_bytes + plan_.weight_bytes +
           (kTokenRows ? warpgroup_in_tile(warpgroup_) * kBlocks * kMmaRows * kUnitDepth : 0);
  }
  __device__ __forceinline__ Tokens tokens_of(int slot) const {
    return operand<Tokens>(tokens_address(slot));
  }

  static __device__ __forceinline__ void clear(Sum (&sums)[kBlocks][kSums]) {
#pragma unroll
    for (auto& block : sums) {
#pragma unroll
      for (Sum& s : block) {
        s = 0;
      }
    }
  }

  // Issues the MMAs of a unit of a stage, for the columns from `first_column` on.
  __device__ __forceinline__ void multiply_unit(Channels channels, Tokens tokens, int unit,
                                                int first_column, bool accumulate,
                                                Sum (&sums)[kBlocks][kPieceSums]) const {
    tiled::multiply_unit(channels, unit * kUnitBlocks * plan_.block_bytes, plan_.block_bytes,
                         tokens, unit * plan_.token_rows * kUnitDepth, first_column, accumulate,
                         sums);
  }

  const Plan& plan_;
  uint32_t ring_;
  int warpgroup_;

 private:
  template <class AnyOperand>
  static __device__ __forceinline__ AnyOperand operand(uint32_t address) {
    return kBlockScales ? AnyOperand::uniform(address) : AnyOperand(address);
  }
};

}  // namespace ostinato::tiled
