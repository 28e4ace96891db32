// The layout of packed weights: tiles of 16 rows by 64 of K, each a run of 1 KB.
//
// [tile of 16 rows][block of 64 of K][row][byte], zero padded to whole tiles and to an even number
// of blocks. Within a row, the v-th vector of 16 bytes stands at v ^ (row / 2 % 4): that is TMA's
// and wgmma's 64-byte swizzle, so that a copy of whole runs arrives in shared memory as an operand
// of wgmma (TMA takes some 2 clocks per row, of up to 128 bytes: rows of 64 would halve its speed),
// and no reader meets a bank conflict. runtime/ops/linear/packed_weight.py packs.
#pragma once

namespace ostinato {

inline constexpr int kPackedRows = 16;
inline constexpr int kPackedDepth = 64;
inline constexpr int kPackedBlockBytes = kPackedRows * kPackedDepth;
inline constexpr int kPackedDepthUnit = 128;  // K is padded to a multiple of it

}  // namespace ostinato
