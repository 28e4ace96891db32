// What all consumer warpgroups have in common: whose turn it is, what has come, what is free again,
// and the order of an item's steps. How tiles are multiplied and weighed is consumer.cuh's
// business, or with 8 bits consumer_fp8.cuh's.
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
        output_(shared, args, out_map, warpgroup_) {}

 protected:
  // All items, by the steps of `self`: start(), continue_item() and finish(), which may start the
  // next item.
  template <class Self>
  __device__ __forceinline__ void follow_items(Self& self) {
    if (warpgroup_ == kConsumers - 1) {
      give_turn();  // the first is warpgroup 0's
    }
    typename Self::Fragments fragments;
    RingPosition position;
    while (true) {
      const Item* item = &await_item(position);
      if (item->is_last()) {
        break;
      }
      if (!has_rows(*item) || item->tiles() == 0) {
        pass(*item);
        release_item(position);
        continue;
      }
      self.start(*item, fragments);
      bool more = true;
      while (more) {
        const auto values = self.continue_item(*item, fragments);
        RingPosition after = position;
        after.advance(kItems);
        more = self.finish(*item, after, values, fragments);
        release_item(position);
        item = &shared_.items[position.slot];
      }
    }
    if (warpgroup_ == 0) {
      take_turn();  // the last one given
    }
    if (threadIdx.x % kWarpgroup == 0) {
      wait_stores_read<0>();
    }
  }

  __device__ __forceinline__ const Item& await_item(const RingPosition& position) {
    wait(&shared_.item_full[position.slot], position.parity);
    return shared_.items[position.slot];
  }
  __device__ __forceinline__ void release_item(RingPosition& position) {
    OSTINATO_DELAY(prefill_item_release, warpgroup_ == 1);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      arrive(&shared_.item_empty[position.slot]);
    }
    position.advance(kItems);
  }
  __device__ __forceinline__ bool has_rows(const Queries& rows) const {
    return warpgroup_ * args_.half_tokens < rows.queries;
  }

  // Turns go round: each warpgroup gives the next one its turn. With 8 bits nobody waits, nor do
  // three warpgroups, of which one more or less has something to multiply (docs/prefill.md).
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
      fence_shared_for_tma();  // written by threads, read by tensor cores
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

  // Tiles that this warpgroup does not multiply. What products do otherwise, barriers do here:
  // nothing is released before all threads have seen that it has come.
  template <class What>
  __device__ __forceinline__ void leave_out(int tiles, RingPosition& position) {
#pragma unroll 1
    for (int n = 0; n < tiles; ++n) {
      wait(&barriers_of<What>(shared_).full[position.slot], position.parity);
      sync_warpgroup(warpgroup_);
      release<What>(position);
    }
  }
  // Their turns, of which the first is due when another warpgroup has multiplied the first.
  __device__ __forceinline__ void pass_turns(int turns) const {
#pragma unroll 1
    for (int n = 0; n < turns; ++n) {
      take_turn();
      give_turn();
    }
  }

  // The item has no query for this warpgroup, or no key.
  __device__ __forceinline__ void pass(const Item& item) {
    if (item.tiles() == 0) {
      if (has_rows(item)) {
        output_.store_nothing(item);
      }
      return;
    }
    for (int n = 0; n < item.tiles(); ++n) {
      leave_out<Keys>(1, keys_);
      pass_turns(1);
      leave_out<Values>(1, values_);
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

  // The place of the output that the copy engine was told to write last is free for queries again.
  __device__ __forceinline__ void release_output() {
    if constexpr (kShareOutput) {
      output_.wait_read();
      release_queries(queries_.slot);
    }
    queries_.advance(kQueryBuffers);
  }

  __device__ __forceinline__ Seen find_seen(const Queries& rows) const {
    const Sight sight{args_.params.left, args_.params.right, rows.length};
    Seen seen;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowOf row(args_, warpgroup_, row_of_thread(half));
      const int position = rows.position + min(row.query, rows.queries - 1);
      seen.first[half] = sight.first(position);
      seen.count[half] = static_cast<uint32_t>(max(sight.stop(position) - seen.first[half], 0));
    }
    return seen;
  }

  // The query of a row of the thread, or null.
  __device__ __forceinline__ const Type* find_query(const Item& item, int half) const {
    const Params& p = args_.params;
    const RowOf row(args_, warpgroup_, row_of_thread(half));
    return row.query < item.queries ? static_cast<const Type*>(p.q.data) +
                                          int64_t{item.first_row + row.query} * p.q.stride +
                                          int64_t{item.first_head + row.head} * p.q.head_stride
                                    : nullptr;
  }

  __device__ __forceinline__ void mend(const Item& item, const Softmax& softmax,
                                       float (&outputs)[kOutputs]) const {
    if (__any_sync(0xffffffff, is_broken(outputs))) {
      const Seen seen = find_seen(item);
      mend_row<0>(args_, item, softmax, seen, outline_.hiding, find_query(item, 0), outputs);
      mend_row<1>(args_, item, softmax, seen, outline_.hiding, find_query(item, 1), outputs);
    }
  }

  // What is asked of an item again and again: its tiles from the first that the warpgroup sees on,
  // and from the first that it sees wholly on.
  struct Outline {
    int tiles, first, hiding;
    int ragged;  // so many tiles may have keys that no query sees
  };
  __device__ __forceinline__ Outline outline_of(const Tiles& tiles, const Queries& rows) const {
    const int hiding = tiles.hiding_tiles() - rows.seen(warpgroup_);
    return {tiles.tiles(), rows.unseen(warpgroup_), hiding, rows.is_ragged() ? hiding : 0};
  }
  // Whether the item may begin before the one before it has ended. With a single tile that is
  // slower.
  __device__ __forceinline__ bool begins_early(const Tiles& tiles, const Queries& rows) const {
    return !tiles.is_last() && has_rows(rows) && tiles.tiles() > 1;
  }

  SharedStorage& shared_;
  const Arguments& args_;
  const int warpgroup_;
  Softmax softmax_;
  Output output_;
  RingPosition keys_, values_, queries_;
  Outline outline_;
};

}  // namespace ostinato::prefill
