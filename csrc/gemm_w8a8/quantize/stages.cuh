// The stages of quantising a row (load, combine, normalise, and encode or round) for the variant
// that the macros of quantize.cu select.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/quantize_math.cuh"
#include "common/vector.cuh"
#include "gemm_w8a8/quantize/params.h"
#include "silu_math.cuh"

namespace ostinato {
namespace {

enum class Kind { per_token, rms_norm, silu_mul };

constexpr Kind kKind = Kind::OSTINATO_KIND;
using In = dtype::OSTINATO_IN_DTYPE;
using Out = dtype::OSTINATO_OUT_DTYPE;
using Weight = dtype::OSTINATO_WEIGHT_DTYPE;
static_assert(sizeof(Weight) == sizeof(In) || sizeof(Weight) == 4,
              "norm_weight has the dtype of x or is fp32");

// Whether results are quantised to 8 bits; otherwise they are rounded to the dtype of x.
constexpr bool kEncodes = !std::is_same_v<Out, In>;
static_assert(kEncodes || kKind != Kind::per_token, "bare rows would be copied");
// The elements that share a scale; 0: a row.
constexpr int kGroup = OSTINATO_GROUP;
static_assert(kGroup == 0 || (kGroup == 128 && kEncodes), "a row, or groups of 128, have a scale");
// Whether each row has a zero point beside its scale, both of its own.
constexpr bool kAsymmetric = OSTINATO_ASYMMETRIC != 0;
static_assert(!kAsymmetric || (std::is_same_v<Out, dtype::int8> && kGroup == 0),
              "INT8 rows have zero points");
using Stored = std::conditional_t<kEncodes, uint8_t, In>;

// Whether a NaN replaces the static scale of its row: INT8 has no code for it.
constexpr bool kMarksNan = std::is_same_v<Out, dtype::int8>;

constexpr int kVectorSize = 16 / sizeof(In);
constexpr int kCodeWords = kVectorSize / 4;

using Values = float[kVectorSize];
using Vector = Packed<In, kVectorSize>;
using WeightVector = Packed<Weight, kVectorSize>;

// The pointers of one row.
struct Row {
  const In* x;
  const In* second;  // of the residual, or the up half; null if there is none
  In* residual_out;
  Stored* out;
  uint32_t k;

  __device__ __forceinline__ Row(const QuantizeParams& p, int64_t row)
      : x(static_cast<const In*>(p.x) + row * p.x_stride),
        second(nullptr),
        residual_out(nullptr),
        out(static_cast<Stored*>(p.out) + row * p.out_stride),
        k(static_cast<uint32_t>(p.k)) {
    if constexpr (kKind == Kind::silu_mul) {
      second = x + p.k;
    } else if constexpr (kKind == Kind::rms_norm) {
      if (p.residual != nullptr) {
        second = static_cast<const In*>(p.residual) + row * p.residual_stride;
        residual_out = p.residual_out == nullptr
                           ? nullptr
                           : static_cast<In*>(p.residual_out) + row * p.residual_out_stride;
      }
    }
    // Otherwise the compiler adds the row's offset to that of each vector, in 64 bits.
    asm("" : "+l"(x), "+l"(second), "+l"(residual_out), "+l"(out));
  }
};

// The largest magnitude of a vector, ignoring NaN.
__device__ __forceinline__ float largest_gate(const Vector& gates) {
  if constexpr (sizeof(In) == 4) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < Vector::kWords; ++i) {
      largest = fmaxf(largest, fabsf(__uint_as_float(gates.words[i])));
    }
    return largest;
  } else {
    using Pair = std::conditional_t<std::is_same_v<In, __nv_bfloat16>, __nv_bfloat162, __half2>;
    const auto pair = [&](int i) { return __habs2(reinterpret_cast<const Pair&>(gates.words[i])); };
    static_assert(Vector::kWords == 4, "a vector has 16 bytes");
    const Pair largest = __hmax2(__hmax2(pair(0), pair(1)), __hmax2(pair(2), pair(3)));
    float low, high;
    unpack_pair<In>(reinterpret_cast<const uint32_t&>(largest), low, high);
    return fmaxf(low, high);
  }
}

