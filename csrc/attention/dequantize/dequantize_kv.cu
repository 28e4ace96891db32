// Dequantises 8-bit keys and values for prefill attention: each is read once and becomes a 16-bit
// operand, where the kernel of 16-bit keys would convert it once for every tile of queries.
//
// Compiled with
//   OSTINATO_CACHE  int8_t or __nv_fp8_e4m3, of keys and values
//   OSTINATO_TYPE   __nv_bfloat16 or __half, of what they become
//
// The sequences that have queries follow one another in the output. A CTA takes kTokens tokens of
// it after the other, looks up where they lie, and then a thread converts the same 16 elements of
// several tokens. It is bound by memory: a byte read and two written for each element.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "attention/common/dequant.cuh"
#include "common/alignment.h"
#include "common/check.h"
#include "common/launch.cuh"
#include "common/sizes.cuh"
#include "common/vector.cuh"
#include "params.h"

namespace ostinato {
namespace {

using Code = OSTINATO_CACHE;
using Type = OSTINATO_TYPE;
constexpr int kThreads = 256;
constexpr int kCtasPerSm = 4;
constexpr int kTokens = 32;     // of a CTA at a time
constexpr int kInFlight = 4;    // vectors of a thread
constexpr int kVector = 16;     // elements
constexpr int kMaxBatch = 512;  // as of a launch of prefill
constexpr int kNotSeen = -1;

struct Shared {
  int begins[kMaxBatch + 1];  // of each sequence in the output, and the end of the last
  int first_seen[kMaxBatch];  // of each sequence
  int warp_sums[kThreads / 32];
  int pages[kTokens];  // of the tokens that the CTA has at the moment, or kNotSeen
  int slots[kTokens];
};

__device__ __forceinline__ int queries_of(const DequantizeKvParams& p, int sequence) {
  return p.cu_seqlens_q == nullptr ? p.max_seqlen_q
                                   : p.cu_seqlens_q[sequence + 1] - p.cu_seqlens_q[sequence];
}

// The tokens of a sequence that are dequantised, 0 without queries; notes the first that is seen.
__device__ __forceinline__ int tokens_of(const DequantizeKvParams& p, Shared& shared,
                                         int sequence) {
  if (sequence >= p.batch) {
    return 0;
  }
  const int queries = queries_of(p, sequence);
  const int length = min(max(p.seq_lens[sequence], 0), p.max_pages * p.page_size);
  shared.first_seen[sequence] = p.left < 0 ? 0 : length - queries - p.left;
  return queries > 0 ? length : 0;
}

// Fills `begins`, and stores it for the kernel that attends. No sequence ends after the last token
// that there is room for.
__device__ __forceinline__ void find_sequences(const DequantizeKvParams& p, Shared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int begin = 0;
  for (int first = 0; first < p.batch; first += kThreads) {
    const int sequence = first + static_cast<int>(threadIdx.x);
    int sum = tokens_of(p, shared, sequence);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(0xffffffff, sum, distance);
      sum = min(sum + (lane >= distance ? before : 0), p.tokens);
    }
    if (lane == 31) {
      shared.warp_sums[warp] = sum;
    }
    __syncthreads();
    int all = begin;
    for (int i = 0; i < kThreads / 32; ++i) {
      sum = min(sum + (i < warp ? shared.warp_sums[i] : 0), p.tokens);
      all = min(all + shared.warp_sums[i], p.tokens);
    }
    if (sequence < p.batch) {
      shared.begins[sequence + 1] = min(begin + sum, p.tokens);
    }
    begin = all;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    shared.begins[0] = 0;
  }
  __syncthreads();
  if (blockIdx.x == 0) {
    for (int i = static_cast<int>(threadIdx.x); i <= p.batch; i += kThreads) {
      p.cu_seqlens_k[i] = shared.begins[i];
    }
  }
}

// Notes page and slot of one of the tokens from `first` on.
__device__ __forceinline__ void find_token(const DequantizeKvParams& p, Shared& shared, int first,
                                           int tokens) {
  const int index = static_cast<int>(threadIdx.x), token = first + index;
  int page = kNotSeen, slot = 0;
  if (p.page_table == nullptr) {
    page = token < tokens ? 0 : kNotSeen;
    slot = token;
  } else if (token < tokens) {
    int sequence = 0, end = p.batch;  // the last sequence that begins at or before the token
    while (end - sequence > 1) {
      const int middle = (sequence + end) / 2;
      (shared.begins[middle] <= token ? sequence : end) = middle;
    }
    const int position = token - shared.begins[sequence];
    if (position >= shared.first_seen[sequence]) {
      const int column = position / p.page_size;
      page = p.page_table[sequence * p.page_table_stride + column];
      slot = position - column * p.page_size;
    }
  }
  shared.pages[index] = page;
  shared.slots[index] = slot;
}

// 16 elements of keys or of values, at the same place of each token.
struct Column {
  const uint8_t* codes;
  const float* scales;
  uint4* out;
  int64_t codes_page_stride, codes_stride, scales_page_stride, scales_stride;
  int out_stride;  // vectors

  // The index-th of a token, of all heads' keys and then of their values.
  __device__ __forceinline__ static Column of(const DequantizeKvParams& p, int index) {
    const int keys = p.heads * p.dim / kVector;
    return index < keys ? of(p.k, p.k_scale, p.k_out, p.heads, p.dim / kVector, index)
                        : of(p.v, p.v_scale, p.v_out, p.heads, p.value_dim / kVector, index - keys);
  }
  __device__ __forceinline__ static Column of(const Slots& codes, const Slots& scales, void* out,
                                              int heads, int vectors, int index) {
    const int head = index / vectors, part = index % vectors;
    return {static_cast<const uint8_t*>(codes.data) + head * codes.head_stride + part * kVector,
            static_cast<const float*>(scales.data) + head * scales.head_stride,
            static_cast<uint4*>(out) + 2 * index,
            codes.page_stride,
            codes.stride,
            scales.page_stride,
            scales.stride,
            2 * heads * vectors};
  }

