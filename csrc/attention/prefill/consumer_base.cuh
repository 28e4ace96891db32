// Base of the consumer warpgroups (consumer.cuh, consumer_fp8.cuh): waits for tiles and releases
// them, orders the warpgroups at the tensor cores, and sequences the steps of a work tile.
#pragma once

#include "common/ring.cuh"
#include "epilogue.cuh"
#include "nonfinite_repair.cuh"

namespace ostinato::prefill {

template <class Softmax>
class ConsumerBase {
 public:
  __device__ ConsumerBase(SharedStorage& shared, const Arguments& args, const CUtensorMap& out_map)
      : shared_(shared),
        args_(args),
        warpgroup_(warp_index() / 4),
        softmax_(args),
        epilogue_(shared, args, out_map, warpgroup_) {}

 protected:
  // Processes all work tiles by the steps of `self`: start(), continue_work_tile() and finish(),
  // which may start the next work tile.
  template <class Self>
  __device__ __forceinline__ void follow_work_tiles(Self& self) {
    if (warpgroup_ == kConsumers - 1) {
      give_turn();  // the first turn belongs to warpgroup 0
    }
    typename Self::Fragments fragments;
    RingPosition position;
    while (true) {
      const WorkTile* work_tile = &await_work_tile(position);
      if (work_tile->is_last()) {
        break;
      }
      if (!has_rows(*work_tile) || work_tile->tiles() == 0) {
        pass(*work_tile);
        release_work_tile(position);
        continue;
      }
      self.start(*work_tile, fragments);
      bool more = true;
      while (more) {
        const auto values = self.continue_work_tile(*work_tile, fragments);
        RingPosition after = position;
        after.advance(kWorkTiles);
        more = self.finish(*work_tile, after, values, fragments);
        release_work_tile(position);
        work_tile = &shared_.work_tiles[position.slot];
      }
    }
    if (warpgroup_ == 0) {
      take_turn();  // the last turn that was given
    }
    if (threadIdx.x % kWarpgroup == 0) {
      wait_stores_read<0>();
    }
  }

  __device__ __forceinline__ const WorkTile& await_work_tile(const RingPosition& position) {
    wait(&shared_.work_tile_full[position.slot], position.parity);
    return shared_.work_tiles[position.slot];
  }
  __device__ __forceinline__ void release_work_tile(RingPosition& position) {
    OSTINATO_DELAY(prefill_work_tile_release, warpgroup_ == 1);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      arrive(&shared_.work_tile_empty[position.slot]);
    }
    position.advance(kWorkTiles);
  }
  __device__ __forceinline__ bool has_rows(const Queries& rows) const {
    return warpgroup_ * args_.warpgroup_tokens < rows.queries;
  }

  // Two consumer warpgroups alternate at the tensor cores (ping-pong): each one passes the turn to
  // the other by named barriers. Without turns 8-bit kernels are faster, and so are three
  // warpgroups, of which one or another always has MMAs to issue (docs/notebooks/prefill.md).
  static constexpr bool kTurns = !kFp8 && kConsumers == 2;
  __device__ __forceinline__ void take_turn() const {
    if constexpr (kTurns) {
      sync_named(turn_barrier(warpgroup_), 2 * kWarpgroup);
    }
  }
  __device__ __forceinline__ void give_turn() const {
    if constexpr (kTurns) {
      arrive_named(turn_barrier(warpgroup_ == kConsumers - 1 ? 0 : warpgroup_ + 1), 2 * kWarpgroup);
    }
  }
  template <class What>
  __device__ __forceinline__ const uint8_t* await(const RingPosition& position) {
    wait(&barriers_of<What>(shared_).full[position.slot], position.parity);
    if constexpr (kSource == Source::Slots) {
      fence_shared_for_tma();  // written by cp.async, read by wgmma
    }
    return ring_of<What>(shared_).tiles[position.slot];
  }

  template <class What>
  __device__ __forceinline__ void release(RingPosition& position) {
    OSTINATO_DELAY(prefill_release, warpgroup_ == 0);
    if (threadIdx.x % kWarpgroup == 0) {
      arrive(&barriers_of<What>(shared_).empty[position.slot]);
    }
    position.advance(kStagesOf<What>);
  }

