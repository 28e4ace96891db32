// Which token a count or a mass of the row's tokens, taken in order, ends at: without sorting them.
//
// The CTAs of a cluster share a row. They count tokens, and add up their masses, in bins of how far
// they are below the best; one bin holds the end, and its tokens, mostly few, are gathered and
// compared. Where they are many, as equal logits may be, they are taken apart by their keys
// first.
#pragma once

#include <cstdint>

#include "common/cluster_group.cuh"
#include "histogram.cuh"
#include "sample_row.cuh"

namespace ostinato::sampling {

constexpr int kWarps = kThreads / 32;
constexpr int kGathered = kThreads;  // as many tokens are compared one by one

// The first token at which more than `value` tokens, or more than that mass, has come together.
struct Target {
  bool by_count;
  uint64_t value;

  __device__ bool is_in(const Amount& before, const Amount& amount) const {
    const uint64_t start = by_count ? before.count : before.mass;
    const uint64_t size = by_count ? amount.count : amount.mass;
    return start <= value && value - start < size;
  }
};

struct Found {
  int bin;
  Amount before;
  Amount amount;
};

struct Choice {
  Mass mass;  // of all tokens up to this one
  uint32_t id;
};

struct SharedStorage {
  Histogram depths;
  Histogram places;
  ArgmaxKey gathered[kGathered];
  Mass masses[kGathered];
  uint32_t gathered_count;
  Amount warp_amounts[kWarps];
  uint64_t warp_values[2][kWarps];
  uint64_t cta_values[2];
  Found found;
  Choice choice;
};

// Tokens of one bin of depths, or of a range of keys.
struct Selection {
  int bin;  // -1: by keys
  ArgmaxKey low;
  ArgmaxKey high;
};

template <bool kAligned>
class Selector {
 public:
  __device__ Selector(const RowPart<kAligned>& part, SharedStorage& shared)
      : part_(part), shared_(shared), cluster_(this_cluster()) {}

  // The keys of the best and the last token.
  __device__ Selection all() {
    // Of logits and ids apart, and of whole vectors first, which takes fewer instructions for each
    // token.
    float best = -INFINITY;
    float last = INFINITY;
    uint32_t id = ~0u;
    part_.template for_each_vector<16>([&](const float (&logits)[kVector], uint32_t first) {
      float most = logits[0];
      float least = logits[0];
#pragma unroll
      for (int i = 1; i < kVector; ++i) {
        most = max_or_nan(most, logits[i]);
        least = fminf(least, logits[i]);
      }
      last = fminf(last, least);
      // Of equal ones the first, which comes later; NaN above all.
      if (id == ~0u || isnan(most) || most >= best) {
        best = most;
#pragma unroll
        for (int i = kVector - 1; i >= 0; --i) {
          id = logits[i] == most || isnan(logits[i]) ? first + i : id;
        }
      }
    });
    const bool has_some = id != ~0u;
    return extent(has_some ? argmax_key_of(best, id) : ~ArgmaxKey{0},
                  has_some ? argmax_key_of(last, 0) : 0);
  }

  // To be called before choose(): counts all tokens, of which `last` is the smallest logit. Returns
  // the amount of all, and in `least` the mass of those that weigh at least min_p times as much as
  // the best.
  __device__ Amount count(const Scale& scale, float last, float min_p, Mass& least) {
    scale_ = scale;
    const double deepest = fmin(scale.depth(last), Scale::kDeepest);
    bins_ = deepest > 0.0 ? kBins / deepest : 0.0;
    clear(shared_.depths);
    Mass kept = 0;
    part_.template for_each<8>([&](float logit, uint32_t) {
      const double depth = scale_.depth(logit);
      if (Scale::is_some(depth)) {
        const Mass mass = Scale::mass(depth);
        add(shared_.depths, bin_of(depth), mass);
        kept += exp(-depth) >= min_p ? mass : 0;
      }
    });
    least = sum(kept);
    combine(shared_.depths);
    Amount all = {};
    if (cluster_.block_rank() == 0) {
      const Amount mine = of_thread(shared_.depths);
      all = before(mine) + mine;
      if (threadIdx.x == kThreads - 1) {
        shared_.found.amount = all;
      }
    }
    cluster_.sync();
    all = cluster_.map_shared_rank(&shared_, 0)->found.amount;
    cluster_.sync();
    return all;
  }

