// Attention of up to 64 rows (queries times heads of a group) to a paged cache: decode, and the
// verification of speculated tokens. Cache bytes are read once, at memory speed.
//
// A fixed grid of persistent CTAs; each reads all lengths and finds its own share of the tiles
// (decode_schedule.cuh), so neither the host nor another kernel plans anything, and no size of the
// launch depends on a length. In a CTA each team of warps has rings of blocks of its own, refills
// what it has used itself, and shares nothing until the end of a piece.
//
// With params.pdl the predecessor may write any of the inputs: append_kv writes the cache. The
// workspace must be zero before its first launch, and after a launch that was aborted; it serves
// one stream at a time.
#include <cuda_runtime.h>

#include "common/check.h"
#include "common/launch.cuh"
#include "common/ring.cuh"
#include "decode_loader.cuh"
#include "decode_output.cuh"

namespace ostinato::decode {
namespace {

// This warp's part of a piece.
__device__ __forceinline__ void attend(SharedStorage& shared, Attention& attention, Loader& loader,
                                       RingPosition& position, const Sight& sight,
                                       const TileRange& range, bool token_scales) {
  const int warp = threadIdx.x / 32;
  const int first_block = team_of(warp) * kTeamWarps;
  for (int tile = range.begin; tile < range.end; ++tile) {
    const int first_token = tile * kTileTokens + first_block * kBlockTokens;
    const int stage = position.slot;
    const auto is_seen = [&](int block) {
      const int token = first_token + block * kBlockTokens;
      return kTeamWarps == 1 ||
             (token < sight.visible.end && token + kBlockTokens > sight.visible.begin);
    };
    wait(&shared.keys_arrived.full[stage][team_of(warp)], position.parity);
    OSTINATO_DELAY(decode_keys_load, warp == 1);
    if constexpr (kTeamWarps == 1) {
      attention.multiply_keys(shared.keys.blocks[stage][first_block]);
      if (token_scales) {
        attention.take_scales(shared.scales[stage][first_block]);
      }
      OSTINATO_DELAY(decode_keys_release, threadIdx.x % 32 == 7);
      sync_team(warp);
      if (loader.ready()) {
        loader.load<Keys>(stage);
      }
      attention.weigh(sight, first_token, token_scales);
      wait(&shared.values_arrived.full[stage][team_of(warp)], position.parity);
      OSTINATO_DELAY(decode_values_load, warp == 2);
      attention.multiply_values(shared.values.blocks[stage][first_block], sight.visible,
                                first_token);
    } else {
      wait(&shared.values_arrived.full[stage][team_of(warp)], position.parity);
#pragma unroll 1
      for (int block = 0; block < kTeamWarps; ++block) {
        if (is_seen(block)) {
          const int token = first_token + block * kBlockTokens;
          attention.multiply_keys(shared.keys.blocks[stage][first_block + block]);
          if (token_scales) {
            attention.take_scales(shared.scales[stage][first_block + block]);
          }
          attention.weigh(sight, token, token_scales);
          attention.multiply_values(shared.values.blocks[stage][first_block + block], sight.visible,
                                    token);
        }
      }
      OSTINATO_DELAY(decode_keys_release, warp == 3);
      sync_team(warp);
      if (loader.ready()) {
        loader.load<Keys>(stage);
      }
    }
    OSTINATO_DELAY(decode_values_release, threadIdx.x % 32 == 9);
    if constexpr (kTeamWarps == 1) {
      sync_team(warp);
    }
    if (loader.ready()) {
      loader.load<Values>(stage);
      loader.advance();
    }
    position.advance(kStages);
  }
}

__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    paged_decode(const __grid_constant__ Arguments params, const __grid_constant__ CacheMaps maps) {
  extern __shared__ __align__(1024) uint8_t storage[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(storage);
  const int warp = threadIdx.x / 32;
  const int cta = blockIdx.x;
  if (warp == 0) {
    for (int i = threadIdx.x; i < kStages * kTeams; i += 32) {
      init_barrier(&shared.keys_arrived.full[0][i], count_arrivals<Keys>(params));
      init_barrier(&shared.values_arrived.full[0][i], count_arrivals<Values>(params));
    }
    fence_barrier_init();
    if (kCopyPages && threadIdx.x == 0) {
      prefetch_tensor_map(maps.keys);
      prefetch_tensor_map(maps.values);
    }
  }
  __syncthreads();
  wait_for_predecessor();

  Shares shares;
  const Lengths lengths = read_lengths(shared, params, &shares);
  Walk<Lengths> walk(lengths, params.batch, params.heads_kv, params.by.heads_kv, shares, cta);
  Loader loader(shared, params, maps, lengths, walk);
  loader.start();
  let_successor_start();

  Attention attention(params);
  RingPosition position;
  SharedSegment segments[2];
  Piece piece;
  while (walk.next(lengths, &piece)) {
    const Sight sight(params, lengths, piece.sequence);
    const Rows rows(params, lengths, piece.sequence, piece.head);
    attention.begin(params, rows.first, sight.queries, piece.head,
                    segment_scale(params, params.k_scale, piece.head * params.k_scale_head_stride));
    attend(shared, attention, loader, position, sight,
           TileRange(sight.visible, piece, team_of(warp)), has_token_scales(params));
    float* part = nullptr;
    if (!piece.whole()) {
      const SharedSegment segment{piece.sequence, piece.head, piece.first_cta(shares.quota),
                                  piece.ctas(shares.quota)};
      const bool begins = piece.begin == 0;
      if (begins) {
        segments[1] = segment;
      } else {
        segments[0] = segment;
      }
      part = part_of(params, cta, begins);
    }
    store_piece(shared, params, attention, rows, part);
  }
  merge_segments(shared, params, lengths, segments);
  write_empty(params, lengths);
}

cudaError_t encode_map(CUtensorMap* map, const void* cache, int64_t page_stride,
                       int64_t slot_stride, int64_t head_stride, const PagedDecodeParams& params) {
  constexpr uint64_t kElement = kElementBytes;
  constexpr uint32_t kStripsCopied = kWholeStrips ? kStrips : 1;
  const TensorMapShape<5> shape = {
      {static_cast<uint64_t>(kWholeStrips ? kStripBytes : kRowBytes),
       static_cast<uint64_t>(params.page_size), kStripsCopied,
       static_cast<uint64_t>(params.heads_kv), static_cast<uint64_t>(params.pages)},
      {1, slot_stride * kElement, kStripBytes, head_stride * kElement, page_stride * kElement},
      {kStripBytes, kBlockTokens, kStripsCopied, 1, 1}};
  // Longer fetches than a block's 128-byte rows read what is not needed yet.
  return encode_tensor_map(map, cache, shape, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

bool is_aligned(const void* pointer, int bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

bool is_supported(const PagedDecodeParams& p) {
  if (p.batch < 1 || p.batch > kMaxBatch || p.heads_kv < 1 || p.heads_q < p.heads_kv ||
      p.heads_q % p.heads_kv != 0 || p.pages < 1 || p.page_size < 1 || p.max_pages < 1 ||
      p.max_seqlen_q < 1 || max_rows(p) > kColumns || (kCopyPages && p.page_size % kBlockTokens)) {
    return false;
  }
  // Places on the line of segments, and tokens, are divided as numbers below 2^30.
  const int64_t capacity = static_cast<int64_t>(p.max_pages) * p.page_size;
  const int64_t places = int64_t{2} * p.batch * p.heads_kv * (capacity / kTileTokens + 2);
  constexpr int kVector = 16 / kElementBytes;
  const int64_t strides = p.k_page_stride | p.k_slot_stride | p.k_head_stride | p.v_page_stride |
                          p.v_slot_stride | p.v_head_stride;
  return capacity < (1 << 30) && places < (1 << 30) && strides % kVector == 0 &&
         (p.q_token_stride | p.q_head_stride) % 2 == 0 &&
         (p.out_token_stride | p.out_head_stride) % 4 == 0 && is_aligned(p.q, 4) &&
         is_aligned(p.k_cache, 16) && is_aligned(p.v_cache, 16) && is_aligned(p.out, 8) &&
         is_aligned(p.workspace, 16);
}

cudaError_t grid_size(int* grid) {
  OSTINATO_RETURN_IF_ERROR(count_sms(grid));
  *grid *= kCtasPerSm;
  return cudaSuccess;
}

}  // namespace
}  // namespace ostinato::decode

OSTINATO_EXPORT int ostinato_prepare() {
  return ostinato::allow_dynamic_smem(ostinato::decode::paged_decode,
                                      sizeof(ostinato::decode::SharedStorage));
}

// What the launch needs beside its tensors; it depends on the device and on `rows` alone, the most
// queries of a sequence times the heads of a group.
OSTINATO_EXPORT int ostinato_workspace_bytes(int rows, int64_t* bytes) {
  using namespace ostinato::decode;
  int grid = 0;
  OSTINATO_RETURN_IF_ERROR(grid_size(&grid));
  *bytes = counter_bytes(grid) + 2 * grid * partial_floats(rows) * sizeof(float);
  return cudaSuccess;
}

OSTINATO_EXPORT int ostinato_launch(const ostinato::PagedDecodeParams* params, void* stream) {
  using namespace ostinato::decode;
  if (!is_supported(*params)) {
    return cudaErrorInvalidValue;
  }
  CacheMaps maps = {};
  if (kCopyPages) {
    OSTINATO_RETURN_IF_ERROR(encode_map(&maps.keys, params->k_cache, params->k_page_stride,
                                        params->k_slot_stride, params->k_head_stride, *params));
    OSTINATO_RETURN_IF_ERROR(encode_map(&maps.values, params->v_cache, params->v_page_stride,
                                        params->v_slot_stride, params->v_head_stride, *params));
  }
  int grid = 0;
  OSTINATO_RETURN_IF_ERROR(grid_size(&grid));
  ostinato::LaunchConfig config;
  config.grid = dim3(grid);
  config.block = dim3(kThreads);
  config.dynamic_smem = sizeof(SharedStorage);
  config.pdl = params->pdl != 0;
  Arguments arguments;
  static_cast<ostinato::PagedDecodeParams&>(arguments) = *params;
  arguments.group = params->heads_q / params->heads_kv;
  arguments.by = {Divisor(grid), Divisor(params->heads_kv), Divisor(arguments.group),
                  Divisor(params->page_size)};
  return ostinato::launch(paged_decode, config, static_cast<cudaStream_t>(stream), arguments, maps);
}
