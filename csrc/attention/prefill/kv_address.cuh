// Address of a key and its value in global memory, for code that reads them without TMA.
#pragma once

#include "work_tile.cuh"

namespace ostinato::prefill {

// Page and slot of a key and its value.
struct KvAddress {
  int64_t page, slot;

  __device__ __forceinline__ KvAddress(const Arguments& args, const WorkTile& work_tile, int key) {
    if constexpr (kSource == Source::Packed) {
      page = 0;
      slot = work_tile.first_key + key;
    } else {
      const Params& p = args.params;
      const int index = args.page_of(key);
      page = p.page_table[work_tile.first_key * p.page_table_stride + index];
      slot = key - index * p.page_size;
    }
  }

  __device__ __forceinline__ const Type* key(const Params& p, const WorkTile& work_tile) const {
    return static_cast<const Type*>(p.k.data) + page * p.k.page_stride + slot * p.k.stride +
           work_tile.kv_head * p.k.head_stride;
  }
  __device__ __forceinline__ const Type* value(const Params& p, const WorkTile& work_tile) const {
    return static_cast<const Type*>(p.v.data) + page * p.v.page_stride + slot * p.v.stride +
           work_tile.kv_head * p.v.head_stride;
  }
};

}  // namespace ostinato::prefill
