// The lengths of all sequences, read and summed up by every CTA for itself.
#pragma once

#include "decode_arguments.cuh"
#include "decode_storage.cuh"

namespace ostinato::decode {

// What is known of each sequence once the lengths are read.
class Lengths {
 public:
  // The tables of this warp, or those of the CTA.
  __device__ Lengths(SharedStorage& shared, const Arguments& params)
      : shared_(shared),
        cu_seqlens_q_(params.cu_seqlens_q),
        max_seqlen_q_(params.max_seqlen_q),
        left_(params.left),
        base_(params.batch <= kFew ? warp_index() * (kFew + 1) : 0) {}

  static constexpr int kFew = 32;  // sequences that a warp reads for itself

  __device__ __forceinline__ int& start(int b) { return shared_.start[base_ + b]; }
  __device__ __forceinline__ int& length(int b) { return shared_.length[base_ + b]; }
  __device__ __forceinline__ int start(int b) const { return shared_.start[base_ + b]; }
  __device__ __forceinline__ int length(int b) const { return shared_.length[base_ + b]; }
  __device__ __forceinline__ int tiles(int b) const { return visible(b).tiles(kTileTokens); }

  __device__ __forceinline__ int queries(int b) const {
    if (cu_seqlens_q_ == nullptr) {
      return max_seqlen_q_;
    }
    return min(max(cu_seqlens_q_[b + 1] - cu_seqlens_q_[b], 0), max_seqlen_q_);
  }

  // Of q and out.
  __device__ __forceinline__ int first_row(int b) const {
    return cu_seqlens_q_ == nullptr ? b * max_seqlen_q_ : cu_seqlens_q_[b];
  }

  __device__ __forceinline__ Visible visible(int b) const {
    // Without a window the number of queries changes nothing; lengths are 0 where there is none.
    return Visible(length(b), left_ < 0 ? 1 : queries(b), left_);
  }

  // As read from global memory; zero without queries.
  __device__ __forceinline__ int read_length(const Arguments& params, int b) const {
    const int capacity = params.max_pages * params.page_size;
    const int length = min(max(params.seq_lens[b], 0), capacity);
    return queries(b) > 0 ? length : 0;
  }

 private:
  SharedStorage& shared_;
  const int32_t* cu_seqlens_q_;
  int max_seqlen_q_, left_, base_;
};

__device__ __forceinline__ int add_lower_lanes(int value) {
  const int lane = threadIdx.x % 32;
  int sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int lower = __shfl_up_sync(0xffffffff, sum, step);
    sum += lane >= step ? lower : 0;
  }
  return sum;
}

// The sequence of a place: the last one that starts at or before it. By a warp; at most 32 * 32
// sequences.
__device__ __forceinline__ int find_sequence(const Lengths& lengths, int batch, int place) {
  const int lane = threadIdx.x % 32;
  const int stride = ceil_div(batch, 32);
  const auto count_before = [&](int b, int last) {
    return __popc(__ballot_sync(0xffffffff, b < last && lengths.start(b) <= place));
  };
  const int first = max(count_before(lane * stride, batch) - 1, 0) * stride;
  if (stride == 1) {
    return first;
  }
  return first + max(count_before(first + lane, min(first + stride, batch)) - 1, 0);
}

// What a warp needs of the sequences before its own, or before its lanes' own.
struct Before {
  int live, tiles;
};

__device__ __forceinline__ Shares choose_shares(const Arguments& params, const Load& load) {
  return load.live == 0 ? Shares{1, 1}
                        : share_out(load, gridDim.x, params.by.grid, params.max_splits);
}

// Where a sequence starts on the line.
__device__ __forceinline__ int start_of(const Shares& shares, const Before& before) {
  return shares.room > 0 ? before.live * shares.room : before.tiles;
}

// Each warp has tables of its own, so no barrier of the CTA is needed.
__device__ __forceinline__ Shares read_few_lengths(Lengths& lengths, const Arguments& params) {
  const int lane = threadIdx.x % 32;
  int tiles = 0;
  if (lane < params.batch) {
    lengths.length(lane) = lengths.read_length(params, lane);
    tiles = lengths.tiles(lane);
  }
  const int sum = add_lower_lanes(tiles);
  const uint32_t live = __ballot_sync(0xffffffff, tiles > 0);
  const Load load{params.heads_kv, params.group * params.max_seqlen_q, __popc(live),
                  __shfl_sync(0xffffffff, sum, 31), __reduce_max_sync(0xffffffff, tiles)};
  const Shares shares = choose_shares(params, load);
  lengths.start(lane) = start_of(shares, {__popc(live & ((1u << lane) - 1)), sum - tiles});
  if (lane == 31) {
    lengths.start(32) = start_of(shares, {load.live, sum});
  }
  __syncwarp();
  return shares;
}

// Any number of sequences, a run of them by each thread.
__device__ __forceinline__ Shares read_many_lengths(SharedStorage& shared, Lengths& lengths,
                                                    const Arguments& params) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int b = threadIdx.x; b < params.batch; b += kThreads) {
    lengths.length(b) = lengths.read_length(params, b);
  }
  __syncthreads();
  const int run = ceil_div(params.batch, kThreads);
  const int begin = min(static_cast<int>(threadIdx.x) * run, params.batch);
  const int end = min(begin + run, params.batch);
  Before own{0, 0};
  int longest = 0;
#pragma unroll 1
  for (int b = begin; b < end; ++b) {
    const int tiles = lengths.tiles(b);
    own = {own.live + (tiles > 0), own.tiles + tiles};
    longest = max(longest, tiles);
  }
  const Before sum{add_lower_lanes(own.live), add_lower_lanes(own.tiles)};
  longest = __reduce_max_sync(0xffffffff, longest);
  if (lane == 31) {
    shared.load[warp] = make_int4(sum.live, sum.tiles, longest, 0);
  }
  __syncthreads();
  Load load{params.heads_kv, params.group * params.max_seqlen_q, 0, 0, 0};
  Before before{sum.live - own.live, sum.tiles - own.tiles};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const int4 part = shared.load[w];
    if (w < warp) {
      before = {before.live + part.x, before.tiles + part.y};
    }
    load.live += part.x;
    load.tiles += part.y;
    load.longest = max(load.longest, part.z);
  }
  const Shares shares = choose_shares(params, load);
#pragma unroll 1
  for (int b = begin; b < end; ++b) {
    const int tiles = lengths.tiles(b);
    lengths.start(b) = start_of(shares, before);
    before = {before.live + (tiles > 0), before.tiles + tiles};
  }
  if (threadIdx.x == 0) {
    lengths.start(params.batch) = start_of(shares, {load.live, load.tiles});
  }
  __syncthreads();
  return shares;
}

// Fills the tables and chooses the shares.
__device__ __forceinline__ Shares read_lengths(SharedStorage& shared, Lengths& lengths,
                                               const Arguments& params) {
  return params.batch <= Lengths::kFew ? read_few_lengths(lengths, params)
                                       : read_many_lengths(shared, lengths, params);
}

}  // namespace ostinato::decode
