// Processing of one head: the elements of each thread, RMS norm, RoPE, and the store of the result,
// for the variant that the macros of append.cu select.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/quantize_math.cuh"
#include "common/vector.cuh"
#include "params.h"

namespace ostinato {
namespace {

using In = dtype::OSTINATO_DTYPE;
using Cache = dtype::OSTINATO_CACHE_DTYPE;
constexpr bool kQuantizes =
    std::is_same_v<Cache, dtype::int8> || std::is_same_v<Cache, dtype::e4m3>;
static_assert(kQuantizes || std::is_same_v<Cache, In>,
              "a cache has the dtype of the keys, or 8 bits");

constexpr int kVectorSize = 16 / sizeof(In);
using Values = float[kVectorSize];
using Vector = Packed<In, kVectorSize>;
using Element = std::conditional_t<kQuantizes, uint8_t, In>;  // of the cache

// The two vectors of a head that a thread has: elements first .. first + kVectorSize of each, as
// far as they are before `end`. Without interleaving, the second vector holds the partners of the
// first, so that pairs are rotated within a thread. The assignment follows from sizes alone, never
// from alignment, and so does the order in which squares are added.
struct Chunk {
  uint32_t first[2];
  uint32_t end[2];

  __device__ __forceinline__ Chunk(uint32_t index, uint32_t dim, uint32_t half) {
    const uint32_t rotated = (half + kVectorSize - 1) / kVectorSize;
    if (index < rotated) {
      first[0] = index * kVectorSize;
      end[0] = half;
      first[1] = half + first[0];
      end[1] = 2 * half;
      return;
    }
    // The unrotated rest is cut in the middle, so that adjacent threads have adjacent vectors.
    index -= rotated;
    const uint32_t left = (dim - 2 * half + 2 * kVectorSize - 1) / (2 * kVectorSize);
    first[0] = index < left ? 2 * half + index * kVectorSize : dim;
    first[1] = index < left ? first[0] + left * kVectorSize : dim;
    end[0] = end[1] = dim;
  }
};

// Cosines and sines of a chunk: of its kVectorSize pairs of elements, in their order.
struct Angles {
  Packed<float, kVectorSize> cos, sin;
};

enum class Projection { q, k, v };

// One head of one token.
struct Head {
  Projection projection;
  bool exists;  // false past the last head: a CTA may have room for more
  int64_t token;
  int64_t index;  // among the heads of its tensor
  const In* row;
  const void* norm_weight;  // null: not normalised
  bool norm_is_fp32;
  const float* cos_sin;  // null: not rotated
  uint32_t half;         // rotary_dim / 2, 0 if not rotated
  uint32_t partners;     // `half` if the elements of a pair are that far apart, 0 if adjacent

  // Heads of a token are numbered across q, then k, then v. Reads no memory.
  __device__ __forceinline__ Head(const AppendKVParams& p, int64_t token, uint32_t head)
      : token(token) {
    const uint32_t heads_q = static_cast<uint32_t>(p.heads_q);
    const uint32_t heads_kv = static_cast<uint32_t>(p.heads_kv);
    exists = head < heads_q + 2 * heads_kv;
    projection = head < heads_q              ? Projection::q
                 : head < heads_q + heads_kv ? Projection::k
                                             : Projection::v;
    index = projection == Projection::q   ? head
            : projection == Projection::k ? head - heads_q
                                          : head - heads_q - heads_kv;
    const Heads x = projection == Projection::q ? p.q : projection == Projection::k ? p.k : p.v;
    row = static_cast<const In*>(x.data) + token * x.stride + index * x.head_stride;
    norm_weight = projection == Projection::q   ? p.q_norm_weight
                  : projection == Projection::k ? p.k_norm_weight
                                                : nullptr;
    norm_is_fp32 = (projection == Projection::q ? p.q_norm_is_fp32 : p.k_norm_is_fp32) != 0;
    cos_sin = projection == Projection::v || !exists ? nullptr : p.cos_sin;
    half = cos_sin == nullptr ? 0 : static_cast<uint32_t>(p.rotary_dim) / 2;
    partners = p.interleaved != 0 ? 0 : half;
  }

  __device__ __forceinline__ Chunk chunk(uint32_t thread, uint32_t dim) const {
    Chunk chunk(thread, dim, partners);
    if (!exists) {
      chunk.first[0] = chunk.first[1] = dim;
      chunk.end[0] = chunk.end[1] = dim;
    }
    return chunk;
  }

  // The token's position, which the preceding kernel may have written: loaded early, used late.
  __device__ __forceinline__ int32_t load_position(const AppendKVParams& p) const {
    return cos_sin == nullptr ? 0 : p.positions[token];
  }
  __device__ __forceinline__ int64_t load_slot(const AppendKVParams& p) const {
    return projection == Projection::q || !exists ? -1 : p.slot_mapping[token];
  }

  // Prefetches the fixed scale of a quantised key or value into L2, before the wait.
  __device__ __forceinline__ void prefetch_scale(const AppendKVParams& p) const {
    const bool is_k = projection == Projection::k;
    if (!exists || projection == Projection::q ||
        (is_k ? p.k_scale_per_token : p.v_scale_per_token) != 0) {
      return;
    }
    const Slots scales = is_k ? p.k_scale : p.v_scale;
    const float* const address =
        static_cast<const float*>(scales.data) + index * scales.head_stride;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
  }

