// The lengths of all sequences, read from global memory and summed up by every CTA for itself.
#pragma once

#include "cluster_ops.cuh"
#include "common/sm_index.cuh"
#include "kernel_args.cuh"
#include "shared_storage.cuh"

namespace ostinato::decode {

// What is known of each sequence once the lengths are read.
class Seqlens {
 public:
  // The tables of this warp, or those of the CTA.
  __device__ Seqlens(SharedStorage& shared, const Arguments& params)
      : shared_(shared),
        params_(params),
        cu_seqlens_q_(params.cu_seqlens_q),
        max_seqlen_q_(params.max_seqlen_q),
        left_(params.left),
        base_(params.batch <= kFew ? warp_index() * (kFew + 1) : 0) {}

  static constexpr int kFew = kFewSequences;

  __device__ __forceinline__ int& start(int b) { return shared_.start[base_ + b]; }
  __device__ __forceinline__ int& seqlen(int b) { return shared_.seqlen[base_ + b]; }
  __device__ __forceinline__ int start(int b) const { return shared_.start[base_ + b]; }
  __device__ __forceinline__ int seqlen(int b) const { return shared_.seqlen[base_ + b]; }
  __device__ __forceinline__ int tiles(int b) const {
    return visible(b).tiles(kTileTokens, kFirstTileTokens);
  }

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
    return Visible(seqlen(b), left_ < 0 ? 1 : queries(b), left_);
  }

  // Of a number in global memory; zero without queries.
  __device__ __forceinline__ int seqlen_of(const Arguments& params, int b, int raw) const {
    const int capacity = params.max_pages * params.page_size;
    return queries(b) > 0 ? min(max(raw, 0), capacity) : 0;
  }
  __device__ __forceinline__ int read_seqlen(const Arguments& params, int b, bool early) const {
    return seqlen_of(params, b, read_table(params.seq_lens + b, early));
  }

  // Numbers in global memory: of the sequence of this thread's lane or, of many, of its share of
  // them. Only kernels with a dynamic scheduler read all of those before they use any.
  struct Raw {
    int of[kMayScheduleDynamically ? kMaxBatch / kThreads : 1];
    uint32_t halves;  // of their first pages, a bit each, where they are known
  };
  __device__ __forceinline__ Raw read(const Arguments& params, bool early) const {
    Raw raw = {};
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      const int b = own(params, i);
      if (b < params.batch) {
        raw.of[i] = read_table(params.seq_lens + b, early);
      }
    }
    if (by_l2_partition(params)) {
      int pages[kReads] = {};
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        const int b = own(params, i);
        if (b < params.batch) {
          pages[i] = read_table(params.page_table + b * params.page_table_stride, early);
        }
      }
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        raw.halves |= partition_of_page(params.halves, pages[i]) << i;
      }
    }
    return raw;
  }
  // Fills the table.
  __device__ __forceinline__ void set(const Arguments& params, const Raw& raw) {
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      const int b = own(params, i);
      if (b < params.batch) {
        seqlen(b) = seqlen_of(params, b, raw.of[i]);
      }
    }
    if (by_l2_partition(params)) {
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        const uint32_t bits = __ballot_sync(0xffffffff, raw.halves >> i & 1);
        if (threadIdx.x % 32 == 0) {
          shared_.halves[own(params, i) / 32] = bits;
        }
      }
    }
  }

  // Of the schedule's heads.
  __device__ __forceinline__ int head(int b, int line_index) const {
    return by_l2_partition(params_) ? head_on_line(params_.halves, line_index, half(b))
                                    : line_index;
  }
  // The number of the CTA, or cluster, in the schedule.
  __device__ __forceinline__ int number() const {
    return by_l2_partition(params_) ? shared_.number : cluster_index();
  }
  // The half that the SM is on.
  __device__ __forceinline__ uint32_t own_partition() const { return shared_.half; }
  // Takes that number, by one thread, before the predecessor has ended and before a barrier of the
  // CTA. The last CTA has the counter as it was: no successor starts before it has been here.
  __device__ __forceinline__ void take_number(uint32_t* counter) {
    const uint32_t sm = sm_index();
    const uint32_t bits = sm < 32 * L2Partition::kSmWords ? params_.halves.sms[sm / 32] : 0;
    const uint32_t half = bits >> sm % 32 & 1;
    const uint32_t taken = atomicAdd(counter, PartitionTickets::step(half));
    if (PartitionTickets::count(taken) == gridDim.x - 1) {
      *counter = 0;
      __threadfence();
    }
    shared_.half = half;
    shared_.number = PartitionTickets::number(taken, half, static_cast<int>(gridDim.x / 2));
  }
  // Whether one of them is not as it is in the table.
  __device__ __forceinline__ bool differ(const Arguments& params, const Raw& raw) const {
    bool some = false;
    if (kMayScheduleDynamically || params.batch <= kFew) {
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        const int b = own(params, i);
        some |= b < params.batch && seqlen(b) != seqlen_of(params, b, raw.of[i]);
        some |= b < params.batch && by_l2_partition(params) && half(b) != (raw.halves >> i & 1);
      }
      return some;
    }
#pragma unroll 1
    for (int b = threadIdx.x; b < params.batch; b += kThreads) {
      some |= seqlen(b) != read_seqlen(params, b, false);
    }
    return some;
  }

 private:
  static constexpr int kReads = kMayScheduleDynamically ? kMaxBatch / kThreads : 1;

  // The i-th sequence that this thread reads.
  static __device__ __forceinline__ int own(const Arguments& params, int i) {
    const bool by_lane = !kMayScheduleDynamically || params.batch <= kFew;
    return static_cast<int>(by_lane ? threadIdx.x % 32 : threadIdx.x) + i * kThreads;
  }

  // The half that holds head 0 of the first page.
  __device__ __forceinline__ uint32_t half(int b) const {
    return shared_.halves[b / 32] >> b % 32 & 1;
  }

  SharedStorage& shared_;
  const Arguments& params_;
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
__device__ __forceinline__ int find_sequence(const Seqlens& seqlens, int batch, int line_index) {
  const int lane = threadIdx.x % 32;
  const int stride = ceil_div(batch, 32);
  const auto count_before = [&](int b, int last) {
    return __popc(__ballot_sync(0xffffffff, b < last && seqlens.start(b) <= line_index));
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

}  // namespace ostinato::decode
