// The KV dequantiser: producer warps that copy 8-bit keys or values into the stage of the ring that
// their operands will fill, convert them exactly to 16 bits, and write these as TMA would.
//
// The copies of the next tile are asked for before a tile is converted, which hides the latency of
// memory, unless consumers still read the stage that they go to. A row's 8-bit elements lie in the
// half of its operands that is written last, and a lane converts what it has copied. Rows that no
// query of the work tile sees are not read and become 0, so that consumers need not clear them.
#pragma once

#include "attention/common/dequant.cuh"
#include "common/async_copy.cuh"
#include "common/ring.cuh"
#include "common/tma.cuh"
#include "kv_vectors.cuh"
#include "token_scales.cuh"

namespace ostinato::prefill {

// Of `What`, keys or values, of one work tile. Its functions are called by a warp.
template <class What>
class KvDequantizer {
 public:
  // `warp`: among those of the same half of the work tile's memory (kKvWarps).
  __device__ KvDequantizer(SharedStorage& shared, const Arguments& args, const WorkTile& work_tile,
                           int warp)
      : shared_(shared), args_(args), work_tile_(work_tile), warp_(warp) {}

  // Fills the ring with the work tile's tiles, and scales if tokens have their own.
  // Calls `then` when the next work tile should be found.
  template <class Then>
  __device__ __forceinline__ void run(CompactRingPosition& position, Then then) {
    // The number of tiles is read anew each time: registers are few.
    Rows next = find_rows(0);
    await_free(position);
    copy(position, addresses_of(next));
    RowScales row_scales = load_scales(next);
    next = find_rows(1);
#pragma unroll 1
    for (int n = 0; n < work_tile_.tiles(); ++n) {
      if (n == tile_of_next()) {
        then();
      }
      const bool more = n + 1 < work_tile_.tiles();
      CompactRingPosition after = position;
      after.advance(kStagesOf<What>);
      // A tile that consumers may wait for does not wait for the stage of the next one.
      const bool ahead = more && is_free(after);
      if (ahead) {
        copy(after, addresses_of(next));
        wait_copies<1>();
      } else {
        wait_copies<0>();
      }
      convert(position);
      clear_non_numbers(position, row_scales);
      write_row_scales(position, row_scales);
      hand_over(position);
      if (more && !ahead) {
        await_free(after);
        copy(after, addresses_of(next));
      }
      row_scales = load_scales(next);
      next = find_rows(n + 2);  // page ids are read a tile ahead
      position = after;
    }
    if (work_tile_.tiles() <= tile_of_next()) {
      then();
    }
  }

 private:
  using Vectors = KvVectors<What>;
  using Vector = uint4;

  // Vectors of 8-bit elements that a lane has read before it converts one.
  static constexpr int kRead = 4;
  static_assert(!kDequantizes || Vectors::kCount % kRead == 0, "they take turns in registers");

  // The tile before which the next work tile is found (the number of tiles: after the last). The
  // ring is full then, so that consumers do not wait for it.
  static constexpr int kFindingTiles = 6, kLeastTiles = 2;
  __device__ __forceinline__ int tile_of_next() const {
    return max(work_tile_.tiles() - kFindingTiles, kLeastTiles);
  }

  // This lane's rows of a tile: of each 32 one.
  struct Rows {
    int page[kRowSets], slot[kRowSets];  // slot -1: no query sees the row
  };
  struct Addresses {
    uint64_t of[kRowSets];  // 0: no query sees the row
  };

  // Scales of this lane's rows, if tokens have their own.
  struct RowScales {
    float key[kRowSets], value[kRowSets];
  };
  __device__ __forceinline__ RowScales load_scales(const Rows& rows) const {
    RowScales scales = {};
    if constexpr (kTokenScales) {
      const Params& p = args_.params;
#pragma unroll
      for (int set = 0; set < kRowSets; ++set) {
        if (rows.slot[set] >= 0) {
          scales.key[set] = read_token_scale(key_scales_of(p), rows.page[set], rows.slot[set],
                                             work_tile_.kv_head);
          scales.value[set] = read_token_scale(value_scales_of(p), rows.page[set], rows.slot[set],
                                               work_tile_.kv_head);
        }
      }
    }
    return scales;
  }

