// A consumer warpgroup: the attention of its rows of each item, one tile of keys after the other.
//
// The products of the next tile's keys and of this tile's values are enqueued together, and while
// the latter go on the next scores become weights. Warpgroups take turns: one's products are
// enqueued while another weighs.
#pragma once

#include "consumer_base.cuh"
#include "recompute_scores.cuh"

namespace ostinato::prefill {

class Consumer : public ConsumerBase<Softmax> {
 public:
  using ConsumerBase::ConsumerBase;
  __device__ __forceinline__ void run() { follow_items(*this); }

 private:
  friend ConsumerBase;

  // What a thread holds: while products go on, they are the tensor cores'.
  struct Fragments {
    float scores[kScores];
    uint32_t weights[kKeySteps][4];
    float outputs[kOutputs];
  };

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
          *reinterpret_cast<uint4*>(values + strip * kStripStep + value_row(row) +
                                    thread % kRowVectors * 16) = make_uint4(0, 0, 0, 0);
        }
      }
    }
    fence_shared_for_tma();
    OSTINATO_DELAY(prefill_values_clear, thread / 32 == 2);
    sync_warpgroup(warpgroup_);
  }

  // Scores of the n-th tile become weights.
  __device__ __forceinline__ bool weigh(const Item& item, int n, bool hiding,
                                        float (&scores)[kScores]) {
    if (hiding || !softmax_.is_settled()) {
      return softmax_.weigh(scores, item.tile(n) * kKeys, hiding, [&] { return find_seen(item); });
    }
    return softmax_.weigh_blindly(scores, Again{*this, item, n});
  }
  struct Again {
    const Consumer& consumer;
    const Item& item;
    int n;

    template <int kHalf>
    __device__ __forceinline__ Rescore<kHalf> rows() const {
      return {consumer.args_, item, n, consumer.find_query(item, kHalf)};
    }
  };

  // When the first product of an item has ended: its weights.
  __device__ __forceinline__ void weigh_first(int tile, const Seen& seen, Fragments& r) {
    pin(r.scores);
    release<Keys>(keys_);
    softmax_.weigh(r.scores, tile * kKeys, outline_.hiding > outline_.first, [&] { return seen; });
    pack_weights(r.scores, r.weights);
  }

  // Scores and weights of the first tile.
  __device__ __forceinline__ void start(const Item& item, Fragments& r) {
    softmax_.begin();
    outline_ = outline_of(item, item);
    const Operand queries = await_queries(queries_);
    leave_out<Keys>(outline_.first, keys_);
    const KeysOperand keys(await<Keys>(keys_));
    pin(r.scores);
    begin_multiplying();
    multiply_keys(queries, keys, r.scores);
    pass_turns(min(outline_.first, 1));
    leave_out<Values>(outline_.first, values_);
    const Seen seen = find_seen(item);
    const int first = item.tile(outline_.first);
    wait_multiplied<0>();
    weigh_first(first, seen, r);
    pass_turns(outline_.first - 1);
  }

  // The values of a tile, cleared where no query sees them.
  __device__ __forceinline__ ValuesOperand await_values(const Item& item, int n) {
    const uint8_t* const values = await<Values>(values_);
    if (n < outline_.ragged) {
      clear_values(item, item.tile(n), values_);
    }
    return ValuesOperand(values, kStripStep);
  }

  // The other tiles; their last one's values, which are returned, remain to be multiplied.
  __device__ __forceinline__ ValuesOperand continue_item(const Item& item, Fragments& r) {
    const int tiles = outline_.tiles, first = outline_.first, hiding = outline_.hiding;
    const Operand queries(shared_.queries[queries_.slot][warpgroup_]);
    ValuesOperand values = await_values(item, first);
    if (tiles == first + 1) {
      return values;
    }
    KeysOperand keys(await<Keys>(keys_));
#pragma unroll 1
    for (int n = first + 1; n < tiles; ++n) {
      take_turn();
      pin(r.scores);
      pin(r.outputs);
      pin(r.weights);
      begin_multiplying();
      multiply_keys(queries, keys, r.scores);
      multiply_values(r.weights, values, r.outputs, n > first + 1);
      give_turn();
      wait_multiplied<1>();
      pin(r.scores);
      release<Keys>(keys_);
      // Values are released as soon as they may be: what follows them is copied in their place,
      // and is due when the next scores are weighed.
      const bool raised = weigh(item, n, n < hiding, r.scores);
      wait_multiplied<0>();
      pin(r.outputs);
      pin(r.weights);
      release<Values>(values_);
      pack_weights(r.scores, r.weights);
      // What the next turn needs, before it is due.
      if (n + 1 < tiles) {
        keys = KeysOperand(await<Keys>(keys_));
      }
      values = await_values(item, n);
      if (raised) {
        softmax_.fade(r.outputs);
      }
      if (n == hiding) {
        mend(item, softmax_, r.outputs);
      }
    }
    return values;
  }

  // The values of an item's last tile, and the output; meanwhile the first tile of the next item,
  // if that lies `after` it. Whether one has begun.
  __device__ __forceinline__ bool finish(const Item& item, const RingPosition& after,
                                         const ValuesOperand& values, Fragments& r) {
    if constexpr (!kShareOutput) {
      release_queries(queries_.slot);
    }
    take_turn();
    pin(r.outputs);
    pin(r.weights);
    begin_multiplying();
    multiply_values(r.weights, values, r.outputs, outline_.tiles > outline_.first + 1);
    if constexpr (kQueryBuffers == 2) {
      const Item& next = await_item(after);
      const Tiles& tiles = next;
      const Queries& rows = next;
      if (begins_early(tiles, rows)) {
        end_and_start(item, tiles, rows, r);
        return true;
      }
    }
    give_turn();
    wait_multiplied<0>();
    end(item, r);
    release_output();
    return false;
  }

  // When the last product has ended.
  __device__ __forceinline__ void end(const Item& item, Fragments& r) {
    pin(r.outputs);
    pin(r.weights);
    release<Values>(values_);
    if (outline_.tiles == outline_.hiding) {
      mend(item, softmax_, r.outputs);
    }
    output_.store(item, queries_.slot, softmax_, r.outputs);
  }

  __device__ __forceinline__ void end_and_start(const Item& item, const Tiles& tiles,
                                                const Queries& rows, Fragments& r) {
    RingPosition ahead = queries_;
    ahead.advance(kQueryBuffers);
    const int first = rows.unseen(warpgroup_);
    const Operand queries = await_queries(ahead);
    // What comes after tiles that are left out may wait for others to have had their turns.
    if (first > 0) {
      give_turn();
      leave_out<Keys>(first, keys_);
    }
    const KeysOperand keys(await<Keys>(keys_));
    pin(r.scores);
    begin_multiplying();
    multiply_keys(queries, keys, r.scores);
    if (first == 0) {
      give_turn();
    }
    const Seen seen = find_seen(rows);
    wait_multiplied<1>();
    end(item, r);
    pass_turns(min(first, 1));
    leave_out<Values>(first, values_);
    softmax_.begin();
    outline_ = outline_of(tiles, rows);
    wait_multiplied<0>();
    weigh_first(tiles.tile(first), seen, r);
    pass_turns(first - 1);
    release_output();
  }
};

// Other warps have no part in it (consumer_fp8.cuh).
__device__ __forceinline__ void assist(SharedStorage&, const Arguments&) {}

}  // namespace ostinato::prefill