  // The token at which the target is reached; it must be.
  __device__ Choice choose(const Target& target) {
    Found found = locate(shared_.depths, {}, target);
    Selection selection = {found.bin, 0, 0};
    while (found.amount.count > kGathered) {
      ArgmaxKey low = ~ArgmaxKey{0};
      ArgmaxKey high = 0;
      for_selected(selection, [&](ArgmaxKey key, float) {
        low = min(low, key);
        high = max(high, key);
      });
      const Selection all = extent(low, high);
      const int shift = max(0, 64 - __clzll(all.high - all.low) - kLogBins);
      clear(shared_.places);
      for_selected(all, [&](ArgmaxKey key, float logit) {
        add(shared_.places, static_cast<int>((key - all.low) >> shift),
            Scale::mass(scale_.depth(logit)));
      });
      combine(shared_.places);
      found = locate(shared_.places, found.before, target);
      selection.bin = -1;
      selection.low = all.low + (static_cast<ArgmaxKey>(found.bin) << shift);
      selection.high = min(all.high, selection.low + (ArgmaxKey{1} << shift) - 1);
    }
    return compare(selection, found, target);
  }

 private:
  static constexpr int kEach = kBins / kThreads;
  static constexpr int kLogBins = 10;
  static_assert(1 << kLogBins == kBins, "the logarithm of kBins");

  __device__ __forceinline__ int bin_of(double depth) const {
    return min(static_cast<int>(depth * bins_), kBins - 1);
  }

  template <typename Visit>
  __device__ __forceinline__ void for_selected(const Selection& selection, Visit&& visit) {
    part_.template for_each<8>([&](float logit, uint32_t id) {
      const ArgmaxKey key = argmax_key_of(logit, id);
      if (selection.bin < 0) {
        if (selection.low <= key && key <= selection.high) {
          visit(key, logit);
        }
      } else {
        const double depth = scale_.depth(logit);
        if (Scale::is_some(depth) && bin_of(depth) == selection.bin) {
          visit(key, logit);
        }
      }
    });
  }

  __device__ __forceinline__ void clear(Histogram& histogram) {
    for (int bin = threadIdx.x; bin < kBins; bin += kThreads) {
      histogram.set(bin, {});
    }
    __syncthreads();
  }

  // Where all lanes have the same bin, as with logits that are all alike, one adds for all: atomic
  // additions to one address come one after the other.
  __device__ __forceinline__ void add(Histogram& histogram, int bin, Mass mass) {
    constexpr int kHalf = kMassBits / 2;
    const uint32_t lanes = __activemask();
    uint32_t count = 1;
    int same;
    __match_all_sync(lanes, bin, &same);
    if (same) {
      const uint32_t low = static_cast<uint32_t>(mass) & ((1u << kHalf) - 1);
      const uint32_t high = static_cast<uint32_t>(mass >> kHalf);
      mass = (Mass{__reduce_add_sync(lanes, high)} << kHalf) + __reduce_add_sync(lanes, low);
      count = __popc(lanes);
      if (threadIdx.x % 32 != __ffs(lanes) - 1) {
        return;
      }
    }
    histogram.add(bin, {mass, count});
  }

  // Adds up the histograms of the cluster, in that of its first CTA.
  __device__ void combine(Histogram& histogram) {
    cluster_.sync();
    const int ctas = static_cast<int>(cluster_.num_blocks());
    if (ctas > 1) {
      Histogram& first = *cluster_.map_shared_rank(&histogram, 0);
      const int share = kBins / ctas;
      for (int i = threadIdx.x; i < share; i += kThreads) {
        const int bin = static_cast<int>(cluster_.block_rank()) * share + i;
        Amount amount = {};
        for (int cta = 0; cta < ctas; ++cta) {
          amount = amount + (*cluster_.map_shared_rank(&histogram, cta))[bin];
        }
        first.set(bin, amount);
      }
      cluster_.sync();
    }
  }

  // What is in the bins that this thread looks through.
  __device__ static Amount of_thread(const Histogram& histogram) {
    Amount mine = {};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      mine = mine + histogram[threadIdx.x * kEach + i];
    }
    return mine;
  }

