// What reading costs: bytes that come to an SM by loads into registers or by bulk copies into shared
// memory, and are then not looked at, xored, or multiplied as decode attention multiplies them
// (docs/performance.md). Each warp has a ring of its own, two CTAs of four warps an SM.
#include <cstdint>
#include <cuda_runtime.h>

constexpr int kWarps = 4, kStages = 3, kChunk = 8192;

__device__ __forceinline__ uint32_t address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void ask(void* to, const void* from, uint64_t* full) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(full)), "r"(kChunk) : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(address(to)),
      "l"(from), "r"(kChunk), "r"(address(full)), "l"(0x12F0000000000000ull)
      : "memory");
}
__device__ __forceinline__ void wait(uint64_t* full, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(address(full)),
      "r"(parity)
      : "memory");
}

// mode: 0 nothing, 1 shared loads, 2 ldmatrix and mma
template <int kMode>
__global__ void __launch_bounds__(128, 2) bulk(const uint8_t* data, int chunks, uint32_t* out) {
  extern __shared__ __align__(1024) uint8_t ring[];
  __shared__ uint64_t full[kWarps][kStages];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint8_t* const mine = ring + warp * kStages * kChunk;
  if (lane == 0) {
    for (int s = 0; s < kStages; ++s) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&full[warp][s])));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  const int step = gridDim.x * kWarps, first = blockIdx.x * kWarps + warp;
  const uint64_t stride = uint64_t(step) * kChunk;
  const uint8_t* from = data + uint64_t(first) * kChunk;
  int asked = first;
  for (int s = 0; s < kStages && asked < chunks; ++s, asked += step, from += stride)
    if (lane == 0) ask(mine + s * kChunk, from, &full[warp][s]);
  uint32_t sum = 0;
  float d[4] = {};
  int slot = 0;
  uint32_t parity = 0;
  for (int chunk = first; chunk < chunks; chunk += step) {
    wait(&full[warp][slot], parity);
    const uint32_t base = address(mine + slot * kChunk);
    if constexpr (kMode == 1) {
#pragma unroll
      for (int i = 0; i < kChunk / 512; ++i) {
        uint32_t a, b, c, e;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(e) : "r"(base + i * 512 + lane * 16));
        sum ^= a ^ b ^ c ^ e;
      }
    } else if constexpr (kMode == 2) {
#pragma unroll
      for (int i = 0; i < kChunk / 512; ++i) {
        uint32_t a, b, c, e;
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(e) : "r"(base + i * 512 + lane * 16));
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a), "r"(b), "r"(c), "r"(e), "r"(0x3f803f80u + lane), "r"(0x3f003f80u + chunk));
      }
    }
    __syncwarp();
    if (asked < chunks) {
      if (lane == 0) ask(mine + slot * kChunk, from, &full[warp][slot]);
      asked += step, from += stride;
    }
    if (++slot == kStages) slot = 0, parity ^= 1;
  }
  if (sum == 0x12345678 || d[0] + d[1] + d[2] + d[3] == 1e30f) out[threadIdx.x] = sum;
}

__global__ void __launch_bounds__(512) loads(const uint4* data, int64_t vectors, uint32_t* out) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  uint32_t sum = 0;
  int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  for (; i + 7 * step < vectors; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j)
      asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;" : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w) : "l"(data + i + j * step), "l"(0x12F0000000000000ull));
#pragma unroll
    for (int j = 0; j < 8; ++j) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  for (; i < vectors; i += step) sum ^= data[i].x;
  if (sum == 0x12345678) out[0] = sum;
}

extern "C" int run(int mode, int sms, const void* data, int64_t bytes, void* out, void* stream) {
  const int smem = kWarps * kStages * kChunk;
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const uint8_t* d = static_cast<const uint8_t*>(data);
  uint32_t* o = static_cast<uint32_t*>(out);
  const int chunks = int(bytes / kChunk);
  cudaFuncSetAttribute(bulk<0>, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
  cudaFuncSetAttribute(bulk<1>, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
  cudaFuncSetAttribute(bulk<2>, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
  if (mode == 0) bulk<0><<<2 * sms, 128, smem, s>>>(d, chunks, o);
  if (mode == 1) bulk<1><<<2 * sms, 128, smem, s>>>(d, chunks, o);
  if (mode == 2) bulk<2><<<2 * sms, 128, smem, s>>>(d, chunks, o);
  if (mode == 3) loads<<<4 * sms, 512, 0, s>>>(reinterpret_cast<const uint4*>(d), bytes / 16, o);
  return cudaGetLastError();
}