  template <bool kAligned>
  __device__ __forceinline__ void load_values(const Chunk& chunk, Vector (&x)[2]) const {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      load<kAligned, Reuse::kOnce>(row, chunk.first[v], chunk.end[v], x[v]);
    }
  }

  template <bool kAligned>
  __device__ __forceinline__ void load_angles(const AppendKVParams& p, int32_t position,
                                              const Chunk& chunk, Angles& angles) const {
    if (cos_sin == nullptr) {
      return;
    }
    const float* cosines = cos_sin + position * p.cos_sin_stride;
    const float* sines = cosines + half;
    if (partners != 0) {
      load<kAligned, Reuse::kEveryRow>(cosines, chunk.first[0], half, angles.cos);
      load<kAligned, Reuse::kEveryRow>(sines, chunk.first[0], half, angles.sin);
      return;
    }
    constexpr int kPairs = kVectorSize / 2;
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      Packed<float, kPairs> cos, sin;
      load<kAligned, Reuse::kEveryRow>(cosines, chunk.first[v] / 2, half, cos);
      load<kAligned, Reuse::kEveryRow>(sines, chunk.first[v] / 2, half, sin);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        angles.cos.words[v * kPairs + i] = cos.words[i];
        angles.sin.words[v * kPairs + i] = sin.words[i];
      }
    }
  }

  // Whether the weights are loaded at their use: those that would take more registers than the
  // values.
  __device__ __forceinline__ bool has_wide_weights() const {
    return sizeof(In) < sizeof(float) && norm_is_fp32;
  }

  // Unpacked at their use: an instruction that needs the weights here would make later loads wait.
  template <bool kAligned>
  __device__ __forceinline__ void load_weights(const Chunk& chunk, Vector (&weights)[2]) const {
    if (norm_weight == nullptr || has_wide_weights()) {
      return;
    }
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      load<kAligned, Reuse::kEveryRow>(static_cast<const In*>(norm_weight), chunk.first[v],
                                       chunk.end[v], weights[v]);
    }
  }

  // Prefetches the weights of a chunk into L2, before the wait.
  __device__ __forceinline__ void prefetch_weights(const Chunk& chunk) const {
    if (norm_weight == nullptr) {
      return;
    }
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      if (chunk.first[v] < chunk.end[v]) {
        const auto* address = static_cast<const uint8_t*>(norm_weight) +
                              chunk.first[v] * (norm_is_fp32 ? sizeof(float) : sizeof(In));
        asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
      }
    }
  }

  template <bool kAligned>
  __device__ __forceinline__ void normalize(float sum, const KnownDivisor& dim, float eps,
                                            const Chunk& chunk, const Vector (&weights)[2],
                                            Values (&x)[2]) const {
    if (norm_weight == nullptr) {
      return;
    }
    const Divisor rms(root_mean_square(sum, dim, eps));
    // One branch for all: a branch for each element costs more than the division.
    if (rms.fast) {
#pragma unroll
      for (int i = 0; i < 2 * kVectorSize; ++i) {
        float& value = x[i / kVectorSize][i % kVectorSize];
        value = rms.divide_fast(value);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2 * kVectorSize; ++i) {
        float& value = x[i / kVectorSize][i % kVectorSize];
        value = rms.divide(value);
      }
    }
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      Values factors;
      if (has_wide_weights()) {
        Packed<float, kVectorSize> wide;
        load<kAligned, Reuse::kEveryRow>(static_cast<const float*>(norm_weight), chunk.first[v],
                                         chunk.end[v], wide);
        wide.unpack(factors);
      } else {
        weights[v].unpack(factors);
      }
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) {
        x[v][i] = __fmul_rn(x[v][i], factors[i]);
      }
    }
  }

  // Every product and sum is rounded, as in torch's operators.
  __device__ __forceinline__ static void rotate_pair(float& a, float& b, float cos, float sin) {
    const float rotated = __fsub_rn(__fmul_rn(a, cos), __fmul_rn(b, sin));
    b = __fadd_rn(__fmul_rn(b, cos), __fmul_rn(a, sin));
    a = rotated;
  }

  __device__ __forceinline__ void rotate(const Chunk& chunk, const Angles& angles,
                                         Values (&x)[2]) const {
    if (cos_sin == nullptr) {
      return;
    }
    Values cos, sin;
    angles.cos.unpack(cos);
    angles.sin.unpack(sin);
    if (partners != 0) {
      if (chunk.first[0] < partners) {
#pragma unroll
        for (int i = 0; i < kVectorSize; ++i) {
          rotate_pair(x[0][i], x[1][i], cos[i], sin[i]);
        }
      }
      return;
    }
    constexpr int kPairs = kVectorSize / 2;
#pragma unroll
    for (int v = 0; v < 2; ++v) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        if (chunk.first[v] / 2 + i < half) {
          rotate_pair(x[v][2 * i], x[v][2 * i + 1], cos[v * kPairs + i], sin[v * kPairs + i]);
        }
      }
    }
  }
};