  // Skips tiles that this warpgroup does not multiply. A tile is released only after all threads
  // have waited for it, which MMAs would ensure otherwise.
  template <class What>
  __device__ __forceinline__ void skip(int tiles, RingPosition& position) {
#pragma unroll 1
    for (int n = 0; n < tiles; ++n) {
      wait(&barriers_of<What>(shared_).full[position.slot], position.parity);
      sync_warpgroup(warpgroup_);
      release<What>(position);
    }
  }
  // Takes and gives turns for skipped tiles. The first turn comes after another warpgroup's first
  // MMAs.
  __device__ __forceinline__ void pass_turns(int turns) const {
#pragma unroll 1
    for (int n = 0; n < turns; ++n) {
      take_turn();
      give_turn();
    }
  }

  // Skips a work tile that has no query for this warpgroup, or no key.
  __device__ __forceinline__ void pass(const WorkTile& work_tile) {
    if (work_tile.tiles() == 0) {
      if (has_rows(work_tile)) {
        epilogue_.store_nothing(work_tile);
      }
      return;
    }
    for (int n = 0; n < work_tile.tiles(); ++n) {
      skip<Keys>(1, keys_);
      pass_turns(1);
      skip<Values>(1, values_);
    }
    await_queries(queries_);
    sync_warpgroup(warpgroup_);
    release_queries(queries_.slot);
    queries_.advance(kQueryBuffers);
  }

  __device__ __forceinline__ Operand await_queries(const RingPosition& position) {
    wait(&shared_.queries_full[position.slot][warpgroup_], position.parity);
    return Operand(shared_.queries[position.slot][warpgroup_]);
  }
  __device__ __forceinline__ void release_queries(int buffer) {
    if (threadIdx.x % kWarpgroup == 0) {
      arrive(&shared_.queries_empty[buffer][warpgroup_]);
    }
  }

  // Frees the buffer of the last output for queries, once TMA has read it.
  __device__ __forceinline__ void release_output() {
    if constexpr (kShareOutput) {
      epilogue_.wait_read();
      release_queries(queries_.slot);
    }
    queries_.advance(kQueryBuffers);
  }

  __device__ __forceinline__ VisibleKeys find_visible_keys(const Queries& rows) const {
    const Mask mask{args_.params.left, args_.params.right, rows.seqlen};
    VisibleKeys visible;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowOf row(args_, warpgroup_, row_of_thread(half));
      const int position = rows.position + min(row.query, rows.queries - 1);
      visible.first[half] = mask.first(position);
      visible.count[half] =
          static_cast<uint32_t>(max(mask.stop(position) - visible.first[half], 0));
    }
    return visible;
  }

  // The query of one of the thread's rows, or null.
  __device__ __forceinline__ const Type* find_query(const WorkTile& work_tile, int half) const {
    const Params& p = args_.params;
    const RowOf row(args_, warpgroup_, row_of_thread(half));
    return row.query < work_tile.queries
               ? static_cast<const Type*>(p.q.data) +
                     int64_t{work_tile.first_row + row.query} * p.q.stride +
                     int64_t{work_tile.first_head + row.head} * p.q.head_stride
               : nullptr;
  }

  __device__ __forceinline__ void repair(const WorkTile& work_tile, const Softmax& softmax,
                                         float (&outputs)[kOutputs]) const {
    if (__any_sync(0xffffffff, is_nonfinite(outputs))) {
      const VisibleKeys visible = find_visible_keys(work_tile);
      repair_row<0>(args_, work_tile, softmax, visible, outline_.masked, find_query(work_tile, 0),
                    outputs);
      repair_row<1>(args_, work_tile, softmax, visible, outline_.masked, find_query(work_tile, 1),
                    outputs);
    }
  }

  // The bounds of a work tile's tiles for this warpgroup: the first tile that is visible to it, and
  // the first one wholly visible to it.
  struct Outline {
    int tiles, first, masked;
    int ragged;  // number of tiles that may have keys masked for all queries
  };
  __device__ __forceinline__ Outline outline_of(const Tiles& tiles, const Queries& rows) const {
    const int masked = tiles.masked_tiles() - rows.unmasked(warpgroup_);
    return {tiles.tiles(), rows.skipped(warpgroup_), masked, rows.is_ragged() ? masked : 0};
  }
  // Whether the next work tile may begin before the current one ends. With a single tile that would
  // be slower.
  __device__ __forceinline__ bool begins_early(const Tiles& tiles, const Queries& rows) const {
    return !tiles.is_last() && has_rows(rows) && tiles.tiles() > 1;
  }

  SharedStorage& shared_;
  const Arguments& args_;
  const int warpgroup_;
  Softmax softmax_;
  Epilogue epilogue_;
  RingPosition keys_, values_, queries_;
  Outline outline_;
};

}  // namespace ostinato::prefill
