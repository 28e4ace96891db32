// The mainloops of products with block scales: sums of 128 products are scaled, and added in fp32.
// All tiles add in the same order and with the same roundings.
#pragma once

#include <type_traits>

#include "block_scales.cuh"
#include "row_fragments.cuh"
#include "stages.cuh"

namespace ostinato::tiled {

#if OSTINATO_BLOCK_SCALES

class ScaledMainloop : public Stages {
 protected:
  using Stages::Stages;

  // Adds a tile's products to its sums.
  __device__ __forceinline__ void sum_scaled(const WorkTile& work_tile, Sum (&sums)[kBlocks][kSums],
                                             RingPosition& position) {
    if (kEvenChannels == kPackedRows || work_tile.channel % kEvenChannels == 0) {
      sum_scaled_by<ColumnScales<kEvenChannels>>(work_tile, sums, position);
    } else {
      sum_scaled_by<ColumnScales<kPackedRows>>(work_tile, sums, position);
    }
  }

 private:
  template <class Columns>
  __device__ __forceinline__ void sum_scaled_by(const WorkTile& work_tile,
                                                Sum (&sums)[kBlocks][kSums],
                                                RingPosition& position) {
    if constexpr (kPiecesAtOnce == 1) {
      sum_scaling_each<Columns>(work_tile, sums, position);
    } else {
      sum_scaling<Columns>(work_tile, sums, position);
    }
  }

  // The scales of a tile in those of a unit of a stage.
  __device__ __forceinline__ TileScales scales_of(const WorkTile& work_tile, int slot,
                                                  int unit) const {
    const int place_x = place_in_scale_box(work_tile.token);
    const int place_w = place_in_scale_box(work_tile.channel / kScaleChannels);
    return {fixed_.x_scales[slot].of[unit] + place_x, fixed_.w_scales[slot].of[unit] + place_w,
            work_tile.channel % kScaleChannels};
  }

  // One piece at a time: while it is scaled, the MMAs of the other warpgroup run.
  template <class Columns>
  __device__ __forceinline__ void sum_scaling_each(const WorkTile& work_tile,
                                                   Sum (&sums)[kBlocks][kSums],
                                                   RingPosition& position) {
    Sum products[kBlocks][kPieceSums];
#pragma unroll kUnrolledStages
    for (int step = 0; step < work_tile.steps; ++step) {
      OSTINATO_DELAY(consumer, warpgroup_ == 0);
      wait_full(position);
      const TileScales scales = scales_of(work_tile, position.slot, 0);
      RowScales row_scales;
      for_each_piece([&](auto piece) {
        pin(products);
        cute::warpgroup_arrive();
        multiply_unit(channels_of(position.slot), tokens_of(position.slot), 0,
                      piece * kPieceColumns, false, products);
        cute::warpgroup_commit_batch();
        if constexpr (piece == 0) {
          row_scales.load(scales, warpgroup_);
        }
        Columns column_scales;
        column_scales.load(scales, piece * kPieceColumns);
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
  template <class Columns>
  __device__ __forceinline__ void sum_scaling(const WorkTile& work_tile,
                                              Sum (&sums)[kBlocks][kSums], RingPosition& position) {
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
      constexpr int kPart = piece % kColumnParts;
      const TileScales scales = scales_of(work_tile, slot, piece / kColumnParts);
      if constexpr (kPart == 0) {
        row_scales.load(scales, warpgroup_);
      }
      Columns column_scales;
      column_scales.load(scales, kPart * kPieceColumns);
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
};
using Mainloop = ScaledMainloop;

#else
using Mainloop = Stages;
#endif

}  // namespace ostinato::tiled
