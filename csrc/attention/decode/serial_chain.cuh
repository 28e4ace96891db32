// Processes a tile in a CTA that computes one serial chain of blocks (kChainPerCta): four blocks in
// order, with the same bits as one warp of a CTA without a cluster.
//
// Only the output depends on the previous block: it is rescaled when the maximum rises. The running
// maximum after a block is the maximum over all blocks so far. So each warp computes the weights of
// one block once the block maxima are known, and then accumulates its steps of the head dim from
// all four blocks.
#pragma once

#include "cluster_ops.cuh"
#include "common/debug.cuh"
#include "common/ring.cuh"
#include "mainloop.cuh"

namespace ostinato::decode {

template <bool kSeveral, class Storage>
__device__ __forceinline__ void run_serial_chain(Storage& shared, Mainloop& mainloop,
                                                 const Mask& mask, const RingPosition& position,
                                                 int tile, bool token_scales) {
  auto& chain = shared.chain;
  const int warp = warp_index(), lane = threadIdx.x % 32, stage = position.slot;
  const int first_token = tile * kTileTokens + block_offset(0);
  const int own_token = first_token + warp * kShareTokens;
  wait(&shared.keys_arrived.full[stage][warp], position.parity);
  OSTINATO_DELAY(decode_keys_load, warp == 1);
  // Keys past the end of the sequence are arbitrary; the mask discards their scores.
  mainloop.multiply_keys(shared.keys.blocks[stage][warp]);
  const TokenScales scales = token_scales ? TokenScales(shared.scales[stage][warp]) : TokenScales();
  const Scores shifted = mainloop.scale(mask, own_token, mask.hides_some(own_token), scales);
  const Columns own_tops = highest(shifted.values[0]);
  if (lane < 4) {
    chain.tops[warp][lane] = make_float2(own_tops.of[0], own_tops.of[1]);
  }
  OSTINATO_DELAY(decode_sums_store, warp == 1);
  sync_team(warp);
  OSTINATO_DELAY(decode_sums_load, warp == 2);
  Columns maximum = mainloop.max(0);
#pragma unroll
  for (int block = 0; block < kWarps; ++block) {
    const float2 top = chain.tops[block][lane % 4];
    if (block <= warp) {
      maximum.of[0] = fmaxf(top.x, maximum.of[0]);
      maximum.of[1] = fmaxf(top.y, maximum.of[1]);
    }
  }
  const Columns own_sums = mainloop.weigh_tile(0, maximum, shifted.values[0], scales);
  const uint2 own_weights = mainloop.weights();
  chain.weights[warp][lane] =
      make_uint4(own_weights.x, own_weights.y, __float_as_uint(own_sums.of[0]),
                 __float_as_uint(own_sums.of[1]));
  sync_team(warp);
  const auto add_block = [&](int block, bool hides_some) {
    const float2 top = chain.tops[block][lane % 4];
    const uint4 weights = chain.weights[block][lane];
    mainloop.raise(0, {{top.x, top.y}});
    mainloop.add_sums(0, {{__uint_as_float(weights.z), __uint_as_float(weights.w)}});
    mainloop.set_weights({weights.x, weights.y});
    mainloop.template multiply_values<kSeveral>(shared.values.blocks[stage][block], mask,
                                                first_token + block * kShareTokens, hides_some);
  };
#pragma unroll
  for (int block = 0; block < kWarps; ++block) {
    wait(&shared.values_arrived.full[stage][block], position.parity);
  }
  OSTINATO_DELAY(decode_values_load, warp == 2);
  const int last_token = first_token + (kWarps - 1) * kShareTokens;
  if (!mask.hides_some(first_token) && !mask.hides_some(last_token)) {
#pragma unroll
    for (int block = 0; block < kWarps; ++block) {
      add_block(block, false);
    }
    return;
  }
  // Not unrolled: instruction-cache misses of unrolled code would cost more than the loop.
#pragma unroll 1
  for (int block = 0; block < kWarps; ++block) {
    const int token = first_token + block * kShareTokens;
    if (mask.reaches(token)) {
      add_block(block, mask.hides_some(token));
    }
  }
}

}  // namespace ostinato::decode
