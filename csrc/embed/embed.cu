// Embedding: copies the table rows of tokens, and marks each token in the set of tokens that its
// request has seen. The first kernel of a step.
//
// Compiled with
//   OSTINATO_DTYPE  bf16, fp16 or fp32, of the table
//
// The semantics are those of runtime/ops/embed.py. A thread has 16 bytes of a row, so that several
// rows are in flight at once; the kernel is bound by the latency of two dependent reads.
#include <cuda_runtime.h>

#include <cstdint>

#include "common/check.h"
#include "common/launch.cuh"
#include "common/quantize_math.cuh"
#include "common/vector.cuh"
#include "params.h"

namespace ostinato {
namespace {

using Element = dtype::OSTINATO_DTYPE;
constexpr int kVector = 16 / static_cast<int>(sizeof(Element));
constexpr uint32_t kThreads = 128;
constexpr uint32_t kMaxSlices = 65535;  // slices per row: the limit of a grid's second dimension

// Clamps an index, which should be valid, to [0, size).
__device__ __forceinline__ int64_t within(int64_t index, int32_t size) {
  const uint64_t last = static_cast<uint64_t>(size - 1);
  const uint64_t asked = static_cast<uint64_t>(index);  // a negative index is large
  return static_cast<int64_t>(asked < last ? asked : last);
}

// A CTA has a slice of row blockIdx.x, or every gridDim.y-th slice.
template <bool kAligned>
__global__ void __launch_bounds__(kThreads) embed(const __grid_constant__ EmbedParams p) {
  wait_for_predecessor();
  // Not before the wait: the next kernel may read n_active as soon as it starts, and the kernel
  // that writes n_active has ended only after this wait.
  let_successor_start();
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  const int64_t asked = p.tokens[row];
  const bool marks = p.seen != nullptr && blockIdx.y == 0 && threadIdx.x == 0;
  // loaded with the token, not after the row
  const int64_t seen_row = marks ? p.seen_rows[row] : 0;
  if (p.n_active != nullptr && row >= *p.n_active) {
    return;
  }
  const int64_t token = within(asked, p.vocabulary);
  if (marks) {  // rows with the same token and set write the same value
    p.seen[within(seen_row, p.seen_size) * p.seen_stride + token] = 1;
  }
  const int64_t table_row = token - p.first_id;
  const bool is_held = table_row >= 0 && table_row < p.table_rows;
  const Element* const source = static_cast<const Element*>(p.table) + table_row * p.table_stride;
  Element* const target = static_cast<Element*>(p.out) + row * p.out_stride;
  const uint32_t dim = static_cast<uint32_t>(p.dim);
  const uint32_t step = gridDim.y * blockDim.x * kVector;
  for (uint32_t first = (blockIdx.y * blockDim.x + threadIdx.x) * kVector; first < dim;
       first += step) {
    Packed<Element, kVector> vector = {};
    if (is_held) {
      load<kAligned, Reuse::kOnce>(source, first, dim, vector);
    }
    store<kAligned, Element, kVector>(target, first, dim, vector.words);
  }
}

bool is_aligned(const void* data, int64_t stride, int32_t rows) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && (rows == 1 || stride % kVector == 0);
}

bool is_valid(const EmbedParams& p) {
  return p.tokens != nullptr && p.table != nullptr && p.out != nullptr && p.table_rows > 0 &&
         p.first_id >= 0 && p.table_rows <= p.vocabulary - p.first_id && p.dim > 0 &&
         (p.seen == nullptr || (p.seen_rows != nullptr && p.seen_size > 0));
}

}  // namespace
}  // namespace ostinato

OSTINATO_EXPORT int ostinato_prepare(void) { return cudaSuccess; }

OSTINATO_LAUNCH(ostinato::EmbedParams) {
  using namespace ostinato;
  const EmbedParams& p = *params;
  if (p.rows == 0) {  // tensors without elements have no address
    return cudaSuccess;
  }
  if (p.rows < 0 || !is_valid(p)) {
    return cudaErrorInvalidValue;
  }
  const uint32_t vectors = (static_cast<uint32_t>(p.dim) + kVector - 1) / kVector;
  const uint32_t slices = (vectors + kThreads - 1) / kThreads;
  LaunchConfig config;
  config.block = dim3(vectors < kThreads ? (vectors + 31) / 32 * 32 : kThreads);
  config.grid = dim3(static_cast<uint32_t>(p.rows), slices < kMaxSlices ? slices : kMaxSlices);
  config.pdl = p.pdl != 0;
  const bool aligned = p.dim % kVector == 0 && is_aligned(p.table, p.table_stride, p.table_rows) &&
                       is_aligned(p.out, p.out_stride, p.rows);
  return launch(aligned ? embed<true> : embed<false>, config, static_cast<cudaStream_t>(stream), p);
}
