// A consumer warpgroup: the attention of its rows of each work tile, one tile of keys after the
// other.
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
  __device__ __forceinline__ void run() { follow_work_tiles(*this); }

 private:
  friend ConsumerBase;

  // What a thread holds: while products go on, they are the tensor cores'.
  struct Fragments {
    float scores[kScores];
    uint32_t weights[kKeySteps][4];
    float outputs[kOutputs];
  };

  // Values that no query of the work tile sees: 0 in place of what may be NaN.
  __device__ __forceinline__ void clear_values(const WorkTile& work_tile, int tile,
                                               const RingPosition& position) {
    const int first = tile * kKeys;
    if (first >= work_tile.visible_begin && first + kKeys <= work_tile.visible_end) {
      return;
    }
    uint8_t* const values = ring_of<Values>(shared_).tiles[position.slot];
    constexpr int kRowVectors = kStripBytes / 16;
    constexpr int kRowsAtOnce = kWarpgroup / kRowVectors;
    const int thread = threadIdx.x % kWarpgroup;
#pragma unroll 1
    for (int row = thread / kRowVectors; row < kKeys; row += kRowsAtOnce) {
      if (first + row < work_tile.visible_begin || first + row >= work_tile.visible_end) {
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
  __device__ __forceinline__ bool weigh(const WorkTile& work_tile, int n, bool hiding,
                                        float (&scores)[kScores]) {
    if (hiding || !softmax_.is_settled()) {
      return softmax_.weigh(scores, work_tile.tile(n) * kKeys, hiding,
                            [&] { return find_seen(work_tile); });
    }
    return softmax_.weigh_blindly(scores, Recompute{*this, work_tile, n});
  }
  struct Recompute {
    const Consumer& consumer;
    const WorkTile& work_tile;
    int n;

    template <int kHalf>
    __device__ __forceinline__ RecomputedScores<kHalf> rows() const {
      return {consumer.args_, work_tile, n, consumer.find_query(work_tile, kHalf)};
    }
  };

  // When the first product of an work tile has ended: its weights.
  __device__ __forceinline__ void weigh_first(int tile, const Seen& seen, Fragments& r) {
    pin(r.scores);
    release<Keys>(keys_);
    softmax_.weigh(r.scores, tile * kKeys, outline_.hiding > outline_.first, [&] { return seen; });
    pack_weights(r.scores, r.weights);
  }

  // Scores and weights of the first tile.
  __device__ __forceinline__ void start(const WorkTile& work_tile, Fragments& r) {
    softmax_.begin();
    outline_ = outline_of(work_tile, work_tile);
    const Operand queries = await_queries(queries_);
    leave_out<Keys>(outline_.first, keys_);
    const KeysOperand keys(await<Keys>(keys_));
    pin(r.scores);
    begin_multiplying();
    multiply_keys(queries, keys, r.scores);
    pass_turns(min(outline_.first, 1));
    leave_out<Values>(outline_.first, values_);
    const Seen seen = find_seen(work_tile);
    const int first = work_tile.tile(outline_.first);
    wait_multiplied<0>();
    weigh_first(first, seen, r);
    pass_turns(outline_.first - 1);
  }

  // The values of a tile, cleared where no query sees them.
  __device__ __forceinline__ ValuesOperand await_values(const WorkTile& work_tile, int n) {
    const uint8_t* const values = await<Values>(values_);
    if (n < outline_.ragged) {
      clear_values(work_tile, work_tile.tile(n), values_);
    }
    return ValuesOperand(values, kStripStep);
  }

  // The other tiles; their last one's values, which are returned, remain to be multiplied.
  __device__ __forceinline__ ValuesOperand continue_work_tile(const WorkTile& work_tile,
                                                              Fragments& r) {
    const int tiles = outline_.tiles, first = outline_.first, hiding = outline_.hiding;
    const Operand queries(shared_.queries[queries_.slot][warpgroup_]);
    ValuesOperand values = await_values(work_tile, first);
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
      const bool raised = weigh(work_tile, n, n < hiding, r.scores);
      wait_multiplied<0>();
      pin(r.outputs);
      pin(r.weights);
      release<Values>(values_);
      pack_weights(r.scores, r.weights);
      // What the next turn needs, before it is due.
      if (n + 1 < tiles) {
        keys = KeysOperand(await<Keys>(keys_));
      }
      values = await_values(work_tile, n);
      if (raised) {
        softmax_.fade(r.outputs);
      }
      if (n == hiding) {
        repair(work_tile, softmax_, r.outputs);
      }
    }
    return values;
  }

  // The values of an work tile's last tile, and the output; meanwhile the first tile of the next
  // work tile, if that lies `after` it. Whether one has begun.
  __device__ __forceinline__ bool finish(const WorkTile& work_tile, const RingPosition& after,
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
      const WorkTile& next = await_work_tile(after);
      const Tiles& tiles = next;
      const Queries& rows = next;
      if (begins_early(tiles, rows)) {
        end_and_start(work_tile, tiles, rows, r);
        return true;
      }
    }
    give_turn();
    wait_multiplied<0>();
    end(work_tile, r);
    release_output();
    return false;
  }

  // When the last product has ended.
  __device__ __forceinline__ void end(const WorkTile& work_tile, Fragments& r) {
    pin(r.outputs);
    pin(r.weights);
    release<Values>(values_);
    if (outline_.tiles == outline_.hiding) {
      repair(work_tile, softmax_, r.outputs);
    }
    epilogue_.store(work_tile, queries_.slot, softmax_, r.outputs);
  }

  __device__ __forceinline__ void end_and_start(const WorkTile& work_tile, const Tiles& tiles,
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
    end(work_tile, r);
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
