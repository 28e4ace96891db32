// The layout of packed weights: tiles of 16 rows by 64 bytes of K, each a run of 1 KB.
//
// [tile of 16 rows][block of 64 bytes][row][byte], zero padded to whole tiles and to an even number
// of blocks. Within a row, the 16-byte vector v is stored at v ^ (row / 2 % 4), the 64-byte swizzle
// of TMA and wgmma. So a copy of whole runs arrives in shared memory as a wgmma operand without
// bank conflicts. (TMA takes about 2 clocks per row of up to 128 bytes: separate 64-byte rows would
// halve its speed.) runtime/ops/linear/packed_weight.py packs.
#pragma once

namespace ostinato {

inline constexpr int kPackedRows = 16;
inline constexpr int kPackedDepth = 64;  // bytes
inline constexpr int kPackedBlockBytes = kPackedRows * kPackedDepth;
inline constexpr int kPackedDepthUnit = 128;  // K is padded to a multiple of this

}  // namespace ostinato
