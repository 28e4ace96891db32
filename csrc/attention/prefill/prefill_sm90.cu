// Prefill attention on Hopper (sm_90a): many queries per sequence against packed keys and values or
// a paged KV cache, as in chunked prefill and mixed batches.
//
// Persistent CTAs with one producer warpgroup, which copies, and two or three consumer warpgroups,
// which use wgmma with 64 rows each; softmax weights stay in registers. Everything that depends on
// lengths is computed on the device (tile_scheduler.cuh); the grid follows from capacities. No
// result depends on the CTA that computes it or on other sequences. Mainloops: consumer.cuh, and
// consumer_fp8.cuh for 8 bits. Mask: mask.cuh. Epilogue: epilogue.cuh. Copies: producer.cuh and
// qkv_loader.cuh.
//
// With params.pdl, the preceding kernel may still be writing any of the inputs. The workspace of
// ostinato_workspace_bytes() bytes must be zero before the first launch and after an aborted
// launch; it serves one stream at a time.
#include <cuda_runtime.h>

#include <algorithm>

#include "attention/common/tma_strides.cuh"
#include "common/check.h"
#include "common/launch.cuh"
#include "producer.cuh"
#if OSTINATO_BYTES
#include "consumer_fp8.cuh"
#else
#include "consumer.cuh"
#endif

