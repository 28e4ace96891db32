// Where keys and values lie in global memory, for what reads them without the copy engine.
#pragma once

#include "work_tile.cuh"

namespace ostinato::prefill {

// Where a key and its value lie.
struct Place {
  int64_t page, slot;

  __device__ __forceinline__ Place(const Arguments& args, const Item& item, int key) {
    if constexpr (kSource == Source::Packed) {
      page = 0;
      slot = item.first_key + key;
    } else {
      const Params& p = args.params;
      const int index = args.page_of(key);
      page = p.page_table[item.first_key * p.page_table_stride + index];
      slot = key - index * p.page_size;
    }
  }

  __device__ __forceinline__ const Type* key(const Params& p, const Item& item) const {
    return static_cast<const Type*>(p.k.data) + page * p.k.page_stride + slot * p.k.stride +
           item.kv_head * p.k.head_stride;
  }
  __device__ __forceinline__ const Type* value(const Params& p, const Item& item) const {
    return static_cast<const Type*>(p.v.data) + page * p.v.page_stride + slot * p.v.stride +
           item.kv_head * p.v.head_stride;
  }
};

}  // namespace ostinato::prefill
