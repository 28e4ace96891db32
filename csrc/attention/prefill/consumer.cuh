// The mainloop of a consumer warpgroup: attention of its rows of each work tile, one tile of keys
// after the other.
//
// The QK MMAs of the next tile and the PV MMAs of the current one are issued together, and the
// softmax of the next tile overlaps with the PV MMAs. Two warpgroups alternate: one issues MMAs
// while the other computes softmax.
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

  // Register fragments of a thread; asynchronous MMAs own them until they complete.
  struct Fragments {
    float scores[kScores];
    uint32_t weights[kKeySteps][4];
    float outputs[kOutputs];
  };

  // Zeroes values that are masked for all queries of the work tile, since they may be NaN.
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

  // Softmax of the n-th tile: scores become weights.
  __device__ __forceinline__ bool weigh(const WorkTile& work_tile, int n, bool masked,
                                        float (&scores)[kScores]) {
    if (masked || !softmax_.is_settled()) {
      return softmax_.weigh(scores, work_tile.tile(n) * kKeys, masked,
                            [&] { return find_visible_keys(work_tile); });
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

  // Weights of a work tile's first tile, once its QK MMAs are complete.
  __device__ __forceinline__ void weigh_first(int tile, const VisibleKeys& visible, Fragments& r) {
    pin(r.scores);
    release<Keys>(keys_);
    softmax_.weigh(r.scores, tile * kKeys, outline_.masked > outline_.first,
                   [&] { return visible; });
    pack_weights(r.scores, r.weights);
  }

  // Scores and weights of the first tile.
  __device__ __forceinline__ void start(const WorkTile& work_tile, Fragments& r) {
    softmax_.begin();
    outline_ = outline_of(work_tile, work_tile);
    const Operand queries = await_queries(queries_);
    skip<Keys>(outline_.first, keys_);
    const KeysOperand keys(await<Keys>(keys_));
    pin(r.scores);
    begin_multiplying();
    multiply_keys(queries, keys, r.scores);
    pass_turns(min(outline_.first, 1));
    skip<Values>(outline_.first, values_);
    const VisibleKeys visible = find_visible_keys(work_tile);
    const int first = work_tile.tile(outline_.first);
    wait_multiplied<0>();
    weigh_first(first, visible, r);
    pass_turns(outline_.first - 1);
  }

  // Waits for the values of a tile, and clears those that are masked for all queries.
  __device__ __forceinline__ ValuesOperand await_values(const WorkTile& work_tile, int n) {
    const uint8_t* const values = await<Values>(values_);
    if (n < outline_.ragged) {
      clear_values(work_tile, work_tile.tile(n), values_);
    }
    return ValuesOperand(values, kStripStep);
  }

  // Processes the other tiles. Returns the values of the last one, which finish() multiplies.
  __device__ __forceinline__ ValuesOperand continue_work_tile(const WorkTile& work_tile,
                                                              Fragments& r) {
    const int tiles = outline_.tiles, first = outline_.first, masked = outline_.masked;
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
      // Values are released as early as possible: the tile that replaces them is needed when the
      // next scores are ready.
      const bool raised = weigh(work_tile, n, n < masked, r.scores);
      wait_multiplied<0>();
      pin(r.outputs);
      pin(r.weights);
      release<Values>(values_);
      pack_weights(r.scores, r.weights);
      // Wait for the next operands before the next turn.
      if (n + 1 < tiles) {
        keys = KeysOperand(await<Keys>(keys_));
      }
      values = await_values(work_tile, n);
      if (raised) {
        softmax_.fade(r.outputs);
      }
      if (n == masked) {
        repair(work_tile, softmax_, r.outputs);
      }
    }
    return values;
  }

  // Multiplies the values of the last tile and writes the output, overlapped with the first tile of
  // the next work tile (at position `after`) if possible. Returns whether the next one has begun.
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

  // Completes a work tile after its last MMAs.
  __device__ __forceinline__ void end(const WorkTile& work_tile, Fragments& r) {
    pin(r.outputs);
    pin(r.weights);
    release<Values>(values_);
    if (outline_.tiles == outline_.masked) {
      repair(work_tile, softmax_, r.outputs);
    }
    epilogue_.store(work_tile, queries_.slot, softmax_, r.outputs);
  }

  __device__ __forceinline__ void end_and_start(const WorkTile& work_tile, const Tiles& tiles,
                                                const Queries& rows, Fragments& r) {
    RingPosition ahead = queries_;
    ahead.advance(kQueryBuffers);
    const int first = rows.skipped(warpgroup_);
    const Operand queries = await_queries(ahead);
    // The first tile after skipped ones may become available only after other warpgroups' turns.
    if (first > 0) {
      give_turn();
      skip<Keys>(first, keys_);
    }
    const KeysOperand keys(await<Keys>(keys_));
    pin(r.scores);
    begin_multiplying();
    multiply_keys(queries, keys, r.scores);
    if (first == 0) {
      give_turn();
    }
    const VisibleKeys visible = find_visible_keys(rows);
    wait_multiplied<1>();
    end(work_tile, r);
    pass_turns(min(first, 1));
    skip<Values>(first, values_);
    softmax_.begin();
    outline_ = outline_of(tiles, rows);
    wait_multiplied<0>();
    weigh_first(tiles.tile(first), visible, r);
    pass_turns(first - 1);
    release_output();
  }
};

// With 16 bits the other producer warps have nothing to do (compare consumer_fp8.cuh).
__device__ __forceinline__ void assist(SharedStorage&, const Arguments&) {}

}  // namespace ostinato::prefill