namespace ostinato::prefill {
namespace {

// Each warp's first lane initialises some of the barriers.
__device__ __forceinline__ void init_barriers(SharedStorage& shared, const Arguments& args) {
  if (threadIdx.x % 32 != 0) {
    return;
  }
  const int warp = threadIdx.x / 32;
  if (warp < kKeyStages) {
    init_barrier(&shared.keys_barriers.full[warp], full_arrivals(args));
    init_barrier(&shared.keys_barriers.empty[warp], kConsumers);
  }
  if (warp < kValueStages) {
    init_barrier(&shared.values_barriers.full[warp], kFp8 ? kTransposeWarps : full_arrivals(args));
    init_barrier(&shared.values_barriers.empty[warp], kConsumers);
    if constexpr (kFp8) {
      auto& copied = barriers_of<CopiedValues>(shared);
      if (warp < kStages) {
        init_barrier(&copied.full[warp], full_arrivals(args));
        init_barrier(&copied.empty[warp], kTransposeWarps);
      }
    }
  }
  if (warp >= kValueStages && warp < kValueStages + kConsumers) {
    for (int buffer = 0; buffer < kQueryBuffers; ++buffer) {
      init_barrier(&shared.queries_full[buffer][warp - kValueStages], 1);
      init_barrier(&shared.queries_empty[buffer][warp - kValueStages], 1);
    }
  } else if (warp == kValueStages + kConsumers) {
    init_barrier(&shared.work_tile_wanted, 1);
    for (int i = 0; i < kWorkTiles; ++i) {
      init_barrier(&shared.work_tile_full[i], 1);
      init_barrier(&shared.work_tile_empty[i],
                   kConsumers * 4 + kProducerWarps - 1 + kTransposeWarps);
    }
  }
  fence_barrier_init();
}
static_assert(kValueStages + kConsumers < kThreads / 32, "each warp initialises some barriers");

__global__ void __launch_bounds__(kThreads, 1)
    prefill(const __grid_constant__ Arguments args, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) uint8_t storage[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(storage);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(maps.queries);
    prefetch_tensor_map(maps.out);
    if (kSource != Source::Slots) {
      prefetch_tensor_map(maps.keys);
      prefetch_tensor_map(maps.values);
    }
  }
  init_barriers(shared, args);
  wait_for_predecessor();
  read_seqlens(shared, args);  // ends with a barrier of the CTA
  const int warp = warp_index();
  if (warp >= kConsumerThreads / 32) {
    give_up_registers<Registers::kSplit.producer>();
    if (warp < kConsumerThreads / 32 + kProducerWarps) {
      Producer(shared, args, maps).run();
      let_successor_start();
    } else {
      assist(shared, args);
    }
  } else {
    take_registers<Registers::kSplit.consumer>();
    Consumer(shared, args, maps.out).run();
  }
}

bool is_aligned(const void* pointer, int bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

constexpr int kVectorBytes = 16;
constexpr int kFarthest = 1 << 29;  // of a window: a larger limit masks nothing

template <class P>
bool has_scales(const P& p) {
  if constexpr (kFp8) {
    return p.q_scale != nullptr && p.k_scale != nullptr && p.v_scale != nullptr;
  }
  return true;
}

bool is_supported(const Params& p) {
  if (p.batch < 1 || p.batch > kMaxBatch || p.heads_kv < 1 || p.heads_q < p.heads_kv ||
      p.heads_q % p.heads_kv != 0 || p.max_seqlen_q < 1 || p.max_seqlen_q >= kFarthest ||
      p.tokens_q < 1) {
    return false;
  }
  const int group = p.heads_q / p.heads_kv;
  if (p.pack < 0 || p.pack > kRows || (p.pack > 0 && group % p.pack != 0)) {
    return false;
  }
  if (kSource == Source::Packed) {
    if (p.cu_seqlens_k == nullptr || p.max_seqlen_k < 0 || p.max_seqlen_k >= kFarthest ||
        p.tokens_k < 0) {
      return false;
    }
  } else if (p.page_table == nullptr || p.seq_lens == nullptr || p.pages < 1 || p.page_size < 1 ||
             p.max_pages < 1 || int64_t{p.max_pages} * p.page_size >= kFarthest ||
             (kSource == Source::Pages && p.page_size % 16 != 0)) {
    return false;
  }
  if (!has_scales(p)) {
    return false;
  }
  if (kSideBySide && p.heads_kv > 1 && (p.k.head_stride | p.v.head_stride) % kStripDim != 0) {
    return false;
  }
  const int64_t strides = p.q.stride | p.q.head_stride | p.k.page_stride | p.k.stride |
                          p.k.head_stride | p.v.page_stride | p.v.stride | p.v.head_stride;
  const int64_t out_strides = p.out.stride | p.out.head_stride;
  return strides * kElement % kVectorBytes == 0 &&
         out_strides * int64_t{sizeof(OutType)} % kVectorBytes == 0 && is_aligned(p.q.data, 16) &&
         is_aligned(p.k.data, 16) && is_aligned(p.v.data, 16) && is_aligned(p.out.data, 16) &&
         is_aligned(p.workspace, kPromotesToGmem ? 16 : 8) &&
         (!kPromotesToGmem || p.workspace != nullptr);
}

template <class T>
constexpr CUtensorMapDataType kMapType =
    sizeof(T) == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16;

template <class T>
cudaError_t encode_rows(CUtensorMap* map, const Heads& rows, int dim, const Arguments& args) {
  const Params& p = args.params;
  const TensorMapShape<3> shape = {
      {static_cast<uint64_t>(dim), static_cast<uint64_t>(p.heads_q),
       static_cast<uint64_t>(p.tokens_q)},
      {0, map_step<T>(rows.head_stride, p.heads_q), map_step<T>(rows.stride, p.tokens_q)},
      {kStripBytes / sizeof(T), static_cast<uint32_t>(args.pack),
       static_cast<uint32_t>(args.warpgroup_tokens)}};
  return encode_tensor_map(map, rows.data, shape, CU_TENSOR_MAP_SWIZZLE_128B, kMapType<T>);
}

// Tensor map of strips of groups of tokens (kSideBySide). Heads are a whole number of strips apart;
// pages may be at any distance.
template <int kWidth>
cudaError_t encode_groups(CUtensorMap* map, const Slots& keys, int head_strips,
                          const Arguments& args) {
  constexpr int kCount = kWidth / kStripDim;
  const Params& p = args.params;
  const TensorMapShape<5> shape = {
      {kStripDim, kGroup, static_cast<uint64_t>((p.heads_kv - 1) * head_strips + kCount),
       static_cast<uint64_t>(p.page_size / kGroup), static_cast<uint64_t>(p.pages)},
      {0, map_step<Type>(keys.stride, kGroup), kStripBytes,
       map_step<Type>(kGroup * keys.stride, kGroup), map_step<Type>(keys.page_stride, p.pages)},
      {kStripDim, kGroup, kCount, static_cast<uint32_t>(args.box_tokens / kGroup), 1}};
  return encode_tensor_map(map, keys.data, shape, CU_TENSOR_MAP_SWIZZLE_128B, kMapType<Type>);
}

template <int kWidth>
cudaError_t encode_keys(CUtensorMap* map, const Slots& keys, const Arguments& args) {
  constexpr bool kWhole = kWidth % kStripDim == 0;
  constexpr int kCount = kWhole ? kWidth / kStripDim : 1;
  const Params& p = args.params;
  const bool packed = kSource == Source::Packed;
  const int64_t pages = packed ? 1 : p.pages, slots = packed ? p.tokens_k : p.page_size;
  const TensorMapShape<5> shape = {
      {static_cast<uint64_t>(kWhole ? kStripDim : kWidth), static_cast<uint64_t>(slots), kCount,
       static_cast<uint64_t>(p.heads_kv), static_cast<uint64_t>(pages)},
      {0, map_step<Type>(keys.stride, slots), kStripBytes,
       map_step<Type>(keys.head_stride, p.heads_kv), map_step<Type>(keys.page_stride, pages)},
      {kStripDim, static_cast<uint32_t>(packed ? kKeys : args.box_tokens),
       static_cast<uint32_t>(packed || args.box_tokens == kKeys ? kCount : 1), 1, 1}};
  return encode_tensor_map(map, keys.data, shape, CU_TENSOR_MAP_SWIZZLE_128B, kMapType<Type>);
}

int greatest_common_divisor(int a, int b) { return b == 0 ? a : greatest_common_divisor(b, a % b); }

// How many heads of a group share a tile. One if sequences have enough queries to fill tiles; else
// as many as fit, also if only the average is small, as in batches that mostly decode.
int choose_pack(int group, const Params& p) {
  const int average = p.tokens_q / p.batch;
  if (p.max_seqlen_q >= kConsumers * kRows && average >= kRows) {
    return 1;
  }
  int pack = std::min(group, kRows);
  while (group % pack != 0) {
    --pack;
  }
  return pack;
}

Arguments make_arguments(const Params& params) {
  Arguments args = {};
  args.params = params;
  Params& p = args.params;
  p.left = std::min(p.left, kFarthest);
  p.right = std::min(p.right, kFarthest);
  args.logit_scale = p.softcap > 0 ? p.scale / p.softcap : p.scale * kLog2E;
  args.direct = p.softcap <= 0 && p.scale > 0 ? 1 : 0;
  args.factor = args.direct != 0 ? args.logit_scale : 1.0f;
  args.group = p.heads_q / p.heads_kv;
  args.pack = p.pack > 0 ? p.pack : choose_pack(args.group, p);
  args.reciprocal = ((1 << 16) + args.pack - 1) / args.pack;
  args.warpgroup_tokens = kRows / args.pack;
  args.tile_tokens = kConsumers * args.warpgroup_tokens;
  // Otherwise the first queries' alignment depends on the number of queries, and with longer key
  // tiles more tiles would be partly masked.
  args.from_first = p.pack > 0 || kRows % kKeys != 0 ? 1 : 0;
  args.packs = p.heads_q / args.pack;
  args.box_tokens = kSource == Source::Pages ? greatest_common_divisor(p.page_size, kKeys) : 0;
  if (kSource == Source::Pages) {
    args.boxes = ceil_div(kKeys / args.box_tokens, kPageWarps);
    args.tiles_ahead = 32 / args.boxes;
    args.key_head = static_cast<int>(p.k.head_stride / kStripDim);
    args.value_head = static_cast<int>(p.v.head_stride / kStripDim);
  }
  if (kSource != Source::Packed) {
    while (1 << args.page_shift < p.page_size) {
      ++args.page_shift;
    }
    args.page_reciprocal = static_cast<uint32_t>(
        ((uint64_t{1} << (29 + args.page_shift)) + p.page_size - 1) / p.page_size);
  }
  return args;
}

// Upper bound of the number of work tiles, whatever the lengths.
int64_t work_tile_capacity(const Arguments& args) {
  const Params& p = args.params;
  const int64_t each = ceil_div(p.max_seqlen_q, args.tile_tokens);
  const int64_t all = p.tokens_q / args.tile_tokens + p.batch;
  return std::min(each * p.batch, all) * args.packs;
}

cudaError_t launch_prefill(const Params& params, cudaStream_t stream) {
  if (!is_supported(params)) {
    return cudaErrorInvalidValue;
  }
  const Arguments args = make_arguments(params);
  const Params& p = args.params;
  Maps maps = {};
  OSTINATO_RETURN_IF_ERROR(encode_rows<Type>(&maps.queries, p.q, kDim, args));
  OSTINATO_RETURN_IF_ERROR(encode_rows<OutType>(&maps.out, p.out, kValueDim, args));
  if (kSource == Source::Packed && p.tokens_k == 0) {
    maps.keys = maps.values = maps.queries;  // prefetched, but never used
  } else if (kSideBySide) {
    OSTINATO_RETURN_IF_ERROR(encode_groups<kDim>(&maps.keys, p.k, args.key_head, args));
    OSTINATO_RETURN_IF_ERROR(encode_groups<kValueDim>(&maps.values, p.v, args.value_head, args));
  } else if (kSource != Source::Slots) {
    OSTINATO_RETURN_IF_ERROR(encode_keys<kDim>(&maps.keys, p.k, args));
    OSTINATO_RETURN_IF_ERROR(encode_keys<kValueDim>(&maps.values, p.v, args));
  }
  int sms = 0;
  OSTINATO_RETURN_IF_ERROR(count_sms(&sms));
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(std::min<int64_t>(sms, work_tile_capacity(args))));
  config.block = dim3(kThreads);
  config.dynamic_smem = sizeof(SharedStorage);
  config.pdl = p.pdl != 0;
  return launch(prefill, config, stream, args, maps);
}

}  // namespace
}  // namespace ostinato::prefill

OSTINATO_EXPORT int ostinato_prepare() {
  return ostinato::allow_dynamic_smem(ostinato::prefill::prefill,
                                      sizeof(ostinato::prefill::SharedStorage));
}

// Workspace of any launch.
OSTINATO_WORKSPACE(ostinato::PrefillCapacities) {
  using namespace ostinato;
  int sms = 0;
  if (prefill::kPromotesToGmem) {
    OSTINATO_RETURN_IF_ERROR(count_sms(&sms));
  }
  *bytes = prefill::kCounterBytes + int64_t{sms} * prefill::kPromotionBytes;
  return cudaSuccess;
}

OSTINATO_LAUNCH(ostinato::PrefillParams) {
  return ostinato::prefill::launch_prefill(*params, static_cast<cudaStream_t>(stream));
}