  // Called before fill() hands over the keys of the tile, and with them the scales.
  __device__ __forceinline__ void write_row_scales(const CompactRingPosition& position,
                                                   const RowScales& row_scales) const {
    if constexpr (kTokenScales && std::is_same_v<What, Keys>) {
      wait(scales_empty_of(shared_, position.slot), position.parity ^ 1);
      TileScales& scales = tile_scales_of(shared_, position.slot);
      float greatest = 0;
#pragma unroll
      for (int set = 0; set < kRowSets; ++set) {
        const int row = warp_ * kWarpRows + set * 32 + threadIdx.x % 32;
        greatest = fmaxf(
            greatest, write_scales(scales, args_, row, row_scales.key[set], row_scales.value[set]));
      }
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) {
        greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffff, greatest, lanes));
      }
      scales.greatest[warp_] = greatest;  // by all lanes
      OSTINATO_DELAY(prefill_scales, warp_ == 1);
    }
  }

  // Values with a scale that is no number become NaN, in their stage.
  __device__ __forceinline__ void clear_non_numbers(const CompactRingPosition& position,
                                                    const RowScales& row_scales) const {
    if constexpr (kTokenScales && std::is_same_v<What, Values>) {
      constexpr uint32_t kNaNs = 0x7fff7fff;
      const int lane = threadIdx.x % 32;
#pragma unroll
      for (int set = 0; set < kRowSets; ++set) {
        uint32_t rows = __ballot_sync(0xffffffff, !TokenScale::is_number(row_scales.value[set]));
        for (; rows != 0; rows &= rows - 1) {
          if (lane < kValueDim / 8) {
            const int row = set * 32 + __ffs(static_cast<int>(rows)) - 1;
            *reinterpret_cast<uint4*>(stage(position) + lane / 8 * kKeyStrip + row * kStripBytes +
                                      lane % 8 * 16) = make_uint4(kNaNs, kNaNs, kNaNs, kNaNs);
          }
        }
      }
    }
  }

  __device__ __forceinline__ Rows find_rows(int n) const {
    Rows rows;
    const bool exists = n < work_tile_.tiles();
    const int first = work_tile_.tile(n) * kKeys + warp_ * kWarpRows + threadIdx.x % 32;
#pragma unroll
    for (int set = 0; set < kRowSets; ++set) {
      const int key = first + set * 32;
      rows.page[set] = 0;
      rows.slot[set] = -1;
      if (exists && key >= work_tile_.visible_begin && key < work_tile_.visible_end) {
        find_page(key, rows.page[set], rows.slot[set]);
      }
    }
    return rows;
  }

  __device__ __forceinline__ void find_page(int key, int& page, int& slot) const {
    const Params& p = args_.params;
    if constexpr (kSource == Source::Packed) {
      slot = work_tile_.first_key + key;
    } else {
      const int index = args_.page_of(key);
      page = p.page_table[work_tile_.first_key * p.page_table_stride + index];
      slot = key - index * p.page_size;
    }
  }

  __device__ __forceinline__ Addresses addresses_of(const Rows& rows) const {
    const Slots& slots = std::is_same_v<What, Keys> ? args_.params.k : args_.params.v;
    const CacheType* const head =
        static_cast<const CacheType*>(slots.data) + work_tile_.kv_head * slots.head_stride;
    Addresses addresses;
#pragma unroll
    for (int set = 0; set < kRowSets; ++set) {
      // As numbers without sign: products of such take fewer instructions.
      const uint32_t page = rows.page[set], slot = rows.slot[set];
      const uint64_t element = page * static_cast<uint64_t>(slots.page_stride) +
                               slot * static_cast<uint64_t>(slots.stride);
      addresses.of[set] =
          rows.slot[set] < 0 ? 0 : reinterpret_cast<uint64_t>(head) + element * kCacheElement;
    }
    return addresses;
  }

  __device__ __forceinline__ uint8_t* stage(const CompactRingPosition& position) const {
    return ring_of<What>(shared_).tiles[position.slot] + warp_ * kWarpRows * kStripBytes;
  }

  // Where the row of this lane's vector i of a tile is; 0 if no query sees it.
  __device__ __forceinline__ static uint64_t address_of(const Addresses& addresses, int i,
                                                        unsigned lane) {
    const unsigned first_row = Vectors::first_row(i);
    return __shfl_sync(0xffffffff, addresses.of[first_row / 32],
                       first_row % 32 + Vectors::row(lane));
  }

  // Whether, or until, consumers have released a stage.
  __device__ __forceinline__ bool is_free(const CompactRingPosition& position) const {
    return __all_sync(0xffffffff, is_complete(&barriers_of<What>(shared_).empty[position.slot],
                                              position.parity ^ 1));
  }
  __device__ __forceinline__ void await_free(const CompactRingPosition& position) const {
    wait(&barriers_of<What>(shared_).empty[position.slot], position.parity ^ 1);
  }

  // Asks for copies of a tile's rows to its stage, which is free.
  __device__ __forceinline__ void copy(const CompactRingPosition& position,
                                       const Addresses& addresses) const {
    const unsigned lane = opaque(threadIdx.x % 32);
    const uint32_t to = shared_address(stage(position));
#pragma unroll
    for (int first = 0; first < Vectors::kCount; first += Vectors::kParts) {
      const uint64_t row = address_of(addresses, first, lane);
      const uint8_t* const from =
          reinterpret_cast<const uint8_t*>(row) + Vectors::byte_of_lane(lane);
#pragma unroll
      for (int i = first; i < first + Vectors::kParts; ++i) {
        copy_vector_part_of_group(to + Vectors::copied_offset(i, lane), from + Vectors::byte_of(i),
                                  row == 0 ? 0 : 16);
      }
    }
    commit_copies();
  }

  // Converts a tile that has been copied to its stage.
  __device__ __forceinline__ void convert(const CompactRingPosition& position) const {
    uint8_t* const to = stage(position);
    const unsigned lane = opaque(threadIdx.x % 32);
    const auto read = [&](int i) {
      return *reinterpret_cast<const Vector*>(to + Vectors::copied_offset(i, lane));
    };
    Vector copied[kRead];
#pragma unroll
    for (int i = 0; i < kRead; ++i) {
      copied[i] = read(i);
    }
#pragma unroll
    for (int i = 0; i < Vectors::kCount; ++i) {
      __syncwarp();  // all lanes have read the rows that this overwrites
      const Vector vector = copied[i % kRead];
      store(to + Vectors::offset(i, 0, lane), vector.x, vector.y);
      store(to + Vectors::offset(i, 1, lane), vector.z, vector.w);
      if (i + kRead < Vectors::kCount) {
        copied[i % kRead] = read(i + kRead);
      }
    }
  }

  __device__ __forceinline__ void hand_over(const CompactRingPosition& position) const {
    fence_shared_for_tma();  // written by threads, read by wgmma
    OSTINATO_DELAY(prefill_dequantize, (std::is_same_v<What, Keys>) && warp_ == 1);
    __syncwarp();
    if (opaque(threadIdx.x) % 32 == 0) {  // found anew: registers are few
      arrive(&barriers_of<What>(shared_).full[position.slot]);
    }
  }

  // Writes eight elements as operands.
  __device__ __forceinline__ static void store(uint8_t* to, uint32_t low, uint32_t high) {
    const Pairs first = dequantize<CacheType, Type>(low);
    const Pairs second = dequantize<CacheType, Type>(high);
    *reinterpret_cast<uint4*>(to) =
        make_uint4(first.first, first.second, second.first, second.second);
  }

  SharedStorage& shared_;
  const Arguments& args_;
  const WorkTile& work_tile_;
  const int warp_;
};

}  // namespace ostinato::prefill
