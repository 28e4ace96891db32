// A consumer warpgroup of 8-bit queries, keys and values.
//
// The tensor cores keep about 14 bits of a sum of 8-bit products, so the products of a tile's
// weights and values are summed anew and then added to the output in fp32. To save registers this
// is done for 64 columns of the value dim at a time: the first part is enqueued with the products
// of the next tile's keys, the others while the next scores become weights.
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

  __device__ __forceinline__ void find_reference(const Item& item, int n, bool hiding,
                                                 Fragments& r) {
    softmax_.find_reference(r.scores, item.tile(n) * kKeys, hiding,
                            [&] { return find_seen(item); });
  }

  // Scores and weights of the first tile.
  __device__ __forceinline__ void weigh_first(const Item& item, Fragments& r) {
    find_reference(item, 0, item.hiding_tiles() > 0, r);
    softmax_.exponentiate<0, 1>(r.scores);
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
    take_turn();
    pin(r.scores);
    begin_multiplying();
    multiply_keys(queries, keys, r.scores);
    give_turn();
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

  // Adds part kPart, which is on its way, and all after it; `meanwhile`, a template of the part, is
  // done while they go on.
  template <int kPart, class Meanwhile>
  __device__ __forceinline__ void add_parts(const ValuesOperand& values, const float (&fade)[2],
                                            Fragments& r, const Meanwhile& meanwhile) {
    meanwhile(std::integral_constant<int, kPart>());
    wait_multiplied<0>();
    add_part<kPart>(fade, r);
    if constexpr (kPart + 1 < kParts) {
      begin_part<kPart + 1>(values, r);
      add_parts<kPart + 1>(values, fade, r, meanwhile);
    }
  }

  // The n-th tile's scores become weights while the values of the one before are multiplied: with
  // the first part, which began before, the others.
  __device__ __forceinline__ void weigh_and_add(const Item& item, int n, bool hiding,
                                                const ValuesOperand& values, Fragments& r) {
    const float fade[2] = {softmax_.fade(0), softmax_.fade(1)};
    find_reference(item, n, hiding, r);
    add_parts<0>(values, fade, r, [&](auto part) {
      constexpr int kPart = decltype(part)::value;
      if constexpr (kParts == 1) {
        softmax_.exponentiate<0, 1>(r.scores);
      } else if constexpr (kPart > 0) {
        softmax_.exponentiate<kPart - 1, kParts - 1>(r.scores);
      }
    });
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
      take_turn();
      pin(r.scores);
      begin_multiplying();
      multiply_keys(queries, keys, r.scores);
      begin_part<0>(values, r);
      give_turn();
      wait_multiplied<1>();
      pin(r.scores);
      release<Keys>(keys_);
      weigh_and_add(item, n, n < hiding, values, r);
      release<Values>(values_);
      pack_weights(r.scores, r.weights);
      // What the next turn needs, before it is due.
      if (n + 1 < tiles) {
        keys = Operand(await<Keys>(keys_));
      }
      values = ValuesOperand(await<Values>(values_));
      if (n == hiding) {
        softmax_.fade_now(r.outputs);
        mend(item, softmax_, r.outputs);
      }
    }
    return values;
  }

  // The values of an item's last tile, and the output. Its first part is on its way.
  __device__ __forceinline__ void end_item(const Item& item, const ValuesOperand& values,
                                           Fragments& r) {
    const float fade[2] = {softmax_.fade(0), softmax_.fade(1)};
    add_part<0>(fade, r);
    if constexpr (kParts > 1) {
      begin_part<1>(values, r);
      add_parts<1>(values, fade, r, [](auto) {});
    }
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
    begin_part<0>(values, r);
    wait_multiplied<0>();
    end_item(item, values, r);
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
    take_turn();
    pin(r.scores);
    begin_part<0>(values, r);
    begin_multiplying();
    multiply_keys(queries, keys, r.scores);
    give_turn();
    wait_multiplied<1>();
    end_item(item, values, r);
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
