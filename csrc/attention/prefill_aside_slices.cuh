// Takes a slice of a thread's outputs, 16 bytes, by a jump to its code: registers have fixed names,
// and a switch in C++ is no jump that is known to be the same for all lanes.
#pragma once

#include "prefill_config.cuh"

namespace ostinato::prefill {

inline constexpr int kVectors = kOutputs / 4;  // of a thread, 16 bytes each

#if OSTINATO_BYTES != 0 && OSTINATO_CONSUMERS == 3 && OSTINATO_VALUE_DIM == 128
static_assert(kVectors == kSumTiles, "with each tile a vector is put aside");

// Outputs %a to %d go to %64 to %67, multiplied with their row's factor, %81 or %82, and become 0,
// or stay NaN. (ptxas makes all wgmma wait where a sum is set to a constant.)
#define OSTINATO_SLICE(slice, a, b, c, d) \
  "SLICE" #slice                          \
  ":\n"                                   \
  "mul.f32 %64, %" #a                     \
  ", %81;\n"                              \
  "mul.f32 %65, %" #b                     \
  ", %81;\n"                              \
  "mul.f32 %66, %" #c                     \
  ", %82;\n"                              \
  "mul.f32 %67, %" #d                     \
  ", %82;\n"                              \
  "mul.f32 %" #a ", %" #a                 \
  ", 0f00000000;\n"                       \
  "mul.f32 %" #b ", %" #b                 \
  ", 0f00000000;\n"                       \
  "mul.f32 %" #c ", %" #c                 \
  ", 0f00000000;\n"                       \
  "mul.f32 %" #d ", %" #d                 \
  ", 0f00000000;\n"                       \
  "bra.uni DONE;\n"
#define OSTINATO_SLICES              \
  OSTINATO_SLICE(0, 0, 1, 2, 3)      \
  OSTINATO_SLICE(1, 4, 5, 6, 7)      \
  OSTINATO_SLICE(2, 8, 9, 10, 11)    \
  OSTINATO_SLICE(3, 12, 13, 14, 15)  \
  OSTINATO_SLICE(4, 16, 17, 18, 19)  \
  OSTINATO_SLICE(5, 20, 21, 22, 23)  \
  OSTINATO_SLICE(6, 24, 25, 26, 27)  \
  OSTINATO_SLICE(7, 28, 29, 30, 31)  \
  OSTINATO_SLICE(8, 32, 33, 34, 35)  \
  OSTINATO_SLICE(9, 36, 37, 38, 39)  \
  OSTINATO_SLICE(10, 40, 41, 42, 43) \
  OSTINATO_SLICE(11, 44, 45, 46, 47) \
  OSTINATO_SLICE(12, 48, 49, 50, 51) \
  OSTINATO_SLICE(13, 52, 53, 54, 55) \
  OSTINATO_SLICE(14, 56, 57, 58, 59) \
  OSTINATO_SLICE(15, 60, 61, 62, 63)

#define OSTINATO_SIXTEEN(c, x, i)                                                        \
  c(x[i]), c(x[i + 1]), c(x[i + 2]), c(x[i + 3]), c(x[i + 4]), c(x[i + 5]), c(x[i + 6]), \
      c(x[i + 7]), c(x[i + 8]), c(x[i + 9]), c(x[i + 10]), c(x[i + 11]), c(x[i + 12]),   \
      c(x[i + 13]), c(x[i + 14]), c(x[i + 15])

// `slice` is the same for all lanes.
__device__ __forceinline__ void take_slice(float (&o)[kOutputs], int slice,
                                           const float (&factor)[2], float (&taken)[4]) {
  float t[16];  // of which 12 are not written: with 4, ptxas allocates all registers otherwise
  asm volatile(
      "{\n"
      "SLICES: .branchtargets SLICE0, SLICE1, SLICE2, SLICE3, SLICE4, SLICE5, SLICE6, SLICE7, "
      "SLICE8, SLICE9, SLICE10, SLICE11, SLICE12, SLICE13, SLICE14, SLICE15;\n"
      "brx.idx.uni %80, SLICES;\n" OSTINATO_SLICES
      "DONE:\n"
      "}\n"
      : OSTINATO_SIXTEEN("+f", o, 0), OSTINATO_SIXTEEN("+f", o, 16), OSTINATO_SIXTEEN("+f", o, 32),
        OSTINATO_SIXTEEN("+f", o, 48), OSTINATO_SIXTEEN("=f", t, 0)
      : "r"(slice), "f"(factor[0]), "f"(factor[1]));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    taken[i] = t[i];
  }
}

#else

// Other kernels put nothing aside.
__device__ __forceinline__ void take_slice(float (&)[kOutputs], int, const float (&)[2],
                                           float (&)[4]) {}

#endif

}  // namespace ostinato::prefill
