// The mask: which tokens each query attends to, by causality, window and sequence length.
//
// Blocks begin at multiples of 16 tokens; `token` is the first token of a block.
#pragma once

#include "mma.cuh"
#include "seqlens.cuh"

namespace ostinato::decode {

// Mask of the queries of one sequence.
struct Mask {
  int seqlen, queries;
  int left, right;         // without a limit: so large that nothing is masked
  int all_begin, all_end;  // range of tokens visible to all queries

  __device__ Mask(const Arguments& params, const Seqlens& seqlens, int b)
      : seqlen(seqlens.seqlen(b)),
        queries(seqlens.queries(b)),
        // With at most 64 queries, right = 64 never masks anything.
        left(params.left < 0 ? 1 << 30 : min(params.left, 1 << 30)),
        right(params.right < 0 ? 64 : min(params.right, 64)),
        // In registers, since every block is compared with them.
        all_begin(keep(first(queries - 1))),
        all_end(keep(stop(0))) {}

  __device__ __forceinline__ int position(int query) const { return seqlen - queries + query; }
  __device__ __forceinline__ int first(int query) const { return position(query) - left; }
  __device__ __forceinline__ int stop(int query) const {
    return min(seqlen, position(query) + right + 1);
  }

  // The tokens from begin() to `seqlen` are visible to some query.
  __device__ __forceinline__ int begin() const { return first(0); }

  // The token in a block's first row. With kEndsWithLast, a sequence's last block ends at its last
  // token, and rows before `token` hold zeros or tokens of the block before.
  __device__ __forceinline__ int first_row(int token) const {
    return kEndsWithLast ? min(token, seqlen - kBlockTokens) : token;
  }
  // The first token at or after `begin` that belongs to this block and not to the one before.
  __device__ __forceinline__ int first_own(int token, int begin) const {
    return kEndsWithLast ? max(token, begin) : begin;
  }

  // Whether some token of the block is visible to some query.
  __device__ __forceinline__ bool reaches(int token) const {
    return token < seqlen && token + kBlockTokens > begin();
  }

  // Whether some token of the block is masked for some query.
  __device__ __forceinline__ bool hides_some(int token) const {
    return token + kBlockTokens > all_end || token < all_begin;
  }
};

}  // namespace ostinato::decode
