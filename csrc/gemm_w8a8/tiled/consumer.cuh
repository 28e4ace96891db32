// The mainloop of a consumer warpgroup of the tiled GEMM: accumulates a tile over K, then calls the
// epilogue.
#pragma once

#include <type_traits>

#include "block_scales.cuh"
#include "cluster_reduce.cuh"
#include "common/cluster.cuh"
#include "common/launch.cuh"
#include "common/ring.cuh"
#if OSTINATO_TOKEN_ROWS
#include "epilogue.cuh"
#elif OSTINATO_SMALL_M
#include "epilogue_small_m.cuh"
#else
#include "epilogue_swap_ab.cuh"
#endif
#include "row_fragments.cuh"
#include "tile_scheduler.cuh"
#include "wgmma.cuh"

namespace ostinato::tiled {

class Consumer {
 public:
  __device__ Consumer(const W8A8GemmParams& params, const Plan& plan, const CUtensorMap& out_map,
                      uint8_t* ring, FixedStorage& fixed)
      : params_(params),
        plan_(plan),
        out_map_(out_map),
        ring_(shared_address(ring)),
        fixed_(fixed),
        warpgroup_(threadIdx.x / kWarpgroup) {}

  __device__ __forceinline__ void run() {
    const int clusters = plan_.clusters;
    Epilogue epilogue(params_, plan_, out_map_, fixed_, warpgroup_);
    RingPosition position;
    int first = blockIdx.x >> (plan_.cluster - 1);
    if (kPingPong && warpgroup_ == 1) {
      first += clusters;
      position.advance(plan_.stages, plan_.depth_steps);
    }
    for (int index = first; index < plan_.work_tiles; index += clusters * (kPingPong ? 2 : 1)) {
      WorkTile work_tile = work_tile_at(plan_, index, rank());
      shared_ = work_tile.shared;
      epilogue.fetch_channels(work_tile);
      wait_for_predecessor();  // returns at once after the first time
      epilogue.fetch_tokens(work_tile);
      Sum sums[kBlocks][kSums];
      if constexpr (kBlockScales) {
        constexpr int kWidest = ColumnScales::kWidest;
        const int first = place_in_scale_box(work_tile.channel / kScaleChannels);
        first % kWidest == 0 ? sum_scaled<kWidest>(work_tile, sums, position, fixed_)
                             : sum_scaled<2>(work_tile, sums, position, fixed_);
      } else if constexpr (kPromote) {
        sum_promoting(work_tile.steps, sums, position);
      } else {
        sum(work_tile.steps, sums, position, epilogue);
      }
      if (!kSmallM) {
        // Recomputed: during the mainloop every register is needed for accumulators.
        work_tile = work_tile_at(plan_, opaque(index), rank());
      }
      store(epilogue, work_tile, sums);
      if (kPingPong) {
        position.advance(plan_.stages, plan_.depth_steps);
      }
    }
    epilogue.finish();
  }

 private:
  // Hides from the compiler that a value is known, so that it recomputes what depends on it.
  __device__ static __forceinline__ int opaque(int value) {
    asm volatile("" : "+r"(value));
    return value;
  }

  __device__ __forceinline__ int rank() const { return plan_.cluster > 1 ? cluster_rank() : 0; }

  // A template, so that epilogues of tiles that are never shared need no store() of part of a tile.
  template <class AnyEpilogue>
  __device__ __forceinline__ void store(AnyEpilogue& epilogue, const WorkTile& work_tile,
                                        Sum (&sums)[kBlocks][kSums]) {
    if constexpr (kCanSplit) {
      if (work_tile.shared) {
        Sum reduced[kBlocks][kSums / 2];
        cluster_reduce(ring_, warpgroup_, rank(), sums, reduced);
        epilogue.template store<kTileColumns / 2>(work_tile, rank() * (kTileColumns / 2), reduced);
        return;
      }
    }
    epilogue.store_tile(work_tile, sums);
  }

