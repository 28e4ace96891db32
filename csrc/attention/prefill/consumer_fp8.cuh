// The mainloop of a consumer warpgroup for 8-bit queries, keys and values.
//
// The tensor cores keep about 14 bits of a sum of 8-bit products. So the PV products of each tile
// start from zero and are added to the output in fp32 (two-level accumulation); they are issued
// together with the QK MMAs of the next tile. With head dim 256, or 128 and three warpgroups,
// registers have no room for two sets of accumulators: there the tensor cores accumulate 16 tiles,
// which are promoted in slices, one with each tile (promote_gmem.cuh). Warpgroups do not take
// turns: without, 8-bit kernels are faster.
#pragma once

#include "consumer_base.cuh"
#include "promote_gmem.cuh"
#include "softmax_fp8.cuh"
#include "transpose_v.cuh"

namespace ostinato::prefill {

class Consumer : public ConsumerBase<Softmax> {
 public:
  using ConsumerBase::ConsumerBase;
  __device__ __forceinline__ void run() { follow_work_tiles(*this); }

 private:
  friend ConsumerBase;

  // Register fragments of a thread; asynchronous MMAs own all but the outputs until they complete.
  struct Fragments {
    float scores[kScores];
    uint32_t weights[kKeySteps][4];
    float products[kOutputs];  // unused if MMAs accumulate into the outputs
    float outputs[kOutputs];
  };

  // The tile index is computed only if the mask needs it.
  __device__ __forceinline__ void find_reference(const WorkTile& work_tile, int n, bool masked,
                                                 Fragments& r) {
    softmax_.find_reference(r.scores, masked, [&] {
      apply_mask(r.scores, work_tile.tile(n) * kKeys, find_visible_keys(work_tile));
    });
  }

  // While wgmma reads operands, a load from shared memory takes some hundred clocks. So a tile's
  // barrier is tested long before the result matters. (With 16 bits this is slower.)
  using ConsumerBase::await;
  template <class What>
  __device__ __forceinline__ bool has_come(const RingPosition& position) {
    return is_complete(&barriers_of<What>(shared_).full[position.slot], position.parity);
  }
  template <class What>
  __device__ __forceinline__ const uint8_t* await(const RingPosition& position, bool has_come) {
    if (!has_come) {
      return await<What>(position);
    }
    return ring_of<What>(shared_).tiles[position.slot];
  }

  // Weights of a work tile's first tile, once its QK MMAs are complete.
  __device__ __forceinline__ void weigh_first(int tile, const VisibleKeys& visible, Fragments& r) {
    pin(r.scores);
    release<Keys>(keys_);
    keys_have_come_ = has_come<Keys>(keys_);
    values_have_come_ = has_come<Values>(values_);
    if constexpr (kPromotesToGmem) {
      float fade[2];  // there are no outputs yet
      softmax_.raise_reference<false>(
          r.scores, outline_.masked > outline_.first,
          [&] { apply_mask(r.scores, tile * kKeys, visible); }, fade);
    } else {
      softmax_.find_reference(r.scores, outline_.masked > outline_.first,
                              [&] { apply_mask(r.scores, tile * kKeys, visible); });
    }
    softmax_.exponentiate(r.scores);
    pack_weights(r.scores, r.weights);
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      r.outputs[i] = 0;
    }
    promotion_.begin(outline_.first, outline_.masked, outline_.tiles);
  }

  __device__ __forceinline__ void start(const WorkTile& work_tile, Fragments& r) {
    softmax_.begin(Softmax::read_scale(args_, work_tile.kv_head));
    promotion_.find_sums(args_);
    outline_ = outline_of(work_tile, work_tile);
    const Operand queries = await_queries(queries_);
    skip<Keys>(outline_.first, keys_);
    const KeysOperand keys(await<Keys>(keys_));
    pin(r.scores);
    begin_multiplying();
    multiply_keys(queries, keys, r.scores);
    skip<Values>(outline_.first, values_);
    const VisibleKeys visible = find_visible_keys(work_tile);
    const int first = work_tile.tile(outline_.first);
    wait_multiplied<0>();
    weigh_first(first, visible, r);
  }
  __device__ __forceinline__ float read_value_scale(const WorkTile& work_tile) const {
    return args_.params.v_scale[work_tile.kv_head * args_.params.v_scale_stride];
  }

