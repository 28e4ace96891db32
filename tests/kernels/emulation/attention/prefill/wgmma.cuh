// What a warpgroup's MMAs do, thread by thread.
#pragma once

#include "attention/common/ptx.cuh"
#include "common/mma_groups.cuh"
#include "common/tma.cuh"
#include "config.cuh"

namespace ostinato::prefill {

// An operand in shared memory (PTX ISA, "matrix descriptor"), swizzled by 128 bytes.
struct Descriptor {
  uint32_t address, strip, group;

  explicit Descriptor(uint64_t bits)
      : address((bits & 0x3fff) * 16),
        strip((bits >> 16 & 0x3fff) * 16),
        group((bits >> 32 & 0x3fff) * 16) {
    if (bits >> 62 != 1) {
      emulator::fail("an operand that is not swizzled by 128 bytes");
    }
  }
  float at(uint32_t offset) const {
    uint16_t bits;
    std::memcpy(&bits, emulator::shared + swizzled(address + offset), sizeof(bits));
    return half_of<Type>(bits, 0);
  }
  // Of rows with the k of the MMA along them, and of rows of one k each.
  float along_k(int row, int k) const { return at(row / 8 * group + row % 8 * 128 + k * 2); }
  float across_k(int k, int column) const {
    return at(column / 64 * strip + k / 8 * group + k % 8 * 128 + column % 64 * 2);
  }
};

// sums (+)= rows · columns of one MMA; a(row of the thread, k) and b(k, column).
template <int kCount, class A, class B>
void multiply(float (&sums)[kCount], bool accumulate, const A& a, const B& b) {
  for (int i = 0; i < kCount; ++i) {
    const int half = i / 2 % 2, column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    float sum = accumulate ? sums[i] : 0;
    for (int k = 0; k < 16; ++k) {
      sum += a(half, k) * b(k, column);
    }
    sums[i] = sum;
  }
}

inline void multiply_keys_step(uint64_t rows, uint64_t columns, float (&sums)[kScores],
                               bool accumulate) {
  const Descriptor of_rows(rows), of_columns(columns);
  pending_mmas().open.push_back([=, &sums] {
    const int first = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    float a[2][16];
    for (int i = 0; i < 32; ++i) {
      a[i / 16][i % 16] = of_rows.along_k(first + i / 16 * 8, i % 16);
    }
    multiply(
        sums, accumulate, [&](int half, int k) { return a[half][k]; },
        [&](int k, int column) { return of_columns.along_k(column, k); });
  });
}

inline void multiply_values_step(const uint32_t (&rows)[4], uint64_t columns,
                                 float (&sums)[kOutputs], bool accumulate) {
  const Descriptor of_columns(columns);
  pending_mmas().open.push_back([=, &rows, &sums] {
    // A thread has four of the sixteen elements of a row; its quad has all.
    const emulator::Words* const all = emulator::exchange({rows[0], rows[1], rows[2], rows[3]});
    float a[2][16];
    for (int i = 0; i < 32; ++i) {
      const int half = i / 16, k = i % 16;
      const uint32_t word = all[emulator::lane() / 4 * 4 + k % 8 / 2][half + k / 8 * 2];
      a[half][k] = half_of<Type>(word, k % 2);
    }
    multiply(
        sums, accumulate, [&](int half, int k) { return a[half][k]; },
        [&](int k, int column) { return of_columns.across_k(k, column); });
  });
}

template <int kCount>
void pin(float (& /*sums*/)[kCount]) {}
template <int kCount>
void pin(uint32_t (& /*weights*/)[kCount][4]) {}

}  // namespace ostinato::prefill
