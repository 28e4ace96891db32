// The stages of quantising a row (load, combine, normalise, and encode or round) for the variant
// that the macros of quantize.cu select.
#pragma once

#include <cstdint>
#include <type_traits>

#include "activation_math.cuh"
#include "common/quantize_math.cuh"
#include "common/vector.cuh"
#include "gemm_w8a8/quantize/params.h"

namespace ostinato {
namespace {

// Those from silu_mul on are gated.
enum class Kind {
  per_token,
  rms_norm,
  layer_norm,
  silu,
  gelu,
  gelu_tanh,
  relu,
  relu2,
  silu_mul,
  gelu_mul,
  gelu_tanh_mul,
  relu_mul,
  relu2_mul
};

constexpr Function function_of(Kind kind) {
  switch (kind) {
    case Kind::silu:
    case Kind::silu_mul:
      return Function::silu;
    case Kind::gelu:
    case Kind::gelu_mul:
      return Function::gelu;
    case Kind::gelu_tanh:
    case Kind::gelu_tanh_mul:
      return Function::gelu_tanh;
    case Kind::relu:
    case Kind::relu_mul:
      return Function::relu;
    case Kind::relu2:
    case Kind::relu2_mul:
      return Function::relu2;
    default:
      return Function::none;
  }
}

constexpr Kind kKind = Kind::OSTINATO_KIND;
constexpr bool kLayerNorm = kKind == Kind::layer_norm;
constexpr bool kNorm = kKind == Kind::rms_norm || kLayerNorm;
constexpr Function kFunction = function_of(kKind);
constexpr bool kActivates = kFunction != Function::none;
constexpr bool kGated = kKind >= Kind::silu_mul;
using In = dtype::OSTINATO_IN_DTYPE;
using Out = dtype::OSTINATO_OUT_DTYPE;
using Weight = dtype::OSTINATO_WEIGHT_DTYPE;
static_assert(sizeof(Weight) == sizeof(In) || sizeof(Weight) == 4,
              "norm_weight and norm_bias have the dtype of x or are fp32");

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

// The head of a row of layer_norm, and the row of which it is a part.
struct Head {
  uint32_t row;
  uint32_t head;

  __device__ __forceinline__ Head(const QuantizeParams& p, int64_t index)
      : row(static_cast<uint32_t>(index)), head(0) {
    if (p.heads > 1) {
      const uint32_t heads = static_cast<uint32_t>(p.heads);
      row = static_cast<uint32_t>(index) / heads;
      head = static_cast<uint32_t>(index) - row * heads;
    }
  }
};

// The norm's weights, or biases, of the row of an index.
__device__ __forceinline__ const Weight* weights_at(const QuantizeParams& p, const void* weights,
                                                    int64_t index) {
  const Weight* first = static_cast<const Weight*>(weights);
  if constexpr (kLayerNorm) {
    first += static_cast<int64_t>(Head(p, index).head) * p.k;
  }
  return first;
}

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
    if constexpr (kLayerNorm) {
      const Head at(p, row);
      const int64_t within = static_cast<int64_t>(at.head) * p.k;
      x = static_cast<const In*>(p.x) + at.row * p.x_stride + within;
      out = static_cast<Stored*>(p.out) + at.row * p.out_stride + within;
    }
    if constexpr (kGated) {
      second = x + p.k;
    } else if constexpr (kNorm) {
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

template <bool kFast>
__device__ __forceinline__ void activate_each(const Values& gates, const Values& ups,
                                              Values& values) {
#pragma unroll
  for (int i = 0; i < kVectorSize; ++i) {
    const float y = activate<kFunction, kFast>(gates[i]);
    values[i] = kGated ? __fmul_rn(y, ups[i]) : y;
  }
}

// f(gate), times up where kGated.
__device__ __forceinline__ void activate_vector(const Vector& x, const Values& ups,
                                                Values& values) {
  Values gates;
  x.unpack(gates);
  if constexpr (kFastLimit<kFunction> > 0.0f) {
    if (largest_gate(x) <= kFastLimit<kFunction>) {
      activate_each<true>(gates, ups, values);
      return;
    }
  }
  activate_each<false>(gates, ups, values);
}

// The values to be quantised or normalised, from the loaded ones; also stores the sum with the
// residual if residual_out is given.
template <bool kAligned>
__device__ __forceinline__ void combine(const Row& row, uint32_t first, const Vector& x,
                                        const Vector& second, Values& values) {
  if constexpr (kActivates) {
    Values ups;
    if constexpr (kGated) {
      second.unpack(ups);
    }
    activate_vector(x, ups, values);
    return;
  }
  x.unpack(values);
  if constexpr (kNorm) {
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
  if (kGated || (kNorm && row.second != nullptr)) {
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

// Subtracts the mean from the elements of a vector that are in the row; the others stay 0.
template <bool kAligned>
__device__ __forceinline__ void subtract_mean(Values& values, float mean, uint32_t first,
                                              uint32_t k) {
#pragma unroll
  for (int i = 0; i < kVectorSize; ++i) {
    const bool inside = (kAligned ? first : first + i) < k;
    values[i] = __fsub_rn(values[i], inside ? mean : 0.0f);
  }
}

template <bool kAligned>
__device__ __forceinline__ void add_bias(const Weight* bias, uint32_t first, uint32_t k,
                                         Values& values) {
  WeightVector vector;
  load<kAligned, Reuse::kEveryRow>(bias, first, k, vector);
  Values biases;
  vector.unpack(biases);
#pragma unroll
  for (int i = 0; i < kVectorSize; ++i) {
    values[i] = __fadd_rn(values[i], biases[i]);
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
