// Which half of the L2 an address belongs to, and what reading costs an SM of the same half, of the
// other, and of either.
#include <cuda_runtime.h>

#include <cstdint>

__device__ __forceinline__ uint32_t smid() {
  uint32_t r;
  asm volatile("mov.u32 %0, %smid;" : "=r"(r));
  return r;
}

// Cycles that `times` dependent atomics take, the least of three takes; each CTA has an SM for
// itself.
__device__ uint32_t latency(uint32_t* at, int times, uint32_t zero) {
  uint32_t best = ~0u, v = 0;
  for (int take = 0; take < 3; ++take) {
    const long long t0 = clock64();
    for (int i = 0; i < times; ++i)
      asm volatile("atom.global.or.b32 %0, [%1], %2;"
                   : "=r"(v)
                   : "l"(at + (v & zero)), "r"(zero)
                   : "memory");
    uint32_t spent = v & zero;
    asm volatile("{\n.reg .u64 t;\nadd.u32 %0, %0, 0;\n}" : "+r"(spent)::"memory");
    best = min(best, uint32_t(clock64() - t0) + spent);
  }
  return best;
}
// `all`: every SM probes every offset; otherwise offset i is probed by CTA i % grid alone.
__global__ void probe(uint8_t* base, const int64_t* offsets, int n, int times, int all,
                      uint32_t* out, uint32_t* who, uint32_t zero) {
  extern __shared__ uint8_t room[];
  if (threadIdx.x) return;
  const uint32_t sm = smid();
  who[blockIdx.x] = sm;
  if (all)
    for (int k = 0; k < n; ++k) {
      const int i = (k + blockIdx.x * 7) % n;
      out[int64_t(blockIdx.x) * n + i] =
          latency(reinterpret_cast<uint32_t*>(base + offsets[i]), times, zero);
    }
  else
    for (int i = blockIdx.x; i < n; i += gridDim.x)
      out[i] = latency(reinterpret_cast<uint32_t*>(base + offsets[i]), times, zero);
}

constexpr int kWarps = 4, kStages = 6, kChunk = 4096;
__device__ __forceinline__ uint32_t address(const void* p) {
  return uint32_t(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void ask(void* to, const void* from, uint64_t* full) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(full)),
               "r"(kChunk)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(address(to)),
      "l"(from), "r"(kChunk), "r"(address(full)), "l"(0x12F0000000000000ull)
      : "memory");
}
__device__ __forceinline__ void wait(uint64_t* full, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra "
      "DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(address(full)),
      "r"(parity)
      : "memory");
}
// lists[2][n]: blocks of 4 KB for SMs of side 0 and 1, of which counts[s] are used.
__global__ void __launch_bounds__(128, 2)
    read(const uint8_t* data, const uint32_t* lists, int n, const uint32_t* counts,
         const uint32_t* ctas, const uint8_t* side_of, uint32_t* tickets) {
  extern __shared__ __align__(1024) uint8_t ring[];
  __shared__ uint64_t full[kWarps][kStages];
  __shared__ uint32_t ticket;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int side = side_of[smid()];
  if (threadIdx.x == 0) ticket = atomicAdd(&tickets[side], 1);
  uint8_t* const mine = ring + warp * kStages * kChunk;
  if (lane == 0) {
    for (int s = 0; s < kStages; ++s)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&full[warp][s])));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int step = ctas[side] * kWarps, first = ticket * kWarps + warp;
  const uint32_t* list = lists + int64_t(side) * n;
  const int chunks = counts[side];
  if (lane != 0) return;
  int asked = first;
  for (int s = 0; s < kStages && asked < chunks; ++s, asked += step)
    ask(mine + s * kChunk, data + uint64_t(list[asked]) * kChunk, &full[warp][s]);
  int slot = 0;
  uint32_t parity = 0;
  uint32_t next = asked < chunks ? list[asked] : 0;
  for (int chunk = first; chunk < chunks; chunk += step) {
    wait(&full[warp][slot], parity);
    if (asked < chunks) {
      ask(mine + slot * kChunk, data + uint64_t(next) * kChunk, &full[warp][slot]);
      asked += step;
      if (asked < chunks) next = list[asked];
    }
    if (++slot == kStages) slot = 0, parity ^= 1;
  }
}
__global__ void zero(uint32_t* tickets) {
  if (threadIdx.x < 2) tickets[threadIdx.x] = 0;
}

extern "C" int run_probe(void* base, const void* offsets, int n, int times, int all, void* out,
                         void* who, int sms) {
  cudaFuncSetAttribute(probe, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024);
  probe<<<sms, 32, 200 * 1024>>>((uint8_t*)base, (const int64_t*)offsets, n, times, all,
                                 (uint32_t*)out, (uint32_t*)who, 0);
  return cudaDeviceSynchronize();
}
extern "C" int run_read(const void* data, const void* lists, int n, const void* counts,
                        const void* ctas, const void* side_of, void* tickets, int sms,
                        void* stream) {
  const int smem = kWarps * kStages * kChunk;
  cudaFuncSetAttribute(read, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
  zero<<<1, 32, 0, (cudaStream_t)stream>>>((uint32_t*)tickets);
  read<<<2 * sms, 128, smem, (cudaStream_t)stream>>>(
      (const uint8_t*)data, (const uint32_t*)lists, n, (const uint32_t*)counts,
      (const uint32_t*)ctas, (const uint8_t*)side_of, (uint32_t*)tickets);
  return cudaGetLastError();
}
