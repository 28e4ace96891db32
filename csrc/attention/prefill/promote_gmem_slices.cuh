// Takes a slice of a thread's outputs, 16 or 32 bytes, by a jump to its code: registers have fixed
// names, and a switch in C++ is no jump that is known to be the same for all lanes.
#pragma once

#include "config.cuh"

namespace ostinato::prefill {

inline constexpr int kVectors = kOutputs / 4;  // of a thread, 16 bytes each
inline constexpr int kSliceVectors = kPromotesToGmem ? kVectors / kSumTiles : 1;

#if OSTINATO_PROMOTES_TO_GMEM
static_assert(kVectors == kSumTiles * kSliceVectors, "with each tile whole vectors are put aside");

// The asm's operands are outputs, 16 registers for what is taken, the slice, and two factors. Four
// outputs go to registers t0 to t3, multiplied with their row's factor, and become 0, or stay NaN.
// (ptxas makes all wgmma wait where a sum is set to a constant.)
#define OSTINATO_TAKE(to, output, factor) "mul.f32 " to ", %" #output ", " factor ";\n"
#define OSTINATO_CLEAR(output) "mul.f32 %" #output ", %" #output ", 0f00000000;\n"
#define OSTINATO_VECTOR_TO(t0, t1, t2, t3, a, b, c, d) \
  OSTINATO_TAKE(t0, a, OSTINATO_FACTOR0)               \
  OSTINATO_TAKE(t1, b, OSTINATO_FACTOR0)               \
  OSTINATO_TAKE(t2, c, OSTINATO_FACTOR1)               \
  OSTINATO_TAKE(t3, d, OSTINATO_FACTOR1)               \
  OSTINATO_CLEAR(a) OSTINATO_CLEAR(b) OSTINATO_CLEAR(c) OSTINATO_CLEAR(d)
// `to` is four arguments, which are seen when macros are replaced once more.
#define OSTINATO_VECTOR(...) OSTINATO_VECTOR_TO(__VA_ARGS__)

#define OSTINATO_SIXTEEN(c, x, i)                                                        \
  c(x[i]), c(x[i + 1]), c(x[i + 2]), c(x[i + 3]), c(x[i + 4]), c(x[i + 5]), c(x[i + 6]), \
      c(x[i + 7]), c(x[i + 8]), c(x[i + 9]), c(x[i + 10]), c(x[i + 11]), c(x[i + 12]),   \
      c(x[i + 13]), c(x[i + 14]), c(x[i + 15])
#define OSTINATO_SIXTY_FOUR(c, x, i)                                                         \
  OSTINATO_SIXTEEN(c, x, i), OSTINATO_SIXTEEN(c, x, i + 16), OSTINATO_SIXTEEN(c, x, i + 32), \
      OSTINATO_SIXTEEN(c, x, i + 48)

#if OSTINATO_VALUE_DIM == 128
#define OSTINATO_OUTPUTS OSTINATO_SIXTY_FOUR("+f", o, 0)
#define OSTINATO_TAKEN "%64", "%65", "%66", "%67"
#define OSTINATO_INDEX "%80"
#define OSTINATO_FACTOR0 "%81"
#define OSTINATO_FACTOR1 "%82"
#define OSTINATO_SLICE(slice, a, b, c, d) \
  "SLICE" #slice ":\n" OSTINATO_VECTOR(OSTINATO_TAKEN, a, b, c, d) "bra.uni DONE;\n"
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
#else
#define OSTINATO_OUTPUTS OSTINATO_SIXTY_FOUR("+f", o, 0), OSTINATO_SIXTY_FOUR("+f", o, 64)
#define OSTINATO_TAKEN "%128", "%129", "%130", "%131"
#define OSTINATO_TAKEN_NEXT "%132", "%133", "%134", "%135"
#define OSTINATO_INDEX "%144"
#define OSTINATO_FACTOR0 "%145"
#define OSTINATO_FACTOR1 "%146"
#define OSTINATO_SLICE(slice, a, b, c, d, e, f, g, h)              \
  "SLICE" #slice ":\n" OSTINATO_VECTOR(OSTINATO_TAKEN, a, b, c, d) \
      OSTINATO_VECTOR(OSTINATO_TAKEN_NEXT, e, f, g, h) "bra.uni DONE;\n"
#define OSTINATO_SLICES                                      \
  OSTINATO_SLICE(0, 0, 1, 2, 3, 4, 5, 6, 7)                  \
  OSTINATO_SLICE(1, 8, 9, 10, 11, 12, 13, 14, 15)            \
  OSTINATO_SLICE(2, 16, 17, 18, 19, 20, 21, 22, 23)          \
  OSTINATO_SLICE(3, 24, 25, 26, 27, 28, 29, 30, 31)          \
  OSTINATO_SLICE(4, 32, 33, 34, 35, 36, 37, 38, 39)          \
  OSTINATO_SLICE(5, 40, 41, 42, 43, 44, 45, 46, 47)          \
  OSTINATO_SLICE(6, 48, 49, 50, 51, 52, 53, 54, 55)          \
  OSTINATO_SLICE(7, 56, 57, 58, 59, 60, 61, 62, 63)          \
  OSTINATO_SLICE(8, 64, 65, 66, 67, 68, 69, 70, 71)          \
  OSTINATO_SLICE(9, 72, 73, 74, 75, 76, 77, 78, 79)          \
  OSTINATO_SLICE(10, 80, 81, 82, 83, 84, 85, 86, 87)         \
  OSTINATO_SLICE(11, 88, 89, 90, 91, 92, 93, 94, 95)         \
  OSTINATO_SLICE(12, 96, 97, 98, 99, 100, 101, 102, 103)     \
  OSTINATO_SLICE(13, 104, 105, 106, 107, 108, 109, 110, 111) \
  OSTINATO_SLICE(14, 112, 113, 114, 115, 116, 117, 118, 119) \
  OSTINATO_SLICE(15, 120, 121, 122, 123, 124, 125, 126, 127)
#endif

// `slice` is the same for all lanes.
__device__ __forceinline__ void take_slice(float (&o)[kOutputs], int slice,
                                           const float (&factor)[2],
                                           float (&taken)[4 * kSliceVectors]) {
  float t[16];  // some are not written: with fewer, ptxas allocates all registers otherwise
  asm volatile(
      "{\n"
      "SLICES: .branchtargets SLICE0, SLICE1, SLICE2, SLICE3, SLICE4, SLICE5, SLICE6, SLICE7, "
      "SLICE8, SLICE9, SLICE10, SLICE11, SLICE12, SLICE13, SLICE14, SLICE15;\n"
      "brx.idx.uni " OSTINATO_INDEX ", SLICES;\n" OSTINATO_SLICES
      "DONE:\n"
      "}\n"
      : OSTINATO_OUTPUTS, OSTINATO_SIXTEEN("=f", t, 0)
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
