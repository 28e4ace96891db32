// Collectives of ranks that have access to each other's memory: sums of rows, alone or with the
// residual, the RMS norm and the quantisation that follow, and rows of all ranks. One launch each.
//
// Compiled with
//   OSTINATO_COLLECTIVE    sum, rms_norm or gather: see params.h
//   OSTINATO_RANKS         2, 4 or 8: the most ranks
//   OSTINATO_KIND          rms_norm
//   OSTINATO_IN_DTYPE      bf16, fp16 or fp32, of x, residual and total
//   OSTINATO_OUT_DTYPE     int8 or e4m3; or that of x, not quantised (all but rms_norm)
//   OSTINATO_WEIGHT_DTYPE  of norm_weight: that of x, or fp32
//   OSTINATO_GROUP         128: each 128 of a row have a scale of their own; 0: rows have
//   OSTINATO_ASYMMETRIC    0
//
// The last six are those of gemm_w8a8/quantize/quantize.cu, whose norms and codes these are, to the
// bit. A sum is made in rank order, in fp32, and rounded once; so its bits are those of all ranks,
// and depend neither on m nor on how it is made. mailbox.cuh says how ranks wait for each other.
//
// With params.pdl, the preceding kernel may write x and residual. It must not write norm_weight,
// n_active or the addresses of the control block, which are read before the wait.
#include <cuda_runtime.h>

#include <cstdint>

#include "common/check.h"
#include "common/launch.cuh"
#include "exchange.cuh"
#include "gemm_w8a8/quantize/kernels.cuh"
#include "mailbox.cuh"
#include "params.h"

namespace ostinato {
namespace {

enum class Collective { sum, rms_norm, gather };
constexpr Collective kCollective = Collective::OSTINATO_COLLECTIVE;
constexpr int kRanks = OSTINATO_RANKS;
static_assert(kRanks <= kMostRanks, "the control block has the addresses of so many buffers");
static_assert(kKind == Kind::rms_norm && !kAsymmetric, "rows are normalised like this, if at all");
static_assert(kCollective == Collective::rms_norm || !kEncodes, "only norms are quantised");

// Rows of up to 32 KB. Threads of a CTA and vectors of a thread follow from a row's length and the
// registers that vectors of all ranks take: 64 in a CTA of 1024 threads, too few before Hopper, and
// 128 in one of 512.
constexpr uint32_t kMostRowVectors = 2048;
constexpr bool kHasWideCtas = kRanks <= 4 && kTargets[0] >= 900;
// At least so many CTAs, also of fewer rows: a launch behind one of many rows clears 16 MB.
constexpr int32_t kClearingCtas = 8;

__device__ __forceinline__ int32_t count_rows(const CollectiveParams& p) {
  int32_t rows = p.first_row + p.m;
  if (p.n_active != nullptr) {
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(rows) : "l"(p.n_active));
  }
  return max(0, min(rows - p.first_row, p.m));
}

// The norm of a row whose sum over ranks is known: the second half of gemm_w8a8/quantize.
template <int kVectors>
struct NormOfSum {
  // Weights that do not fit into registers are read again from the caches.
  static constexpr bool kHoldWeights = kVectors <= 2;
  WeightVector weights[kHoldWeights ? kVectors : 1];
  // The residual of a CTA's first row, which arrives while the CTA waits for other ranks.
  Vector residual[kHoldWeights ? kVectors : 1];
  bool has_residual = false;

  __device__ __forceinline__ void load_weights(const CollectiveParams& p, const Part& part, int v,
                                               WeightVector& into) const {
    load<true, Reuse::kEveryRow>(static_cast<const Weight*>(p.norm_weight),
                                 (v * part.threads + part.thread) * kVectorSize,
                                 static_cast<uint32_t>(p.k), into);
  }

