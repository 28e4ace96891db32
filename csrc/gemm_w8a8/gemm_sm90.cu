// The tiled W8A8 GEMM of Hopper (sm_90a): TMA, wgmma and a persistent grid, from CUTLASS 3.
// One kernel per build; the macros below choose it, docs/gemm_tiled.md says which one is for what.
// m counts tokens and n output channels, whichever operand feeds the MMA's rows.
//
//   OSTINATO_OPERAND      int8 or e4m3: x and w
//   OSTINATO_OUT          bf16, fp16 or fp32: out and bias
//   OSTINATO_TILE_M, _N, _K, OSTINATO_CLUSTER_M, _N
//   OSTINATO_SWAP_AB      1: channels are the MMA's rows, so that few tokens waste none of them
//   OSTINATO_PINGPONG     1: two warpgroups take turns, each with a tile; 0: they share one
//   OSTINATO_FAST_ACCUM   e4m3 only. 1: sums stay in the tensor cores (about 13 fraction bits);
//                         0: they are added to fp32 registers every 128 products
//   OSTINATO_ZERO_POINT   1: params may have an x_zero_point (int8 only)
//   OSTINATO_RASTER       tiles in order: 0 as CUTLASS guesses, 1 along m first, 2 along n first
//   OSTINATO_SWIZZLE      1, 2, 4 or 8: in bands so many clusters wide, where the tiles fill them
//
// Any m, n and k. TMA needs x, w, out and their rows aligned to 16 bytes, and stores whole 16-byte
// chunks: n is a multiple of 16 / sizeof(OSTINATO_OUT), which the caller gets by padding w,
// w_scale, bias and w_sum when the weights are loaded.

// Without it CuTe builds tiles of 160 or 224 columns from MMAs of 32, at half the speed.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED

#include <cuda_runtime.h>

#include <cstdint>

#include "common/check.h"
#include "common/launch.cuh"
#include "common/params.h"
#include "cutlass/cutlass.h"
#include "cutlass/device_kernel.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/kernel_hardware_info.h"
#include "gemm_w8a8/epilogue_sm90.cuh"

#ifndef CUTLASS_ENABLE_GDC_FOR_SM90
#error "compile with -DCUTLASS_ENABLE_GDC_FOR_SM90: without it the kernel never waits (PDL)"
#endif

