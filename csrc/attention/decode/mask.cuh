// The mask: which tokens each query sees, by causality, window and sequence length.
//
// Blocks begin at multiples of 16 tokens; `token` is the first token of a block.
#pragma once

#include "mma.cuh"
#include "seqlens.cuh"

namespace ostinato::decode {

// The tokens that the queries of one sequence see.
struct Mask {
  int seqlen, queries;
  int left, right;         // what is no limit is so large that it hides nothing
  int all_begin, all_end;  // the tokens that all queries see

  __device__ Mask(const Arguments& params, const Seqlens& seqlens, int b)
      : seqlen(seqlens.seqlen(b)),
        queries(seqlens.queries(b)),
        // A limit beyond the last of at most 64 queries is none.
        left(params.left < 0 ? 1 << 30 : min(params.left, 1 << 30)),
        right(params.right < 0 ? 64 : min(params.right, 64)),
        // Every block is compared with these.
        all_begin(keep(first(queries - 1))),
        all_end(keep(stop(0))) {}

  __device__ __forceinline__ int position(int query) const { return seqlen - queries + query; }
  __device__ __forceinline__ int first(int query) const { return position(query) - left; }
  __device__ __forceinline__ int stop(int query) const {
    return min(seqlen, position(query) + right + 1);
  }

  // The tokens that any query sees are those from here to `length`.
  __device__ __forceinline__ int begin() const { return first(0); }

  // The token in a block's first row. In the last block of a sequence, if it ends with the last
  // token, there may be rows before `token`: zeros, or what another block has.
  __device__ __forceinline__ int first_row(int token) const {
    return kEndsWithLast ? min(token, seqlen - kBlockTokens) : token;
  }
  // The first token of the block that is its own, of those from `begin` on.
  __device__ __forceinline__ int first_own(int token, int begin) const {
    return kEndsWithLast ? max(token, begin) : begin;
  }

  // Whether some query may see some token of the block.
  __device__ __forceinline__ bool reaches(int token) const {
    return token < seqlen && token + kBlockTokens > begin();
  }

  // Whether some query does not see some token of the block.
  __device__ __forceinline__ bool hides_some(int token) const {
    return token + kBlockTokens > all_end || token < all_begin;
  }
};

}  // namespace ostinato::decode