  // Issues the PV MMAs of a tile.
  __device__ __forceinline__ void begin_values(const ValuesOperand& values, Fragments& r) {
    pin(r.weights);
    if constexpr (kPromotesToGmem) {
      pin(r.outputs);
      begin_multiplying();
      multiply_values(r.weights, values, r.outputs, true);
    } else {
      pin(r.products);
      begin_multiplying();
      multiply_values(r.weights, values, r.products, false);
    }
  }

  // After the PV MMAs: adds the products to the outputs, which are relative to the previous
  // reference.
  __device__ __forceinline__ void add_values(const float (&fade)[2], Fragments& r) {
    pin(r.weights);
    if constexpr (kPromotesToGmem) {
      pin(r.outputs);
    } else {
      pin(r.products);
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
        r.outputs[i] = fmaf(r.outputs[i], fade[row_of(i)], r.products[i]);
      }
    }
  }

  // Waits for a tile's scores while the PV MMAs of the previous tile run. Tests the barriers of the
  // next keys and values well before they are waited for.
  __device__ __forceinline__ void await_scores(Fragments& r) {
    wait_multiplied<1>();
    pin(r.scores);
    release<Keys>(keys_);
    RingPosition next_values = values_;
    next_values.advance(kStagesOf<Values>);
    keys_have_come_ = has_come<Keys>(keys_);
    values_have_come_ = has_come<Values>(next_values);
  }

  // Waits for the operands of the tile after tile n before they are needed.
  __device__ __forceinline__ void await_next(int n, KeysOperand& keys, ValuesOperand& values) {
    if (n + 1 < outline_.tiles) {
      keys = KeysOperand(await<Keys>(keys_, keys_have_come_));
    }
    values = ValuesOperand(await<Values>(values_, values_have_come_));
  }

  // Processes a tile whose products accumulate in the tensor cores. kExact: nothing is masked,
  // scores are direct, and promotion is due with every tile. These are most tiles; they have a loop
  // of their own without those branches. (Unrolling it by slices was slower:
  // docs/notebooks/prefill.md.)
  template <bool kExact>
  __device__ __forceinline__ void multiply_tile(const WorkTile& work_tile, int n,
                                                const Operand& queries, KeysOperand& keys,
                                                ValuesOperand& values, Fragments& r) {
    pin(r.scores);
    begin_multiplying();
    multiply_keys(queries, keys, r.scores);
    // While these MMAs run there is no other work, and registers are free.
    if (kExact || promotion_.is_due(n)) {
      promotion_.promote(r.outputs);
    }
    begin_values(values, r);
    await_scores(r);
    float fade[2];
    const bool risen = softmax_.raise_reference<kExact>(
        r.scores, n < outline_.masked,
        [&] { apply_mask(r.scores, work_tile.tile(n) * kKeys, find_visible_keys(work_tile)); },
        fade);
    constexpr int kBeside = 8;  // more would need registers
    float sums[4];
    softmax_.exponentiate_some<0, kBeside>(r.scores, sums);
    wait_multiplied<0>();
    release<Values>(values_);
    add_values(fade, r);
    if (__builtin_expect(risen, false)) {
      promotion_.fade(fade, r.outputs);
    }
    softmax_.exponentiate_some<kBeside, kScores>(r.scores, sums);
    softmax_.add_sums(sums);
    pack_weights(r.scores, r.weights);
    await_next(n, keys, values);
    if (!kExact && n == outline_.masked) {
      repair(work_tile, softmax_, r.outputs);
    }
  }

  // Processes the other tiles. Returns the values of the last one, which finish() multiplies.
  __device__ __forceinline__ ValuesOperand continue_work_tile(const WorkTile& work_tile,
                                                              Fragments& r) {
    const int tiles = outline_.tiles, first = outline_.first, masked = outline_.masked;
    const Operand queries(shared_.queries[queries_.slot][warpgroup_]);
    ValuesOperand values(await<Values>(values_, values_have_come_));
    if (tiles == first + 1) {
      return values;
    }
    KeysOperand keys(await<Keys>(keys_, keys_have_come_));
    if constexpr (kPromotesToGmem) {
      int n = first + 1;
      const int exact = softmax_.is_direct() ? min(promotion_.begins(), tiles) : tiles;
#pragma unroll 1
      for (; n < exact; ++n) {
        multiply_tile<false>(work_tile, n, queries, keys, values, r);
      }
#pragma unroll 1
      for (; n < tiles; ++n) {
        multiply_tile<true>(work_tile, n, queries, keys, values, r);
      }
    } else {
#pragma unroll 1
      for (int n = first + 1; n < tiles; ++n) {
        const float fade[2] = {softmax_.fade(0), softmax_.fade(1)};
        pin(r.scores);
        begin_multiplying();
        multiply_keys(queries, keys, r.scores);
        begin_values(values, r);
        await_scores(r);
        find_reference(work_tile, n, n < masked, r);
        softmax_.exponentiate(r.scores);
        // ptxas starts this wait before most of the exponentials, which is best: keeping them
        // before the wait made tiles up to a tenth slower (docs/notebooks/prefill.md).
        wait_multiplied<0>();
        add_values(fade, r);
        release<Values>(values_);
        pack_weights(r.scores, r.weights);
        await_next(n, keys, values);
        if (n == masked) {
          softmax_.fade_now(r.outputs);
          repair(work_tile, softmax_, r.outputs);
        }
      }
    }
    return values;
  }

  // Completes a work tile after its last PV MMAs: writes the output.
  __device__ __forceinline__ void end(const WorkTile& work_tile, float value_scale, Fragments& r) {
    release<Values>(values_);
    if (!kPromotesToGmem && outline_.tiles == outline_.masked) {
      repair(work_tile, softmax_, r.outputs);
    }
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      r.outputs[i] *= value_scale;
    }
    epilogue_.store(work_tile, queries_.slot, softmax_, r.outputs);
  }

  // Completes the sums of a work tile while its last PV MMAs run, before the next work tile begins:
  // registers have no room for both.
  __device__ __forceinline__ void complete(const WorkTile& work_tile, Fragments& r) {
    if (promotion_.holds_some()) {
      promotion_.fetch(r.scores);
      wait_multiplied<0>();
      pin(r.outputs);
      promotion_.add(r.scores, r.outputs);
    } else if (outline_.tiles == outline_.masked) {
      wait_multiplied<0>();
      pin(r.outputs);
      repair(work_tile, softmax_, r.outputs);
    }
  }

  // Multiplies the values of the last tile and writes the output, overlapped with the first tile of
  // the next work tile (at position `after`) if possible. Returns whether the next one has begun.
  __device__ __forceinline__ bool finish(const WorkTile& work_tile, const RingPosition& after,
                                         const ValuesOperand& values, Fragments& r) {
    if constexpr (!kShareOutput) {
      release_queries(queries_.slot);
    }
    const float value_scale = read_value_scale(work_tile);
    begin_values(values, r);
    if constexpr (kPromotesToGmem) {
      complete(work_tile, r);
    }
    if constexpr (kQueryBuffers == 2) {
      const WorkTile& next = await_work_tile(after);
      const Tiles tiles = next;
      const Queries rows = next;
      if (begins_early(tiles, rows)) {
        end_and_start(work_tile, next, tiles, rows, value_scale, r);
        return true;
      }
    }
    wait_multiplied<0>();
    const float fade[2] = {softmax_.fade(0), softmax_.fade(1)};
    add_values(fade, r);
    end(work_tile, value_scale, r);
    release_output();
    return false;
  }

  __device__ __forceinline__ void end_and_start(const WorkTile& work_tile, const WorkTile& next,
                                                const Tiles& tiles, const Queries& rows,
                                                float value_scale, Fragments& r) {
    RingPosition ahead = queries_;
    ahead.advance(kQueryBuffers);
    const int first = rows.skipped(warpgroup_);
    const Operand queries = await_queries(ahead);
    skip<Keys>(first, keys_);
    const KeysOperand keys(await<Keys>(keys_, keys_have_come_ && first == 0));
    pin(r.scores);
    begin_multiplying();
    multiply_keys(queries, keys, r.scores);
    const float scale = Softmax::read_scale(args_, next.kv_head);
    const VisibleKeys visible = find_visible_keys(rows);
    wait_multiplied<1>();
    const float fade[2] = {softmax_.fade(0), softmax_.fade(1)};
    add_values(fade, r);
    end(work_tile, value_scale, r);
    skip<Values>(first, values_);
    softmax_.begin(scale);
    outline_ = outline_of(tiles, rows);
    wait_multiplied<0>();
    weigh_first(tiles.tile(first), visible, r);
    release_output();
  }

  std::conditional_t<kPromotesToGmem, Promotion, NoPromotion> promotion_;
  bool keys_have_come_, values_have_come_;  // of the next tiles
};

// The task of the producer warpgroup's other warps.
__device__ __forceinline__ void assist(SharedStorage& shared, const Arguments&) {
  Transposer(shared).run();
}

}  // namespace ostinato::prefill
