// A consumer warpgroup of 8-bit queries, keys and values.
//
// The tensor cores keep about 14 bits of a sum of 8-bit products, so the products of a tile's
// weights and values are summed anew and then added to the output in fp32. They are enqueued with
// the products of the next tile's keys. For head dim 256, and for three warpgroups and 128,
// registers are too few for that: there the tensor cores sum 16 tiles, which are put aside in
// slices, with each tile one (promote_gmem.cuh). Warpgroups take no turns: with 8 bits they are
// faster without.
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

  // What a thread holds: while products go on, all but the outputs are the tensor cores'.
  struct Fragments {
    float scores[kScores];
    uint32_t weights[kKeySteps][4];
    float products[kOutputs];  // not where outputs take them at once
    float outputs[kOutputs];
  };

  // Which tile it is, is read only where it must be.
  __device__ __forceinline__ void find_reference(const WorkTile& work_tile, int n, bool hiding,
                                                 Fragments& r) {
    softmax_.find_reference(
        r.scores, hiding, [&] { hide(r.scores, work_tile.tile(n) * kKeys, find_seen(work_tile)); });
  }

  // While wgmma reads its operands, an answer from shared memory takes some hundred clocks: so
  // whether a tile has come is asked long before that matters. (With 16 bits this is slower.)
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

  // When the first product of an work tile has ended: its weights.
  __device__ __forceinline__ void weigh_first(int tile, const Seen& seen, Fragments& r) {
    pin(r.scores);
    release<Keys>(keys_);
    keys_have_come_ = has_come<Keys>(keys_);
    values_have_come_ = has_come<Values>(values_);
    if constexpr (kPromotesToGmem) {
      float fade[2];  // there are no outputs yet
      softmax_.raise_reference<false>(
          r.scores, outline_.hiding > outline_.first, [&] { hide(r.scores, tile * kKeys, seen); },
          fade);
    } else {
      softmax_.find_reference(r.scores, outline_.hiding > outline_.first,
                              [&] { hide(r.scores, tile * kKeys, seen); });
    }
    softmax_.exponentiate(r.scores);
    pack_weights(r.scores, r.weights);
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      r.outputs[i] = 0;
    }
    promotion_.begin(outline_.first, outline_.hiding, outline_.tiles);
  }

  __device__ __forceinline__ void start(const WorkTile& work_tile, Fragments& r) {
    softmax_.begin(Softmax::read_scale(args_, work_tile.kv_head));
    promotion_.find_sums(args_);
    outline_ = outline_of(work_tile, work_tile);
    const Operand queries = await_queries(queries_);
    leave_out<Keys>(outline_.first, keys_);
    const KeysOperand keys(await<Keys>(keys_));
    pin(r.scores);
    begin_multiplying();
    multiply_keys(queries, keys, r.scores);
    leave_out<Values>(outline_.first, values_);
    const Seen seen = find_seen(work_tile);
    const int first = work_tile.tile(outline_.first);
    wait_multiplied<0>();
    weigh_first(first, seen, r);
  }
  __device__ __forceinline__ float read_value_scale(const WorkTile& work_tile) const {
    return args_.params.v_scale[work_tile.kv_head * args_.params.v_scale_stride];
  }

  // Begins the product of a tile's weights and values.
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

  // When it has ended: to the outputs, which the tile before left relative to another reference.
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

  // A tile's scores, while its predecessor's values are still multiplied. Whether the next keys and
  // values have come is asked well before it is waited for.
  __device__ __forceinline__ void await_scores(Fragments& r) {
    wait_multiplied<1>();
    pin(r.scores);
    release<Keys>(keys_);
    RingPosition next_values = values_;
    next_values.advance(kStagesOf<Values>);
    keys_have_come_ = has_come<Keys>(keys_);
    values_have_come_ = has_come<Values>(next_values);
  }

  // What the tile behind tile n needs, before it is due.
  __device__ __forceinline__ void await_next(int n, KeysOperand& keys, ValuesOperand& values) {
    if (n + 1 < outline_.tiles) {
      keys = KeysOperand(await<Keys>(keys_, keys_have_come_));
    }
    values = ValuesOperand(await<Values>(values_, values_have_come_));
  }

  // A tile whose values are summed beside those before it. kExact: of those that hide nothing, with
  // scores that are direct, and from which on sums are put aside; these are many, and a loop of
  // their own, which does not ask. (Unrolled by slices they were slower: docs/prefill.md.)
  template <bool kExact>
  __device__ __forceinline__ void multiply_tile(const WorkTile& work_tile, int n,
                                                const Operand& queries, KeysOperand& keys,
                                                ValuesOperand& values, Fragments& r) {
    pin(r.scores);
    begin_multiplying();
    multiply_keys(queries, keys, r.scores);
    // While these products go on there is nothing else to do, and registers are free.
    if (kExact || promotion_.is_due(n)) {
      promotion_.promote(r.outputs);
    }
    begin_values(values, r);
    await_scores(r);
    float fade[2];
    const bool risen = softmax_.raise_reference<kExact>(
        r.scores, n < outline_.hiding,
        [&] { hide(r.scores, work_tile.tile(n) * kKeys, find_seen(work_tile)); }, fade);
    constexpr int kBeside = 8;  // more would take registers
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
    if (!kExact && n == outline_.hiding) {
      repair(work_tile, softmax_, r.outputs);
    }
  }

  // The other tiles; their last one's values, which are returned, remain to be multiplied.
  __device__ __forceinline__ ValuesOperand continue_work_tile(const WorkTile& work_tile,
                                                              Fragments& r) {
    const int tiles = outline_.tiles, first = outline_.first, hiding = outline_.hiding;
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
        find_reference(work_tile, n, n < hiding, r);
        softmax_.exponentiate(r.scores);
        // ptxas makes this wait begin before most of the exponentials, and so it should be: where
        // they were kept before it, tiles took up to a tenth longer (docs/prefill.md).
        wait_multiplied<0>();
        add_values(fade, r);
        release<Values>(values_);
        pack_weights(r.scores, r.weights);
        await_next(n, keys, values);
        if (n == hiding) {
          softmax_.fade_now(r.outputs);
          repair(work_tile, softmax_, r.outputs);
        }
      }
    }
    return values;
  }

  // What follows an work tile's last values: the output.
  __device__ __forceinline__ void end(const WorkTile& work_tile, float value_scale, Fragments& r) {
    release<Values>(values_);
    if (!kPromotesToGmem && outline_.tiles == outline_.hiding) {
      repair(work_tile, softmax_, r.outputs);
    }
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      r.outputs[i] *= value_scale;
    }
    epilogue_.store(work_tile, queries_.slot, softmax_, r.outputs);
  }

  // What is left to do, while the products of the last values go on, with an work tile's sums,
  // before the next work tile begins: registers have no room for both.
  __device__ __forceinline__ void complete(const WorkTile& work_tile, Fragments& r) {
    if (promotion_.holds_some()) {
      promotion_.fetch(r.scores);
      wait_multiplied<0>();
      pin(r.outputs);
      promotion_.add(r.scores, r.outputs);
    } else if (outline_.tiles == outline_.hiding) {
      wait_multiplied<0>();
      pin(r.outputs);
      repair(work_tile, softmax_, r.outputs);
    }
  }

  // The values of an work tile's last tile, and the output; meanwhile the first tile of the next
  // work tile, if that lies `after` it. Whether one has begun.
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
    const int first = rows.unseen(warpgroup_);
    const Operand queries = await_queries(ahead);
    leave_out<Keys>(first, keys_);
    const KeysOperand keys(await<Keys>(keys_, keys_have_come_ && first == 0));
    pin(r.scores);
    begin_multiplying();
    multiply_keys(queries, keys, r.scores);
    const float scale = Softmax::read_scale(args_, next.kv_head);
    const Seen seen = find_seen(rows);
    wait_multiplied<1>();
    const float fade[2] = {softmax_.fade(0), softmax_.fade(1)};
    add_values(fade, r);
    end(work_tile, value_scale, r);
    leave_out<Values>(first, values_);
    softmax_.begin(scale);
    outline_ = outline_of(tiles, rows);
    wait_multiplied<0>();
    weigh_first(tiles.tile(first), seen, r);
    release_output();
  }

  std::conditional_t<kPromotesToGmem, Promotion, NoPromotion> promotion_;
  bool keys_have_come_, values_have_come_;  // the next
};

// What the producer warpgroup's other warps do.
__device__ __forceinline__ void assist(SharedStorage& shared, const Arguments&) {
  Transposer(shared).run();
}

}  // namespace ostinato::prefill
