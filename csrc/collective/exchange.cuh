// Sums of rows over ranks, and rows of all ranks: who sends what, and in which order.
//
// A CTA takes its rows in order, and waits for one only when it has sent this one and those before,
// or all of its rows. So launches of which every CTA is resident end, whatever the order in which
// CTAs run: of the rows that are waited for, nobody has to wait to send the first.
#pragma once

#include <cstdint>

#include "common/vector.cuh"
#include "mailbox.cuh"
#include "params.h"

namespace ostinato {
namespace {

// How many rows a CTA has sent beyond the one that it waits for: while it adds up, others arrive.
constexpr int32_t kRowsAhead = 2;

// What a CTA does of a launch, as every thread of it knows it.
struct Part {
  int32_t cta;
  int32_t ctas;
  uint32_t threads;  // of a CTA
  uint32_t thread;
  int32_t rows;      // that are not padding
  uint32_t vectors;  // of a row
};

template <typename T>
__device__ __forceinline__ uint4 load_own(const CollectiveParams& p, int64_t row, uint32_t vector) {
  const T* const address = static_cast<const T*>(p.x) + row * p.x_stride;
  return __ldcs(reinterpret_cast<const uint4*>(address) + vector);
}

// Adds up a vector of each rank, from rank 0's on, and rounds the sum.
template <typename T>
struct Sum {
  static constexpr int kElements = 16 / static_cast<int>(sizeof(T));
  float values[kElements];

  __device__ __forceinline__ void operator()(int rank, const uint4& words) {
    const Packed<T, kElements> packed = {{words.x, words.y, words.z, words.w}};
    float next[kElements];
    packed.unpack(next);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      values[i] = rank == 0 ? next[i] : __fadd_rn(values[i], next[i]);
    }
  }

  __device__ __forceinline__ uint4 rounded() const {
    Packed<T, kElements> packed;
    packed.pack(values);
    return make_uint4(packed.words[0], packed.words[1], packed.words[2], packed.words[3]);
  }
};

// Every rank sends its rows to all others. Calls receive(row, index, own) for each vector of a row
// of this CTA, with the vector that this rank has, then finish(row).
template <typename T, int kRanks, int kVectors, typename Receive, typename Finish>
__device__ __forceinline__ void all_to_all(const CollectiveParams& p, const Part& part,
                                           Mailbox<kRanks>& mailbox, const Receive& receive,
                                           const Finish& finish) {
  const uint32_t segment = p.m * part.vectors;
  // The first row: asked for before the mailbox's words, not behind them, and not loaded again.
  constexpr bool kHoldsRow = kVectors <= 2;
  uint4 first_row[kVectors] = {};
  if (kHoldsRow && part.cta < part.rows) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t vector = v * part.threads + part.thread;
      if (vector < part.vectors) {
        first_row[v] = load_own<T>(p, part.cta, vector);
      }
    }
  }
  const auto own_at = [&](int32_t row, int v, uint32_t vector) {
    return kHoldsRow && row == part.cta ? first_row[v] : load_own<T>(p, row, vector);
  };
  mailbox.open();
  const auto send = [&](int32_t row) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t vector = v * part.threads + part.thread;
      if (row < part.rows && vector < part.vectors) {
        mailbox.send_to_others(row * part.vectors + vector, segment, own_at(row, v, vector));
      }
    }
  };
  const int32_t ahead = kRowsAhead * part.ctas;
  for (int32_t row = part.cta; row < part.cta + ahead; row += part.ctas) {
    send(row);
  }
  OSTINATO_DELAY(collective_clear, part.thread / 32 == 0);
  mailbox.clear(part.cta * part.threads + part.thread, part.ctas * part.threads);
  for (int32_t row = part.cta; row < part.rows; row += part.ctas) {
    send(row + ahead);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t vector = v * part.threads + part.thread;
      if (vector < part.vectors) {
        receive(v, row, vector, row * part.vectors + vector, segment, own_at(row, v, vector));
      }
    }
    finish(row);
  }
}

// Sums that every rank makes: one message. Calls finish(row, sums), the sums rounded.
template <typename T, int kRanks, int kVectors, typename Finish>
__device__ __forceinline__ void sum_in_one_shot(const CollectiveParams& p, const Part& part,
                                                Mailbox<kRanks>& mailbox, const Finish& finish) {
  uint4 sums[kVectors] = {};
  all_to_all<T, kRanks, kVectors>(
      p, part, mailbox,
      [&](int v, int32_t, uint32_t, uint32_t index, uint32_t segment, const uint4& own) {
        Sum<T> sum;
        mailbox.receive_each(index, segment, own, sum);
        sums[v] = sum.rounded();
      },
      [&](int32_t row) { finish(row, sums); });
}

// Sums that one rank makes of each row, in turn: rows go to their ranks, sums to all. A region has
// the rows of the others that this one adds up, and behind them all sums.
template <typename T, int kRanks, int kVectors, typename Finish>
__device__ __forceinline__ void sum_in_two_shots(const CollectiveParams& p, const Part& part,
                                                 Mailbox<kRanks>& mailbox, const Finish& finish) {
  mailbox.open();
  const int32_t size = p.size;
  const uint32_t segment = (p.m + size - 1) / size * part.vectors;
  const uint32_t sums_at = (size - 1) * segment;
  for (int32_t row = part.cta; row < part.rows; row += part.ctas) {
    const int32_t owner = row % size;
    for (uint32_t vector = part.thread; owner != p.rank && vector < part.vectors;
         vector += part.threads) {
      mailbox.send(owner, row / size * part.vectors + vector, segment, load_own<T>(p, row, vector));
    }
  }
  OSTINATO_DELAY(collective_clear_two_shots, part.thread / 32 == 0);
  mailbox.clear(part.cta * part.threads + part.thread, part.ctas * part.threads);
  for (int32_t owned = part.cta; owned * size + p.rank < part.rows; owned += part.ctas) {
    const int32_t row = owned * size + p.rank;
    for (uint32_t vector = part.thread; vector < part.vectors; vector += part.threads) {
      Sum<T> sum;
      mailbox.receive_each(owned * part.vectors + vector, segment, load_own<T>(p, row, vector),
                           sum);
      mailbox.send_to_all(sums_at + row * part.vectors + vector, sum.rounded());
    }
  }
  for (int32_t row = part.cta; row < part.rows; row += part.ctas) {
    uint4 sums[kVectors] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t vector = v * part.threads + part.thread;
      if (vector < part.vectors) {
        const int32_t owner = row % size;
        sums[v] = mailbox.receive(owner, sums_at + row * part.vectors + vector);
      }
    }
    finish(row, sums);
  }
}

// Vectors of a region that a launch uses.
__host__ __device__ inline int64_t used_vectors(const CollectiveParams& p, int64_t row_vectors) {
  const int32_t rows_of_each = p.two_shot != 0 ? (p.m + p.size - 1) / p.size : p.m;
  return ((p.size - 1) * rows_of_each + (p.two_shot != 0 ? p.m : 0)) * row_vectors;
}

}  // namespace
}  // namespace ostinato
