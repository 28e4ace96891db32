// A consumer warpgroup: the attention of its rows of each item, one tile of keys after the other.
//
// The products of the next tile's keys and of this tile's values are enqueued together, and while
// the latter go on the next scores become weights. Warpgroups take turns: one's products are
// enqueued while another weighs.
#pragma once

#include "common/ring.cuh"
#include "prefill_mend.cuh"
#include "prefill_output.cuh"

namespace ostinato::prefill {

class Consumer {
 public:
  __device__ Consumer(SharedStorage& shared, const Arguments& args, const CUtensorMap& out_map)
      : shared_(shared),
        args_(args),
        warpgroup_(warp_index() / 4),
        softmax_(args),
        output_(shared, args, out_map, warpgroup_) {}

  __device__ __forceinline__ void run() {
    if (warpgroup_ == kConsumers - 1) {
      give_turn();  // the first is warpgroup 0's
    }
    Fragments fragments;
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
      start(*item, fragments);
      bool more = true;
      while (more) {
        const Operand values = continue_item(*item, fragments);
        more = false;
        if constexpr (kQueryBuffers == 2) {
          RingPosition after = position;
          after.advance(kItems);
          const Item& next = await_item(after);
          if (!next.is_last() && has_rows(next) && next.tiles() > 0) {
            finish_and_start(*item, next, values, fragments);
            item = &next;
            more = true;
          }
        }
        if (!more) {
          finish(*item, values, fragments);
        }
        release_item(position);
      }
    }
    if (warpgroup_ == 0) {
      take_turn();  // the last one given
    }
    if (threadIdx.x % kWarpgroup == 0) {
      wait_stores_read<0>();
    }
  }

 private:
  // What a thread holds: while products go on, they are the tensor cores'.
  struct Fragments {
    float scores[kScores];
    uint32_t weights[kKeySteps][4];
    float outputs[kOutputs];
  };

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
  __device__ __forceinline__ bool has_rows(const Item& item) const {
    return warpgroup_ * args_.half_tokens < item.queries;
  }

  // Turns go round: each warpgroup gives the next one its turn.
  __device__ __forceinline__ void take_turn() const {
    sync_named(turn_barrier(warpgroup_), 2 * kWarpgroup);
  }
  __device__ __forceinline__ void give_turn() const {
    arrive_named(turn_barrier(warpgroup_ == kConsumers - 1 ? 0 : warpgroup_ + 1), 2 * kWarpgroup);
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
    position.advance(kStages);
  }

  // The item has no query for this warpgroup, or no key. What products do otherwise, barriers do
  // here: nothing is released before all threads have seen that it has come.
  __device__ __forceinline__ void pass(const Item& item) {
    if (item.tiles() == 0) {
      if (has_rows(item)) {
        output_.store_nothing(item);
      }
      return;
    }
    for (int n = 0; n < item.tiles(); ++n) {
      wait(&barriers_of<Keys>(shared_).full[keys_.slot], keys_.parity);
      sync_warpgroup(warpgroup_);
      release<Keys>(keys_);
      take_turn();
      give_turn();
      wait(&barriers_of<Values>(shared_).full[values_.slot], values_.parity);
      sync_warpgroup(warpgroup_);
      release<Values>(values_);
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

  // The place of an output that the copy engine was told to write is free for queries again.
  __device__ __forceinline__ void release_output() {
    if (unread_ >= 0) {
      output_.wait_read();
      release_queries(unread_);
      unread_ = -1;
    }
  }

  __device__ __forceinline__ void store(const Item& item, Softmax& softmax,
                                        float (&outputs)[kOutputs]) {
    output_.store(item, queries_.slot, softmax, outputs);
    if constexpr (kShareOutput) {
      unread_ = queries_.slot;
    }
    queries_.advance(kQueryBuffers);
  }

  // Values that no query of the item sees: 0 in place of what may be NaN.
  __device__ __forceinline__ void clear_values(const Item& item, int tile,
                                               const RingPosition& position) {
    const int first = tile * kKeys;
    if (first >= item.visible_begin && first + kKeys <= item.visible_end) {
      return;
    }
    uint8_t* const values = ring_of<Values>(shared_).tiles[position.slot];
    constexpr int kRowVectors = kStripBytes / 16;
    constexpr int kRowsAtOnce = kWarpgroup / kRowVectors;
    const int thread = threadIdx.x % kWarpgroup;
#pragma unroll 1
    for (int row = thread / kRowVectors; row < kKeys; row += kRowsAtOnce) {
      if (first + row < item.visible_begin || first + row >= item.visible_end) {
#pragma unroll
        for (int strip = 0; strip < kValueStrips; ++strip) {
          *reinterpret_cast<uint4*>(values + strip * kKeyStrip + row * kStripBytes +
                                    thread % kRowVectors * 16) = make_uint4(0, 0, 0, 0);
        }
      }
    }
    fence_shared_for_tma();
    OSTINATO_DELAY(prefill_values_clear, thread / 32 == 2);
    sync_warpgroup(warpgroup_);
  }

  __device__ __forceinline__ Seen find_seen(const Item& item) const {
    const Sight sight{args_.params.left, args_.params.right, item.length};
    Seen seen;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowOf row(args_, warpgroup_, row_of_thread(half));
      const int position = item.position + min(row.query, item.queries - 1);
      seen.first[half] = sight.first(position);
      seen.count[half] = static_cast<uint32_t>(max(sight.stop(position) - seen.first[half], 0));
    }
    return seen;
  }

  // The query of a row of the thread, or null.
  __device__ __forceinline__ const Type* find_query(const Item& item, int half) const {
    const PrefillParams& p = args_.params;
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
      mend_row<0>(args_.params, item, softmax, seen, find_query(item, 0), outputs);
      mend_row<1>(args_.params, item, softmax, seen, find_query(item, 1), outputs);
    }
  }

