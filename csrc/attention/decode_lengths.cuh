// The lengths of all sequences, read and summed up by every CTA for itself.
#pragma once

#include "decode_schedule.cuh"
#include "decode_storage.cuh"

namespace ostinato::decode {

// What is known of each sequence once the lengths are read.
class Lengths {
 public:
  __device__ Lengths(const Arguments& params, const int* start, const int* length)
      : params_(params), start_(start), length_(length) {}

  __device__ __forceinline__ int start(int b) const { return start_[b]; }
  __device__ __forceinline__ int length(int b) const { return length_[b]; }
  __device__ __forceinline__ int tiles(int b) const { return visible(b).tiles(kTileTokens); }

  __device__ __forceinline__ int queries(int b) const { return count_queries(params_, b); }

  // Of q and out.
  __device__ __forceinline__ int first_row(int b) const {
    return params_.cu_seqlens_q == nullptr ? b * params_.max_seqlen_q : params_.cu_seqlens_q[b];
  }

  __device__ __forceinline__ Visible visible(int b) const {
    // Without a window the number of queries changes nothing; lengths are 0 where there is none.
    return Visible(length(b), params_.left < 0 ? 1 : queries(b), params_.left);
  }

  static __device__ __forceinline__ int count_queries(const Arguments& params, int b) {
    if (params.cu_seqlens_q == nullptr) {
      return params.max_seqlen_q;
    }
    return min(max(params.cu_seqlens_q[b + 1] - params.cu_seqlens_q[b], 0), params.max_seqlen_q);
  }

  // As read from global memory; zero without queries.
  static __device__ __forceinline__ int read_length(const Arguments& params, int b) {
    const int capacity = params.max_pages * params.page_size;
    const int length = min(max(params.seq_lens[b], 0), capacity);
    return count_queries(params, b) > 0 ? length : 0;
  }

 private:
  const Arguments& params_;
  const int* start_;
  const int* length_;
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

// Fills the tables and chooses the shares: a few sequences by each warp for itself, without a
// barrier of the CTA.
__device__ __forceinline__ Lengths read_lengths(SharedStorage& shared, const Arguments& params,
                                                Shares* shares) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int grid = gridDim.x;
  if (params.batch <= 32) {
    int* const start = shared.start + warp * 33;
    int* const length = shared.length + warp * 32;
    int tiles = 0;
    if (lane < params.batch) {
      length[lane] = Lengths::read_length(params, lane);
      tiles = Lengths(params, start, length).tiles(lane);
    }
    const int sum = add_lower_lanes(tiles);
    const uint32_t live = __ballot_sync(0xffffffff, tiles > 0);
    const Load load{params.heads_kv, __popc(live), __shfl_sync(0xffffffff, sum, 31),
                    __reduce_max_sync(0xffffffff, tiles)};
    *shares = load.live == 0 ? Shares{1, 1}
                             : share_out(load, kColumns, grid, params.by.grid, params.max_splits);
    const uint32_t lower = (1u << lane) - 1;
    start[lane] = shares->room > 0 ? __popc(live & lower) * shares->room : sum - tiles;
    if (lane == 31) {
      start[32] = shares->room > 0 ? load.live * shares->room : sum;
    }
    __syncwarp();
    return Lengths(params, start, length);
  }

  for (int b = threadIdx.x; b < params.batch; b += kThreads) {
    shared.length[b] = Lengths::read_length(params, b);
  }
  __syncthreads();
  const Lengths lengths(params, shared.start, shared.length);
  const int run = ceil_div(params.batch, kThreads);
  const int begin = min(static_cast<int>(threadIdx.x) * run, params.batch);
  const int end = min(begin + run, params.batch);
  int tiles = 0, live = 0, longest = 0;
  for (int b = begin; b < end; ++b) {
    const int n = lengths.tiles(b);
    tiles += n;
    live += n > 0;
    longest = max(longest, n);
  }
  const int tile_sum = add_lower_lanes(tiles);
  const int live_sum = add_lower_lanes(live);
  longest = __reduce_max_sync(0xffffffff, longest);
  if (lane == 31) {
    shared.load[warp] = make_int4(live_sum, tile_sum, longest, 0);
  }
  __syncthreads();
  Load load{params.heads_kv, 0, 0, 0};
  int live_before = live_sum - live, tiles_before = tile_sum - tiles;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const int4 part = shared.load[w];
    live_before += w < warp ? part.x : 0;
    tiles_before += w < warp ? part.y : 0;
    load.live += part.x;
    load.tiles += part.y;
    load.longest = max(load.longest, part.z);
  }
  *shares = load.live == 0 ? Shares{1, 1}
                           : share_out(load, kColumns, grid, params.by.grid, params.max_splits);
  for (int b = begin; b < end; ++b) {
    const int n = lengths.tiles(b);
    shared.start[b] = shares->room > 0 ? live_before * shares->room : tiles_before;
    live_before += n > 0;
    tiles_before += n;
  }
  if (threadIdx.x == 0) {
    shared.start[params.batch] = shares->room > 0 ? load.live * shares->room : load.tiles;
  }
  __syncthreads();
  return lengths;
}

}  // namespace ostinato::decode
