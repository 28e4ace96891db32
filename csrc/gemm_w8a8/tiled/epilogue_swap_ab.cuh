// The swap-AB epilogue of the tiled GEMM, with channels as MMA rows: results are transposed in
// shared memory into rows of out. (The formula: epilogue_math.cuh.)
#pragma once

#include "common/mbarrier.cuh"
#include "common/tma.cuh"
#include "epilogue_argmax.cuh"
#include "epilogue_math.cuh"
#include "tile_scheduler.cuh"
#include "wgmma.cuh"

namespace ostinato::tiled {

class Epilogue {
  static constexpr int kChunkSums = kChunkTokens / 2;   // per thread
  static constexpr int kChunkPairs = kChunkTokens / 4;  // of a thread's results

 public:
  __device__ Epilogue(const W8A8GemmParams& params, const Plan& plan, const CUtensorMap& out_map,
                      FixedStorage& fixed, int warpgroup)
      : params_(params),
        plan_(plan),
        out_map_(out_map),
        fixed_(fixed),
        warpgroup_(warpgroup),
        thread_(threadIdx.x % kWarpgroup) {}

  // Loads scales and bias of this thread's channels.
  __device__ __forceinline__ void fetch_channels(const WorkTile& work_tile) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int channel = channel_of_thread(work_tile, block, half);
        w_scale_[block][half] = w_scale_of(params_, channel);
        bias_[block][half] = channel < params_.n && params_.bias != nullptr
                                 ? to_float(static_cast<const Output*>(params_.bias)[channel])
                                 : 0.0F;
      }
    }
  }

  // Copies the scales of the tile's tokens to shared memory during the mainloop.
  __device__ __forceinline__ void fetch_tokens(const WorkTile& work_tile) {
    if (kFindsArgmax && params_.best != nullptr && work_tile.token != known_token_) {
      known_token_ = work_tile.token;
      read_chunks_ = chunks_read(params_, plan_, work_tile);
    }
    for (int i = thread_; kResultScales && i < kTokens; i += kWarpgroup) {
      const int token = work_tile.token + i;
      const bool inside = token < params_.m;
      const int64_t offset = inside ? int64_t(token) * params_.x_scale_stride : 0;
      copy_word_async(&fixed_.epilogue.x_scale[warpgroup_][i], params_.x_scale + offset, inside);
    }
  }

  // Writes the accumulators of kCount tokens from `first` on, counted in the tile.
  template <int kCount>
  __device__ __forceinline__ void store(const WorkTile& work_tile, int first,
                                        Sum (&sums)[kBlocks][kCount / 2]) {
    begin<kCount>(work_tile, first, sums);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if ((warpgroup_in_tile(warpgroup_) * kBlocks + block) * kMmaRows >= plan_.tile_channels) {
        break;  // past the end of this tile
      }
      if (block > 0) {
        free_chunks();
      }
#pragma unroll
      for (int chunk = 0; chunk < kCount / kChunkTokens; ++chunk) {
        const int token = first + chunk * kChunkTokens;
        if (token < plan_.tile_tokens) {
          const int buffer = chunk % kChunks;
          transpose(buffer, token, block, &sums[block][chunk * kChunkSums]);
          OSTINATO_DELAY(epilogue_transpose, thread_ / 32 == 1);
          if (!kFindsArgmax || read_chunks_ >> (token / kChunkTokens) & 1) {
            write_chunk(buffer, work_tile, token, block);
          } else {
            free_chunks();
          }
          // The last cluster may have a surplus tile.
          if (kFindsArgmax && params_.best != nullptr && work_tile.channel < params_.n) {
            const int slice = warpgroup_in_tile(warpgroup_) * kBlocks + block;
            store_argmax(params_, plan_, work_tile, slice, token, thread_, [&](int row, int byte) {
              return this->chunk(buffer) + chunk_offset(row, byte);
            });
          }
        }
      }
    }
    end();
  }

  // Writes a tile, or keeps its results to be stored during the next tile's mainloop.
  template <bool kDefer = kDeferStores>
  __device__ __forceinline__ void store_tile(const WorkTile& work_tile,
                                             Sum (&sums)[kBlocks][kSums]) {
    if constexpr (kDefer) {
      // Only TMA stores are deferred, since they cost no time of the warps.
      if (plan_.whole_blocks &&
          keeps_to_tile(work_tile, round_up(plan_.tile_tokens, kChunkTokens))) {
        defer<Output>(work_tile, sums);
        return;
      }
    }
    store<kTileColumns>(work_tile, 0, sums);
  }

  // During a mainloop, stores the previous tile: one chunk every few steps, since the TMA unit that
  // reads it also fills the ring.
  __device__ __forceinline__ void store_deferred(int step) {
    const int next = chunks_before(step);
    if (kDeferStores && next << plan_.store_shift == step && next < deferred_chunks_) {
#pragma unroll
      for (int chunk = 0; chunk < kTileChunks; ++chunk) {
        if (chunk == next) {
          store_deferred_chunk(chunk);
        }
      }
    }
  }

  // Stores the chunks that remain after the last step.
  __device__ __forceinline__ void store_deferred_from(int steps) {
    const int next = chunks_before(steps);
    if (kDeferStores && next < deferred_chunks_) {
#pragma unroll
      for (int chunk = 0; chunk < kTileChunks; ++chunk) {
        if (chunk >= next && chunk < deferred_chunks_) {
          store_deferred_chunk(chunk);
        }
      }
    }
    // The compiler cannot tell that these registers are free now.
    deferred_chunks_ = 0;
#pragma unroll
    for (uint32_t& pair : deferred_) {
      pair = 0;
    }
  }

  // Waits for stores that read shared memory, which must outlive them.
  __device__ __forceinline__ void finish() {
    store_deferred_from(0);
    if (thread_ == 0) {
      wait_stores_read<0>();
    }
  }

 private:
  static constexpr int kVectorBytes = 16;

  __device__ __forceinline__ void sync_warpgroup() { sync_named(1 + warpgroup_, kWarpgroup); }

  // Waits until all chunk buffers have been read.
  __device__ __forceinline__ void free_chunks() {
    if (thread_ == 0) {
      wait_stores_read<0>();
    }
    sync_warpgroup();
  }

  // Computes the results of a tile and keeps them for store_deferred().
  template <class Out>
  __device__ __forceinline__ void defer(const WorkTile& work_tile, Sum (&sums)[kBlocks][kSums]) {
    begin<kTileColumns>(work_tile, 0, sums);
#pragma unroll
    for (int chunk = 0; chunk < kTileChunks; ++chunk) {
      pack<Out>(chunk * kChunkTokens, 0, &sums[0][chunk * kChunkSums],
                &deferred_[chunk * kChunkPairs]);
    }
    const bool inside = warpgroup_in_tile(warpgroup_) * kMmaRows < plan_.tile_channels;
    deferred_chunks_ = inside ? ceil_div(plan_.tile_tokens, kChunkTokens) : 0;
    deferred_channel_ = first_channel(work_tile, 0);
    deferred_token_ = work_tile.token;
    end();
  }

  // How many chunks of the previous tile are stored before a step.
  __device__ __forceinline__ int chunks_before(int step) const {
    return (step + (1 << plan_.store_shift) - 1) >> plan_.store_shift;
  }

  __device__ __forceinline__ void store_deferred_chunk(int chunk) {
    const int buffer = chunk % kChunks;
    write_rows(buffer, &deferred_[chunk * kChunkPairs]);
    OSTINATO_DELAY(epilogue_transpose, thread_ / 32 == 1);
    store_by_tma(buffer, deferred_channel_, deferred_token_ + chunk * kChunkTokens);
  }

  template <int kCount>
  __device__ __forceinline__ void begin(const WorkTile& work_tile, int first,
                                        Sum (&sums)[kBlocks][kCount / 2]) {
    wait_async_copies();
    free_chunks();
    if (kInt8 && params_.x_zero_point != nullptr) {
      subtract_zero_points<kCount>(work_tile, first, sums);
    }
  }

  // The next tile overwrites the tokens' scales, which a slow warp may still be reading.
  __device__ __forceinline__ void end() { sync_warpgroup(); }

  // Whether no token before `end`, counted in the tile, belongs to the next tile.
  __device__ __forceinline__ bool keeps_to_tile(const WorkTile& work_tile, int end) const {
    return end <= plan_.tile_tokens || work_tile.token + plan_.tile_tokens >= params_.m;
  }

  __device__ __forceinline__ int first_channel(const WorkTile& work_tile, int block) const {
    return work_tile.channel + (warpgroup_in_tile(warpgroup_) * kBlocks + block) * kMmaRows;
  }

  // One of the two channels of a block whose accumulators the thread holds.
  __device__ __forceinline__ int channel_of_thread(const WorkTile& work_tile, int block,
                                                   int half) const {
    return first_channel(work_tile, block) + thread_ / 32 * 16 + half * 8 + thread_ % 32 / 4;
  }

  // Not prefetched into registers like the scales: few calls have zero points, and all would pay.
  template <int kCount>
  __device__ __forceinline__ void subtract_zero_points(const WorkTile& work_tile, int first,
                                                       Sum (&sums)[kBlocks][kCount / 2]) {
    int32_t* const zero_points = fixed_.epilogue.x_zero_point[warpgroup_];
    for (int i = thread_; i < kTokens; i += kWarpgroup) {
      const int token = work_tile.token + i;
      zero_points[i] = token < params_.m
                           ? params_.x_zero_point[int64_t(token) * params_.x_zero_point_stride]
                           : 0;
    }
    sync_warpgroup();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      uint32_t w_sum[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int channel = channel_of_thread(work_tile, block, half);
        w_sum[half] = channel < params_.n ? params_.w_sum[channel] : 0;
      }
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        const int token = first + i / 4 * 8 + thread_ % 4 * 2 + i % 2;
        // Unsigned, since the product alone may overflow; the difference never does.
        sums[block][i] -= static_cast<uint32_t>(zero_points[token]) * w_sum[i / 2 % 2];
      }
    }
  }

  // Results of two adjacent tokens of one channel.
  __device__ __forceinline__ float2 scaled(const Sum* sums, float2 x_scale, int block,
                                           int half) const {
    const float w_scale = w_scale_[block][half];
    const float bias = bias_[block][half];
    return make_float2(fmaf(x_scale.x, w_scale * to_float(sums[0]), bias),
                       fmaf(x_scale.y, w_scale * to_float(sums[1]), bias));
  }

  // Offset of a byte of a chunk's row, with TMA's swizzle, which also spreads rows over banks.
  __device__ __forceinline__ uint32_t chunk_offset(int row, int byte) const {
    const int vector = byte % kStripBytes / kVectorBytes;
    return (byte / kStripBytes * kChunkTokens + row) * kStripBytes +
           (vector ^ (row % 8)) * kVectorBytes + byte % kVectorBytes;
  }

  __device__ __forceinline__ uint8_t* chunk(int buffer) {
    return &fixed_.epilogue.chunk[warpgroup_][buffer][0][0][0];
  }

  // The thread's token scales from `token` of the tile on: two of every eight.
  __device__ __forceinline__ const float* x_scales(int token) const {
    return &fixed_.epilogue.x_scale[warpgroup_][token + thread_ % 4 * 2];
  }

  // Packs the results of a chunk, from `token` of the tile on, for write_rows().
  template <class Out>
  __device__ __forceinline__ void pack(int token, int block, const Sum* sums,
                                       uint32_t* packed) const {
    const float* const x_scale = x_scales(token);
#pragma unroll
    for (int i = 0; i < kChunkPairs; ++i) {
      const float2 scale = two_scales(x_scale + i / 2 * 8);
      const float2 y = scaled(sums + i * 2, scale, block, i % 2);
      packed[i] = pack_pair<Out>(y.x, y.y);
    }
  }

  // Writes a packed chunk to shared memory, one row per token.
  __device__ __forceinline__ void write_rows(int buffer, const uint32_t* packed) {
    const int lane = thread_ % 32;
    const uint32_t rows = shared_address(chunk(buffer));
    const int row = lane / 16 * 8 + lane % 8;
    const int column = thread_ / 32 * 16 + lane / 8 % 2 * 8;
#pragma unroll
    for (int i = 0; i < kChunkPairs; i += 4) {
      store_transposed(rows + chunk_offset(i * 4 + row, column * 2), packed[i], packed[i + 1],
                       packed[i + 2], packed[i + 3]);
    }
  }

  // Computes a chunk and writes it to shared memory, for 16- or 32-bit results.
  template <class Out = Output>
  __device__ __forceinline__ void transpose(int buffer, int token, int block, const Sum* sums) {
    if constexpr (sizeof(Out) == 2) {
      uint32_t packed[kChunkPairs];
      pack<Out>(token, block, sums, packed);
      write_rows(buffer, packed);
    } else {
      const int lane = thread_ % 32;
      const int strip = thread_ / 32 * 16;  // the warp's 16 channels
      const float* const x_scale = x_scales(token);
#pragma unroll
      for (int group = 0; group < kChunkTokens / 8; ++group) {
        const float2 scale = two_scales(x_scale + group * 8);
        const int row = group * 8 + lane % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 y = scaled(sums + group * 4 + half * 2, scale, block, half);
          const int byte = (strip + half * 8 + lane / 4) * 4;
          *reinterpret_cast<float*>(chunk(buffer) + chunk_offset(row, byte)) = y.x;
          *reinterpret_cast<float*>(chunk(buffer) + chunk_offset(row + 1, byte)) = y.y;
        }
      }
    }
  }

  // Stores a chunk. TMA writes whole blocks of channels, clipped to out; a chunk whose end belongs
  // to the next tile is written by threads.
  __device__ __forceinline__ void write_chunk(int buffer, const WorkTile& work_tile, int token,
                                              int block) {
    if (plan_.whole_blocks && keeps_to_tile(work_tile, token + kChunkTokens)) {
      store_by_tma(buffer, first_channel(work_tile, block), work_tile.token + token);
    } else {
      free_chunks();
      copy_out(buffer, work_tile, token, block);
    }
  }

  // `channel` and `token`: the chunk's first, in out.
  __device__ __forceinline__ void store_by_tma(int buffer, int channel, int token) {
    fence_shared_for_tma();
    if (thread_ == 0) {
      // All but the latest: the next chunk reuses one of their buffers.
      wait_stores_read<kChunks - 2>();
    }
    sync_warpgroup();
    OSTINATO_DELAY(epilogue_store, thread_ == 0);
    if (thread_ == 0) {
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
        tma_store(out_map_, chunk(buffer) + strip * kChunkTokens * kStripBytes,
                  channel * int(sizeof(Output)) + strip * kStripBytes, token);
      }
      commit_stores();
    }
  }

  __device__ __forceinline__ void copy_out(int buffer, const WorkTile& work_tile, int first_token,
                                           int block) {
    constexpr int kVector = kVectorBytes / sizeof(Output);
    constexpr int kVectors = kMmaRows / kVector;  // per row
    const int tile_end = work_tile.channel + plan_.tile_channels;
    const int channels = tile_end < params_.n ? tile_end : params_.n;
    const int tokens_left = params_.m - work_tile.token;
    const int tokens = tokens_left < plan_.tile_tokens ? tokens_left : plan_.tile_tokens;
#pragma unroll
    for (int i = 0; i < kChunkTokens * kVectors / kWarpgroup; ++i) {
      const int row = (i * kWarpgroup + thread_) / kVectors;
      const int vector = (i * kWarpgroup + thread_) % kVectors;
      const int token = first_token + row;
      const int channel = first_channel(work_tile, block) + vector * kVector;
      if (token >= tokens || channel >= channels) {
        continue;
      }
      Output* const out = static_cast<Output*>(params_.out) +
                          int64_t(work_tile.token + token) * params_.out_stride + channel;
      const auto* const from =
          reinterpret_cast<const Output*>(chunk(buffer) + chunk_offset(row, vector * kVectorBytes));
      if (plan_.aligned_out && channel + kVector <= channels) {
        *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(from);
      } else {
        for (int j = 0; j < kVector && channel + j < channels; ++j) {
          out[j] = from[j];
        }
      }
    }
  }

  const W8A8GemmParams& params_;
  const Plan& plan_;
  const CUtensorMap& out_map_;
  FixedStorage& fixed_;
  int warpgroup_, thread_;
  int known_token_ = -1;  // the tile's token for which read_chunks_ is valid
  uint32_t read_chunks_ = ~0u;
  float w_scale_[kBlocks][2], bias_[kBlocks][2];
  uint32_t deferred_[kDeferStores ? kSums / 2 : 1];  // results of a tile
  int deferred_chunks_ = 0, deferred_channel_ = 0, deferred_token_ = 0;
};

}  // namespace ostinato::tiled
