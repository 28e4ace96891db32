// The query converter: a warpgroup makes the bf16 rows of a work tile fp16, in shared memory, so
// that 8-bit keys and values need only be converted to fp16, which takes a quarter of the
// instructions.
//
// A row is multiplied by a power of two, by which its greatest element gets into [2^14, 2^15). What
// is lost is below 2^-38 of it.
#pragma once

#include "common/pack_pair.cuh"
#include "common/tma.cuh"
#include "shared_storage.cuh"

namespace ostinato::prefill {

template <class Storage>
__device__ __forceinline__ float& query_unit_of(Storage& shared, int buffer, int warpgroup,
                                                int row) {
  return shared.query_units[buffer][warpgroup][row];
}

// The factor of a row whose greatest element, as bf16, has these bits; a power of two.
__device__ __forceinline__ float query_factor(uint32_t greatest) {
  constexpr uint32_t kBias = 127, kTop = 14;
  const uint32_t exponent = greatest >> 7 & 0xff;
  const uint32_t biased = 2 * kBias + kTop - exponent;
  return __uint_as_float(min(biased, 2 * kBias - 1) << 23);  // its inverse is normal
}

// The greater ones of the magnitudes of two pairs, as integers.
__device__ __forceinline__ uint32_t greater_magnitudes(uint32_t magnitudes, uint32_t pair) {
  const uint32_t low = max(magnitudes & 0xffff, pair & 0x7fff);
  return max(magnitudes & 0xffff0000, pair & 0x7fff0000) | low;
}

// Converts a warpgroup's queries, which TMA has written to `queries`. Two lanes have a row, and
// each warp has those whose scores it gets.
template <class Storage>
__device__ __forceinline__ void convert_queries(Storage& shared, uint8_t* queries, int buffer,
                                                int warpgroup) {
  constexpr int kVectors = kDim / 16;  // of a lane
  constexpr int kHeld = kVectors < 8 ? kVectors : 8;
  const unsigned thread = opaque(threadIdx.x) % kWarpgroup;
  const unsigned row = thread / 2;
  uint8_t* const begin = queries + row * kStripBytes;
  // Vectors of a row are in any order; of eight lanes each has banks of its own.
  const auto vector = [&](unsigned i) {
    const unsigned slot = (2 * i + thread % 2) ^ row % 4 * 2;
    return reinterpret_cast<uint4*>(begin + slot / 8 * kRowStrip + slot % 8 * 16);
  };
  // As many at once as there are registers for, all of a head dim up to 128: a read takes long
  // while tensor cores read operands.
  uint4 held[kHeld];
  const auto read = [&](int first) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      held[i] = *vector(first + i);
    }
  };
  uint32_t magnitudes = 0;
#pragma unroll
  for (int first = kVectors - kHeld; first >= 0; first -= kHeld) {
    read(first);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      magnitudes = greater_magnitudes(magnitudes, held[i].x);
      magnitudes = greater_magnitudes(magnitudes, held[i].y);
      magnitudes = greater_magnitudes(magnitudes, held[i].z);
      magnitudes = greater_magnitudes(magnitudes, held[i].w);
    }
  }
  uint32_t greatest = max(magnitudes & 0xffff, magnitudes >> 16);
  greatest = max(greatest, __shfl_xor_sync(0xffffffff, greatest, 1));
  const float factor = query_factor(greatest);
  const auto convert = [&](uint32_t pair) {
    return pack_pair<Type>(__uint_as_float(pair << 16) * factor,
                           __uint_as_float(pair & 0xffff0000) * factor);
  };
#pragma unroll
  for (int first = 0; first < kVectors; first += kHeld) {
    if (first > 0) {  // the first ones have been read last
      read(first);
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const uint4& words = held[i];
      *vector(first + i) =
          make_uint4(convert(words.x), convert(words.y), convert(words.z), convert(words.w));
    }
  }
  if (thread % 2 == 0) {
    query_unit_of(shared, buffer, warpgroup, row) =
        __uint_as_float((254u << 23) - __float_as_uint(factor));
  }
  fence_shared_for_tma();  // written by threads, read by wgmma
  OSTINATO_DELAY(prefill_queries_convert, thread / 32 == 1);
  sync_warpgroup(warpgroup);
}

}  // namespace ostinato::prefill