namespace ostinato {
namespace {

namespace dtype {
using int8 = int8_t;
using e4m3 = cutlass::float_e4m3_t;
using bf16 = cutlass::bfloat16_t;
using fp16 = cutlass::half_t;
using fp32 = float;
}  // namespace dtype

using Operand = dtype::OSTINATO_OPERAND;
using Output = dtype::OSTINATO_OUT;

constexpr bool kInt8 = cute::is_same_v<Operand, dtype::int8>;
constexpr bool kSwapAB = OSTINATO_SWAP_AB;
constexpr bool kPingpong = OSTINATO_PINGPONG;
constexpr bool kFastAccum = OSTINATO_FAST_ACCUM;
constexpr bool kZeroPoint = OSTINATO_ZERO_POINT;

constexpr int kTileRows = kSwapAB ? OSTINATO_TILE_N : OSTINATO_TILE_M;
constexpr int kTileColumns = kSwapAB ? OSTINATO_TILE_M : OSTINATO_TILE_N;
constexpr int kClusterRows = kSwapAB ? OSTINATO_CLUSTER_N : OSTINATO_CLUSTER_M;
constexpr int kClusterColumns = kSwapAB ? OSTINATO_CLUSTER_M : OSTINATO_CLUSTER_N;
static_assert(kTileRows % (kPingpong ? 64 : 128) == 0,
              "an MMA has 64 rows, and two warpgroups share a tile unless they take turns");
static_assert(kTileColumns % 16 == 0 && kTileColumns <= 256,
              "an INT8 MMA has a multiple of 16 columns, at most 256");
static_assert(!(kInt8 && kFastAccum), "INT8 sums are exact: there is nothing to accumulate fast");

using TileShape =
    cute::Shape<cute::Int<kTileRows>, cute::Int<kTileColumns>, cute::Int<OSTINATO_TILE_K>>;
using ClusterShape = cute::Shape<cute::Int<kClusterRows>, cute::Int<kClusterColumns>, cute::_1>;

using Accumulator = cute::conditional_t<kInt8, int32_t, float>;
using EpilogueTree = Epilogue<TileShape, Output, Accumulator, kSwapAB, kZeroPoint>;

using EpilogueSchedule = cute::conditional_t<kPingpong, cutlass::epilogue::TmaWarpSpecialized,
                                             cutlass::epilogue::TmaWarpSpecializedCooperative>;
using ExactSchedule =
    cute::conditional_t<kPingpong, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                        cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
using FastSchedule =
    cute::conditional_t<kPingpong, cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum,
                        cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8FastAccum>;
using Schedule = cute::conditional_t<kFastAccum, FastSchedule, ExactSchedule>;

// Swapped, the MMA's rows are columns of out.
using OutLayout =
    cute::conditional_t<kSwapAB, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;
constexpr int kAlignment = 16;  // bytes, of every base address and row: TMA asks for it

using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
    cutlass::epilogue::collective::EpilogueTileAuto, Accumulator, float, void, OutLayout,
    kAlignment / sizeof(Output), Output, OutLayout, kAlignment / sizeof(Output), EpilogueSchedule,
    typename EpilogueTree::Tree>::CollectiveOp;

using CollectiveMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Operand, cutlass::layout::RowMajor,
    kAlignment, Operand, cutlass::layout::ColumnMajor, kAlignment, Accumulator, TileShape,
    ClusterShape,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
        sizeof(typename CollectiveEpilogue::SharedStorage))>,
    Schedule>::CollectiveOp;

using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>,
                                                    CollectiveMainloop, CollectiveEpilogue>;

using Order = cutlass::gemm::kernel::detail::RasterOrderOptions;

Order raster_order(int along) {
  if (along == 0) {
    return Order::Heuristic;
  }
  return (along == 1) != kSwapAB ? Order::AlongM : Order::AlongN;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// CUTLASS rounds the clusters along both sides up to the width of a band, and a CTA without a tile
// costs as much as one with: narrower bands, until hardly any is added.
int band_width(int rows, int columns) {
  const int64_t along_rows = ceil_div(ceil_div(rows, kTileRows), kClusterRows);
  const int64_t along_columns = ceil_div(ceil_div(columns, kTileColumns), kClusterColumns);
  const int64_t clusters = along_rows * along_columns;
  int width = OSTINATO_SWIZZLE;
  while (width > 1 && ceil_div(along_rows, width) * ceil_div(along_columns, width) * width * width >
                          clusters + clusters / 32) {
    width /= 2;
  }
  return width;
}

bool aligned(const void* pointer, int64_t row_bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % kAlignment == 0 && row_bytes % kAlignment == 0;
}

bool implemented(const W8A8GemmParams& params) {
  constexpr int64_t kOutBytes = sizeof(Output);
  return params.m >= 0 && params.n >= 0 && params.k > 0 && params.x_scale != nullptr &&
         params.w_scale != nullptr && aligned(params.x, params.x_stride) &&
         aligned(params.w, params.w_stride) && aligned(params.out, params.out_stride * kOutBytes) &&
         params.n * kOutBytes % kAlignment == 0 &&
         (params.x_zero_point == nullptr || (kZeroPoint && params.w_sum != nullptr));
}

cudaError_t launch_gemm(const W8A8GemmParams& params, cudaStream_t stream) {
  if (!implemented(params)) {
    return cudaErrorInvalidValue;
  }
  if (params.m == 0 || params.n == 0) {
    return cudaSuccess;
  }
  cutlass::KernelHardwareInfo hardware;
  OSTINATO_RETURN_IF_ERROR(cudaGetDevice(&hardware.device_id));
  OSTINATO_RETURN_IF_ERROR(cudaDeviceGetAttribute(
      &hardware.sm_count, cudaDevAttrMultiProcessorCount, hardware.device_id));

  const auto* x = static_cast<const Operand*>(params.x);
  const auto* w = static_cast<const Operand*>(params.w);
  const typename Kernel::StrideA x_stride{params.x_stride, cute::_1{}, 0};
  const typename Kernel::StrideB w_stride{params.w_stride, cute::_1{}, 0};
  typename Kernel::StrideD out_stride{};
  cute::get<kSwapAB ? 1 : 0>(out_stride) = params.out_stride;

  typename Kernel::Arguments arguments{};
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  if constexpr (kSwapAB) {
    arguments.problem_shape = {params.n, params.m, params.k, 1};
    arguments.mainloop = {w, w_stride, x, x_stride};
  } else {
    arguments.problem_shape = {params.m, params.n, params.k, 1};
    arguments.mainloop = {x, x_stride, w, w_stride};
  }
  arguments.epilogue = {EpilogueTree::arguments(params), nullptr, out_stride,
                        static_cast<Output*>(params.out), out_stride};
  arguments.hw_info = hardware;
  arguments.scheduler.max_swizzle_size =
      kSwapAB ? band_width(params.n, params.m) : band_width(params.m, params.n);
  arguments.scheduler.raster_order = raster_order(OSTINATO_RASTER);

  // Encodes the TMA descriptors; they travel in the kernel's parameters.
  const typename Kernel::Params kernel_params = Kernel::to_underlying_arguments(arguments, nullptr);
  LaunchConfig config;
  config.grid = Kernel::get_grid_shape(kernel_params);
  config.block = Kernel::get_block_shape();
  config.dynamic_smem = Kernel::SharedStorageSize;
  config.cluster = dim3(kClusterRows, kClusterColumns, 1);
  config.pdl = params.pdl != 0;
  return launch(cutlass::device_kernel<Kernel>, config, stream, kernel_params);
}

}  // namespace
}  // namespace ostinato

OSTINATO_EXPORT int ostinato_prepare(void) {
  return ostinato::allow_dynamic_smem(cutlass::device_kernel<ostinato::Kernel>,
                                      ostinato::Kernel::SharedStorageSize);
}

OSTINATO_EXPORT int ostinato_launch(const ostinato::W8A8GemmParams* params, void* stream) {
  return ostinato::launch_gemm(*params, static_cast<cudaStream_t>(stream));
}
