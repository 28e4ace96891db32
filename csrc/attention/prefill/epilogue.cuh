// The epilogue of a work tile: writes rows of out through shared memory, and their LSE.
#pragma once

#include "common/pack_pair.cuh"
#include "common/tma.cuh"
#include "score_fragment.cuh"
#include "smem_operands.cuh"

namespace ostinato::prefill {

// Maps a row of a warpgroup (0 to 63) to a query of the work tile and one of its heads.
struct RowOf {
  int query, head;

  __device__ __forceinline__ RowOf(const Arguments& args, int warpgroup, int row) {
    const int token = row * args.reciprocal >> 16;
    head = row - token * args.pack;
    // If `pack` does not divide 64, the last rows are unused.
    query = token < args.warpgroup_tokens ? warpgroup * args.warpgroup_tokens + token : INT32_MAX;
  }
};

// The factor that normalises a row's outputs, including the sink; writes the row's LSE.
__device__ __forceinline__ float finish_row(const Arguments& args, const WorkTile& work_tile,
                                            const RowOf& row, bool writes, float maximum,
                                            float total) {
  const Params& p = args.params;
  const int head = work_tile.first_head + row.head;
  float factor = 1;
  if (total == 0) {
    maximum = -INFINITY;
  } else if (p.sinks != nullptr) {
    const float sink = p.sinks[head] * kLog2E;
    const float top = fmaxf(maximum, sink);
    factor = power_of_2(maximum - top);
    total = total * factor + power_of_2(sink - top);
    maximum = top;
  }
  if (writes && p.lse.data != nullptr) {
    const int64_t token = work_tile.first_row + row.query;
    static_cast<float*>(p.lse.data)[token * p.lse.stride + head * p.lse.head_stride] =
        total == 0 ? -INFINITY : (maximum + log2f(total)) * kLn2;
  }
  return total == 0 ? 0.0f : __fdividef(factor, total);
}

class Epilogue {
 public:
  __device__ Epilogue(SharedStorage& shared, const Arguments& args, const CUtensorMap& map,
                      int warpgroup)
      : shared_(shared), args_(args), map_(map), warpgroup_(warpgroup) {}

  // Writes the warpgroup's rows of the work tile, whose queries are in `buffer`. Returns once the
  // stores are issued; after wait_read() they have left shared memory.
  template <class Softmax>
  __device__ __forceinline__ void store(const WorkTile& work_tile, int buffer, Softmax& softmax,
                                        float (&outputs)[kOutputs]) {
    rows_ = output_of(shared_, buffer, warpgroup_);
    softmax.end();
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowOf row(args_, warpgroup_, row_of_thread(half));
      const bool valid = row.query < work_tile.queries;
      factor[half] =
          finish_row(args_, work_tile, valid ? row : RowOf(args_, 0, 0),
                     valid && threadIdx.x % 4 == 0, softmax.maximum(half), softmax.total(half));
    }
    // The query buffer is no longer read: all threads of the warpgroup have synchronised in a turn
    // after the work tile's last QK MMAs (consumer.cuh).
    if constexpr (!kShareOutput || kFp8) {
      wait_read();
      sync_warpgroup(warpgroup_);
    }
    store_pass<0>(work_tile, outputs, factor);
    if constexpr (kPasses == 2) {
      wait_read();
      sync_warpgroup(warpgroup_);
      store_pass<1>(work_tile, outputs, factor);
    }
  }

  // Writes the rows of a work tile without visible keys directly to global memory: a shared buffer
  // of output and queries may already hold the next work tile's queries.
  __device__ __forceinline__ void store_nothing(const WorkTile& work_tile) const {
    constexpr int kVectors = kValueDim / 8;
#pragma unroll 1
    for (int i = threadIdx.x % kWarpgroup; i < kRows * kVectors; i += kWarpgroup) {
      const RowOf row(args_, warpgroup_, i / kVectors);
      if (row.query < work_tile.queries) {
        store_vector(work_tile, row, i % kVectors, make_uint4(0, 0, 0, 0));
        if (i % kVectors == 0) {
          finish_row(args_, work_tile, row, true, kNothing, 0);
        }
      }
    }
  }

