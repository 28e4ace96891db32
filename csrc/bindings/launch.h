// From the arguments of a launch in Python to the struct that its kernel library takes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "library.h"

namespace ostinato {

inline void launch_w8a8_gemm(
    const Library<W8A8GemmParams>& library, std::uintptr_t x, std::int64_t x_stride,
    std::uintptr_t w, std::int64_t w_stride, std::uintptr_t x_scale, std::int32_t x_scale_stride,
    std::uintptr_t w_scale, std::int32_t w_scale_stride, std::uintptr_t out,
    std::int64_t out_stride, std::int32_t m, std::int32_t n, std::int32_t k, std::uintptr_t stream,
    std::uintptr_t bias, std::uintptr_t x_zero_point, std::int32_t x_zero_point_stride,
    std::uintptr_t w_sum, std::uintptr_t n_active, std::int32_t tile_channels,
    std::int32_t tile_tokens, std::int32_t cluster, std::int32_t share_weights,
    std::int32_t split_k, std::int32_t band, bool pdl, std::uintptr_t best,
    std::int64_t best_stride, std::uintptr_t temperature, std::uintptr_t repetition_penalty) {
  W8A8GemmParams params = {};
  params.x = pointer(x);
  params.x_stride = x_stride;
  params.w = pointer(w);
  params.w_stride = w_stride;
  params.x_scale = pointer<float>(x_scale);
  params.x_scale_stride = x_scale_stride;
  params.w_scale = pointer<float>(w_scale);
  params.w_scale_stride = w_scale_stride;
  params.bias = pointer(bias);
  params.x_zero_point = pointer<std::int32_t>(x_zero_point);
  params.x_zero_point_stride = x_zero_point_stride;
  params.w_sum = pointer<std::int32_t>(w_sum);
  params.n_active = pointer<std::int32_t>(n_active);
  params.out = pointer(out);
  params.out_stride = out_stride;
  params.best = pointer<std::uint64_t>(best);
  params.best_stride = best_stride;
  params.temperature = pointer<float>(temperature);
  params.repetition_penalty = pointer<float>(repetition_penalty);
  params.m = m;
  params.n = n;
  params.k = k;
  params.tile_channels = tile_channels;
  params.tile_tokens = tile_tokens;
  params.cluster = cluster;
  params.share_weights = share_weights;
  params.split_k = split_k;
  params.band = band;
  params.pdl = pdl ? 1 : 0;
  library.launch(params, stream);
}

inline void launch_quantize(const Library<PaddedQuantizeParams>& library, std::uintptr_t x,
                            std::int64_t x_stride, std::uintptr_t out, std::int64_t out_stride,
                            std::int32_t m, std::int32_t k, std::uintptr_t stream,
                            std::uintptr_t scale_out, std::uintptr_t static_scale,
                            std::uintptr_t zero_point, std::uintptr_t residual,
                            std::int64_t residual_stride, std::uintptr_t residual_out,
                            std::int64_t residual_out_stride, std::uintptr_t norm_weight, float eps,
                            bool pdl, std::uintptr_t n_active, bool discard_x) {
  PaddedQuantizeParams params = {};
  params.x = pointer(x);
  params.x_stride = x_stride;
  params.residual = pointer(residual);
  params.residual_stride = residual_stride;
  params.residual_out = pointer(residual_out);
  params.residual_out_stride = residual_out_stride;
  params.norm_weight = pointer(norm_weight);
  params.eps = eps;
  params.static_scale = pointer<float>(static_scale);
  params.zero_point = pointer<std::int32_t>(zero_point);
  params.out = pointer(out);
  params.out_stride = out_stride;
  params.scale_out = pointer<float>(scale_out);
  params.m = m;
  params.k = k;
  params.pdl = pdl ? 1 : 0;
  params.n_active = pointer<std::int32_t>(n_active);
  params.discard_x = discard_x ? 1 : 0;
  library.launch(params, stream);
}

// Tensors of attention: an address, and strides from the slowest dimension on.
using HeadsArgument = std::tuple<std::uintptr_t, std::int64_t, std::int64_t>;
using SlotsArgument = std::tuple<std::uintptr_t, std::int64_t, std::int64_t, std::int64_t>;

inline Heads heads(const HeadsArgument& x) {
  return {pointer(std::get<0>(x)), std::get<1>(x), std::get<2>(x)};
}

inline Slots slots(const SlotsArgument& x) {
  return {pointer(std::get<0>(x)), std::get<1>(x), std::get<2>(x), std::get<3>(x)};
}

// Of none, or of pages, heads and then SMs.
inline Halves halves(const std::vector<std::uint32_t>& words) {
  constexpr std::size_t kWords = 2 + Halves::kSmWords;
  Halves found = {};
  if (words.empty()) {
    return found;
  }
  if (words.size() != kWords) {
    throw std::invalid_argument("halves: got " + std::to_string(words.size()) +
                                " words, expected " + std::to_string(kWords));
  }
  found.pages = words[0];
  found.heads = words[1];
  std::copy(words.begin() + 2, words.end(), found.sms);
  return found;
}

inline void launch_paged_decode(
    const PagedDecodeLibrary& library, const HeadsArgument& q, const SlotsArgument& k_cache,
    const SlotsArgument& v_cache, std::uintptr_t page_table, std::int64_t page_table_stride,
    std::uintptr_t seq_lens, const HeadsArgument& out, std::uintptr_t workspace, std::int32_t batch,
    std::int32_t heads_q, std::int32_t heads_kv, std::int32_t pages, std::int32_t page_size,
    std::int32_t max_pages, std::int32_t max_seqlen_q, float scale, std::uintptr_t stream,
    std::uintptr_t cu_seqlens_q, std::uintptr_t sinks, const HeadsArgument& lse, std::int32_t left,
    std::int32_t right, float softcap, const SlotsArgument& k_scale, const SlotsArgument& v_scale,
    bool pdl, const std::vector<std::uint32_t>& halves_words) {
  PagedDecodeParams params = {};
  params.q = heads(q);
  params.k_cache = slots(k_cache);
  params.v_cache = slots(v_cache);
  params.k_scale = slots(k_scale);
  params.v_scale = slots(v_scale);
  params.page_table = pointer<std::int32_t>(page_table);
  params.page_table_stride = page_table_stride;
  params.seq_lens = pointer<std::int32_t>(seq_lens);
  params.cu_seqlens_q = pointer<std::int32_t>(cu_seqlens_q);
  params.sinks = pointer<float>(sinks);
  params.out = heads(out);
  params.lse = heads(lse);
  params.workspace = pointer(workspace);
  params.batch = batch;
  params.heads_q = heads_q;
  params.heads_kv = heads_kv;
  params.pages = pages;
  params.page_size = page_size;
  params.max_pages = max_pages;
  params.max_seqlen_q = max_seqlen_q;
  params.left = left;
  params.right = right;
  params.scale = scale;
  params.softcap = softcap;
  params.pdl = pdl ? 1 : 0;
  params.halves = halves(halves_words);
  library.launch(params, stream);
}

inline void launch_prefill(
    const PrefillLibrary& library, const HeadsArgument& q, const SlotsArgument& k,
    const SlotsArgument& v, const HeadsArgument& out, std::int32_t batch, std::int32_t heads_q,
    std::int32_t heads_kv, std::int32_t tokens_q, std::int32_t max_seqlen_q, float scale,
    std::uintptr_t stream, std::uintptr_t workspace, std::uintptr_t cu_seqlens_q,
    std::uintptr_t cu_seqlens_k, std::int32_t tokens_k, std::int32_t max_seqlen_k,
    std::uintptr_t seq_lens, std::uintptr_t page_table, std::int64_t page_table_stride,
    std::int32_t pages, std::int32_t page_size, std::int32_t max_pages, std::uintptr_t sinks,
    const HeadsArgument& lse, std::int32_t left, std::int32_t right, float softcap,
    std::int32_t least_rows, std::int32_t pack, bool pdl, std::uintptr_t q_scale,
    std::uintptr_t k_scale, std::uintptr_t v_scale, std::int32_t q_scale_stride,
    std::int32_t k_scale_stride, std::int32_t v_scale_stride) {
  ScaledPrefillParams params = {};
  params.q = heads(q);
  params.k = slots(k);
  params.v = slots(v);
  params.cu_seqlens_q = pointer<std::int32_t>(cu_seqlens_q);
  params.cu_seqlens_k = pointer<std::int32_t>(cu_seqlens_k);
  params.seq_lens = pointer<std::int32_t>(seq_lens);
  params.page_table = pointer<std::int32_t>(page_table);
  params.page_table_stride = page_table_stride;
  params.sinks = pointer<float>(sinks);
  params.out = heads(out);
  params.lse = heads(lse);
  params.workspace = pointer(workspace);
  params.batch = batch;
  params.heads_q = heads_q;
  params.heads_kv = heads_kv;
  params.tokens_q = tokens_q;
  params.tokens_k = tokens_k;
  params.pages = pages;
  params.page_size = page_size;
  params.max_pages = max_pages;
  params.max_seqlen_q = max_seqlen_q;
  params.max_seqlen_k = max_seqlen_k;
  params.left = left;
  params.right = right;
  params.scale = scale;
  params.softcap = softcap;
  params.least_rows = least_rows;
  params.pack = pack;
  params.pdl = pdl ? 1 : 0;
  params.q_scale = pointer<float>(q_scale);
  params.k_scale = pointer<float>(k_scale);
  params.v_scale = pointer<float>(v_scale);
  params.q_scale_stride = q_scale_stride;
  params.k_scale_stride = k_scale_stride;
  params.v_scale_stride = v_scale_stride;
  library.launch(params, stream);
}

inline void launch_append_kv(
    const Library<AppendKVParams>& library, const HeadsArgument& k, const HeadsArgument& v,
    const SlotsArgument& k_cache, const SlotsArgument& v_cache, std::uintptr_t slot_mapping,
    std::int32_t tokens, std::int32_t heads_kv, std::int32_t dim, std::int32_t page_size,
    std::uintptr_t stream, const HeadsArgument& q, const HeadsArgument& q_out, std::int32_t heads_q,
    const SlotsArgument& k_scale, bool k_scale_per_token, const SlotsArgument& v_scale,
    bool v_scale_per_token, std::uintptr_t positions, std::uintptr_t cos_sin,
    std::int64_t cos_sin_stride, std::int32_t rotary_dim, bool interleaved,
    std::uintptr_t q_norm_weight, bool q_norm_is_fp32, std::uintptr_t k_norm_weight,
    bool k_norm_is_fp32, float norm_eps, bool pdl) {
  AppendKVParams params = {};
  params.q = heads(q);
  params.q_out = heads(q_out);
  params.k = heads(k);
  params.v = heads(v);
  params.k_cache = slots(k_cache);
  params.v_cache = slots(v_cache);
  params.k_scale = slots(k_scale);
  params.v_scale = slots(v_scale);
  params.k_scale_per_token = k_scale_per_token ? 1 : 0;
  params.v_scale_per_token = v_scale_per_token ? 1 : 0;
  params.slot_mapping = pointer<std::int64_t>(slot_mapping);
  params.positions = pointer<std::int32_t>(positions);
  params.cos_sin = pointer<float>(cos_sin);
  params.cos_sin_stride = cos_sin_stride;
  params.q_norm_weight = pointer(q_norm_weight);
  params.k_norm_weight = pointer(k_norm_weight);
  params.q_norm_is_fp32 = q_norm_is_fp32 ? 1 : 0;
  params.k_norm_is_fp32 = k_norm_is_fp32 ? 1 : 0;
  params.norm_eps = norm_eps;
  params.tokens = tokens;
  params.heads_q = heads_q;
  params.heads_kv = heads_kv;
  params.dim = dim;
  params.rotary_dim = rotary_dim;
  params.page_size = page_size;
  params.interleaved = interleaved ? 1 : 0;
  params.pdl = pdl ? 1 : 0;
  library.launch(params, stream);
}

inline MergeOutputs merge_outputs(const HeadsArgument& x) {
  return {pointer(std::get<0>(x)), std::get<1>(x), std::get<2>(x)};
}

inline MergeLse merge_lse(const HeadsArgument& x) {
  return {pointer<float>(std::get<0>(x)), std::get<1>(x), std::get<2>(x)};
}

inline void launch_merge_states(const Library<MergeStatesParams>& library, const HeadsArgument& o_a,
                                const HeadsArgument& lse_a, const HeadsArgument& o_b,
                                const HeadsArgument& lse_b, const HeadsArgument& out,
                                const HeadsArgument& out_lse, std::int32_t tokens,
                                std::int32_t heads, std::int32_t dim, std::uintptr_t stream,
                                bool pdl) {
  MergeStatesParams params = {};
  params.o_a = merge_outputs(o_a);
  params.o_b = merge_outputs(o_b);
  params.out = merge_outputs(out);
  params.lse_a = merge_lse(lse_a);
  params.lse_b = merge_lse(lse_b);
  params.out_lse = merge_lse(out_lse);
  params.tokens = tokens;
  params.heads = heads;
  params.dim = dim;
  params.pdl = pdl ? 1 : 0;
  library.launch(params, stream);
}

inline void launch_sample(const Library<SampleParams>& library, std::uintptr_t logits,
                          std::int64_t logits_stride, std::uintptr_t temperature,
                          std::uintptr_t top_k, bool top_k_is_int64, std::uintptr_t top_p,
                          std::uintptr_t min_p, std::uintptr_t seeds, std::uintptr_t counters,
                          std::uintptr_t out, std::int32_t rows, std::int32_t vocabulary,
                          std::uintptr_t stream, std::uintptr_t repetition_penalty,
                          std::uintptr_t seen, std::int64_t seen_stride, std::uintptr_t seen_rows,
                          bool pdl, std::uintptr_t best, std::int64_t best_stride,
                          std::int32_t parts) {
  SampleParams params = {};
  params.logits = pointer(logits);
  params.logits_stride = logits_stride;
  params.temperature = pointer<float>(temperature);
  params.top_k = pointer(top_k);
  params.top_k_is_int64 = top_k_is_int64 ? 1 : 0;
  params.top_p = pointer<float>(top_p);
  params.min_p = pointer<float>(min_p);
  params.seeds = pointer<std::int64_t>(seeds);
  params.counters = pointer<std::int64_t>(counters);
  params.repetition_penalty = pointer<float>(repetition_penalty);
  params.seen = pointer<std::uint8_t>(seen);
  params.seen_stride = seen_stride;
  params.seen_rows = pointer<std::int64_t>(seen_rows);
  params.best = pointer<std::uint64_t>(best);
  params.best_stride = best_stride;
  params.parts = parts;
  params.out = pointer<std::int64_t>(out);
  params.rows = rows;
  params.vocabulary = vocabulary;
  params.pdl = pdl ? 1 : 0;
  library.launch(params, stream);
}

inline void launch_embed(const Library<EmbedParams>& library, std::uintptr_t tokens,
                         std::uintptr_t table, std::int64_t table_stride, std::uintptr_t out,
                         std::int64_t out_stride, std::int32_t rows, std::int32_t vocabulary,
                         std::int32_t dim, std::uintptr_t stream, std::uintptr_t seen,
                         std::int64_t seen_stride, std::int32_t seen_size, std::uintptr_t seen_rows,
                         std::uintptr_t n_active, bool pdl) {
  EmbedParams params = {};
  params.tokens = pointer<std::int64_t>(tokens);
  params.table = pointer(table);
  params.table_stride = table_stride;
  params.seen = pointer<std::uint8_t>(seen);
  params.seen_stride = seen_stride;
  params.seen_rows = pointer<std::int64_t>(seen_rows);
  params.n_active = pointer<std::int32_t>(n_active);
  params.out = pointer(out);
  params.out_stride = out_stride;
  params.rows = rows;
  params.vocabulary = vocabulary;
  params.dim = dim;
  params.seen_size = seen_size;
  params.pdl = pdl ? 1 : 0;
  library.launch(params, stream);
}

inline void launch_l2_probe(const Library<L2ProbeParams>& library, std::uintptr_t base,
                            std::uintptr_t offsets, std::uintptr_t clocks, std::uintptr_t sms,
                            std::int32_t count, bool by_all, std::uintptr_t stream) {
  L2ProbeParams params = {};
  params.base = pointer(base);
  params.offsets = pointer<std::int64_t>(offsets);
  params.clocks = pointer<std::int32_t>(clocks);
  params.sms = pointer<std::int32_t>(sms);
  params.count = count;
  params.by_all = by_all ? 1 : 0;
  library.launch(params, stream);
}

inline void launch_fused_linear(const Library<FusedLinearParams>& library, std::uintptr_t x,
                                std::uintptr_t w, std::uintptr_t w_scale,
                                std::int32_t w_scale_stride, std::uintptr_t out, std::int32_t n,
                                std::int32_t k, std::uintptr_t stream, std::uintptr_t residual,
                                std::uintptr_t residual_out, std::uintptr_t norm_weight, float eps,
                                std::uintptr_t bias, bool pdl) {
  FusedLinearParams params = {};
  params.x = pointer(x);
  params.residual = pointer(residual);
  params.residual_out = pointer(residual_out);
  params.norm_weight = pointer(norm_weight);
  params.eps = eps;
  params.w = pointer(w);
  params.w_scale = pointer<float>(w_scale);
  params.w_scale_stride = w_scale_stride;
  params.bias = pointer(bias);
  params.out = pointer(out);
  params.n = n;
  params.k = k;
  params.pdl = pdl ? 1 : 0;
  library.launch(params, stream);
}

}  // namespace ostinato