  __device__ __forceinline__ Channels channels_of(int slot) const {
    return Channels(
        ring_ + slot * plan_.stage_bytes +
        (kTokenRows ? 0 : warpgroup_in_tile(warpgroup_) * kBlocks * kMmaRows * kPackedDepth));
  }
  __device__ __forceinline__ uint32_t tokens_address(int slot) const {
    return ring_ + slot * plan_.stage_bytes + plan_.weight_bytes +
           (kTokenRows ? warpgroup_in_tile(warpgroup_) * kBlocks * kMmaRows * kUnitDepth : 0);
  }
  __device__ __forceinline__ Tokens tokens_of(int slot) const {
    return Tokens(tokens_address(slot));
  }

  __device__ __forceinline__ void wait_full(const RingPosition& position) {
    wait(&fixed_.full[position.slot], position.parity);
    if (kThrottled) {
      wait(&fixed_.full_tokens[position.slot], position.parity);
    }
  }

  // Issues the MMAs of a unit of a stage, for the columns from `first_column` on.
  __device__ __forceinline__ void multiply_unit(Channels channels, Tokens tokens, int unit,
                                                int first_column, bool accumulate,
                                                Sum (&sums)[kBlocks][kPieceSums]) const {
    tiled::multiply_unit(channels, unit * kUnitBlocks * plan_.block_bytes, plan_.block_bytes,
                         tokens, unit * plan_.token_rows * kUnitDepth, first_column, accumulate,
                         sums);
  }

  // Issues the MMAs of a stage as one wgmma group.
  template <class Sums>
  __device__ __forceinline__ void multiply_stage(int slot, bool accumulate, Sums& sums) {
    const Channels channels = channels_of(slot);
    const Tokens tokens = tokens_of(slot);
    cute::warpgroup_arrive();
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      multiply_unit(channels, tokens, unit, 0, accumulate || unit > 0, sums);
    }
    cute::warpgroup_commit_batch();
  }

  // Releases a stage to the producers that write to it: those of the whole cluster or, while the
  // CTAs share K, the CTA's own. The barrier counts equally many arrivals either way.
  __device__ __forceinline__ void release(int slot) {
    OSTINATO_DELAY(release, warpgroup_ == 0);
    // MMAs are of the whole warpgroup, but every warp reads block scales by itself.
    const int thread = threadIdx.x % (kBlockScales ? 32 : kWarpgroup);
    if (kBlockScales) {
      __syncwarp();
    }
    if (thread >= plan_.cluster) {
      return;
    }
    if (plan_.cluster == 1 || shared_) {
      arrive(&fixed_.empty[slot]);
    } else {
      arrive_at(&fixed_.empty[slot], thread);
    }
  }

  // Ping-pong: one warpgroup issues MMAs while the other stores its tile. The turn also keeps a
  // warpgroup from running ahead by a whole ring, where the parity of a barrier would be ambiguous.
  __device__ __forceinline__ void wait_turn() {
    if (kPingPong) {
      wait(&fixed_.turn[warpgroup_], turn_parity_);
      turn_parity_ ^= 1;
    }
  }
  __device__ __forceinline__ void give_turn() {
    if (kPingPong && threadIdx.x % 32 == 0) {
      arrive(&fixed_.turn[warpgroup_ ^ 1]);
    }
  }

  // Mainloops are templates, so that only the variant's own has to suit its pieces.
  template <class Sums>
  __device__ __forceinline__ void sum(int steps, Sums& sums, RingPosition& position,
                                      Epilogue& epilogue) {
    pin(sums);
    int previous = 0;
    wait_turn();
    for (int step = 0; step < steps; ++step) {
      OSTINATO_DELAY(consumer, warpgroup_ == 0);
      wait_full(position);
      multiply_stage(position.slot, step > 0, sums);
      epilogue.store_deferred(step);
      // The MMAs of this stage run on; those of the previous stage have completed.
      cute::warpgroup_wait<1>();
      if (step > 0) {
        release(previous);
      }
      previous = position.slot;
      position.advance(plan_.stages);
    }
    give_turn();
    epilogue.store_deferred_from(steps);
    cute::warpgroup_wait<0>();
    pin(sums);
    release(previous);
  }

