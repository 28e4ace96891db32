// The mainloops of products with block scales: sums of 128 products are scaled, and added in fp32.
// All tiles add in the same order and with the same roundings.
#pragma once

#include <type_traits>

#include "block_scales.cuh"
#include "common/debug.cuh"
#include "common/mma_groups.cuh"
#include "common/ring.cuh"
#include "row_fragments.cuh"

namespace ostinato::tiled {

// On top of a warpgroup's view of the ring: the tiled GEMM's, or another one's.
template <class Stages>
class ScaledMainloop : public Stages {
 protected:
  using Stages::Stages;

  // Adds the products of a tile, which has so many stages, to its sums.
  template <class WorkTile>
  __device__ __forceinline__ void sum_scaled(const WorkTile& work_tile, int steps,
                                             Sum (&sums)[kBlocks][kSums], RingPosition& position) {
    constexpr int kAlternating = Stages::kAlternatingScales;
    this->clear(sums);
    if (Stages::kEvenTiles || work_tile.channel % kEvenChannels == 0) {
      sum_scaled_by<ColumnScales<kEvenChannels, kAlternating>>(work_tile, steps, sums, position);
    } else {
      sum_scaled_by<ColumnScales<kPackedRows, kAlternating>>(work_tile, steps, sums, position);
    }
  }

 private:
  using Scales = RowScales<Stages::kAlternatingScales>;

  template <class Columns, class WorkTile>
  __device__ __forceinline__ void sum_scaled_by(const WorkTile& work_tile, int steps,
                                                Sum (&sums)[kBlocks][kSums],
                                                RingPosition& position) {
    if constexpr (kPiecesAtOnce == 1) {
      sum_scaling_each<Columns>(work_tile, steps, sums, position);
    } else {
      sum_scaling<Columns>(work_tile, steps, sums, position);
    }
  }

  // One piece at a time: while it is scaled, the MMAs of the other warpgroup run.
  template <class Columns, class WorkTile>
  __device__ __forceinline__ void sum_scaling_each(const WorkTile& work_tile, int steps,
                                                   Sum (&sums)[kBlocks][kSums],
                                                   RingPosition& position) {
    Sum products[kBlocks][kPieceSums];
#pragma unroll kUnrolledStages
    for (int step = 0; step < steps; ++step) {
      OSTINATO_DELAY(consumer, this->warpgroup_ == 0);
      this->wait_full(position);
      const TileScales scales = this->scales_of(work_tile, position.slot, 0);
      Scales row_scales;
      for_each_piece([&](auto piece) {
        pin(products);
        begin_multiplying();
        this->multiply_unit(this->channels_of(position.slot), this->tokens_of(position.slot), 0,
                            piece * kPieceColumns, false, products);
        commit_multiplication();
        if constexpr (piece == 0) {
          row_scales.load(scales, this->warpgroup_);
        }
        Columns column_scales;
        column_scales.load(scales, piece * kPieceColumns);
        wait_multiplied<0>();
        pin(products);
        if constexpr (piece == kPieces - 1) {
          this->release(position.slot);
        }
        column_scales.add_scaled(products, row_scales, piece * kPieceSums, sums);
      });
      position.advance(this->plan_.stages);
    }
  }

  // Several pieces at once: while one is scaled, the MMAs of the next ones run, those of the next
  // stage included.
  template <class Columns, class WorkTile>
  __device__ __forceinline__ void sum_scaling(const WorkTile& work_tile, int steps,
                                              Sum (&sums)[kBlocks][kSums], RingPosition& position) {
    Sum products[kPieces][kBlocks][kPieceSums];
    Rows rows[2];
    const auto issue = [&](int slot, auto piece, auto& rows_of_unit) {
      if constexpr (kRowsInRegisters && piece == 0) {
        rows_of_unit.load(this->tokens_address(slot));
      }
      pin(products[piece]);
      begin_multiplying();
      if constexpr (kRowsInRegisters) {
        rows_of_unit.multiply(this->channels_of(slot), this->plan_.block_bytes,
                              piece * kPieceColumns, products[piece]);
      } else {
        this->multiply_unit(this->channels_of(slot), this->tokens_of(slot), piece / kColumnParts,
                            piece % kColumnParts * kPieceColumns, false, products[piece]);
      }
      commit_multiplication();
    };
    // Waits for a piece, of which `kBeside` others run on, and adds it.
    Scales row_scales;
    const auto add = [&](int slot, auto piece, auto beside, auto& rows_of_unit) {
      constexpr int kPart = piece % kColumnParts;
      const TileScales scales = this->scales_of(work_tile, slot, piece / kColumnParts);
      if constexpr (kPart == 0) {
        row_scales.load(scales, this->warpgroup_);
      }
      Columns column_scales;
      column_scales.load(scales, kPart * kPieceColumns);
      wait_multiplied<beside>();
      pin(products[piece]);
      if constexpr (piece == kPieces - 1) {
        if constexpr (kRowsInRegisters) {
          rows_of_unit.pin();
        }
        this->release(slot);
      }
      column_scales.add_scaled(products[piece], row_scales, kPart * kPieceSums, sums);
    };
    // Computes this many stages; none of their MMAs runs on. (Where some did across the edge of a
    // loop, the compiler would make all MMAs wait.)
    const auto run = [&](auto stages) {
      this->wait_full(position);
      for_each_piece([&](auto piece) { issue(position.slot, piece, rows[0]); });
#pragma unroll
      for (int stage = 1; stage < stages; ++stage) {
        OSTINATO_DELAY(consumer, this->warpgroup_ == 0);
        const int slot = position.slot;
        position.advance(this->plan_.stages);
        for_each_piece([&](auto piece) {
          add(slot, piece, std::integral_constant<int, kPieces - 1>(), rows[(stage - 1) % 2]);
          if constexpr (piece == 0) {
            this->wait_full(position);
          }
          issue(position.slot, piece, rows[stage % 2]);
        });
      }
      for_each_piece([&](auto piece) {
        add(position.slot, piece, std::integral_constant<int, kPieces - 1 - piece>(),
            rows[(stages - 1) % 2]);
      });
      position.advance(this->plan_.stages);
    };
    int step = 0;
    for (; step + kRunStages <= steps; step += kRunStages) {
      run(std::integral_constant<int, kRunStages>());
    }
    for (; step < steps; ++step) {
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

}  // namespace ostinato::tiled
