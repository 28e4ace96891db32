// What racecheck (compute-sanitizer of CUDA 13.0) says of barriers of fewer threads than a CTA's.
// Teams of 64 threads meet at named barriers, each team as often as it likes; then all 128 meet at
// barrier 0, and what all have read is written anew. Right by the PTX model, whatever the counts.
//   nvcc -O3 -arch=sm_90a racecheck-named-barriers.cu -o rc
//   for k in 0 1 2 3 4; do compute-sanitizer --tool racecheck ./rc $k; done
// On an H200, 23 November 2026 (sanitizers.txt): no hazard where both teams meet equally often, 0 or
// 3 times; a hazard between the read and the write of `area`, which have barrier 0 of all threads
// between them, with 2 and 5, 1 and 9, 0 and 7.
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
__device__ __forceinline__ void sync_team(int t) { asm volatile("bar.sync %0, 64;" ::"r"(t + 1) : "memory"); }
__global__ void mini(const int* counts, int pieces, float4* out) {
  __shared__ float4 area[128];
  __shared__ volatile float own[2][64];
  const int t = threadIdx.x / 64, i = threadIdx.x % 64;
  area[threadIdx.x] = make_float4(threadIdx.x, 1, 2, 3);
  __syncthreads();
  float4 sum = {0, 0, 0, 0};
  for (int p = 0; p < pieces; ++p) {
    const float4 v = area[(threadIdx.x * 37 + p) % 128];  // LDS.128 of another thread's
    const int n = counts[2 * p + t];
    for (int j = 0; j < n; ++j) {
      own[t][i] = v.x + j;
      sync_team(t);
      sum.x += own[t][(i + 7) % 64];
      sync_team(t);
    }
    sum.y += v.y;
    __syncthreads();
    area[threadIdx.x] = make_float4(sum.x, v.y, v.z, v.w);  // STS.128
    __syncthreads();
  }
  out[threadIdx.x] = sum;
}
int main(int argc, char** argv) {
  int *c; float4* o; cudaHostAlloc((void**)&c, 1024, 0); cudaHostAlloc((void**)&o, 128 * 16, 0);
  const int pieces = 6; const int kinds[5][2] = {{0, 0}, {3, 3}, {2, 5}, {1, 9}, {0, 7}};
  for (auto& k : kinds) {
    if (argc > 1 && atoi(argv[1]) != &k - kinds) continue;  // one of the launches alone
    for (int p = 0; p < pieces; ++p) { c[2 * p] = k[p % 2]; c[2 * p + 1] = k[1 - p % 2]; }
    mini<<<1, 128>>>(c, pieces, o);
    printf("counts %d and %d: %s, thread 5 %.0f\n", k[0], k[1], cudaGetErrorString(cudaDeviceSynchronize()), o[5].x);
  }
}
