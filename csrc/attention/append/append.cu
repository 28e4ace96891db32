// append_kv: writes new keys and values into the slots of a paged cache, normalised, rotated (RoPE)
// and quantised, and normalises and rotates q: everything between the projections and the attention
// of a layer, in one launch.
//
// Compiled with
//   OSTINATO_DTYPE        bf16, fp16 or fp32, of q, k and v
//   OSTINATO_CACHE_DTYPE  of the cache: the same, int8 or e4m3
//
// The semantics are those of runtime/ops/attention/append_kv.py. The bits of a head depend on that
// head alone: not on other tokens, its index, alignment or strides. docs/notebooks/append.md has
// the reasons and the measurements.
#include <cuda_runtime.h>

#include <cstdint>

#include "common/check.h"
#include "common/launch.cuh"
#include "kernels.cuh"
#include "params.h"

namespace ostinato {
namespace {

// The number of chunks of a head, which is the number of threads that share it.
uint32_t chunks_of(const AppendKVParams& p) {
  constexpr int64_t kVector = kVectorSize;
  const int64_t half = p.cos_sin == nullptr || p.interleaved != 0 ? 0 : p.rotary_dim / 2;
  return static_cast<uint32_t>((half + kVector - 1) / kVector +
                               (p.dim - 2 * half + 2 * kVector - 1) / (2 * kVector));
}

bool divides(int64_t alignment, const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % alignment == 0;
}

bool is_aligned(const Heads& x, int32_t tokens, int32_t heads) {
  constexpr int64_t kSize = sizeof(In);
  return heads == 0 || (divides(16, x.data) && (tokens == 1 || x.stride * kSize % 16 == 0) &&
                        (heads == 1 || x.head_stride * kSize % 16 == 0));
}

bool is_aligned(const Slots& cache) {
  return divides(kVectorSize * sizeof(Element), cache.data) &&
         cache.page_stride % kVectorSize == 0 && cache.stride % kVectorSize == 0 &&
         cache.head_stride % kVectorSize == 0;
}

// Whether every chunk consists of whole, aligned vectors.
bool is_aligned(const AppendKVParams& p) {
  if (p.dim % kVectorSize != 0) {
    return false;
  }
  if (p.cos_sin != nullptr) {
    // For interleaved pairs, a vector has half as many angles.
    const int32_t rotated = p.interleaved != 0 ? p.rotary_dim : p.rotary_dim / 2;
    const int64_t angles = p.interleaved != 0 ? kVectorSize / 2 : 4;
    if (rotated % kVectorSize != 0 || !divides(angles * 4, p.cos_sin) ||
        p.cos_sin_stride % angles != 0) {
      return false;
    }
  }
  return is_aligned(p.q, p.tokens, p.heads_q) && is_aligned(p.q_out, p.tokens, p.heads_q) &&
         is_aligned(p.k, p.tokens, p.heads_kv) && is_aligned(p.v, p.tokens, p.heads_kv) &&
         is_aligned(p.k_cache) && is_aligned(p.v_cache) && divides(16, p.q_norm_weight) &&
         divides(16, p.k_norm_weight);
}

bool is_valid(const AppendKVParams& p) {
  return p.tokens >= 0 && p.heads_q >= 0 && p.heads_kv > 0 && p.dim > 0 && p.page_size > 0 &&
         p.rotary_dim >= 0 && p.rotary_dim <= p.dim && p.rotary_dim % 2 == 0;
}

bool has_pointers(const AppendKVParams& p) {
  return p.k.data != nullptr && p.v.data != nullptr && p.k_cache.data != nullptr &&
         p.v_cache.data != nullptr && p.slot_mapping != nullptr &&
         (p.heads_q == 0 || (p.q.data != nullptr && p.q_out.data != nullptr)) &&
         (p.cos_sin == nullptr) == (p.positions == nullptr) &&
         (p.k_scale.data != nullptr) == kQuantizes && (p.v_scale.data != nullptr) == kQuantizes &&
         (p.k_scale_out.data == nullptr || (kQuantizes && p.k_scale_per_token == 0)) &&
         (p.v_scale_out.data == nullptr || (kQuantizes && p.v_scale_per_token == 0));
}

}  // namespace
}  // namespace ostinato

OSTINATO_EXPORT int ostinato_prepare(void) { return cudaSuccess; }

OSTINATO_LAUNCH(ostinato::AppendKVParams) {
  using namespace ostinato;
  const AppendKVParams& p = *params;
  if (!is_valid(p)) {
    return cudaErrorInvalidValue;
  }
  if (p.tokens == 0) {  // tensors without elements have no address
    return cudaSuccess;
  }
  if (!has_pointers(p)) {
    return cudaErrorInvalidValue;
  }
  const uint32_t chunks = chunks_of(p);
  uint32_t log2_lanes = 0;
  while (log2_lanes < 5 && 1u << log2_lanes < chunks) {
    ++log2_lanes;
  }
  const int64_t heads = int64_t{p.heads_q} + 2 * int64_t{p.heads_kv};
  const int64_t threads = heads << log2_lanes;
  LaunchConfig config;
  config.block =
      dim3(threads < kThreads ? static_cast<uint32_t>((threads + 31) / 32 * 32) : kThreads);
  config.grid = dim3(static_cast<uint32_t>(p.tokens),
                     static_cast<uint32_t>((threads + kThreads - 1) / kThreads));
  config.pdl = p.pdl != 0;
  const bool aligned = is_aligned(p);
  const auto enqueue = [&](void (*kernel)(AppendKVParams, uint32_t, KnownDivisor),
                           uint32_t argument) {
    return launch(kernel, config, static_cast<cudaStream_t>(stream), p, argument,
                  KnownDivisor(static_cast<float>(p.dim)));
  };
  if (chunks > 32) {
    return enqueue(aligned ? append_long_heads<true> : append_long_heads<false>, chunks);
  }
  if (p.q_norm_weight == nullptr && p.k_norm_weight == nullptr) {
    return enqueue(aligned ? append_heads<true, Norm::none> : append_heads<false, Norm::none>,
                   log2_lanes);
  }
  if (p.norm_after_rotation != 0) {
    return enqueue(aligned ? append_heads<true, Norm::after_rotation>
                           : append_heads<false, Norm::after_rotation>,
                   log2_lanes);
  }
  return enqueue(aligned ? append_heads<true, Norm::before_rotation>
                         : append_heads<false, Norm::before_rotation>,
                 log2_lanes);
}
