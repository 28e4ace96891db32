// What the kernel is given, beside the maps of the caches.
#pragma once

#include "decode_config.cuh"
#include "decode_schedule.cuh"

namespace ostinato::decode {

// The parameters in the order of their use: each cache line of them that is missing is felt.
struct Arguments {
  explicit Arguments(const PagedDecodeParams& p, int grid)
      : seq_lens(p.seq_lens),
        cu_seqlens_q(p.cu_seqlens_q),
        batch(p.batch),
        heads_kv(p.heads_kv),
        group(p.heads_q / p.heads_kv),
        max_seqlen_q(p.max_seqlen_q),
        page_size(p.page_size),
        max_pages(p.max_pages),
        left(p.left),
        max_splits(p.max_splits),
        by{Divisor(grid), Divisor(heads_kv), Divisor(group), Divisor(page_size), Divisor(batch)},
        page_table(p.page_table),
        page_table_stride(p.page_table_stride),
        right(p.right),
        scale(p.scale),
        softcap(p.softcap),
        q(p.q),
        q_token_stride(p.q_token_stride),
        q_head_stride(p.q_head_stride),
        workspace(p.workspace),
        out(p.out),
        out_token_stride(p.out_token_stride),
        out_head_stride(p.out_head_stride),
        sinks(p.sinks),
        lse(p.lse),
        lse_token_stride(p.lse_token_stride),
        lse_head_stride(p.lse_head_stride),
        k_scale(p.k_scale),
        k_scale_page_stride(p.k_scale_page_stride),
        k_scale_slot_stride(p.k_scale_slot_stride),
        k_scale_head_stride(p.k_scale_head_stride),
        v_scale(p.v_scale),
        v_scale_page_stride(p.v_scale_page_stride),
        v_scale_slot_stride(p.v_scale_slot_stride),
        v_scale_head_stride(p.v_scale_head_stride),
        k_cache(p.k_cache),
        k_page_stride(p.k_page_stride),
        k_slot_stride(p.k_slot_stride),
        k_head_stride(p.k_head_stride),
        v_cache(p.v_cache),
        v_page_stride(p.v_page_stride),
        v_slot_stride(p.v_slot_stride),
        v_head_stride(p.v_head_stride) {}

  // What decides who does what.
  const int32_t* seq_lens;
  const int32_t* cu_seqlens_q;
  int32_t batch, heads_kv;
  int32_t group;  // query heads of a KV head
  int32_t max_seqlen_q, page_size, max_pages, left, max_splits;
  Divisors by;
  const int32_t* page_table;
  int64_t page_table_stride;
  // The queries.
  int32_t right;
  float scale, softcap;
  const void* q;
  int64_t q_token_stride, q_head_stride;
  // The output.
  void* workspace;
  void* out;
  int64_t out_token_stride, out_head_stride;
  const float* sinks;
  float* lse;
  int64_t lse_token_stride, lse_head_stride;
  // 8-bit caches.
  const float* k_scale;
  int64_t k_scale_page_stride, k_scale_slot_stride, k_scale_head_stride;
  const float* v_scale;
  int64_t v_scale_page_stride, v_scale_slot_stride, v_scale_head_stride;
  // Where threads copy.
  const void* k_cache;
  int64_t k_page_stride, k_slot_stride, k_head_stride;
  const void* v_cache;
  int64_t v_page_stride, v_slot_stride, v_head_stride;
};

}  // namespace ostinato::decode