  // What the threads before this one have.
  __device__ Amount before(const Amount& mine) {
    const int lane = threadIdx.x % 32;
    Amount sum = mine;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const Amount lower = {__shfl_up_sync(~0u, sum.mass, distance),
                            __shfl_up_sync(~0u, sum.count, distance)};
      sum = lane < distance ? sum : sum + lower;
    }
    if (lane == 31) {
      shared_.warp_amounts[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    Amount others = {sum.mass - mine.mass, sum.count - mine.count};
    for (int warp = 0; warp < static_cast<int>(threadIdx.x / 32); ++warp) {
      others = others + shared_.warp_amounts[warp];
    }
    __syncthreads();
    return others;
  }

  // The bin in which the target is reached, when `start` has come together before all bins.
  __device__ Found locate(const Histogram& histogram, const Amount& start, const Target& target) {
    if (cluster_.block_rank() == 0) {
      Amount sum = start + before(of_thread(histogram));
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int bin = threadIdx.x * kEach + i;
        const Amount amount = histogram[bin];
        if (target.is_in(sum, amount)) {
          shared_.found = {bin, sum, amount};
        }
        sum = sum + amount;
      }
    }
    cluster_.sync();
    const Found found = cluster_.map_shared_rank(&shared_, 0)->found;
    cluster_.sync();
    return found;
  }

  // Gathers the selected tokens and finds the one that the target is reached at.
  __device__ Choice compare(const Selection& selection, const Found& found, const Target& target) {
    SharedStorage& first = *cluster_.map_shared_rank(&shared_, 0);
    if (threadIdx.x == 0) {
      shared_.gathered_count = 0;
    }
    cluster_.sync();
    for_selected(selection, [&](ArgmaxKey key, float logit) {
      const uint32_t slot = atomicAdd(&first.gathered_count, 1u);
      first.gathered[slot] = key;
      first.masses[slot] = Scale::mass(scale_.depth(logit));
    });
    cluster_.sync();
    if (cluster_.block_rank() == 0 && threadIdx.x < found.amount.count) {
      const ArgmaxKey mine = shared_.gathered[threadIdx.x];
      const Amount one = {shared_.masses[threadIdx.x], 1};
      Amount sum = found.before;
      for (uint32_t i = 0; i < found.amount.count; ++i) {
        if (shared_.gathered[i] < mine) {
          sum = sum + Amount{shared_.masses[i], 1};
        }
      }
      if (target.is_in(sum, one)) {
        shared_.choice = {sum.mass + one.mass, id_of(mine)};
      }
    }
    cluster_.sync();
    const Choice choice = first.choice;
    cluster_.sync();
    return choice;
  }

  // The smallest and the largest of all threads of the cluster.
  __device__ Selection extent(ArgmaxKey low, ArgmaxKey high) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      low = min(low, __shfl_xor_sync(~0u, low, distance));
      high = max(high, __shfl_xor_sync(~0u, high, distance));
    }
    if (threadIdx.x % 32 == 0) {
      shared_.warp_values[0][threadIdx.x / 32] = low;
      shared_.warp_values[1][threadIdx.x / 32] = high;
    }
    __syncthreads();
    for (int warp = 0; warp < kWarps; ++warp) {
      low = min(low, shared_.warp_values[0][warp]);
      high = max(high, shared_.warp_values[1][warp]);
    }
    if (threadIdx.x == 0) {
      shared_.cta_values[0] = low;
      shared_.cta_values[1] = high;
    }
    cluster_.sync();
    for (uint32_t cta = 0; cta < cluster_.num_blocks(); ++cta) {
      const SharedStorage& other = *cluster_.map_shared_rank(&shared_, cta);
      low = min(low, other.cta_values[0]);
      high = max(high, other.cta_values[1]);
    }
    cluster_.sync();
    return {-1, low, high};
  }

  // The sum over all threads of the cluster.
  __device__ Mass sum(Mass mine) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      mine += __shfl_xor_sync(~0u, mine, distance);
    }
    if (threadIdx.x % 32 == 0) {
      shared_.warp_values[0][threadIdx.x / 32] = mine;
    }
    __syncthreads();
    Mass all = 0;
    for (int warp = 0; warp < kWarps; ++warp) {
      all += shared_.warp_values[0][warp];
    }
    if (threadIdx.x == 0) {
      shared_.cta_values[0] = all;
    }
    cluster_.sync();
    all = 0;
    for (uint32_t cta = 0; cta < cluster_.num_blocks(); ++cta) {
      all += cluster_.map_shared_rank(&shared_, cta)->cta_values[0];
    }
    cluster_.sync();
    return all;
  }

  const RowPart<kAligned>& part_;
  SharedStorage& shared_;
  ClusterGroup cluster_;
  Scale scale_ = {};
  double bins_ = 0.0;  // for each unit of depth
};

}  // namespace ostinato::sampling