  __device__ __forceinline__ uint4 load_codes(int page, int slot) const {
    return __ldcs(
        reinterpret_cast<const uint4*>(codes + page * codes_page_stride + slot * codes_stride));
  }
  __device__ __forceinline__ float load_scale(int page, int slot) const {
    return scales[page * scales_page_stride + slot * scales_stride];
  }
  __device__ __forceinline__ uint4* target(int token) const {
    return out + int64_t{token} * out_stride;
  }
};

// Every 8-bit number is an fp16 number, so that only the product is rounded.
__device__ __forceinline__ uint2 dequantize_word(uint32_t word, float scale) {
  const Pairs pairs = dequantize<Code, __half>(word);
  float x[4];
  unpack_pair<__half>(pairs.first, x[0], x[1]);
  unpack_pair<__half>(pairs.second, x[2], x[3]);
  return make_uint2(pack_pair<Type>(x[0] * scale, x[1] * scale),
                    pack_pair<Type>(x[2] * scale, x[3] * scale));
}

__device__ __forceinline__ void store_dequantized(uint4* target, const uint4& codes, float scale) {
  const uint2 a = dequantize_word(codes.x, scale), b = dequantize_word(codes.y, scale);
  const uint2 c = dequantize_word(codes.z, scale), d = dequantize_word(codes.w, scale);
  target[0] = make_uint4(a.x, a.y, b.x, b.y);
  target[1] = make_uint4(c.x, c.y, d.x, d.y);
}

// Of the tokens that the CTA has, every step-th from `index` on.
__device__ __forceinline__ void convert(const Shared& shared, const Column& column, int first,
                                        int index, int step) {
  for (; index < kTokens; index += kInFlight * step) {
    uint4 codes[kInFlight];
    float scales[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int token = index + i * step;
      const int page = token < kTokens ? shared.pages[token] : kNotSeen;
      if (page != kNotSeen) {
        codes[i] = column.load_codes(page, shared.slots[token]);
        scales[i] = column.load_scale(page, shared.slots[token]);
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int token = index + i * step;
      if (token < kTokens && shared.pages[token] != kNotSeen) {
        store_dequantized(column.target(first + token), codes[i], scales[i]);
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    dequantize_kv(const __grid_constant__ DequantizeKvParams p, int log2_columns) {
  extern __shared__ uint8_t storage[];
  Shared& shared = *reinterpret_cast<Shared*>(storage);
  wait_for_predecessor();
  let_successor_start();
  int tokens = p.tokens;
  if (p.page_table != nullptr) {
    find_sequences(p, shared);
    tokens = shared.begins[p.batch];
  }
  // Threads side by side have vectors side by side; those left over have another token.
  const int columns = 1 << log2_columns;
  const int index = static_cast<int>(threadIdx.x) >> log2_columns;
  const int all = p.heads * (p.dim + p.value_dim) / kVector;
  const int step = static_cast<int>(gridDim.x) * kTokens;
  for (int first = static_cast<int>(blockIdx.x) * kTokens; first < tokens; first += step) {
    if (threadIdx.x < kTokens) {
      find_token(p, shared, first, tokens);
    }
    __syncthreads();
    for (int at = static_cast<int>(threadIdx.x) % columns; at < all; at += columns) {
      convert(shared, Column::of(p, at), first, index, kThreads >> log2_columns);
    }
    __syncthreads();
  }
}

bool in_vectors(const Slots& codes) {
  return aligned(codes.data, codes.page_stride | codes.stride | codes.head_stride);
}

bool is_valid(const DequantizeKvParams& p) {
  const bool sized = p.tokens >= 0 && p.heads > 0 && p.dim > 0 && p.value_dim > 0 &&
                     p.dim % kVector == 0 && p.value_dim % kVector == 0;
  const bool paged = p.page_table == nullptr ||
                     (p.seq_lens != nullptr && p.cu_seqlens_k != nullptr && p.batch > 0 &&
                      p.batch <= kMaxBatch && p.page_size > 0 && p.max_pages > 0);
  return sized && paged && p.k_scale.data != nullptr && p.v_scale.data != nullptr &&
         p.k_out != nullptr && p.v_out != nullptr && in_vectors(p.k) && in_vectors(p.v);
}

}  // namespace
}  // namespace ostinato

OSTINATO_EXPORT int ostinato_prepare(void) { return cudaSuccess; }

OSTINATO_LAUNCH(ostinato::DequantizeKvParams) {
  using namespace ostinato;
  const DequantizeKvParams& p = *params;
  if (!is_valid(p)) {
    return cudaErrorInvalidValue;
  }
  int sms = 0;
  OSTINATO_RETURN_IF_ERROR(count_sms(&sms));
  const int columns = p.heads * (p.dim + p.value_dim) / kVector;
  int log2_columns = 0;
  while (1 << log2_columns < std::min(columns, kThreads)) {
    ++log2_columns;
  }
  LaunchConfig config;
  config.block = dim3(kThreads);
  // One at least, which says where sequences begin.
  const int tiles = std::max(1, ceil_div(p.tokens, kTokens));
  config.grid = dim3(static_cast<unsigned>(std::min(tiles, sms * kCtasPerSm)));
  config.dynamic_smem = sizeof(Shared);
  config.pdl = p.pdl != 0;
  return launch(dequantize_kv, config, static_cast<cudaStream_t>(stream), p, log2_columns);
}