  // Before the wait: they are constants.
  __device__ __forceinline__ void ask_for_weights(const CollectiveParams& p, const Part& part) {
    if constexpr (kHoldWeights) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        load_weights(p, part, v, weights[v]);
      }
    }
  }

  // After the wait.
  __device__ __forceinline__ void ask_for_residual(const CollectiveParams& p, const Part& part) {
    if constexpr (kHoldWeights) {
      has_residual = p.residual != nullptr && part.cta < part.rows;
      if (has_residual) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          load<true, Reuse::kOnce>(
              static_cast<const In*>(p.residual) + part.cta * p.residual_stride,
              (v * part.threads + part.thread) * kVectorSize, static_cast<uint32_t>(p.k),
              residual[v]);
        }
      }
    }
  }

  __device__ __forceinline__ void finish(const CollectiveParams& p, const KnownDivisor& count,
                                         const Part& part, int64_t index,
                                         const uint4 (&sums)[kVectors],
                                         Exchange<kVectors>& exchange) const {
    QuantizeParams rows = {};
    rows.residual = p.residual;
    rows.residual_stride = p.residual_stride;
    rows.residual_out = p.total;
    rows.residual_out_stride = p.total_stride;
    rows.eps = p.eps;
    rows.static_scale = p.static_scale;
    rows.zero_point = p.zero_point;
    rows.out = p.out;
    rows.out_stride = p.out_stride;
    rows.scale_out = p.scale_out;
    rows.scale_stride = p.scale_stride;
    rows.power_of_two = p.power_of_two;
    rows.m = p.m;
    rows.k = p.k;
    const Row row(rows, index);
    const auto first_of = [&](int v) { return (v * part.threads + part.thread) * kVectorSize; };
    Values values[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const Vector sum = {{sums[v].x, sums[v].y, sums[v].z, sums[v].w}};
      if (row.second != nullptr) {
        Vector second;
        if (kHoldWeights && has_residual && index == part.cta) {
          second = residual[kHoldWeights ? v : 0];
        } else {
          load<true, Reuse::kOnce>(row.second, first_of(v), row.k, second);
        }
        combine<true>(row, first_of(v), sum, second, values[v]);
      } else {
        sum.unpack(values[v]);
        store<true, In, kVectorSize>(static_cast<In*>(p.total) + index * p.total_stride,
                                     first_of(v), row.k, sum.words);
      }
    }
    finish_row<Share::cta, true>(
        rows, Static(rows), count, row, index, part.thread, values, first_of,
        [&](int v) {
          WeightVector weight;
          if constexpr (kHoldWeights) {
            weight = weights[v];
          } else {
            load_weights(p, part, v, weight);
          }
          return weight;
        },
        exchange);
    __syncthreads();  // the next row uses the same shared memory
  }
};

template <int kVectors, int kThreads, bool kTwoShots>
__global__ void __launch_bounds__(kThreads, 1)
    collective(const __grid_constant__ CollectiveParams p, const KnownDivisor count) {
  Part part;
  part.cta = static_cast<int32_t>(blockIdx.x);
  part.ctas = static_cast<int32_t>(gridDim.x);
  part.thread = threadIdx.x;
  part.threads = blockDim.x;
  part.rows = count_rows(p);
  part.vectors = static_cast<uint32_t>(p.k) / kVectorSize;
  Mailbox<kRanks> mailbox(p);
  NormOfSum<kVectors> norm;
  __shared__ Exchange<kVectors> exchange;
  if constexpr (kCollective == Collective::rms_norm) {
    norm.ask_for_weights(p, part);
  }
  if (p.early_successor != 0) {
    let_successor_start();
  }
  wait_for_predecessor();
  if (part.rows == 0) {
    return;  // no epoch: see mailbox.cuh
  }
  if constexpr (kCollective == Collective::rms_norm && !kTwoShots) {
    norm.ask_for_residual(p, part);
  }
  if constexpr (kCollective == Collective::gather) {
    all_to_all<In, kRanks, kVectors>(
        p, part, mailbox,
        [&](int, int64_t row, uint32_t vector, uint32_t index, uint32_t segment, const uint4& own) {
          mailbox.receive_each(index, segment, own, [&](int rank, const uint4& words) {
            In* const out = static_cast<In*>(p.out) + rank * p.out_rank_stride + row * p.out_stride;
            reinterpret_cast<uint4*>(out)[vector] = words;
          });
        },
        [](int64_t) {});
  } else {
    const auto finish = [&](int64_t row, const uint4(&sums)[kVectors]) {
      if constexpr (kCollective == Collective::rms_norm) {
        norm.finish(p, count, part, row, sums, exchange);
      } else {
        In* const out = static_cast<In*>(p.out) + row * p.out_stride;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const uint32_t vector = v * part.threads + part.thread;
          if (vector < part.vectors) {
            reinterpret_cast<uint4*>(out)[vector] = sums[v];
          }
        }
      }
    };
    if constexpr (kTwoShots) {
      sum_in_two_shots<In, kRanks, kVectors>(p, part, mailbox, finish);
    } else {
      sum_in_one_shot<In, kRanks, kVectors>(p, part, mailbox, finish);
    }
  }
  mailbox.close(static_cast<uint32_t>(used_vectors(p, part.vectors)), part.ctas);
}

