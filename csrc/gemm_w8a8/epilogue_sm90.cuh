// The epilogue of the tiled W8A8 GEMM as a CUTLASS visitor tree:
//   out = x_scale * (w_scale * (acc - x_zero_point * w_sum)) + bias, in fp32, rounded once.
#pragma once

#include <cstdint>

#include "common/params.h"
#include "cute/tensor.hpp"
#include "cutlass/array.h"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/numeric_types.h"

namespace ostinato {

// A function object of its own, not cutlass::homogeneous_multiply_add: CUTLASS specialises trees of
// the latter to skip a scale that it finds to be zero, and looks at it before the kernel waits for
// its predecessor (PDL), which may be what writes the scale.
template <class Vector>
struct Dequantize {
  CUTLASS_DEVICE Vector operator()(Vector const& x_scale, Vector const& w_scale, Vector const& acc,
                                   Vector const& bias) const {
    Vector y;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Vector::kElements; ++i) {
      y[i] = fmaf(x_scale[i], w_scale[i] * acc[i], bias[i]);
    }
    return y;
  }
};

template <class Vector>
struct SubtractZeroPoint {
  CUTLASS_DEVICE Vector operator()(Vector const& acc, Vector const& x_zero_point,
                                   Vector const& w_sum) const {
    Vector y;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Vector::kElements; ++i) {
      // Unsigned, since the product alone may overflow; the difference never does.
      y[i] = static_cast<int32_t>(static_cast<uint32_t>(acc[i]) -
                                  static_cast<uint32_t>(x_zero_point[i]) *
                                      static_cast<uint32_t>(w_sum[i]));
    }
    return y;
  }
};

// TileShape is (rows, columns, depth) of the MMA. Tokens are its rows, or with SwapAB its columns.
template <class TileShape, class Output, class Accumulator, bool SwapAB, bool ZeroPoint>
struct Epilogue {
  static_assert(!ZeroPoint || cute::is_same_v<Accumulator, int32_t>,
                "a zero point needs INT8 operands");

  template <class Element, class Compute, class Stride>
  using Row = cutlass::epilogue::fusion::Sm90RowBroadcast<0, TileShape, Element, Compute,
                                                          cute::Stride<cute::_0, Stride, cute::_0>>;
  template <class Element, class Compute, class Stride>
  using Column =
      cutlass::epilogue::fusion::Sm90ColBroadcast<0, TileShape, Element, Compute,
                                                  cute::Stride<Stride, cute::_0, cute::_0>>;

  template <class Element, class Compute, class Stride>
  using PerToken =
      cute::conditional_t<SwapAB, Row<Element, Compute, Stride>, Column<Element, Compute, Stride>>;
  template <class Element, class Compute, class Stride>
  using PerChannel =
      cute::conditional_t<SwapAB, Column<Element, Compute, Stride>, Row<Element, Compute, Stride>>;

  // A stride of type bool is chosen at run time: a vector, or one element for all.
  using XScale = PerToken<float, float, bool>;
  using WScale = PerChannel<float, float, bool>;
  using Bias = PerChannel<Output, float, cute::_1>;
  using XZeroPoint = PerToken<int32_t, int32_t, bool>;
  using WSum = PerChannel<int32_t, int32_t, cute::_1>;

  static constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;
  using Fetch = cutlass::epilogue::fusion::Sm90AccFetch;
  using Centred = cutlass::epilogue::fusion::Sm90EVT<
      cutlass::epilogue::fusion::Sm90Compute<SubtractZeroPoint, int32_t, int32_t, kRound>, Fetch,
      XZeroPoint, WSum>;
  using Sum = cute::conditional_t<ZeroPoint, Centred, Fetch>;
  using Tree = cutlass::epilogue::fusion::Sm90EVT<
      cutlass::epilogue::fusion::Sm90Compute<Dequantize, Output, float, kRound>, XScale, WScale,
      Sum, Bias>;

  template <class Vector, bool IsRow, class Element, class Stride>
  static typename Vector::Arguments vector(Element const* pointer, Stride stride) {
    // A null pointer stands for zeros.
    if constexpr (IsRow) {
      return {pointer, Element(0), {cute::_0{}, stride, cute::_0{}}};
    } else {
      return {pointer, Element(0), {stride, cute::_0{}, cute::_0{}}};
    }
  }

  static typename Tree::Arguments arguments(const W8A8GemmParams& params) {
    const auto x_scale = vector<XScale, SwapAB>(params.x_scale, params.x_scale_stride != 0);
    const auto w_scale = vector<WScale, !SwapAB>(params.w_scale, params.w_scale_stride != 0);
    const auto bias = vector<Bias, !SwapAB>(static_cast<Output const*>(params.bias), cute::_1{});
    if constexpr (ZeroPoint) {
      const auto zero =
          vector<XZeroPoint, SwapAB>(params.x_zero_point, params.x_zero_point_stride != 0);
      const auto w_sum = vector<WSum, !SwapAB>(params.w_sum, cute::_1{});
      return {x_scale, w_scale, {{}, zero, w_sum, {}}, bias, {}};
    } else {
      return {x_scale, w_scale, {}, bias, {}};
    }
  }
};

}  // namespace ostinato