template <bool kAligned>
__device__ __forceinline__ void store_values(void* row, const Chunk& chunk, const Values (&x)[2]) {
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    Vector packed;
    packed.pack(x[v]);
    store<kAligned, In, kVectorSize>(static_cast<In*>(row), chunk.first[v], chunk.end[v],
                                     packed.words);
  }
}

// Stores codes of x / scale. `kBounded` requires that the scale is that of the row itself, and
// fast.
template <typename Out, bool kAligned, bool kBounded>
__device__ __forceinline__ void store_codes(uint8_t* row, const Chunk& chunk, const Divisor& scale,
                                            const Values (&x)[2]) {
  const Grid<Out> grid(0.0f);
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    uint32_t codes[kVectorSize / 4];
#pragma unroll
    for (int word = 0; word < kVectorSize / 4; ++word) {
      float q[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float value = x[v][4 * word + i];
        q[i] = kBounded ? scale.divide_fast(value) : scale.divide(value);
      }
      codes[word] = kBounded ? grid.encode_bounded(q) : grid.encode(q);
    }
    store<kAligned, uint8_t, kVectorSize>(row, chunk.first[v], chunk.end[v], codes);
  }
}

// Where a fixed scale is written besides, or null. A member of quantised caches alone: in the
// others it would only change the order of instructions.
struct ShownScale {
  float* address = nullptr;
  __device__ __forceinline__ void show_at(float* scale) { address = scale; }
  __device__ __forceinline__ float* shown() const { return address; }
};
struct NoScale {
  __device__ __forceinline__ void show_at(float*) {}
  __device__ __forceinline__ float* shown() const { return nullptr; }
};

// Destination of a head, once its slot is known.
struct Target : std::conditional_t<kQuantizes, ShownScale, NoScale> {
  void* row;     // null: not written
  float* scale;  // of a quantised cache, otherwise null
  bool dynamic;  // the scale is computed from the row and written

  __device__ __forceinline__ Target(const AppendKVParams& p, const Head& head, int64_t slot)
      : row(nullptr), scale(nullptr), dynamic(false) {
    if (head.projection == Projection::q) {
      if (head.exists) {
        row = static_cast<In*>(p.q_out.data) + head.token * p.q_out.stride +
              head.index * p.q_out.head_stride;
      }
      return;
    }
    if (!head.exists || slot < 0) {
      return;
    }
    const bool is_k = head.projection == Projection::k;
    const uint32_t page_size = static_cast<uint32_t>(p.page_size);
    int64_t page, offset;
    if (slot >> 32 == 0) {  // a 64-bit division takes some hundred instructions
      page = static_cast<uint32_t>(slot) / page_size;
      offset = static_cast<uint32_t>(slot) % page_size;
    } else {
      page = slot / page_size;
      offset = slot % page_size;
    }
    const auto at = [&](const Slots& slots) {
      return page * slots.page_stride + offset * slots.stride + head.index * slots.head_stride;
    };
    const Slots cache = is_k ? p.k_cache : p.v_cache;
    row = static_cast<Element*>(cache.data) + at(cache);
    if constexpr (kQuantizes) {
      const Slots scales = is_k ? p.k_scale : p.v_scale;
      dynamic = (is_k ? p.k_scale_per_token : p.v_scale_per_token) != 0;
      scale = static_cast<float*>(scales.data) + at(scales);
      const Slots out = is_k ? p.k_scale_out : p.v_scale_out;
      if (out.data != nullptr) {
        show_at(static_cast<float*>(out.data) + at(out));
      }
    }
  }

  __device__ __forceinline__ bool writes_scale() const {
    if constexpr (kQuantizes) {
      return dynamic || shown() != nullptr;
    }
    return dynamic;
  }
};

// Stores a head: `largest` is its largest magnitude, if its scale is written; `fixed` is the scale,
// unless it is dynamic.
template <bool kAligned>
__device__ __forceinline__ void store_head(const Target& target, const Chunk& chunk, float largest,
                                           float fixed, bool writes_scale, const Values (&x)[2]) {
  if (target.row == nullptr) {
    return;
  }
  if constexpr (kQuantizes) {
    if (target.scale != nullptr) {
      uint8_t* const row = static_cast<uint8_t*>(target.row);
      const float divisor = target.dynamic ? dynamic_scale<Cache>(largest) : fixed;
      if (writes_scale && target.writes_scale()) {
        // INT8 has no code for NaN, so the scale shows it.
        const bool shows_nan = std::is_same_v<Cache, dtype::int8> && isnan(largest);
        *(target.dynamic ? target.scale : target.shown()) = shows_nan ? largest : divisor;
      }
      const Divisor scale(divisor);
      if (target.dynamic && scale.fast) {
        store_codes<Cache, kAligned, true>(row, chunk, scale, x);
      } else {
        store_codes<Cache, kAligned, false>(row, chunk, scale, x);
      }
      return;
    }
  }
  store_values<kAligned>(target.row, chunk, x);
}

}  // namespace
}  // namespace ostinato