template <int kVectors, int kThreads>
cudaError_t launch_with(const CollectiveParams& p, cudaStream_t stream) {
  const uint32_t vectors = static_cast<uint32_t>(p.k) / kVectorSize;
  const uint32_t threads = (vectors + 32 * kVectors - 1) / (32 * kVectors) * 32;
  LaunchConfig config;
  // All CTAs must be resident at once: so many are, whatever registers they take.
  const int64_t ctas_per_sm = kThreads / threads < 4 ? kThreads / threads : 4;
  const int64_t most = p.sms * ctas_per_sm;
  const int64_t wanted = p.m < kClearingCtas ? kClearingCtas : p.m;
  config.grid = dim3(static_cast<uint32_t>(wanted < most ? wanted : most));
  config.block = dim3(threads);
  config.pdl = p.pdl != 0;
  const KnownDivisor count(static_cast<float>(p.k));
  if constexpr (kCollective != Collective::gather) {
    if (p.two_shot != 0) {
      return launch(collective<kVectors, kThreads, true>, config, stream, p, count);
    }
  }
  return launch(collective<kVectors, kThreads, false>, config, stream, p, count);
}

bool is_aligned(const void* pointer, int64_t stride, int64_t element = sizeof(In)) {
  return reinterpret_cast<uintptr_t>(pointer) % (kVectorSize * element) == 0 &&
         stride % kVectorSize == 0;
}

bool is_valid(const CollectiveParams& p) {
  constexpr bool kNormalizes = kCollective == Collective::rms_norm;
  const bool exchanges =
      p.x != nullptr && p.out != nullptr && p.control != nullptr && p.k > 0 &&
      p.k % kVectorSize == 0 && p.k / kVectorSize <= kMostRowVectors && p.size >= 1 &&
      p.size <= kRanks && p.rank >= 0 && p.rank < p.size && p.sms >= 1 && p.timeout_ns > 0 &&
      used_vectors(p, p.k / kVectorSize) <= p.region_vectors && p.region_vectors <= INT32_MAX / 3;
  const bool aligned = is_aligned(p.x, p.x_stride) && is_aligned(p.residual, p.residual_stride) &&
                       is_aligned(p.total, p.total_stride) && is_aligned(p.norm_weight, 0) &&
                       is_aligned(p.out, p.out_stride, sizeof(Stored)) &&
                       p.out_rank_stride % kVectorSize == 0;
  return exchanges && aligned && (p.two_shot == 0 || kCollective != Collective::gather) &&
         (p.norm_weight != nullptr) == kNormalizes && (p.total != nullptr) == kNormalizes &&
         (p.scale_out != nullptr) == kEncodes && (kNormalizes || p.residual == nullptr) &&
         (p.static_scale == nullptr || (kEncodes && kGroup == 0)) &&
         (p.zero_point == nullptr || p.static_scale != nullptr);
}

}  // namespace
}  // namespace ostinato

OSTINATO_EXPORT int ostinato_prepare(void) { return cudaSuccess; }

OSTINATO_LAUNCH(ostinato::CollectiveParams) {
  using namespace ostinato;
  const CollectiveParams& p = *params;
  if (p.m == 0) {  // tensors without elements have no address
    return cudaSuccess;
  }
  if (p.m < 0 || !is_valid(p)) {
    return cudaErrorInvalidValue;
  }
  const uint32_t vectors = static_cast<uint32_t>(p.k) / kVectorSize;
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  if constexpr (kHasWideCtas) {
    return vectors <= 1024 ? launch_with<1, 1024>(p, on) : launch_with<4, 512>(p, on);
  } else {
    return vectors <= 512    ? launch_with<1, 512>(p, on)
           : vectors <= 1024 ? launch_with<2, 512>(p, on)
                             : launch_with<4, 512>(p, on);
  }
}
