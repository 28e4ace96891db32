// Matrices of 8 rows of 16 bytes in shared memory, and of 8 by 8 values in a warp's registers.
#pragma once

#include "attention/common/ptx.cuh"

namespace ostinato::decode {

inline void load_matrices(uint32_t (&words)[4], uint32_t address) {
  const emulator::Words* const rows = emulator::exchange({address});
  const int lane = emulator::lane();
  for (int m = 0; m < 4; ++m) {
    std::memcpy(&words[m], emulator::shared + rows[m * 8 + lane / 4][0] + lane % 4 * 4, 4);
  }
  __syncwarp();
}

inline void load_transposed(uint32_t (&words)[4], uint32_t address) {
  const emulator::Words* const rows = emulator::exchange({address});
  const int lane = emulator::lane();
  for (int m = 0; m < 4; ++m) {
    uint16_t pair[2];
    for (int e = 0; e < 2; ++e) {
      const uint32_t row = rows[m * 8 + lane % 4 * 2 + e][0];
      std::memcpy(&pair[e], emulator::shared + row + lane / 4 * 2, 2);
    }
    std::memcpy(&words[m], pair, sizeof(pair));
  }
  __syncwarp();
}

inline uint32_t transpose(uint32_t matrix) {
  const emulator::Words* const all = emulator::exchange({matrix});
  const int row = emulator::lane() % 4 * 2, column = emulator::lane() / 4;
  uint32_t transposed = 0;
  for (int e = 0; e < 2; ++e) {
    const uint32_t word = all[(row + e) * 4 + column / 2][0];
    transposed |= (word >> (16 * (column % 2)) & 0xffff) << (16 * e);
  }
  __syncwarp();
  return transposed;
}

inline uint32_t keep(uint32_t value) { return value; }

}  // namespace ostinato::decode
