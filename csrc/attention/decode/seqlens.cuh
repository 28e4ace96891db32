// Sequence lengths and their prefix sums. Every CTA reads and sums all lengths for itself.
#pragma once

#include "cluster_ops.cuh"
#include "common/sm_index.cuh"
#include "kernel_args.cuh"
#include "shared_storage.cuh"

namespace ostinato::decode {

// Per-sequence data that is known once the lengths are read.
class Seqlens {
 public:
  // Uses the tables of this warp (few sequences) or of the CTA.
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

  // The sequence's first row of q and out.
  __device__ __forceinline__ int first_row(int b) const {
    return cu_seqlens_q_ == nullptr ? b * max_seqlen_q_ : cu_seqlens_q_[b];
  }

  __device__ __forceinline__ Visible visible(int b) const {
    // Without a window, the number of queries is irrelevant: lengths are 0 if there are no queries.
    return Visible(seqlen(b), left_ < 0 ? 1 : queries(b), left_);
  }

  // Clamps a length from global memory; 0 for sequences without queries.
  __device__ __forceinline__ int seqlen_of(const Arguments& params, int b, int raw) const {
    const int capacity = params.max_pages * params.page_size;
    return queries(b) > 0 ? min(max(raw, 0), capacity) : 0;
  }
  __device__ __forceinline__ int read_seqlen(const Arguments& params, int b, bool early) const {
    return seqlen_of(params, b, read_table(params.seq_lens + b, early));
  }

  // Raw table entries: of the sequence of this thread's lane or, for many sequences, of this
  // thread's share. Only kernels with a dynamic scheduler load the whole share before using it.
  struct Raw {
    int of[kMayScheduleDynamically ? kMaxBatch / kThreads : 1];
    uint32_t partitions;  // L2 partitions of the first pages, one bit each
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
        raw.partitions |= partition_of_page(params.l2_partition, pages[i]) << i;
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
        const uint32_t bits = __ballot_sync(0xffffffff, raw.partitions >> i & 1);
        if (threadIdx.x % 32 == 0) {
          shared_.partitions[own(params, i) / 32] = bits;
        }
      }
    }
  }

  // The KV head that the schedulers' head index denotes.
  __device__ __forceinline__ int head(int b, int line_index) const {
    return by_l2_partition(params_) ? head_on_line(params_.l2_partition, line_index, partition(b))
                                    : line_index;
  }
  // The CTA's (or cluster's) number in the schedule.
  __device__ __forceinline__ int number() const {
    return by_l2_partition(params_) ? shared_.number : cluster_index();
  }
  // The L2 partition of this SM.
  __device__ __forceinline__ uint32_t own_partition() const { return shared_.partition; }
  // Assigns number() by L2 partition. Called by one thread before the preceding kernel has ended
  // and before a barrier of the CTA. The last CTA resets the counter; no successor can have started
  // before.
  __device__ __forceinline__ void take_number(uint32_t* counter) {
    const uint32_t sm = sm_index();
    const uint32_t bits = sm < 32 * L2Partition::kSmWords ? params_.l2_partition.sms[sm / 32] : 0;
    const uint32_t partition = bits >> sm % 32 & 1;
    const uint32_t taken = atomicAdd(counter, PartitionTickets::step(partition));
    if (PartitionTickets::count(taken) == gridDim.x - 1) {
      *counter = 0;
      __threadfence();
    }
    shared_.partition = partition;
    shared_.number = PartitionTickets::number(taken, partition, static_cast<int>(gridDim.x / 2));
  }
  // Whether any raw entry differs from the table.
  __device__ __forceinline__ bool differ(const Arguments& params, const Raw& raw) const {
    bool some = false;
    if (kMayScheduleDynamically || params.batch <= kFew) {
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        const int b = own(params, i);
        some |= b < params.batch && seqlen(b) != seqlen_of(params, b, raw.of[i]);
        some |= b < params.batch && by_l2_partition(params) &&
                partition(b) != (raw.partitions >> i & 1);
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

  // The L2 partition that holds head 0 of the sequence's first page.
  __device__ __forceinline__ uint32_t partition(int b) const {
    return shared_.partitions[b / 32] >> b % 32 & 1;
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

// The last sequence that starts at or before a position. Called by a warp; at most 32 * 32
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

// Sums over the sequences before those of a thread.
struct Before {
  int live, tiles;
};

}  // namespace ostinato::decode
