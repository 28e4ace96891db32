// What the MMAs of the tiled GEMM do, thread by thread.
#pragma once

#include "common/mma_groups.cuh"
#include "config.cuh"

namespace ostinato::tiled {

using Sum = std::conditional_t<kInt8, uint32_t, float>;

inline uint32_t swizzled_64(uint32_t address) { return address ^ (address >> 7 & 3) << 4; }

// The product of two elements of 8 or 16 bits.
inline Sum element_product(const char* a, const char* b) {
  if constexpr (kInt8) {
    return static_cast<Sum>(int{static_cast<int8_t>(*a)} * int{static_cast<int8_t>(*b)});
  } else if constexpr (k16Bit) {
    using Element = std::conditional_t<kOperandType == OperandType::bf16, __nv_bfloat16, __half>;
    Element pair[2];
    std::memcpy(static_cast<void*>(&pair[0]), a, sizeof(Element));
    std::memcpy(static_cast<void*>(&pair[1]), b, sizeof(Element));
    return static_cast<float>(pair[0]) * static_cast<float>(pair[1]);
  } else {
    __nv_fp8_e4m3 pair[2];
    std::memcpy(static_cast<void*>(&pair[0]), a, 1);
    std::memcpy(static_cast<void*>(&pair[1]), b, 1);
    return static_cast<float>(pair[0]) * static_cast<float>(pair[1]);
  }
}

// An operand in shared memory, of rows as wide as its swizzle.
template <int kRowBytes>
struct Operand {
  uint32_t address;

  explicit Operand(uint32_t at) : address(at) {
    if (at % 512 != 0) {
      emulator::fail("an operand that begins within a swizzle");
    }
  }
  static Operand uniform(uint32_t at) { return Operand(at); }
  const char* at(uint32_t offset) const {
    const uint32_t place = address + offset;
    return emulator::shared + (kRowBytes == 64 ? swizzled_64(place) : swizzled(place));
  }
};
using Channels = Operand<kPackedDepth>;
using Tokens = Operand<kUnitDepth>;

// In the order of the MMAs: 32 bytes of K at a time.
inline void multiply_unit(Channels channels, int channel_offset, int block_bytes, Tokens tokens,
                          int token_offset, int first_column, bool accumulate,
                          Sum (&sums)[kBlocks][kPieceSums]) {
  pending_mmas().open.push_back([=, &sums] {
    const int first_row = threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4;
    for (int block = 0; block < kBlocks; ++block) {
      for (int i = 0; i < kPieceSums; ++i) {
        const int row = block * kMmaRows + first_row + i / 2 % 2 * 8;
        const int column = first_column + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        const int channel = kTokenRows ? column : row, token = kTokenRows ? row : column;
        Sum sum = accumulate ? sums[block][i] : 0;
        for (int depth = 0; depth < kUnitDepth; depth += kOperandBytes) {
          sum += element_product(channels.at(channel_offset + depth / kPackedDepth * block_bytes +
                                             channel * kPackedDepth + depth % kPackedDepth),
                                 tokens.at(token_offset + token * kUnitDepth + depth));
        }
        sums[block][i] = sum;
      }
    }
  });
}

template <int kCount>
void pin(Sum (& /*sums*/)[kBlocks][kCount]) {}

}  // namespace ostinato::tiled