  // Scores of the n-th tile become weights.
  __device__ __forceinline__ bool weigh(const Item& item, int n, bool hiding,
                                        float (&scores)[kScores]) {
    if (hiding || !softmax_.is_settled()) {
      return softmax_.weigh(scores, item.tile(n) * kKeys, hiding, [&] { return find_seen(item); });
    }
    return softmax_.weigh_blindly(scores, Again{*this, item, n});
  }
  __device__ __forceinline__ void weigh_first(const Item& item, float (&scores)[kScores]) {
    softmax_.weigh(scores, item.tile(0) * kKeys, item.hiding_tiles() > 0,
                   [&] { return find_seen(item); });
  }
  struct Again {
    const Consumer& consumer;
    const Item& item;
    int n;

    template <int kHalf>
    __device__ __forceinline__ Rescore<kHalf> rows() const {
      return {consumer.args_.params, item, n, consumer.find_query(item, kHalf)};
    }
  };

  // Scores and weights of the first tile.
  __device__ __forceinline__ void start(const Item& item, Fragments& r) {
    softmax_.begin();
    const Operand queries = await_queries(queries_);
    const Operand keys(await<Keys>(keys_));
    take_turn();
    pin(r.scores);
    begin_multiplying();
    multiply_keys(queries, keys, r.scores);
    give_turn();
    wait_multiplied<0>();
    pin(r.scores);
    release<Keys>(keys_);
    weigh_first(item, r.scores);
    pack_weights(r.scores, r.weights);
  }

  // The values of a tile, cleared where no query sees them.
  __device__ __forceinline__ Operand await_values(const Item& item, int n, bool hiding) {
    const uint8_t* const values = await<Values>(values_);
    if (hiding) {
      clear_values(item, item.tile(n), values_);
    }
    return Operand(values, kKeyStrip);
  }

  // The other tiles; their last one's values, which are returned, remain to be multiplied.
  __device__ __forceinline__ Operand continue_item(const Item& item, Fragments& r) {
    const int tiles = item.tiles(), hiding = item.hiding_tiles();
    const Operand queries(shared_.queries[queries_.slot][warpgroup_]);
    Operand values = await_values(item, 0, hiding > 0);
    if (tiles == 1) {
      return values;
    }
    Operand keys(await<Keys>(keys_));
#pragma unroll 1
    for (int n = 1; n < tiles; ++n) {
      take_turn();
      pin(r.scores);
      pin(r.outputs);
      pin(r.weights);
      begin_multiplying();
      multiply_keys(queries, keys, r.scores);
      multiply_values(r.weights, values, r.outputs, n > 1);
      give_turn();
      if (n == 1) {
        release_output();
      }
      wait_multiplied<1>();
      pin(r.scores);
      release<Keys>(keys_);
      const bool raised = weigh(item, n, n < hiding, r.scores);
      wait_multiplied<0>();
      pin(r.outputs);
      pin(r.weights);
      release<Values>(values_);
      pack_weights(r.scores, r.weights);
      // What the next turn needs, before it is due.
      if (n + 1 < tiles) {
        keys = Operand(await<Keys>(keys_));
      }
      values = await_values(item, n, n < hiding);
      if (raised) {
        softmax_.fade(r.outputs);
      }
      if (n == hiding) {
        mend(item, softmax_, r.outputs);
      }
    }
    return values;
  }

  // The values of an item's last tile, and the output.
  __device__ __forceinline__ void finish(const Item& item, const Operand& values, Fragments& r) {
    const int tiles = item.tiles();
    release_output();
    if constexpr (!kShareOutput) {
      release_queries(queries_.slot);
    }
    pin(r.outputs);
    pin(r.weights);
    begin_multiplying();
    multiply_values(r.weights, values, r.outputs, tiles > 1);
    wait_multiplied<0>();
    pin(r.outputs);
    pin(r.weights);
    release<Values>(values_);
    if (tiles == item.hiding_tiles()) {
      mend(item, softmax_, r.outputs);
    }
    store(item, softmax_, r.outputs);
    release_output();
  }

  // The same; meanwhile the first tile of the next item is multiplied.
  __device__ __forceinline__ void finish_and_start(const Item& item, const Item& next,
                                                   const Operand& values, Fragments& r) {
    const int tiles = item.tiles();
    release_output();
    RingPosition ahead = queries_;
    ahead.advance(kQueryBuffers);
    const Operand queries = await_queries(ahead);
    const Operand keys(await<Keys>(keys_));
    take_turn();
    pin(r.scores);
    pin(r.outputs);
    pin(r.weights);
    begin_multiplying();
    multiply_values(r.weights, values, r.outputs, tiles > 1);
    multiply_keys(queries, keys, r.scores);
    give_turn();
    wait_multiplied<1>();
    pin(r.outputs);
    pin(r.weights);
    release<Values>(values_);
    if (tiles == item.hiding_tiles()) {
      mend(item, softmax_, r.outputs);
    }
    store(item, softmax_, r.outputs);
    softmax_.begin();
    wait_multiplied<0>();
    pin(r.scores);
    release<Keys>(keys_);
    weigh_first(next, r.scores);
    pack_weights(r.scores, r.weights);
  }

  SharedStorage& shared_;
  const Arguments& args_;
  const int warpgroup_;
  Softmax softmax_;
  Output output_;
  RingPosition keys_, values_, queries_;
  int unread_ = -1;  // the buffer with an output that is not known to be read
};

}  // namespace ostinato::prefill
