// The tile scheduler: the list of work tiles and their order, a pure function of the sequence
// lengths that every CTA evaluates for itself.
//
// Sequences with long work tiles come first. Within a sequence, KV heads are processed in sections
// that fit into L2; within a section, the tiles of the last queries come first, since with a causal
// mask they have the most keys. A CTA takes its next work tile when it has finished one: from a
// counter, or round-robin.
#pragma once

#include "shared_storage.cuh"

namespace ostinato::prefill {

__device__ __forceinline__ Sequence read_sequence(const Arguments& args, int b) {
  const Params& p = args.params;
  Sequence sequence;
  if (p.cu_seqlens_q == nullptr) {
    sequence.first_row = b * p.max_seqlen_q;
    sequence.queries = p.max_seqlen_q;
  } else {
    sequence.first_row = p.cu_seqlens_q[b];
    sequence.queries = clamp(p.cu_seqlens_q[b + 1] - sequence.first_row, 0, p.max_seqlen_q);
  }
  if constexpr (kSource == Source::Packed) {
    sequence.first_key = p.cu_seqlens_k[b];
    sequence.seqlen = clamp(p.cu_seqlens_k[b + 1] - sequence.first_key, 0, p.max_seqlen_k);
  } else {
    sequence.first_key = b;
    sequence.seqlen = clamp(p.seq_lens[b], 0, p.max_pages * p.page_size);
  }
  if (int64_t{sequence.queries} * args.group < p.least_rows) {
    sequence.queries = 0;
  }
  return sequence;
}

// Approximate upper bound of the keys that a work tile of the sequence reads.
__device__ __forceinline__ int longest_tile(const Arguments& args, const Sequence& sequence) {
  const Params& p = args.params;
  const int span = p.left < 0 || p.right < 0 ? INT32_MAX : p.left + p.right + args.tile_tokens;
  return sequence.queries == 0 ? -1 : min(sequence.seqlen, span);
}

__device__ __forceinline__ int query_tiles(const Arguments& args, const Sequence& sequence) {
  return (sequence.queries + args.tile_tokens - 1) / args.tile_tokens;
}

// Fills the tables. Called by all threads.
__device__ __forceinline__ void read_seqlens(SharedStorage& shared, const Arguments& args) {
  const int batch = args.params.batch;
  for (int b = threadIdx.x; b < batch; b += kThreads) {
    shared.weight[b] = longest_tile(args, read_sequence(args, b));
  }
  __syncthreads();
  for (int b = threadIdx.x; b < batch; b += kThreads) {
    const int weight = shared.weight[b];
    int rank = 0;
    for (int other = 0; other < batch; ++other) {
      const int theirs = shared.weight[other];
      rank += theirs > weight || (theirs == weight && other < b) ? 1 : 0;
    }
    const Sequence sequence = read_sequence(args, b);
    shared.sequences[rank] = sequence;
    shared.start[rank] = query_tiles(args, sequence) * args.packs;
  }
  __syncthreads();
  if (threadIdx.x < 32) {  // exclusive prefix sums
    const int lane = threadIdx.x;
    int total = 0;
    for (int first = 0; first < batch; first += 32) {
      const int own = first + lane < batch ? shared.start[first + lane] : 0;
      int sum = own;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int lower = __shfl_up_sync(0xffffffff, sum, step);
        sum += lane >= step ? lower : 0;
      }
      if (first + lane < batch) {
        shared.start[first + lane] = total + sum - own;
      }
      total += __shfl_sync(0xffffffff, sum, 31);
    }
    if (lane == 0) {
      shared.start[batch] = total;
    }
  }
  __syncthreads();
}

// Hides from the compiler that a number is known, so that it does not keep values derived from it
// in registers across work tiles: copying warps have few registers.
__device__ __forceinline__ int opaque(int number) {
  asm volatile("" : "+r"(number));
  return number;
}

