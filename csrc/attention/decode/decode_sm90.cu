// Decode attention: up to 64 query rows (queries times query heads of a KV head) per sequence
// against a paged KV cache. Serves decode and the verification of speculated tokens, at memory
// speed.
//
// A grid of persistent CTAs, or of clusters ("CTA" stands for both). Every CTA reads all sequence
// lengths and computes its own splits (static_scheduler.cuh), so neither the host nor another
// kernel plans the launch, and the grid does not depend on the lengths. Each team of warps in a CTA
// has its own ring of KV blocks, refills the stages that it has consumed, and exchanges data with
// the other teams only at the end of a split.
//
// With params.pdl, the preceding kernel may still be writing any of the inputs (append_kv writes
// the cache). The workspace must be zero before the first launch and after an aborted launch; it
// serves one stream at a time.
#include <cuda_runtime.h>

#include <type_traits>

#include "attention/common/tma_strides.cuh"
#include "combine.cuh"
#include "common/check.h"
#include "common/launch.cuh"
#include "common/ring.cuh"
#include "kv_loader.cuh"
#include "launch_grid.cuh"
#include "serial_chain.cuh"
#include "throttle.cuh"

namespace ostinato::decode {
namespace {

// Whether the data for the epilogue and the next split is prefetched inside the mainloop, between
// the second and the third tile. There the latency stalls one warp; between two splits it would
// stall the copies of the whole CTA.
inline constexpr bool kLooksAheadWithin = kMayScheduleDynamically && Mainloop::kFetchesAhead;

// Runs the mainloop over this warp's tiles of a split. Calls `look_ahead` exactly once.
template <bool kSeveral, bool kThrottled, class LookAhead>
__device__ __forceinline__ void run_mainloop(SharedStorage& shared, Mainloop& mainloop,
                                             KvLoader& kv_loader, DynamicScheduler& scheduler,
                                             Throttle& throttle, RingPosition& position,
                                             const Mask& mask, const TileRange& range,
                                             bool token_scales, const LookAhead& look_ahead) {
  const int warp = warp_index(), team = team_of(warp);
  const int first_block = team * kTeamWarps;
  const int looks_ahead_at = max(range.begin, min(range.begin + 2, range.end - 1));
  for (int tile = range.begin; kLooksAheadWithin || tile < range.end; ++tile) {
    if constexpr (kLooksAheadWithin) {
      if (tile == looks_ahead_at) {
        look_ahead();
      }
      if (tile >= range.end) {
        return;
      }
    }
    const int stage = position.slot;
    if constexpr (kChainPerCta) {
      run_serial_chain<kSeveral>(shared, mainloop, mask, position, tile, token_scales);
    } else {
      wait(&shared.keys_arrived.full[stage][team], position.parity);
      OSTINATO_DELAY(decode_keys_load, warp == 1);
#pragma unroll 1
      for (int block = first_block; block < first_block + kTeamWarps; ++block) {
        const int token = tile * kTileTokens + block_offset(block);
        if (kTeamWarps > 1 && !mask.reaches(token)) {
          continue;
        }
        mainloop.multiply_keys(shared.keys.blocks[stage][block]);
        const TokenScales scales =
            token_scales ? TokenScales(shared.scales[stage][block]) : TokenScales();
        const bool hides_some = mask.hides_some(token);
        mainloop.weigh(mask, token, hides_some, scales);
        wait(&shared.values_arrived.full[stage][team], position.parity);
        OSTINATO_DELAY(decode_values_load, warp == 2);
        mainloop.multiply_values<kSeveral>(shared.values.blocks[stage][block], mask, token,
                                           hides_some);
      }
    }
    OSTINATO_DELAY(decode_keys_release, threadIdx.x % 32 == 7);
    OSTINATO_DELAY(decode_values_release, warp == 3);
    sync_team(warp);
    if constexpr (kThrottled) {
      throttle.pass();
    }
    // not in the first tile: the reply to the request may still be in flight
    if (tile > range.begin) {
      scheduler.publish();
    }
    kv_loader.load(stage);
    position.advance(kStages);
  }
}

__device__ __forceinline__ void locate_queries(Mainloop& mainloop, const Arguments& params,
                                               const Seqlens& seqlens, const Splits::Split& split) {
  mainloop.queries.locate(params, seqlens.first_row(split.sequence),
                          seqlens.queries(split.sequence), split.head);
}

__device__ __forceinline__ void prefetch_scale(const Slots& scale, uint32_t head) {
  if (scale.data != nullptr) {
    prefetch_line(static_cast<const float*>(scale.data) + head * scale.head_stride);
  }
}

// Prefetches what every CTA reads first into L2: the lengths, the page table line by line, and the
// scales of keys and values.
// Before the preceding kernel ends this is only a hint: tables that it may write are read again
// later.
__device__ __forceinline__ void prefetch_tables(const Arguments& params) {
  constexpr int kLineEntries = 128 / sizeof(int32_t);
  const int line = params.by.batch.divide(blockIdx.x);
  const int sequence = blockIdx.x - line * params.batch;
  if (line * kLineEntries < params.max_pages) {
    prefetch_line(params.page_table + sequence * params.page_table_stride + line * kLineEntries);
  }
  if (blockIdx.x * kLineEntries < params.batch) {
    prefetch_line(params.seq_lens + blockIdx.x * kLineEntries);
  }
  if (kQuantized && blockIdx.x < params.heads_kv && !has_token_scales(params)) {
    prefetch_scale(params.k_scale, blockIdx.x);
    prefetch_scale(params.v_scale, blockIdx.x);
  }
}

// kSeveral: sequences may have several queries. A separate instantiation: the extra code slows
// single-query decode even when it is not taken.
template <bool kSeveral>
__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    paged_decode(const __grid_constant__ Arguments params, const __grid_constant__ CacheMaps maps) {
  extern __shared__ __align__(1024) uint8_t storage[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(storage);
  if (threadIdx.x == kThreads - 1) {
    prefetch_tables(params);
    if (kCopyPages) {
      prefetch_tensor_map(maps.keys);
      prefetch_tensor_map(maps.values);
    }
  }
  init_team(shared, params);
  ClusterReduce cluster_reduce(shared);

  // Sequence lengths and page ids are read speculatively: before the preceding kernel has ended,
  // which may still be writing them. Any value is safe to use (Arguments::speculative), and after
  // the preceding kernel has ended they are read again, overlapped with the first copies. If a
  // value has changed, the CTA starts over.
  bool speculative = kMaySpeculate && params.speculative != 0;
  if (!speculative) {
    wait_for_predecessor();
  }
  Seqlens seqlens(shared, params);
  if (by_l2_partition(params) && threadIdx.x == kThreads - 1) {
    seqlens.take_number(&params.scheduler_counters[kNumberCounter]);
  }
  DynamicScheduler scheduler(shared, params, seqlens);
  KvLoader kv_loader(shared, params, maps, seqlens, scheduler);
  Mainloop mainloop(params);
  Splits::Shares shares;
  CtaSplits cta_splits;
  Splits::Split split;
  bool more;
#pragma unroll 1
  while (true) {
    const CtaPlan plan = read_seqlens(shared, seqlens, params, speculative);
    shares = plan.shares;
    scheduler.begin(plan.dynamic, Splits::room(shares));
    cta_splits = CtaSplits(scheduler, params, seqlens, shares);
    kv_loader.begin(cta_splits, speculative);
    more = cta_splits.next(scheduler, seqlens, &split);
    if (more) {
      locate_queries(mainloop, params, seqlens, split);
    }
    Seqlens::Raw raw_seqlens = {};
    KvLoader::Ids ids = {};
    if (speculative) {
      // With few CTAs, prefetching would only slow the last CTAs of the preceding kernel.
      if (Splits::crowded(params, seqlens.start(params.batch) * params.line_heads, shares)) {
        kv_loader.prefetch();
      }
      wait_for_predecessor();
      raw_seqlens = seqlens.read(params, false);
      ids = kv_loader.read_again();
    }
    if (more) {
      kv_loader.start();
      // The first block needs the queries. Behind the copies of all stages, their loads would wait.
      mainloop.queries.fetch();
      kv_loader.fill();
    }
    let_successor_start();
    if (!speculative || !__syncthreads_or(ids.differ() || seqlens.differ(params, raw_seqlens))) {
      break;
    }
    kv_loader.drop();
    speculative = false;
  }
  Throttle throttle(params, seqlens, shares);
  if (!more) {
    throttle.end();
    write_empty(params, seqlens);
    return;
  }

  RingPosition position;
  Partials partials;
  // Instantiated twice: the code of the throttle, even if it is skipped, slows short splits.
  const auto process_splits = [&](auto throttled) {
    for (bool first = true; more; first = false) {
      cluster_reduce.open();
      scheduler.request();
      const Mask mask(params, seqlens, split.sequence);
      const Visible visible = seqlens.visible(split.sequence);
      const int first_tile = split.begin, last_tile = split.end;
      const float key_scale = kv_scale(params, params.k_scale, split.head);
      Rows rows;
      float4* partial;
      const auto find_output = [&] {
        rows = Rows(params, seqlens, split.sequence, split.head);
        partial = partials.target(params, seqlens, shares, split);
      };
      const auto find_next = [&] {
        more = cta_splits.next(scheduler, seqlens, &split);
        if (more) {
          locate_queries(mainloop, params, seqlens, split);
        }
      };
      const auto fetch_next = [&] {
        if (more) {
          mainloop.queries.fetch();
        }
      };
      PairRows targets;
      const auto look_ahead = [&] {
        find_output();
        targets = PairRows(params, rows, threadIdx.x % 4);
        find_next();
        fetch_next();
        if (!more) {
          scheduler.leave();
        }
      };
      // Prefetch for the epilogue and the next split before the mainloop if registers allow it.
      constexpr bool kLooksAheadFirst = Mainloop::kFetchesAhead && !kLooksAheadWithin;
      if constexpr (kLooksAheadFirst) {
        find_output();
        find_next();
      }
      mainloop.begin(key_scale);
      if constexpr (kLooksAheadFirst) {
        fetch_next();
      }
      const TileRange range(visible, first_tile, last_tile, team_of(warp_index()));
      if constexpr (decltype(throttled)::value) {
        // Tiles in which this warp has no token count, too, or a warp with a token in each of them
        // would seem to be ahead.
        for (int tile = last_tile - first_tile; tile > range.end - range.begin; --tile) {
          throttle.pass();
        }
      }
      run_mainloop<kSeveral, decltype(throttled)::value>(shared, mainloop, kv_loader, scheduler,
                                                         throttle, position, mask, range,
                                                         has_token_scales(params), look_ahead);
      if constexpr (!Mainloop::kFetchesAhead) {
        find_output();
      }
      store_split(shared, cluster_reduce, params, mainloop, rows, partial, first,
                  kLooksAheadWithin ? &targets : nullptr);
      cluster_reduce.receive(params, rows, partial);
      if constexpr (!Mainloop::kFetchesAhead) {
        find_next();
        fetch_next();
        if (!more) {
          scheduler.leave();
        }
      }
    }
  };
  if (kMayThrottle && throttle.used()) {
    process_splits(std::bool_constant<kMayThrottle>());
  } else {
    process_splits(std::false_type());
  }
  scheduler.end();
  throttle.end();
  partials.combine(params, seqlens);
  write_empty(params, seqlens);
}

cudaError_t encode_map(CUtensorMap* map, const Slots& cache, const PagedDecodeParams& params) {
  using Element = std::conditional_t<kQuantized, uint8_t, Type>;
  constexpr uint32_t kStripsCopied = kWholeStrips ? kStrips : 1;
  const TensorMapShape<5> shape = {
      {static_cast<uint64_t>(kWholeStrips ? kStripBytes : kRowBytes),
       static_cast<uint64_t>(params.page_size), kStripsCopied,
       static_cast<uint64_t>(params.heads_kv), static_cast<uint64_t>(params.pages)},
      {1, map_step<Element>(cache.stride, params.page_size), kStripBytes,
       map_step<Element>(cache.head_stride, params.heads_kv),
       map_step<Element>(cache.page_stride, params.pages)},
      {kStripBytes, kBlockTokens, kStripsCopied, 1, 1}};
  // L2 promotion beyond the 128-byte rows of a block would fetch data that is not needed yet.
  return encode_tensor_map(map, cache.data, shape, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

bool is_aligned(const void* pointer, int bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

bool is_supported(const PagedDecodeParams& p) {
  if (p.batch < 1 || p.batch > kMaxBatch || p.heads_kv < 1 || p.heads_q < p.heads_kv ||
      p.heads_q % p.heads_kv != 0 || p.pages < 1 || p.page_size < 1 || p.max_pages < 1 ||
      p.max_seqlen_q < 1 || p.max_seqlen_q * (p.heads_q / p.heads_kv) > kColumns ||
      (kCopyPages && p.page_size % kBlockTokens)) {
    return false;
  }
  // Positions on a line are divided as numbers below 2^30, tiles as numbers below 2^21.
  const int64_t capacity = static_cast<int64_t>(p.max_pages) * p.page_size;
  const int64_t targets = int64_t{2} * p.batch * p.heads_kv * (capacity / kTileTokens + 2);
  constexpr int kVector = 16 / kElementBytes;
  const int64_t strides = p.k_cache.page_stride | p.k_cache.stride | p.k_cache.head_stride |
                          p.v_cache.page_stride | p.v_cache.stride | p.v_cache.head_stride;
  return capacity < (1 << 27) && targets < (1 << 30) && strides % kVector == 0 &&
         (p.q.stride | p.q.head_stride) % 2 == 0 && (p.out.stride | p.out.head_stride) % 4 == 0 &&
         is_aligned(p.q.data, 4) && is_aligned(p.k_cache.data, 16) &&
         is_aligned(p.v_cache.data, 16) && is_aligned(p.out.data, 8) && is_aligned(p.workspace, 16);
}

}  // namespace
}  // namespace ostinato::decode

OSTINATO_EXPORT int ostinato_prepare() {
  using namespace ostinato::decode;
  OSTINATO_RETURN_IF_ERROR(prepare(paged_decode<false>));
  return prepare(paged_decode<true>);
}

// Workspace of any launch that stays within these capacities. Without fixed splits it depends on
// the device alone.
OSTINATO_WORKSPACE(ostinato::DecodeCapacities) {
  using namespace ostinato::decode;
  const ostinato::DecodeCapacities& most = *capacities;
  if (most.rows < 1 || most.rows > kColumns || most.sequences < 1 || most.tokens < 1) {
    return cudaErrorInvalidValue;
  }
  Grid grid;
  OSTINATO_RETURN_IF_ERROR(grid_size(&grid, most.sequences, most.tokens));
  *bytes = workspace_bytes(grid.sms, grid.ctas, most.sequences, most.tokens);
  return cudaSuccess;
}

OSTINATO_LAUNCH(ostinato::PagedDecodeParams) {
  using namespace ostinato::decode;
  if (!is_supported(*params)) {
    return cudaErrorInvalidValue;
  }
  CacheMaps maps = {};
  if (kCopyPages) {
    OSTINATO_RETURN_IF_ERROR(encode_map(&maps.keys, params->k_cache, *params));
    OSTINATO_RETURN_IF_ERROR(encode_map(&maps.values, params->v_cache, *params));
  }
  Grid grid;
  OSTINATO_RETURN_IF_ERROR(grid_size(&grid, int64_t{1} * params->batch * params->heads_kv,
                                     int64_t{1} * params->max_pages * params->page_size));
  return ostinato::launch(params->max_seqlen_q > 1 ? paged_decode<true> : paged_decode<false>,
                          launch_config(grid.most, params->pdl != 0),
                          static_cast<cudaStream_t>(stream),
                          Arguments(*params, grid.sms, grid.ctas), maps);
}
