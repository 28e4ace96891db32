// The kernel's arguments beside the tensor maps of the caches, computed from PagedDecodeParams.
#pragma once

#include "config.cuh"
#include "fixed_split.cuh"
#include "l2_partition.cuh"

namespace ostinato::decode {

// Whether the kernel may follow numbers that are not final: only the copy engine survives any page
// id, and warps that might read different ones must not wait for each other's copies.
inline constexpr bool kMayGuess = kCopyPages && kArrivalWarps == 1;

// Whether each token has scales of its own.
__host__ __device__ __forceinline__ bool has_token_scales(const Slots& keys, const Slots& values) {
  return kQuantized && (keys.page_stride | keys.stride | values.page_stride | values.stride) != 0;
}

// The parameters in the order of their use: each cache line of them that is missing is felt.
struct Arguments {
  // `ctas`: of the grid, or clusters.
  explicit Arguments(const PagedDecodeParams& p, int sms, int ctas)
      : seq_lens(p.seq_lens),
        cu_seqlens_q(p.cu_seqlens_q),
        batch(p.batch),
        heads_kv(p.heads_kv),
        lines(count_lines(ctas, p.batch, p.heads_kv)),
        line_ctas(ctas / lines),
        line_heads(heads_kv / lines),
        group(p.heads_q / p.heads_kv),
        max_seqlen_q(p.max_seqlen_q),
        page_size(p.page_size),
        max_pages(p.max_pages),
        left(p.left),
        guesses(kMayGuess && p.pdl != 0 && p.cu_seqlens_q == nullptr &&
                !has_token_scales(p.k_scale, p.v_scale)),
        by{Divisor(lines), Divisor(line_ctas), Divisor(line_heads),
           Divisor(group), Divisor(page_size), Divisor(batch)},
        page_table(p.page_table),
        page_table_stride(p.page_table_stride),
        right(p.right),
        scale(p.scale),
        softcap(p.softcap),
        q(p.q),
        counters(static_cast<uint32_t*>(p.workspace)),
        scheduler_counters(counters + warp_counters(sms)),
        partials(
            reinterpret_cast<float4*>(static_cast<uint8_t*>(p.workspace) + counter_bytes(sms))),
        out(p.out),
        sinks(p.sinks),
        lse(p.lse),
        k_scale(p.k_scale),
        v_scale(p.v_scale),
        k_cache(p.k_cache),
        v_cache(p.v_cache),
        halves(p.l2_partition) {
    // Where free splits have several heads on a line, its place decides how a head is cut.
    const bool splits_depend = !kFixedSplits && line_heads > 1;
    if (!kMayPartitionL2 || !divides_heads(halves, heads_kv) || batch <= kFewSequences ||
        ctas % 2 != 0 || lines % 2 != 0 || splits_depend) {
      halves.heads = 0;
    }
  }

  // What decides who does what.
  const int32_t* seq_lens;
  const int32_t* cu_seqlens_q;
  int32_t batch, heads_kv;
  int32_t lines, line_ctas, line_heads;  // static_scheduler.cuh
  int32_t group;                         // query heads of a KV head
  int32_t max_seqlen_q, page_size, max_pages, left;
  int32_t guesses;  // 1: what the predecessor may write (decode_sm90.cu)
  Divisors by;
  const int32_t* page_table;
  int64_t page_table_stride;
  // The queries.
  int32_t right;
  float scale, softcap;
  Heads q;
  // The output.
  uint32_t* counters;            // the workspace
  uint32_t* scheduler_counters;  // of them
  float4* partials;
  Heads out;
  const float* sinks;
  Heads lse;
  // 8-bit caches.
  Slots k_scale, v_scale;
  // Where threads copy.
  Slots k_cache, v_cache;
  L2Partition halves;  // heads = 0 also where they change nothing
};

__device__ __forceinline__ bool has_token_scales(const Arguments& params) {
  return has_token_scales(params.k_scale, params.v_scale);
}

// Whether the schedule's heads and CTAs are numbered by halves of the L2 (l2_partition.cuh).
__device__ __forceinline__ bool by_l2_partition(const Arguments& params) {
  return kMayPartitionL2 && params.halves.heads != 0;
}

// Reads what a predecessor may still be writing (`early`), or has written. Early, past the L1
// cache, where it would still be when it is read again.
__device__ __forceinline__ int read_table(const int32_t* at, bool early) {
  return early ? __ldcg(at) : *at;
}

}  // namespace ostinato::decode
