// What a bulk copy costs the copy engine of an SM, by its size: one thread keeps up to 64 KB in flight, from the L2.
// mode 0: cp.async.bulk; 1: cp.async.bulk.tensor, a box of `bytes` as rows of 2 KB, blocks of 4 KB with a stride.
#include <cuda.h>
#include <cuda_runtime.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#define OK(x) do { auto e = (x); if (e != 0) { printf("%s: %d\n", #x, int(e)); exit(1); } } while (0)
__device__ uint32_t sa(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
__device__ void wait(uint64_t* b, int parity) {
  asm volatile("{\n.reg .pred p;\nL: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra L;\n}" ::"r"(sa(b)), "r"(parity) : "memory");
}
template <int kMode>
__global__ void copies(const uint8_t* from, const __grid_constant__ CUtensorMap map, int bytes, int count, int in_flight, int footprint, int group, long long* clocks) {
  extern __shared__ __align__(1024) uint8_t ring[];
  __shared__ uint64_t full[64];
  if (threadIdx.x == 0) {
    for (int i = 0; i < in_flight; ++i) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(sa(&full[i])));
    asm volatile("fence.mbarrier_init.release.cluster;");
    const int blocks = kMode ? footprint / 4096 / 8 : footprint / bytes;
    int slot = 0, parity = 0, at = blockIdx.x * 37 % blocks;
    const long long t = clock64();
    for (int i = 0; i < count + in_flight; ++i) {
      if (i >= in_flight) wait(&full[slot], parity ^ 1);
      if (i < count) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(sa(&full[slot])), "r"(bytes * group) : "memory");
#pragma unroll 1
        for (int g = 0; g < group; ++g) {
        if (kMode == 0) {
          asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(sa(ring + (slot * group + g) * bytes)), "l"(from + size_t(at) * bytes), "r"(bytes), "r"(sa(&full[slot])) : "memory");
        } else {
          // base block: at, with the bits of the box's dims clear
          const int first = (at % 2) + (at / 2) * 8;  // in units of 4 KB; bit 14 of the address is the box's
          asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(sa(ring + (slot * group + g) * bytes)), "l"(&map), "r"(0), "r"(first * 2), "r"(0), "r"(0), "r"(sa(&full[slot])) : "memory");
        }
        if (++at == blocks) at = 0;
        }
      }
      if (++slot == in_flight) { slot = 0; parity ^= 1; }
    }
    clocks[blockIdx.x] = clock64() - t;
  }
}
int main() {
  int const footprint = 16 << 20;
  uint8_t* data; OK(cudaMalloc(&data, footprint * 4)); OK(cudaMemset(data, 1, footprint * 4));
  long long* clocks; OK(cudaMallocManaged(&clocks, 132 * 8));
  void* fn; cudaDriverEntryPointQueryResult q; OK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &fn, 12000, cudaEnableDefault, &q));
  auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(fn);
  OK(cudaFuncSetAttribute(copies<0>, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 << 10));
  OK(cudaFuncSetAttribute(copies<1>, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 << 10));
  for (int grid : {1, 132})
    for (int mode = 0; mode < 2; ++mode)
      for (int bytes : {512, 1024, 2048, 4096, 8192, 16384}) {
        if (mode && bytes < 4096) continue;
        CUtensorMap map = {};
        const cuuint64_t sizes[4] = {256, cuuint64_t(footprint / 2048), 2, 2}, strides[3] = {2048, 16384, 65536};
        const cuuint32_t box[4] = {256, 2, bytes >= 8192 ? 2u : 1u, bytes >= 16384 ? 2u : 1u}, one[4] = {1, 1, 1, 1};
        OK(encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT64, 4, data, sizes, strides, box, one, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
        for (int group : {1, 2, 4, 8}) {
        const int stages = 131072 / bytes / group, in_flight = stages > 64 ? 64 : stages, count = 20000 / group;
        if (in_flight < 2) continue;
        for (int r = 0; r < 2; ++r) {
          if (mode) copies<1><<<grid, 32, in_flight * bytes * group>>>(data, map, bytes, count, in_flight, footprint, group, clocks);
          else copies<0><<<grid, 32, in_flight * bytes * group>>>(data, map, bytes, count, in_flight, footprint, group, clocks);
          OK(cudaDeviceSynchronize());
        }
        double sum = 0; for (int i = 0; i < grid; ++i) sum += clocks[i];
        const double per = sum / grid / count / group;
        printf("%3d SMs, %-6s %5d bytes: %7.1f clocks a copy, %5.1f bytes a clock, %d in flight, %d a barrier\n", grid, mode ? "box" : "bulk", bytes, per, bytes / per, in_flight * group, group);
        }
      }
}
