// Kernel arguments, computed on the host from PagedDecodeParams; the tensor maps are separate.
#pragma once

#include "config.cuh"
#include "fixed_split.cuh"
#include "l2_partition.cuh"

namespace ostinato::decode {

// Whether the kernel may use speculative lengths and page ids: only TMA is safe with an arbitrary
// page id, and warps that may read different ids must not wait for each other's copies.
inline constexpr bool kMaySpeculate = kCopyPages && kArrivalWarps == 1;

// Whether each token has its own scales.
__host__ __device__ __forceinline__ bool has_token_scales(const Slots& keys, const Slots& values) {
  return kQuantized && (keys.page_stride | keys.stride | values.page_stride | values.stride) != 0;
}

// Ordered by first use: every cache line of the arguments that misses costs time.
struct Arguments {
  // `ctas`: CTAs, or clusters, of the grid.
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
        speculative(kMaySpeculate && p.pdl != 0 && p.cu_seqlens_q == nullptr &&
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
        l2_partition(p.l2_partition) {
    // With balanced splits and several heads per line, a head's position decides how it is split,
    // so permuting heads would change results.
    const bool splits_depend = !kFixedSplits && line_heads > 1;
    if (!kMayPartitionL2 || !divides_heads(l2_partition, heads_kv) || batch <= kFewSequences ||
        ctas % 2 != 0 || lines % 2 != 0 || splits_depend) {
      l2_partition.heads = 0;
    }
  }

  // Used by the schedulers.
  const int32_t* seq_lens;
  const int32_t* cu_seqlens_q;
  int32_t batch, heads_kv;
  int32_t lines, line_ctas, line_heads;  // static_scheduler.cuh
  int32_t group;                         // query heads of a KV head
  int32_t max_seqlen_q, page_size, max_pages, left;
  int32_t speculative;  // 1: lengths and page ids are read before the preceding kernel ends
  Divisors by;
  const int32_t* page_table;
  int64_t page_table_stride;
  // Used for the queries.
  int32_t right;
  float scale, softcap;
  Heads q;
  // Used by the epilogue.
  uint32_t* counters;            // at the start of the workspace
  uint32_t* scheduler_counters;  // behind the warps' counters
  float4* partials;
  Heads out;
  const float* sinks;
  Heads lse;
  // Used for 8-bit caches.
  Slots k_scale, v_scale;
  // Used by cp.async copies.
  Slots k_cache, v_cache;
  L2Partition l2_partition;  // heads = 0 also if partitions would change nothing
};

__device__ __forceinline__ bool has_token_scales(const Arguments& params) {
  return has_token_scales(params.k_scale, params.v_scale);
}

// Whether the schedulers' heads and CTAs are numbered by L2 partition (l2_partition.cuh).
__device__ __forceinline__ bool by_l2_partition(const Arguments& params) {
  return kMayPartitionL2 && params.l2_partition.heads != 0;
}

// Reads a table entry. `early`: the preceding kernel may still be writing it; bypass L1, where a
// stale line would survive until the entry is read again.
__device__ __forceinline__ int read_table(const int32_t* at, bool early) {
  return early ? __ldcg(at) : *at;
}

}  // namespace ostinato::decode