  static __device__ __forceinline__ void clear(Sum (&sums)[kBlocks][kSums]) {
#pragma unroll
    for (auto& block : sums) {
#pragma unroll
      for (Sum& s : block) {
        s = 0;
      }
    }
  }

  // Two-level accumulation: sums of 128 products are added in fp32.
  template <class Sums>
  __device__ __forceinline__ void sum_promoting(int steps, Sums& sums, RingPosition& position) {
    clear(sums);
    wait_turn();
    for (int step = 0; step < steps; ++step) {
      wait_full(position);
      const Channels channels = channels_of(position.slot);
      const Tokens tokens = tokens_of(position.slot);
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        Sums products;
        pin(products);
        cute::warpgroup_arrive();
        multiply_unit(channels, tokens, unit, 0, false, products);
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<0>();
        pin(products);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
          for (int i = 0; i < kSums; ++i) {
            sums[b][i] += products[b][i];
          }
        }
      }
      release(position.slot);
      position.advance(plan_.stages);
    }
    give_turn();
  }

  // Two-level accumulation with block scales: sums of 128 products are scaled, and added in fp32.
  // All tiles add in the same order and with the same roundings.
  template <int kVector, class Fixed>
  __device__ __forceinline__ void sum_scaled(const WorkTile& work_tile, Sum (&sums)[kBlocks][kSums],
                                             RingPosition& position, const Fixed& fixed) {
    clear(sums);
    if constexpr (kPiecesAtOnce == 1) {
      sum_scaling_each<kVector>(work_tile, sums, position, fixed);
    } else {
      sum_scaling<kVector>(work_tile, sums, position, fixed);
    }
  }

  // One piece at a time: while it is scaled, the MMAs of the other warpgroup run.
  template <int kVector, class Fixed>
  __device__ __forceinline__ void sum_scaling_each(const WorkTile& work_tile,
                                                   Sum (&sums)[kBlocks][kSums],
                                                   RingPosition& position, const Fixed& fixed) {
    const int first_w = place_in_scale_box(work_tile.channel / kScaleChannels);
    const int first_x = place_in_scale_box(work_tile.token);
    Sum products[kBlocks][kPieceSums];
    for (int step = 0; step < work_tile.steps; ++step) {
      OSTINATO_DELAY(consumer, warpgroup_ == 0);
      wait_full(position);
      RowScales row_scales;
      for_each_piece([&](auto piece) {
        constexpr int kColumn = piece * kPieceColumns;
        pin(products);
        cute::warpgroup_arrive();
        multiply_unit(channels_of(position.slot), tokens_of(position.slot), 0, kColumn, false,
                      products);
        cute::warpgroup_commit_batch();
        if constexpr (piece == 0) {
          row_scales.load(fixed.x_scales[position.slot].of[0] + first_x, warpgroup_);
        }
        ColumnScales column_scales;
        column_scales.template load<kVector>(fixed.w_scales[position.slot].of[0] + first_w,
                                             kColumn);
        cute::warpgroup_wait<0>();
        pin(products);
        if constexpr (piece == kPieces - 1) {
          release(position.slot);
        }
        column_scales.add_scaled(products, row_scales, piece * kPieceSums, sums);
      });
      position.advance(plan_.stages);
    }
  }

  // Several pieces at once: while one is scaled, the MMAs of the next ones run, those of the next
  // stage included.
  template <int kVector, class Fixed>
  __device__ __forceinline__ void sum_scaling(const WorkTile& work_tile,
                                              Sum (&sums)[kBlocks][kSums], RingPosition& position,
                                              const Fixed& fixed) {
    const int first_w = place_in_scale_box(work_tile.channel / kScaleChannels);
    const int first_x = place_in_scale_box(work_tile.token);
    Sum products[kPieces][kBlocks][kPieceSums];
    Rows rows[2];
    const auto issue = [&](int slot, auto piece, auto& rows_of_unit) {
      if constexpr (kRowsInRegisters && piece == 0) {
        rows_of_unit.load(tokens_address(slot));
      }
      pin(products[piece]);
      cute::warpgroup_arrive();
      if constexpr (kRowsInRegisters) {
        rows_of_unit.multiply(channels_of(slot), plan_.block_bytes, piece * kPieceColumns,
                              products[piece]);
      } else {
        multiply_unit(channels_of(slot), tokens_of(slot), piece / kColumnParts,
                      piece % kColumnParts * kPieceColumns, false, products[piece]);
      }
      cute::warpgroup_commit_batch();
    };
    // Waits for a piece, of which `kBeside` others run on, and adds it.
    RowScales row_scales;
    const auto add = [&](int slot, auto piece, auto beside, auto& rows_of_unit) {
      constexpr int kUnit = piece / kColumnParts, kPart = piece % kColumnParts;
      const float* const w = fixed.w_scales[slot].of[kUnit] + first_w;
      const float* const x = fixed.x_scales[slot].of[kUnit] + first_x;
      if constexpr (kPart == 0) {
        row_scales.load(kTokenRows ? x : w, warpgroup_);
      }
      ColumnScales column_scales;
      column_scales.template load<kVector>(kTokenRows ? w : x, kPart * kPieceColumns);
      cute::warpgroup_wait<beside>();
      pin(products[piece]);
      if constexpr (piece == kPieces - 1) {
        if constexpr (kRowsInRegisters) {
          rows_of_unit.pin();
        }
        release(slot);
      }
      column_scales.add_scaled(products[piece], row_scales, kPart * kPieceSums, sums);
    };
    // Computes this many stages; none of their MMAs runs on. (Where some did across the edge of a
    // loop, the compiler would make all MMAs wait.)
    const auto run = [&](auto stages) {
      wait_full(position);
      for_each_piece([&](auto piece) { issue(position.slot, piece, rows[0]); });
#pragma unroll
      for (int stage = 1; stage < stages; ++stage) {
        OSTINATO_DELAY(consumer, warpgroup_ == 0);
        const int slot = position.slot;
        position.advance(plan_.stages);
        for_each_piece([&](auto piece) {
          add(slot, piece, std::integral_constant<int, kPieces - 1>(), rows[(stage - 1) % 2]);
          if constexpr (piece == 0) {
            wait_full(position);
          }
          issue(position.slot, piece, rows[stage % 2]);
        });
      }
      for_each_piece([&](auto piece) {
        add(position.slot, piece, std::integral_constant<int, kPieces - 1 - piece>(),
            rows[(stages - 1) % 2]);
      });
      position.advance(plan_.stages);
    };
    int step = 0;
    for (; step + kRunStages <= work_tile.steps; step += kRunStages) {
      run(std::integral_constant<int, kRunStages>());
    }
    for (; step < work_tile.steps; ++step) {
      run(std::integral_constant<int, 1>());
    }
  }

  // Calls visit(std::integral_constant of a piece), in order.
  template <int kPiece = 0, class Visit>
  static __device__ __forceinline__ void for_each_piece(const Visit& visit) {
    visit(std::integral_constant<int, kPiece>());
    if constexpr (kPiece + 1 < kPieces) {
      for_each_piece<kPiece + 1>(visit);
    }
  }

  const W8A8GemmParams& params_;
  const Plan& plan_;
  const CUtensorMap& out_map_;
  uint32_t ring_;
  FixedStorage& fixed_;
  int warpgroup_;
  bool shared_ = false;
  uint32_t turn_parity_ = warpgroup_ == 0 ? 1 : 0;  // the first turn belongs to warpgroup 0
};

}  // namespace ostinato::tiled
