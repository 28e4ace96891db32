// One warp's products of the small-M GEMM: 16 weight rows x 8 tokens x 64 of K, for INT8 and E4M3.
//
// The order of K inside a block is free as long as weights and tokens agree. Lane l takes bytes
// 16 (l % 4) ... + 15 of weight rows l / 4 and l / 4 + 8, and the same bytes of token l / 4: one
// 16-byte load per row, from memory that is contiguous over the warp for the weights.
#pragma once

#include <cstdint>

namespace ostinato {

struct WeightFragment {
  uint4 low;   // row l / 4
  uint4 high;  // row l / 4 + 8
};

// Accumulators of an MMA with 16 rows and 8 columns: lane l holds row l / 4 (+ 8 in the last two),
// columns 2 (l % 4) and 2 (l % 4) + 1.
template <class Sum>
using Accumulator = Sum[4];

struct Int8 {
  using Sum = int32_t;
  using Weights = WeightFragment;
  using Tokens = uint4;
  static constexpr bool kInteger = true;

  static __device__ __forceinline__ Weights prepare(const WeightFragment& w) { return w; }

  static __device__ __forceinline__ Tokens prepare(const uint4& x) { return x; }

  // Adds to both sums, which may be the same.
  static __device__ __forceinline__ void multiply(Accumulator<Sum>& even, Accumulator<Sum>& odd,
                                                  const Weights& w, const Tokens& x) {
    mma(even, w.low.x, w.high.x, w.low.y, w.high.y, x.x, x.y);
    mma(odd, w.low.z, w.high.z, w.low.w, w.high.w, x.z, x.w);
  }

 private:
  static __device__ __forceinline__ void mma(Accumulator<Sum>& d, uint32_t a0, uint32_t a1,
                                             uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
};

// sm_90 has no E4M3 mma.sync. Every E4M3 value is an FP16 value, so the FP16 product with FP32 sums
// is at least as accurate as the FP8 tensor core path, and where weights are streamed its lower
// rate does not show.
class E4m3 {
  struct Halves {
    uint32_t first, second;  // two FP16 values each
  };

 public:
  using Sum = float;
  static constexpr bool kInteger = false;

  struct Weights {
    Halves low[4], high[4];  // by words of the fragment
  };
  struct Tokens {
    Halves words[4];
  };

  static __device__ __forceinline__ Weights prepare(const WeightFragment& w) {
    return {{widen(w.low.x), widen(w.low.y), widen(w.low.z), widen(w.low.w)},
            {widen(w.high.x), widen(w.high.y), widen(w.high.z), widen(w.high.w)}};
  }

  static __device__ __forceinline__ Tokens prepare(const uint4& x) {
    return {{widen(x.x), widen(x.y), widen(x.z), widen(x.w)}};
  }

  // Adds to both sums, which may be the same.
  static __device__ __forceinline__ void multiply(Accumulator<Sum>& even, Accumulator<Sum>& odd,
                                                  const Weights& w, const Tokens& x) {
    mma(even, w.low[0], w.high[0], x.words[0]);
    mma(odd, w.low[1], w.high[1], x.words[1]);
    mma(even, w.low[2], w.high[2], x.words[2]);
    mma(odd, w.low[3], w.high[3], x.words[3]);
  }

 private:
  static __device__ __forceinline__ Halves widen(uint32_t four) {
    Halves wide;
    asm("{\n"
        ".reg .b16 first, second;\n"
        "mov.b32 {first, second}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, first;\n"
        "cvt.rn.f16x2.e4m3x2 %1, second;\n"
        "}"
        : "=r"(wide.first), "=r"(wide.second)
        : "r"(four));
    return wide;
  }

  static __device__ __forceinline__ void mma(Accumulator<Sum>& d, const Halves& a, const Halves& b,
                                             const Halves& x) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.first), "r"(b.first), "r"(a.second), "r"(b.second), "r"(x.first), "r"(x.second));
  }
};

}  // namespace ostinato