  // Waits until TMA has read the output from shared memory. (Only one thread issues TMA stores.)
  __device__ __forceinline__ void wait_read() const {
    if (threadIdx.x % kWarpgroup == 0) {
      wait_stores_read<0>();
    }
  }

 private:
  // Sizes of one pass.
  static constexpr int kPassColumns = kValueDim / kPasses;
  static constexpr int kPassStrips = kOutputStrips / kPasses;
  static_assert(kPasses <= 2 && kOutputStrips % kPasses == 0, "passes have whole strips");

  template <int kPass>
  __device__ __forceinline__ void store_pass(const WorkTile& work_tile,
                                             const float (&outputs)[kOutputs],
                                             const float (&factor)[2]) const {
    write_rows<kPass>(outputs, factor);
    fence_shared_for_tma();
    OSTINATO_DELAY(prefill_epilogue_store, threadIdx.x % kWarpgroup / 32 == 1);
    sync_warpgroup(warpgroup_);
    const int first = warpgroup_ * args_.warpgroup_tokens;
    if (first + args_.warpgroup_tokens <= work_tile.queries) {
      copy_rows<kPass>(work_tile, first);
    } else {
      store_rows<kPass>(work_tile);
      sync_warpgroup(warpgroup_);  // they have left shared memory
    }
  }

  // Writes rows to shared memory with TMA's swizzle. Of every 16 columns, a warp has four 8 x 8
  // matrices: both halves of its rows, for the first 8 columns and for the others.
  template <int kPass>
  __device__ __forceinline__ void write_rows(const float (&outputs)[kOutputs],
                                             const float (&factor)[2]) const {
    const int lane = threadIdx.x % 32;
    const int row = threadIdx.x % kWarpgroup / 32 * 16 + lane % 16;
    uint8_t* const begin = rows_ + row * kStripBytes;
#pragma unroll
    for (int step = 0; step < kPassColumns / 16; ++step) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = &outputs[kPass * kPassColumns / 2 + step * 8 + i * 2];
        words[i] = pack_pair<OutType>(pair[0] * factor[i % 2], pair[1] * factor[i % 2]);
      }
      const int vector = (step * 2 % 8 + lane / 16) ^ row % 8;
      store_matrices(begin + step / 4 * kRowStrip + vector * 16, words);
    }
  }

  // TMA store, if all rows are queries.
  template <int kPass>
  __device__ __forceinline__ void copy_rows(const WorkTile& work_tile, int first) const {
    if (threadIdx.x % kWarpgroup == 0) {
#pragma unroll
      for (int strip = 0; strip < kPassStrips; ++strip) {
        tma_store(map_, rows_ + strip * kRowStrip, (kPass * kPassStrips + strip) * kOutputStripDim,
                  work_tile.first_head, work_tile.first_row + first);
      }
      commit_stores();
    }
  }

  __device__ __forceinline__ void store_vector(const WorkTile& work_tile, const RowOf& row,
                                               int vector, const uint4& words) const {
    const Params& p = args_.params;
    OutType* const out = static_cast<OutType*>(p.out.data) +
                         int64_t{work_tile.first_row + row.query} * p.out.stride +
                         int64_t{work_tile.first_head + row.head} * p.out.head_stride;
    *reinterpret_cast<uint4*>(out + vector * 8) = words;
  }

  // Otherwise stores by threads, which write nothing past the last query.
  template <int kPass>
  __device__ __forceinline__ void store_rows(const WorkTile& work_tile) const {
    constexpr int kVectors = kPassColumns / 8;
#pragma unroll 1
    for (int i = threadIdx.x % kWarpgroup; i < kRows * kVectors; i += kWarpgroup) {
      const int in_half = i / kVectors, vector = i % kVectors;
      const RowOf row(args_, warpgroup_, in_half);
      if (row.query < work_tile.queries) {
        const uint8_t* const from = rows_ + vector / 8 * kRowStrip + in_half * kStripBytes;
        store_vector(work_tile, row, kPass * kVectors + vector,
                     *reinterpret_cast<const uint4*>(from + (vector % 8 ^ in_half % 8) * 16));
      }
    }
  }

  SharedStorage& shared_;
  const Arguments& args_;
  const CUtensorMap& map_;
  const int warpgroup_;
  uint8_t* rows_;
};

}  // namespace ostinato::prefill
