// Takes a slice of a thread's outputs by a jump to its code: registers have fixed names, and a
// switch in C++ is no jump that is known to be the same for all lanes.
#pragma once

#include "prefill_config.cuh"

namespace ostinato::prefill {

inline constexpr int kVectors = kOutputs / 4;                        // of a thread, 16 bytes each
inline constexpr int kSliceVectors = ceil_div(kVectors, kSumTiles);  // the last slice may have less

#if OSTINATO_BYTES != 0 && OSTINATO_CONSUMERS == 3 && OSTINATO_VALUE_DIM == 128

// Outputs %a to %d, one vector, go to %v to %y, multiplied with their row's factor, and become 0,
// or stay NaN. (ptxas makes all wgmma wait where a sum is set to a constant.)
#define OSTINATO_TAKE(a, b, c, d, v, w, x, y)                     \
  "mul.f32 %" #v ", %" #a ", %81;\n mul.f32 %" #w ", %" #b        \
  ", %81;\n"                                                      \
  "mul.f32 %" #x ", %" #c ", %82;\n mul.f32 %" #y ", %" #d        \
  ", %82;\n"                                                      \
  "mul.f32 %" #a ", %" #a ", 0f00000000;\n mul.f32 %" #b ", %" #b \
  ", 0f00000000;\n"                                               \
  "mul.f32 %" #c ", %" #c ", 0f00000000;\n mul.f32 %" #d ", %" #d ", 0f00000000;\n"
#define OSTINATO_TAKE_0(...) OSTINATO_TAKE(0, 1, 2, 3, __VA_ARGS__)
#define OSTINATO_TAKE_1(...) OSTINATO_TAKE(4, 5, 6, 7, __VA_ARGS__)
#define OSTINATO_TAKE_2(...) OSTINATO_TAKE(8, 9, 10, 11, __VA_ARGS__)
#define OSTINATO_TAKE_3(...) OSTINATO_TAKE(12, 13, 14, 15, __VA_ARGS__)
#define OSTINATO_TAKE_4(...) OSTINATO_TAKE(16, 17, 18, 19, __VA_ARGS__)
#define OSTINATO_TAKE_5(...) OSTINATO_TAKE(20, 21, 22, 23, __VA_ARGS__)
#define OSTINATO_TAKE_6(...) OSTINATO_TAKE(24, 25, 26, 27, __VA_ARGS__)
#define OSTINATO_TAKE_7(...) OSTINATO_TAKE(28, 29, 30, 31, __VA_ARGS__)
#define OSTINATO_TAKE_8(...) OSTINATO_TAKE(32, 33, 34, 35, __VA_ARGS__)
#define OSTINATO_TAKE_9(...) OSTINATO_TAKE(36, 37, 38, 39, __VA_ARGS__)
#define OSTINATO_TAKE_10(...) OSTINATO_TAKE(40, 41, 42, 43, __VA_ARGS__)
#define OSTINATO_TAKE_11(...) OSTINATO_TAKE(44, 45, 46, 47, __VA_ARGS__)
#define OSTINATO_TAKE_12(...) OSTINATO_TAKE(48, 49, 50, 51, __VA_ARGS__)
#define OSTINATO_TAKE_13(...) OSTINATO_TAKE(52, 53, 54, 55, __VA_ARGS__)
#define OSTINATO_TAKE_14(...) OSTINATO_TAKE(56, 57, 58, 59, __VA_ARGS__)
#define OSTINATO_TAKE_15(...) OSTINATO_TAKE(60, 61, 62, 63, __VA_ARGS__)
#define OSTINATO_FIRST(take) OSTINATO_##take(64, 65, 66, 67)
#define OSTINATO_SECOND(take) OSTINATO_##take(68, 69, 70, 71)
#define OSTINATO_THIRD(take) OSTINATO_##take(72, 73, 74, 75)
#define OSTINATO_FOURTH(take) OSTINATO_##take(76, 77, 78, 79)
#define OSTINATO_SLICE(slice, code) "SLICE" #slice ":\n" code "bra.uni DONE;\n"
#define OSTINATO_ONE(slice, a) OSTINATO_SLICE(slice, OSTINATO_FIRST(a))
#define OSTINATO_TWO(slice, a, b) OSTINATO_SLICE(slice, OSTINATO_FIRST(a) OSTINATO_SECOND(b))
#define OSTINATO_THREE(slice, a, b, c) \
  OSTINATO_SLICE(slice, OSTINATO_FIRST(a) OSTINATO_SECOND(b) OSTINATO_THIRD(c))
#define OSTINATO_FOUR(slice, a, b, c, d) \
  OSTINATO_SLICE(slice, OSTINATO_FIRST(a) OSTINATO_SECOND(b) OSTINATO_THIRD(c) OSTINATO_FOURTH(d))

#if OSTINATO_SUM_TILES == 8
#define OSTINATO_LABELS "SLICE0, SLICE1, SLICE2, SLICE3, SLICE4, SLICE5, SLICE6, SLICE7"
#define OSTINATO_SLICES             \
  OSTINATO_TWO(0, TAKE_0, TAKE_1)   \
  OSTINATO_TWO(1, TAKE_2, TAKE_3)   \
  OSTINATO_TWO(2, TAKE_4, TAKE_5)   \
  OSTINATO_TWO(3, TAKE_6, TAKE_7)   \
  OSTINATO_TWO(4, TAKE_8, TAKE_9)   \
  OSTINATO_TWO(5, TAKE_10, TAKE_11) \
  OSTINATO_TWO(6, TAKE_12, TAKE_13) OSTINATO_TWO(7, TAKE_14, TAKE_15)
#else
static_assert(kSumTiles == 16, "slices of that many tiles");
#define OSTINATO_LABELS                                                                       \
  "SLICE0, SLICE1, SLICE2, SLICE3, SLICE4, SLICE5, SLICE6, SLICE7, SLICE8, SLICE9, SLICE10, " \
  "SLICE11, SLICE12, SLICE13, SLICE14, SLICE15"
#define OSTINATO_SLICES     \
  OSTINATO_ONE(0, TAKE_0)   \
  OSTINATO_ONE(1, TAKE_1)   \
  OSTINATO_ONE(2, TAKE_2)   \
  OSTINATO_ONE(3, TAKE_3)   \
  OSTINATO_ONE(4, TAKE_4)   \
  OSTINATO_ONE(5, TAKE_5)   \
  OSTINATO_ONE(6, TAKE_6)   \
  OSTINATO_ONE(7, TAKE_7)   \
  OSTINATO_ONE(8, TAKE_8)   \
  OSTINATO_ONE(9, TAKE_9)   \
  OSTINATO_ONE(10, TAKE_10) \
  OSTINATO_ONE(11, TAKE_11) \
  OSTINATO_ONE(12, TAKE_12) \
  OSTINATO_ONE(13, TAKE_13) \
  OSTINATO_ONE(14, TAKE_14) \
  OSTINATO_ONE(15, TAKE_15)
#endif

#define OSTINATO_SIXTEEN(c, x, i)                                                        \
  c(x[i]), c(x[i + 1]), c(x[i + 2]), c(x[i + 3]), c(x[i + 4]), c(x[i + 5]), c(x[i + 6]), \
      c(x[i + 7]), c(x[i + 8]), c(x[i + 9]), c(x[i + 10]), c(x[i + 11]), c(x[i + 12]),   \
      c(x[i + 13]), c(x[i + 14]), c(x[i + 15])

// Outputs `o` of a slice, which is the same for all lanes, as many vectors as it has.
__device__ __forceinline__ void take_slice(float (&o)[kOutputs], int slice,
                                           const float (&factor)[2],
                                           float (&taken)[4 * kSliceVectors]) {
  float t[16];
  asm volatile(
      "{\n"
      "SLICES: .branchtargets " OSTINATO_LABELS
      ";\n"
      "brx.idx.uni %80, SLICES;\n" OSTINATO_SLICES
      "DONE:\n"
      "}\n"
      : OSTINATO_SIXTEEN("+f", o, 0), OSTINATO_SIXTEEN("+f", o, 16), OSTINATO_SIXTEEN("+f", o, 32),
        OSTINATO_SIXTEEN("+f", o, 48), OSTINATO_SIXTEEN("=f", t, 0)
      : "r"(slice), "f"(factor[0]), "f"(factor[1]));
#pragma unroll
  for (int i = 0; i < 4 * kSliceVectors; ++i) {
    taken[i] = t[i];
  }
}

#else

// Other kernels put nothing aside.
__device__ __forceinline__ void take_slice(float (&)[kOutputs], int, const float (&)[2],
                                           float (&)[4 * kSliceVectors]) {}

#endif

}  // namespace ostinato::prefill
