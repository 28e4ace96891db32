// Argmax keys: a logit and a token id in 64 bits that order tokens by falling logit, then by rising
// id. The smallest key of a row is its argmax, however the row is divided among threads.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace ostinato {

using ArgmaxKey = uint64_t;

// NaN comes first, as in torch's sort; both zeros are one.
__device__ __forceinline__ ArgmaxKey argmax_key_of(float logit, uint32_t id) {
  const uint32_t bits = __float_as_uint(logit + 0.0f);
  const uint32_t rising = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return ArgmaxKey{isnan(logit) ? 0 : ~rising} << 32 | id;
}
__device__ __forceinline__ float logit_of(ArgmaxKey key) {
  const uint32_t rising = ~static_cast<uint32_t>(key >> 32);
  return __uint_as_float(rising & 0x80000000u ? rising & 0x7fffffffu : ~rising);
}
__device__ __forceinline__ uint32_t id_of(ArgmaxKey key) { return static_cast<uint32_t>(key); }

// The smallest key of kLanes neighbouring lanes, for each of them.
template <int kLanes>
__device__ __forceinline__ ArgmaxKey smallest_of_lanes(ArgmaxKey key) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    const ArgmaxKey other = __shfl_xor_sync(0xffffffffu, key, distance);
    key = other < key ? other : key;
  }
  return key;
}

// Whether a row's token is its best, as it is: NaN is no temperature above 0. A penalty of null
// is 1.
__device__ __forceinline__ bool is_greedy(float temperature, float penalty) {
  return !(temperature > 0.0f) && penalty == 1.0f;
}

}  // namespace ostinato
