// What the kernel is given, beside the maps of the caches.
#pragma once

#include "decode_config.cuh"
#include "decode_units.cuh"

namespace ostinato::decode {

// The parameters in the order of their use: each cache line of them that is missing is felt.
struct Arguments {
  explicit Arguments(const PagedDecodeParams& p, int grid)
      : seq_lens(p.seq_lens),
        cu_seqlens_q(p.cu_seqlens_q),
        batch(p.batch),
        heads_kv(p.heads_kv),
        lines(count_lines(grid, p.batch, p.heads_kv)),
        line_ctas(grid / lines),
        line_heads(heads_kv / lines),
        group(p.heads_q / p.heads_kv),
        max_seqlen_q(p.max_seqlen_q),
        page_size(p.page_size),
        max_pages(p.max_pages),
        left(p.left),
        by{Divisor(lines), Divisor(line_ctas), Divisor(line_heads),
           Divisor(group), Divisor(page_size), Divisor(batch)},
        page_table(p.page_table),
        page_table_stride(p.page_table_stride),
        right(p.right),
        scale(p.scale),
        softcap(p.softcap),
        q(p.q),
        workspace(p.workspace),
        out(p.out),
        sinks(p.sinks),
        lse(p.lse),
        k_scale(p.k_scale),
        v_scale(p.v_scale),
        k_cache(p.k_cache),
        v_cache(p.v_cache) {}

  // What decides who does what.
  const int32_t* seq_lens;
  const int32_t* cu_seqlens_q;
  int32_t batch, heads_kv;
  int32_t lines, line_ctas, line_heads;  // decode_schedule.cuh
  int32_t group;                         // query heads of a KV head
  int32_t max_seqlen_q, page_size, max_pages, left;
  Divisors by;
  const int32_t* page_table;
  int64_t page_table_stride;
  // The queries.
  int32_t right;
  float scale, softcap;
  Heads q;
  // The output.
  void* workspace;
  Heads out;
  const float* sinks;
  Heads lse;
  // 8-bit caches.
  Slots k_scale, v_scale;
  // Where threads copy.
  Slots k_cache, v_cache;
};

}  // namespace ostinato::decode
