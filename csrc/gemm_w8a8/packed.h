// The layout of packed weights: tiles of 16 rows by 64 of K, each a run of 1 KB.
//
// [tile of 16 rows][block of 64 of K][row][byte], zero padded to whole tiles and to an even number
// of blocks. In torch: pad w to [16 t, 128 d], then w.view(t, 16, 2 d, 64).permute(0, 2, 1, 3). A
// bulk copy of many blocks of a tile reads one run of memory; a TMA box of many tiles arrives in
// shared memory as rows of 64 bytes, which is an operand of wgmma.
#pragma once

namespace ostinato {

inline constexpr int kPackedRows = 16;
inline constexpr int kPackedDepth = 64;
inline constexpr int kPackedBlockBytes = kPackedRows * kPackedDepth;
inline constexpr int kPackedDepthUnit = 128;  // K is padded to a multiple of it

}  // namespace ostinato