__device__ __forceinline__ void gate(const Vector& x, const Values& ups, Values& values) {
  Values gates;
  x.unpack(gates);
  if (largest_gate(x) <= kSiluFastLimit) {
#pragma unroll
    for (int i = 0; i < kVectorSize; ++i) {
      values[i] = __fmul_rn(silu_fast(gates[i]), ups[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVectorSize; ++i) {
      values[i] = __fmul_rn(silu(gates[i]), ups[i]);
    }
  }
}

// The values to be quantised or normalised, from the loaded ones; also stores the sum with the
// residual if residual_out is given.
template <bool kAligned>
__device__ __forceinline__ void combine(const Row& row, uint32_t first, const Vector& x,
                                        const Vector& second, Values& values) {
  if constexpr (kKind == Kind::silu_mul) {
    Values ups;
    second.unpack(ups);
    gate(x, ups, values);
    return;
  }
  x.unpack(values);
  if constexpr (kKind == Kind::rms_norm) {
    if (row.second != nullptr) {
      Values residuals;
      second.unpack(residuals);
#pragma unroll
      for (int i = 0; i < kVectorSize; ++i) {
        values[i] = __fadd_rn(values[i], residuals[i]);
      }
      Vector sum;
      sum.pack(values);
      sum.unpack(values);
      if (row.residual_out != nullptr) {
        store<kAligned, In, kVectorSize>(row.residual_out, first, row.k, sum.words);
      }
    }
  }
}

template <bool kAligned>
__device__ __forceinline__ void load_pair(const Row& row, uint32_t first, Vector& x,
                                          Vector& second) {
  load<kAligned, Reuse::kOnce>(row.x, first, row.k, x);
  if (kKind == Kind::silu_mul || (kKind == Kind::rms_norm && row.second != nullptr)) {
    load<kAligned, Reuse::kOnce>(row.second, first, row.k, second);
  }
}

template <bool kFast>
__device__ __forceinline__ void normalize(Values& values, const Divisor& rms,
                                          const WeightVector& weight) {
  Values weights;
  weight.unpack(weights);
#pragma unroll
  for (int i = 0; i < kVectorSize; ++i) {
    const float quotient = kFast ? rms.divide_fast(values[i]) : rms.divide(values[i]);
    values[i] = __fmul_rn(quotient, weights[i]);
  }
}

// Scale and zero point of static quantisation, read early to hide their latency.
struct Static {
  bool given;
  float scale;
  float zero_point;

  __device__ __forceinline__ explicit Static(const QuantizeParams& p)
      : given(p.static_scale != nullptr),
        scale(given ? *p.static_scale : 0.0f),
        zero_point(p.zero_point == nullptr ? 0.0f : static_cast<float>(*p.zero_point)) {}

  // A row's own, which is encoded as a static one.
  __device__ __forceinline__ Static(float row_scale, float row_zero_point)
      : given(true), scale(row_scale), zero_point(row_zero_point) {}
};

// The encoding of a row: its scale, and the grid of Code.
template <typename Code>
struct Encoder {
  Divisor scale;
  Grid<Code> grid;
  bool bounded;  // all quotients are within the grid, and `scale` is fast

  __device__ __forceinline__ Encoder(const Static& fixed, float scale_value)
      : scale(scale_value), grid{fixed.zero_point} {
    bounded = !fixed.given && scale.fast;
  }

  // `kBounded` only if `bounded` is true.
  template <bool kAligned, bool kBounded>
  __device__ __forceinline__ void write(const Row& row, uint32_t first,
                                        const Values& values) const {
    uint32_t codes[kCodeWords];
#pragma unroll
    for (int word = 0; word < kCodeWords; ++word) {
      float q[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float value = values[4 * word + i];
        q[i] = kBounded ? scale.divide_fast(value) : scale.divide(value);
      }
      codes[word] = kBounded ? grid.encode_bounded(q) : grid.encode(q);
    }
    store<kAligned, uint8_t, kVectorSize>(row.out, first, row.k, codes);
  }
};

// Discards a line from L2, which would otherwise be written back to memory. Its contents are
// undefined until it is written again.
inline constexpr int kLineBytes = 128;
__device__ __forceinline__ void discard_line(const void* line) {
  asm volatile("discard.global.L2 [%0], 128;" ::"l"(line) : "memory");
}

// Rounds values to the dtype of x.
template <bool kAligned>
__device__ __forceinline__ void write_rounded(const Row& row, uint32_t first,
                                              const Values& values) {
  Vector rounded;
  rounded.pack(values);
  store<kAligned, In, kVectorSize>(row.out, first, row.k, rounded.words);
}

}  // namespace
}  // namespace ostinato
