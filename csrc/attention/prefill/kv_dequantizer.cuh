// The KV dequantiser: producer warps that read 8-bit keys or values from global memory, convert
// them exactly to 16-bit operands, and write these as TMA would.
//
// A lane holds vectors of the next tile in registers: each is loaded when its register becomes
// free, about a tile before its use, which hides the latency of memory. Rows that no query of the
// work tile sees are not read and become 0, so that consumers need not clear them.
#pragma once

#include "attention/common/dequant.cuh"
#include "common/ring.cuh"
#include "common/tma.cuh"
#include "kv_vectors.cuh"
#include "token_scales.cuh"

namespace ostinato::prefill {

// Reads 16 bytes past the L1: other SMs may read them again, this one does not.
__device__ __forceinline__ uint4 load_vector(const void* from) {
  uint4 words;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from));
  return words;
}

// Of `What`, keys or values, of one work tile. Its functions are called by a warp.
template <class What>
class KvDequantizer {
 public:
  // `warp`: among those of the same half of the work tile's memory (kKvWarps).
  __device__ KvDequantizer(SharedStorage& shared, const Arguments& args, const WorkTile& work_tile,
                           int warp)
      : shared_(shared), args_(args), work_tile_(work_tile), warp_(warp) {}

  // Fills the ring with the work tile's tiles, and the ring of scales if tokens have their own.
  // Calls `then` before tile `due`, or after the last one.
  template <class Then>
  __device__ __forceinline__ void run(CompactRingPosition& position, CompactRingPosition& scales,
                                      int due, Then then) {
    // The number of tiles is read anew each time: registers are few.
    Vector held[Vectors::kHeld];
    Rows rows = find_rows(0);
    load_first(rows, held);
    RowScales row_scales = load_scales(rows);
    Rows next = find_rows(1);
#pragma unroll 1
    for (int n = 0; n < work_tile_.tiles(); ++n) {
      if (n == due) {
        then();
        load_first(find_rows(n), held);  // again, since registers have no room for both
      }
      write_row_scales(scales, row_scales);
      fill(position, rows, row_scales, held);
      if constexpr (kSource == Source::Packed) {
        rows = find_rows(n + 1);
        load_first(rows, held);
      } else {
        rows = next;
        load_first(rows, held);
        next = find_rows(n + 2);  // page ids are read a tile ahead
      }
      row_scales = load_scales(rows);
    }
    if (work_tile_.tiles() <= due) {
      then();
    }
  }

 private:
  using Vectors = KvVectors<What>;
  using Vector = uint4;

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
  __device__ __forceinline__ void write_row_scales(CompactRingPosition& position,
                                                   const RowScales& row_scales) const {
    if constexpr (kTokenScales && std::is_same_v<What, Keys>) {
      wait(scales_empty_of(shared_, position.slot), position.parity ^ 1);
#pragma unroll
      for (int set = 0; set < kRowSets; ++set) {
        write_scales(tile_scales_of(shared_, position.slot), args_,
                     warp_ * kWarpRows + set * 32 + threadIdx.x % 32, row_scales.key[set],
                     row_scales.value[set]);
      }
      OSTINATO_DELAY(prefill_scales, warp_ == 1);
      position.advance(kScaleStages);
    }
  }

  // Values with a scale that is no number become NaN, in the stage that begins at `to`.
  __device__ __forceinline__ static void clear_non_numbers(uint8_t* to,
                                                           const RowScales& row_scales) {
    if constexpr (kTokenScales && std::is_same_v<What, Values>) {
      constexpr uint32_t kNaNs = 0x7fff7fff;
      const int lane = threadIdx.x % 32;
#pragma unroll
      for (int set = 0; set < kRowSets; ++set) {
        uint32_t rows = __ballot_sync(0xffffffff, !TokenScale::is_number(row_scales.value[set]));
        for (; rows != 0; rows &= rows - 1) {
          if (lane < kValueDim / 8) {
            const int row = set * 32 + __ffs(static_cast<int>(rows)) - 1;
            *reinterpret_cast<uint4*>(to + lane / 8 * kKeyStrip + row * kStripBytes +
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
      const CacheType* const from =
          head + rows.page[set] * slots.page_stride + rows.slot[set] * slots.stride;
      addresses.of[set] = rows.slot[set] < 0 ? 0 : reinterpret_cast<uint64_t>(from);
    }
    return addresses;
  }

  // Loads this lane's vector i of a tile.
  __device__ __forceinline__ static Vector load(const Addresses& addresses, int i, int lane) {
    const int first_row = i * Vectors::kRowsAtOnce;
    const uint64_t from =
        __shfl_sync(0xffffffff, addresses.of[first_row / 32], first_row % 32 + Vectors::row(lane));
    Vector words = make_uint4(0, 0, 0, 0);
    if (from != 0) {
      words = load_vector(reinterpret_cast<const CacheType*>(from) + Vectors::vector(lane) * 16);
    }
    return words;
  }

  // Loads the first vectors of a tile.
  __device__ __forceinline__ void load_first(const Rows& rows,
                                             Vector (&held)[Vectors::kHeld]) const {
    const Addresses addresses = addresses_of(rows);
    // Registers have no room for what follows from the lane where conversion to fp16 leaves more
    // vectors in flight; with bf16 they have none for finding it anew.
    const int known = static_cast<int>(threadIdx.x) % 32;
    const int lane = kTokenScales || std::is_same_v<Type, __half> ? opaque(known) : known;
#pragma unroll
    for (int i = 0; i < Vectors::kHeld; ++i) {
      held[i] = load(addresses, i, lane);
    }
  }

  // Fills a stage of the ring with a tile, whose first vectors are held.
  __device__ __forceinline__ void fill(CompactRingPosition& position, const Rows& rows,
                                       const RowScales& row_scales,
                                       Vector (&held)[Vectors::kHeld]) const {
    RingBarriers<What>& barriers = barriers_of<What>(shared_);
    const Addresses addresses = addresses_of(rows);
    wait(&barriers.empty[position.slot], position.parity ^ 1);
    uint8_t* const to =
        ring_of<What>(shared_).tiles[position.slot] + warp_ * kWarpRows * kStripBytes;
    const int lane = opaque(threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < Vectors::kCount; ++i) {
      Vector& vector = held[i % Vectors::kHeld];
      store(to + Vectors::offset(i, 0, lane), vector.x, vector.y);
      store(to + Vectors::offset(i, 1, lane), vector.z, vector.w);
      if (i + Vectors::kHeld < Vectors::kCount) {
        vector = load(addresses, i + Vectors::kHeld, lane);
      }
      __syncwarp();  // more at a time would need registers
    }
    clear_non_numbers(to, row_scales);
    fence_shared_for_tma();  // written by threads, read by wgmma
    OSTINATO_DELAY(prefill_dequantize, (std::is_same_v<What, Keys>) && warp_ == 1);
    __syncwarp();
    if (lane == 0) {
      arrive(&barriers.full[position.slot]);
    }
    position.advance(kStagesOf<What>);
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
