// A consumer warpgroup of 8-bit queries, keys and values.
//
// The tensor cores keep about 14 bits of a sum of 8-bit products, so the products of a tile's
// weights and values are summed anew and then added to the output in fp32. They are enqueued with
// the products of the next tile's keys. For value dims above 128 registers are too few for that:
// there 64 columns of the value dim are multiplied and added at a time, before the next tile's
// keys. Warpgroups take no turns: with 8 bits they are faster without.
#pragma once

#include "prefill_consumer_base.cuh"
#include "prefill_softmax_fp8.cuh"
#include "prefill_transpose.cuh"

namespace ostinato::prefill {

class Consumer : public ConsumerBase<Softmax> {
 public:
  using ConsumerBase::ConsumerBase;
  __device__ __forceinline__ void run() { follow_items(*this); }

 private:
  friend ConsumerBase;

  // What a thread holds: while products go on, all but the outputs are the tensor cores'.
  struct Fragments {
    float scores[kScores];
    uint32_t weights[kKeySteps][4];
    float products[kPartOutputs];
    float outputs[kOutputs];
  };

  // While wgmma reads its operands, an answer from shared memory takes some hundred clocks. So
  // which tile it is, is read only where it must be, and whether the next one has come is asked
  // long before that matters.
  __device__ __forceinline__ void find_reference(const Item& item, int n, bool hiding,
                                                 Fragments& r) {
    softmax_.find_reference(r.scores, hiding,
                            [&] { hide(r.scores, item.tile(n) * kKeys, find_seen(item)); });
  }

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

  // Scores and weights of the first tile.
  __device__ __forceinline__ void weigh_first(const Item& item, Fragments& r) {
    find_reference(item, 0, item.hiding_tiles() > 0, r);
    softmax_.exponentiate(r.scores);
    pack_weights(r.scores, r.weights);
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      r.outputs[i] = 0;
    }
  }

  __device__ __forceinline__ void start(const Item& item, Fragments& r) {
    softmax_.begin(item);
    const Operand queries = await_queries(queries_);
    const Operand keys(await<Keys>(keys_));
    pin(r.scores);
    begin_multiplying();
    multiply_keys(queries, keys, r.scores);
    wait_multiplied<0>();
    pin(r.scores);
    release<Keys>(keys_);
    weigh_first(item, r);
  }

  // Begins the product of a part of the values.
  template <int kPart>
  __device__ __forceinline__ void begin_part(const ValuesOperand& values, Fragments& r) {
    pin(r.products);
    pin(r.weights);
    begin_multiplying();
    multiply_values<kPart>(r.weights, values, r.products, false);
  }

  // When it has ended: to the outputs, which the tile before left relative to another reference.
  template <int kPart>
  __device__ __forceinline__ void add_part(const float (&fade)[2], Fragments& r) {
    pin(r.products);
    pin(r.weights);
#pragma unroll
    for (int i = 0; i < kPartOutputs; ++i) {
      float& output = r.outputs[kPart * kPartOutputs + i];
      output = fmaf(output, fade[row_of(i)], r.products[i]);
    }
  }

  // Multiplies a tile's weights and values, and adds them: part kPart and all after it.
  template <int kPart = 0>
  __device__ __forceinline__ void add_values(const ValuesOperand& values, Fragments& r) {
    const float fade[2] = {softmax_.fade(0), softmax_.fade(1)};
    begin_part<kPart>(values, r);
    wait_multiplied<0>();
    add_part<kPart>(fade, r);
    if constexpr (kPart + 1 < kParts) {
      add_values<kPart + 1>(values, r);
    }
  }

  // The other tiles; their last one's values, which are returned, remain to be multiplied.
  __device__ __forceinline__ ValuesOperand continue_item(const Item& item, Fragments& r) {
    const int tiles = item.tiles(), hiding = item.hiding_tiles();
    const Operand queries(shared_.queries[queries_.slot][warpgroup_]);
    ValuesOperand values(await<Values>(values_));
    if (tiles == 1) {
      return values;
    }
    Operand keys(await<Keys>(keys_));
#pragma unroll 1
    for (int n = 1; n < tiles; ++n) {
      const float fade[2] = {softmax_.fade(0), softmax_.fade(1)};
      if constexpr (kParts > 1) {
        add_values(values, r);
        release<Values>(values_);
      }
      pin(r.scores);
      begin_multiplying();
      multiply_keys(queries, keys, r.scores);
      if constexpr (kParts == 1) {
        begin_part<0>(values, r);
      }
      wait_multiplied<kParts == 1 ? 1 : 0>();
      pin(r.scores);
      release<Keys>(keys_);
      RingPosition next_values = values_;
      if constexpr (kParts == 1) {
        next_values.advance(kStages);
      }
      const bool keys_have_come = has_come<Keys>(keys_);
      const bool values_have_come = has_come<Values>(next_values);
      find_reference(item, n, n < hiding, r);
      softmax_.exponentiate(r.scores);
      if constexpr (kParts == 1) {
        wait_multiplied<0>();
        add_part<0>(fade, r);
        release<Values>(values_);
      }
      pack_weights(r.scores, r.weights);
      // What the next tile needs, before it is due.
      if (n + 1 < tiles) {
        keys = Operand(await<Keys>(keys_, keys_have_come));
      }
      values = ValuesOperand(await<Values>(values_, values_have_come));
      if (n == hiding) {
        softmax_.fade_now(r.outputs);
        mend(item, softmax_, r.outputs);
      }
    }
    return values;
  }

  // What follows an item's last values: the output.
  __device__ __forceinline__ void end_item(const Item& item, Fragments& r) {
    release<Values>(values_);
    if (item.tiles() == item.hiding_tiles()) {
      mend(item, softmax_, r.outputs);
    }
    const float scale = args_.params.v_scale[item.kv_head * args_.params.v_scale_stride];
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      r.outputs[i] *= scale;
    }
    store(item, softmax_, r.outputs);
  }

  __device__ __forceinline__ void finish(const Item& item, const ValuesOperand& values,
                                         Fragments& r) {
    release_output();
    if constexpr (!kShareOutput) {
      release_queries(queries_.slot);
    }
    add_values(values, r);
    end_item(item, r);
    release_output();
  }

  // The same; meanwhile the first tile of the next item is multiplied.
  __device__ __forceinline__ void finish_and_start(const Item& item, const Item& next,
                                                   const ValuesOperand& values, Fragments& r) {
    release_output();
    if constexpr (!kShareOutput) {
      release_queries(queries_.slot);
    }
    RingPosition ahead = queries_;
    ahead.advance(kQueryBuffers);
    const Operand queries = await_queries(ahead);
    const Operand keys(await<Keys>(keys_));
    pin(r.scores);
    begin_part<0>(values, r);
    begin_multiplying();
    multiply_keys(queries, keys, r.scores);
    wait_multiplied<1>();
    const float fade[2] = {softmax_.fade(0), softmax_.fade(1)};
    add_part<0>(fade, r);
    end_item(item, r);
    softmax_.begin(next);
    wait_multiplied<0>();
    pin(r.scores);
    release<Keys>(keys_);
    weigh_first(next, r);
  }
};

// What the producer warpgroup's other warps do.
__device__ __forceinline__ void assist(SharedStorage& shared, const Arguments&) {
  Transposer(shared).run();
}

}  // namespace ostinato::prefill
