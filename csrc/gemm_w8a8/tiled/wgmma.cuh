// MMAs of the tiled GEMM: wgmma with both operands in shared memory.
#pragma once

// CuTe provides tiles of 160 or 224 columns only with this macro.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED

#include <cstdint>
#include <utility>

#include "config.cuh"
#include "cute/arch/config.hpp"
#include "cute/arch/mma_sm90_gmma.hpp"

namespace ostinato::tiled {

#define OSTINATO_MMA_NAME_OF(columns, depth, types) MMA_64x##columns##x##depth##_##types
#define OSTINATO_MMA_NAME(columns, depth, types) OSTINATO_MMA_NAME_OF(columns, depth, types)

#if OSTINATO_TOKEN_ROWS
#define OSTINATO_COLUMNS OSTINATO_CHANNELS
#else
#define OSTINATO_COLUMNS OSTINATO_TOKENS
#endif
// A name of CuTe's is pasted from a number, not from half of one.
#if !OSTINATO_HALF_PIECES
#define OSTINATO_MMA_COLUMNS OSTINATO_COLUMNS
#elif OSTINATO_COLUMNS == 64
#define OSTINATO_MMA_COLUMNS 32
#elif OSTINATO_COLUMNS == 96
#define OSTINATO_MMA_COLUMNS 48
#elif OSTINATO_COLUMNS == 128
#define OSTINATO_MMA_COLUMNS 64
#elif OSTINATO_COLUMNS == 160
#define OSTINATO_MMA_COLUMNS 80
#elif OSTINATO_COLUMNS == 192
#define OSTINATO_MMA_COLUMNS 96
#elif OSTINATO_COLUMNS == 224
#define OSTINATO_MMA_COLUMNS 112
#elif OSTINATO_COLUMNS == 256
#define OSTINATO_MMA_COLUMNS 128
#endif
static_assert(OSTINATO_MMA_COLUMNS == kPieceColumns, "an MMA computes the columns of a piece");

template <OperandType>
struct MmaOf;
template <>
struct MmaOf<OperandType::int8> {
  using Sum = uint32_t;  // the bits of an int32
  using Mma = cute::SM90::GMMA::OSTINATO_MMA_NAME(OSTINATO_MMA_COLUMNS, 32, S32S8S8_SS_TN);
};
template <>
struct MmaOf<OperandType::e4m3> {
  using Sum = float;
  using Mma = cute::SM90::GMMA::OSTINATO_MMA_NAME(OSTINATO_MMA_COLUMNS, 32, F32E4M3E4M3_SS_TN)<>;
};
template <>
struct MmaOf<OperandType::bf16> {
  using Sum = float;
  using Mma = cute::SM90::GMMA::OSTINATO_MMA_NAME(
      OSTINATO_MMA_COLUMNS, 16,
      F32BF16BF16_SS)<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K>;
};
template <>
struct MmaOf<OperandType::fp16> {
  using Sum = float;
  using Mma = cute::SM90::GMMA::OSTINATO_MMA_NAME(
      OSTINATO_MMA_COLUMNS, 16,
      F32F16F16_SS)<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K>;
};
#if OSTINATO_ROWS_IN_REGISTERS
// The same of rows in registers.
using RegisterMma = cute::SM90::GMMA::OSTINATO_MMA_NAME(OSTINATO_MMA_COLUMNS, 32,
                                                        F32E4M3E4M3_RS_TN)<>;
#endif
#undef OSTINATO_MMA_NAME
#undef OSTINATO_MMA_NAME_OF

using Sum = MmaOf<kOperandType>::Sum;
using Mma = MmaOf<kOperandType>::Mma;

// A wgmma operand of rows of kRowBytes, swizzled by TMA (PTX ISA, "matrix descriptor"): address,
// distance of groups of 8 rows, and the swizzle, which is as wide as a row.
template <int kRowBytes>
class Operand {
  static_assert(kRowBytes == 64 || kRowBytes == 128, "a row is as wide as the swizzle");
  static constexpr int kUnit = 16;  // bytes, the unit of descriptor fields
  static constexpr uint32_t kSwizzle = kRowBytes == 128 ? 1 : 2;
  static constexpr uint32_t kHigh = kGroupRows * kRowBytes / kUnit | kSwizzle << 30;

 public:
  // The shared address is broadcast: wgmma takes descriptors from uniform registers, and the
  // compiler uses these only if it can prove uniformity.
  __device__ explicit Operand(uint32_t address)
      : Operand(__shfl_sync(0xffffffff, address / kUnit, 0), Checked()) {}

  // The operand at an address that is in a uniform register already.
  static __device__ __forceinline__ Operand uniform(uint32_t address) {
    return Operand(address / kUnit, Checked());
  }

  __device__ __forceinline__ uint64_t descriptor(uint32_t offset) const {
    return uint64_t(kHigh) << 32 | (low_ + offset / kUnit);
  }

 private:
  struct Checked {};
  __device__ __forceinline__ Operand(uint32_t units, Checked) : low_(units | 1 << 16) {}

  uint32_t low_;
};

template <int... kIndex>
__device__ __forceinline__ void multiply(uint64_t rows, uint64_t columns, Sum (&sums)[kPieceSums],
                                         bool accumulate, std::integer_sequence<int, kIndex...>) {
  Mma::fma(rows, columns, sums[kIndex]...,
           accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}

// Keeps the compiler from moving register accesses across asynchronous MMAs.
template <int kCount>
__device__ __forceinline__ void pin(Sum (&sums)[kBlocks][kCount]) {
#pragma unroll
  for (auto& block : sums) {
#pragma unroll
    for (Sum& sum : block) {
      cute::warpgroup_fence_operand(sum);
    }
  }
}

using Channels = Operand<kPackedDepth>;
using Tokens = Operand<kUnitDepth>;

// Issues sums += channels · tokensᵀ, or its transpose, for one unit of K and the columns from
// `first_column` on, at `channel_offset` and `token_offset` bytes from the operands. Blocks of K of
// channels are `block_bytes` apart. All tiles accumulate K in this order, so that floating-point
// sums have the same bits in each.
__device__ __forceinline__ void multiply_unit(Channels channels, int channel_offset,
                                              int block_bytes, Tokens tokens, int token_offset,
                                              int first_column, bool accumulate,
                                              Sum (&sums)[kBlocks][kPieceSums]) {
#pragma unroll
  for (int depth = 0; depth < kUnitDepth; depth += kMmaDepth) {
    const uint32_t in_block = depth / kPackedDepth * block_bytes + depth % kPackedDepth;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int channel = kTokenRows ? first_column : block * kMmaRows;
      const int token = kTokenRows ? block * kMmaRows : first_column;
      const uint64_t of_channels =
          channels.descriptor(channel_offset + in_block + channel * kPackedDepth);
      const uint64_t of_tokens = tokens.descriptor(token_offset + depth + token * kUnitDepth);
      multiply(kTokenRows ? of_tokens : of_channels, kTokenRows ? of_channels : of_tokens,
               sums[block], accumulate || depth > 0, std::make_integer_sequence<int, kPieceSums>());
    }
  }
}

}  // namespace ostinato::tiled
