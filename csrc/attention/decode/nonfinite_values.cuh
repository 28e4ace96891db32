// Non-finite values. A weight of 0 masks a value only if the value is finite: 0 * NaN is NaN. So
// values that no query sees are replaced by zeros, and a block with a NaN or infinity that some
// query does not see is multiplied query by query (Mainloop).
#pragma once

#include <cmath>

#include "dequant.cuh"
#include "mask.cuh"

namespace ostinato::decode {

inline constexpr float kNoExponent = -101;  // of a scale that is NaN or infinite

__device__ __forceinline__ bool is_number(float x) { return fabsf(x) < INFINITY; }

// Those of a block's tokens, a lane's lane / 4 and the one 8 later, if they have scales of their
// own.
struct TokenScales {
  float key[2] = {1, 1}, value_exponent[2] = {};
  bool own = false;
  bool spoilt = false;  // a value's scale is NaN or infinite

  TokenScales() = default;
  // Whoever scales the values of a token scales its weight for them: as an exponent, so that
  // weights keep their precision whatever the size of the scales. By a warp.
  __device__ __forceinline__ explicit TokenScales(const float* scales) : own(true) {
    const int row = threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      key[i] = scales[row + i * 8];
      // The exponent must be a number also of a token that a query does not see.
      const float scale = scales[kBlockTokens + row + i * 8];
      const bool number = is_number(scale);
      value_exponent[i] = number ? fminf(fmaxf(log2f(scale), -100.0f), 100.0f) : kNoExponent;
      spoilt |= !number;
    }
    spoilt = __any_sync(0xffffffff, spoilt);
  }
};

// What of V an MMA's operand keeps: of the tokens 2 (lane % 4), the next one, and those 8 later.
struct ValueMask {
  uint32_t keep[2] = {};

  ValueMask() = default;
  // The tokens from `begin` to `end`, of a block whose first row is that of `token`.
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

// Whether a word of cache elements has one whose exponent is that of NaN and infinity. Adding 1 to
// such an exponent (E4M3: to NaN, the one number of its kind) carries into the sign's place.
__device__ __forceinline__ uint32_t no_number_bits(uint32_t word) {
  if constexpr (std::is_same_v<Cache, E4m3>) {
    return ((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
  } else {
    constexpr uint32_t kOne = std::is_same_v<Operand, __nv_bfloat16> ? 0x00800080u : 0x04000400u;
    return ((word & 0x7fff7fffu) + kOne) & 0x80008000u;
  }
}

// Whether a block of values holds NaN or an infinity in a token that some query sees. By a warp.
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
