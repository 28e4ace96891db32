// Non-finite values. A weight of 0 masks a value only if the value is finite: 0 * NaN is NaN. So
// values masked for all queries are replaced by zeros, and a block with a NaN or infinity that is
// visible to some query but not to all is multiplied query by query (Mainloop).
#pragma once

#include <cmath>

#include "dequant.cuh"
#include "mask.cuh"

namespace ostinato::decode {

inline constexpr float kNoExponent = -101;  // exponent that stands for a NaN or infinite scale

__device__ __forceinline__ bool is_number(float x) { return fabsf(x) < INFINITY; }

// Per-token scales of a block, if there are any: of the tokens lane / 4 and lane / 4 + 8.
struct TokenScales {
  float key[2] = {1, 1}, value_exponent[2] = {};
  bool own = false;
  bool nonfinite = false;  // a value's scale is NaN or infinite

  TokenScales() = default;
  // The scale of a token's values is applied to its weight as an exponent, so that weights keep
  // their precision whatever the magnitude of the scales. Called by a warp.
  __device__ __forceinline__ explicit TokenScales(const float* scales) : own(true) {
    const int row = threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      key[i] = scales[row + i * 8];
      // The exponent must be finite even for a masked token.
      const float scale = scales[kBlockTokens + row + i * 8];
      const bool number = is_number(scale);
      value_exponent[i] = number ? fminf(fmaxf(log2f(scale), -100.0f), 100.0f) : kNoExponent;
      nonfinite |= !number;
    }
    nonfinite = __any_sync(0xffffffff, nonfinite);
  }
};

// Mask of an MMA operand of V: tokens 2 (lane % 4) and the next one, and those 8 later.
struct ValueMask {
  uint32_t keep[2] = {};

  ValueMask() = default;
  // Keeps the tokens from `begin` to `end`, in a block whose first row is `token`.
  __device__ __forceinline__ ValueMask(int begin, int end, int token) {
    const int first = token + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int low = first + i * 8;
      keep[i] = (low >= begin && low < end ? 0x0000ffffu : 0u) |
                (low + 1 >= begin && low + 1 < end ? 0xffff0000u : 0u);
    }
  }

  __device__ __forceinline__ void apply(uint32_t (&values)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[i] &= keep[i / 2];
    }
  }
};

// Nonzero if a word of cache elements has one with the exponent of NaN and infinity. Adding 1 to
// such an exponent (for E4M3, to the one encoding of NaN) carries into the sign bit.
__device__ __forceinline__ uint32_t no_number_bits(uint32_t word) {
  if constexpr (std::is_same_v<Cache, E4m3>) {
    return ((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
  } else {
    constexpr uint32_t kOne = std::is_same_v<Operand, __nv_bfloat16> ? 0x00800080u : 0x04000400u;
    return ((word & 0x7fff7fffu) + kOne) & 0x80008000u;
  }
}

// Whether a block has a NaN or infinite value at a token visible to some query. Called by a warp.
__device__ __forceinline__ bool holds_no_number(const uint8_t* block, const Mask& mask, int token) {
  if constexpr (std::is_same_v<Cache, Int8>) {
    return false;
  }
  constexpr int kVectors = kRowBytes / 16;
  const int lane = threadIdx.x % 32, row = lane % kBlockTokens;
  const int first = mask.first_row(token), begin = mask.first_own(token, mask.begin());
  uint32_t found = 0;
  if (first + row >= begin && first + row < mask.seqlen) {
#pragma unroll(kQuantized ? 1 : 2)
    for (int vector = lane / kBlockTokens; vector < kVectors; vector += 32 / kBlockTokens) {
      const uint4 words =
          *reinterpret_cast<const uint4*>(block + vector / 8 * (kStripBytes * kBlockTokens) +
                                          row * kStripBytes + (vector % 8 ^ row % 8) * 16);
      found |= no_number_bits(words.x) | no_number_bits(words.y) | no_number_bits(words.z) |
               no_number_bits(words.w);
    }
  }
  return __any_sync(0xffffffff, found != 0);
}

}  // namespace ostinato::decode
