// What the kernels that the linear layers of one token stand for make of a row and a weight.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "common/quantize_math.cuh"
#include "gemm_w8a8/packed.h"

namespace emulator {

// As quantize.cu, of rows: groups of four for Grid, which takes as many.
inline std::vector<int8_t> codes_of(const float* x, int k, float scale) {
  const ostinato::Divisor divisor(scale);
  std::vector<int8_t> codes(k);
  for (int i = 0; i < k; i += 4) {
    float q[4];
    for (int j = 0; j < 4; ++j) {
      q[j] = divisor.fast ? divisor.divide_fast(x[i + j]) : divisor.divide(x[i + j]);
    }
    const ostinato::Grid<ostinato::dtype::int8> grid(0.0f);
    const uint32_t word = divisor.fast ? grid.encode_bounded(q) : grid.encode(q);
    std::memcpy(&codes[i], &word, 4);
  }
  return codes;
}

// Where a packed weight, whose tiles have so many blocks, has element i of a row.
inline size_t place_of(int row, int i, int blocks) {
  const int vector = i % ostinato::kPackedDepth / 16 ^ row / 2 % 4;
  return (size_t{1} * (row / ostinato::kPackedRows) * blocks + i / ostinato::kPackedDepth) *
             ostinato::kPackedBlockBytes +
         row % ostinato::kPackedRows * ostinato::kPackedDepth + vector * 16 + i % 16;
}

}  // namespace emulator
