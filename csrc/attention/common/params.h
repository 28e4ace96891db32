// The arguments of attention and of append_kv, as plain structs shared by the kernels and the
// loader (csrc/bindings/module.cpp). Plain C++: no CUDA and no torch header, so that the host
// compiler builds the loader alone. Strides count elements, sizes are logical, pointers are device
// pointers.
#pragma once

#include <cstdint>

namespace ostinato {

// Heads of tokens: [tokens, heads, dim], the elements of a head adjacent.
struct Heads {
  void* data;
  int64_t stride;  // from token to token
  int64_t head_stride;
};

// Something for every head of every slot of a paged cache: [pages, page_size, heads_kv, ...].
struct Slots {
  void* data;
  int64_t page_stride;
  int64_t stride;  // from slot to slot within a page
  int64_t head_stride;
};

// Which half of the L2 holds what, where that is known. What the other half holds comes across the
// chip, which takes energy (docs/halves.md). A hint: results do not depend on it.
struct Halves {
  static constexpr int kSmWords = 8;
  uint32_t sms[kSmWords];  // bit i % 32 of word i / 32: the half that SM i is on
  uint32_t pages, heads;   // keys and values of a head in a page are in the half that is the parity
                           // of (page & pages) and (head & heads); heads = 0: not known
};

// New q, k and v -> q_out and the slots of a paged cache.
struct AppendKVParams {
  Heads q;  // null, with heads_q = 0: none
  Heads q_out;
  Heads k;
  Heads v;
  Slots k_cache;  // [pages, page_size, heads_kv, dim]
  Slots v_cache;
  Slots k_scale;  // fp32, of an 8-bit cache; unless per token only head_stride counts, 0 or 1
  Slots v_scale;
  int32_t k_scale_per_token;  // 1: [pages, page_size, heads_kv], written
  int32_t v_scale_per_token;
  const int64_t* slot_mapping;  // [tokens], negative: not written
  const int32_t* positions;     // [tokens], rows of cos_sin
  const float* cos_sin;         // [positions, rotary_dim] cosines, then sines; null: not rotated
  int64_t cos_sin_stride;
  const void* q_norm_weight;  // [dim], or null
  const void* k_norm_weight;
  int32_t q_norm_is_fp32;  // 0: of the dtype of q
  int32_t k_norm_is_fp32;
  float norm_eps;
  int32_t tokens, heads_q, heads_kv, dim, rotary_dim, page_size;
  int32_t interleaved;  // 1: pairs (2i, 2i + 1), 0: (i, i + rotary_dim / 2)
  int32_t pdl;
};

// Attention of a few queries per sequence to a paged KV cache
// (csrc/attention/decode/decode_sm90.cu).
struct PagedDecodeParams {
  Heads q;        // [tokens, heads_q, dim]
  Slots k_cache;  // [pages, page_size, heads_kv, dim] in any order, dim contiguous
  Slots v_cache;
  Slots k_scale;  // fp32, of an 8-bit cache, otherwise null; strides 0 where all share one
  Slots v_scale;
  const int32_t* page_table;  // [batch, max_pages]
  int64_t page_table_stride;
  const int32_t* seq_lens;      // [batch]; clamped to 0 .. max_pages * page_size
  const int32_t* cu_seqlens_q;  // [batch + 1]; null: max_seqlen_q rows of q for each sequence
  const float* sinks;           // [heads_q], or null
  Heads out;                    // [tokens, heads_q, dim]
  Heads lse;                    // fp32 [tokens, heads_q], or null
  void* workspace;              // ostinato_workspace_bytes() bytes; zero before its first launch
  int32_t batch, heads_q, heads_kv;
  int32_t pages, page_size, max_pages, max_seqlen_q;
  int32_t left, right;  // the window; -1: no limit. Causal: right = 0
  float scale;
  float softcap;  // 0: none
  int32_t pdl;
  Halves halves;
};

// Attention of many queries per sequence (csrc/attention/prefill/prefill_sm90.cu). Keys and values
// lie packed, or in a paged cache; a library is compiled for one of both.
struct PrefillParams {
  Heads q;  // [tokens_q, heads_q, dim]
  Slots k;  // packed [tokens_k, heads_kv, dim], a slot for each token and no page, or
  Slots v;  // [pages, page_size, heads_kv, dim] in any order, dim contiguous; v with value_dim
  const int32_t* cu_seqlens_q;  // [batch + 1]; null: max_seqlen_q rows of q for each sequence
  const int32_t* cu_seqlens_k;  // [batch + 1], packed only
  const int32_t* seq_lens;      // [batch], paged only; clamped to 0 .. max_pages * page_size
  const int32_t* page_table;    // [batch, max_pages], paged only
  int64_t page_table_stride;
  const float* sinks;  // [heads_q], or null
  Heads out;           // [tokens_q, heads_q, value_dim]
  Heads lse;           // fp32 [tokens_q, heads_q], or null
  void* workspace;  // 8 bytes, zero before its first launch; null: CTAs do not balance their work
  int32_t batch, heads_q, heads_kv;
  int32_t tokens_q, tokens_k;
  int32_t pages, page_size, max_pages, max_seqlen_q, max_seqlen_k;
  int32_t left, right;  // the window; -1: no limit. Causal: right = 0
  float scale;
  float softcap;       // 0: none
  int32_t least_rows;  // sequences with fewer rows (queries times heads of a group) are left out
  int32_t pack;        // heads of a group that share tiles, a divisor of it; 0: the kernel's choice
  int32_t pdl;
};

}  // namespace ostinato