// The rank of the sequence of a work tile: the last one that starts at or before it, of at most 32
// * 32. Called by a warp.
__device__ __forceinline__ int find_rank(const SharedStorage& shared, int batch, int index) {
  const int lane = threadIdx.x % 32;
  const int stride = ceil_div(batch, 32);
  const auto count_before = [&](int rank, int end) {
    return __popc(__ballot_sync(0xffffffff, rank < end && shared.start[rank] <= index));
  };
  const int first = max(count_before(lane * stride, batch) - 1, 0) * stride;
  if (stride == 1) {
    return first;
  }
  return first + max(count_before(first + lane, min(first + stride, batch)) - 1, 0);
}

// Keys of a section: keys and values that its heads read repeatedly fit in 36 MB of L2.
inline constexpr int kSectionKeys = (36 << 20) / ((kDim + kValueDim) * kElement);

// Describes the work tile at position `index` of the order, whose sequence has rank `rank`.
__device__ __forceinline__ void describe_work_tile(const SharedStorage& shared,
                                                   const Arguments& args, int index, int rank,
                                                   WorkTile& work_tile) {
  const Params& p = args.params;
  const Sequence& sequence = shared.sequences[rank];
  const int tiles = query_tiles(args, sequence);
  const int packs_of_head = args.group / args.pack;
  // KV heads per section.
  const int fitting = max(kSectionKeys / max(sequence.seqlen, 1), 1);
  const int sections = (p.heads_kv + fitting - 1) / fitting;
  const int heads = (p.heads_kv + sections - 1) / sections;
  const int section_work_tiles = tiles * heads * packs_of_head;
  const int in_sequence = index - shared.start[rank];
  const int section = in_sequence / section_work_tiles;
  const int in_section = in_sequence - section * section_work_tiles;
  const int packs = min(heads, p.heads_kv - section * heads) * packs_of_head;
  const int before = in_section / packs;
  const int pack_index = section * heads * packs_of_head + in_section - before * packs;
  work_tile.first_head = pack_index * args.pack;
  work_tile.kv_head = pack_index / packs_of_head;
  work_tile.first_key = sequence.first_key;
  // If the queries do not fill the tiles, the first tile has fewer warpgroups: it has the fewest
  // keys.
  const int rest = sequence.queries % args.tile_tokens;
  const int of_first = rest == 0 || args.from_first != 0
                           ? args.tile_tokens
                           : ceil_div(rest, args.warpgroup_tokens) * args.warpgroup_tokens;
  const int end = of_first + (tiles - 1 - before) * args.tile_tokens;
  const int first_query = max(end - args.tile_tokens, 0);
  work_tile.first_row = sequence.first_row + first_query;
  work_tile.queries = min(end, sequence.queries) - first_query;
  work_tile.seqlen = sequence.seqlen;
  work_tile.position = sequence.seqlen - sequence.queries + first_query;
  find_visible(Mask{p.left, p.right, sequence.seqlen}, args.warpgroup_tokens, work_tile);
}

// Finds the work tile at position `index` of the order. Called by a warp; `work_tile` is in shared
// memory.
__device__ __forceinline__ void find_work_tile(const SharedStorage& shared, const Arguments& args,
                                               int index, WorkTile& work_tile) {
  const int batch = opaque(args.params.batch);
  const bool exists = index < shared.start[batch];
  const int rank = exists ? find_rank(shared, batch, index) : 0;
  if (threadIdx.x % 32 == 0) {
    if (exists) {
      describe_work_tile(shared, args, index, rank, work_tile);
    } else {
      work_tile.end = -1;
    }
  }
}

// The next position in the order: from the counter, or round-robin. Called by one thread.
__device__ __forceinline__ int next_index(const Arguments& args, int index) {
  const int grid = static_cast<int>(gridDim.x);
  uint32_t* const counter = static_cast<uint32_t*>(args.params.workspace);
  return counter == nullptr ? index + grid : grid + static_cast<int>(atomicAdd(counter, 1u));
}

// Called when a CTA has found no work tile left: the last CTA resets the counter.
__device__ __forceinline__ void leave_counter(const Arguments& args) {
  uint32_t* const counter = static_cast<uint32_t*>(args.params.workspace);
  if (counter != nullptr && atomicInc(counter + 1, gridDim.x - 1) == gridDim.x - 1) {
    atomicExch(counter, 0u);
  }
}

}  // namespace ostinato::prefill
