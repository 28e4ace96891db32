// TMA: tensor maps encoded on the host, and copies of their boxes to and from shared memory. Names
// and semantics: CUDA driver API, "Tensor Map Object Management"; PTX ISA, "cp.async.bulk.tensor".
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "check.h"
#include "mbarrier.cuh"

namespace ostinato {

// A tensor, innermost dimension first, and the box of one copy. Strides are in bytes, the rest in
// elements.
template <int kRank>
struct TensorMapShape {
  uint64_t size[kRank];
  uint64_t stride[kRank];  // that of the innermost dimension is ignored
  uint32_t box[kRank];
};

// Libraries do not link the driver; the runtime provides the address of the function.
inline cudaError_t find_tensor_map_encoder(decltype(&cuTensorMapEncodeTiled)* encoder) {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &result);
    const bool usable = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(usable ? function : nullptr);
  }();
  *encoder = found;
  return found == nullptr ? cudaErrorNotSupported : cudaSuccess;
}

// The base address and all strides must be multiples of 16 bytes. Outside the tensor a copy reads
// zeros. L2 promotion fetches whole lines from memory.
template <int kRank>
cudaError_t encode_tensor_map(
    CUtensorMap* map, const void* base, const TensorMapShape<kRank>& shape,
    CUtensorMapSwizzle swizzle, CUtensorMapDataType element = CU_TENSOR_MAP_DATA_TYPE_UINT8,
    CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B) {
  decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  OSTINATO_RETURN_IF_ERROR(find_tensor_map_encoder(&encode));
  uint32_t steps[kRank];
  for (uint32_t& step : steps) {
    step = 1;
  }
  const CUresult result = encode(map, element, kRank, const_cast<void*>(base), shape.size,
                                 shape.stride + 1, shape.box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies the box at (x, y), and completes its bytes at `barrier`. The address of the box, so x
// elements of a row, must be a multiple of 16 bytes, `shared` one of 128 (PTX ISA; with another x
// Hopper reports an illegal instruction).
__device__ __forceinline__ void tma_load(void* shared, const CUtensorMap& map, int x, int y,
                                         uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(x), "r"(y), "r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ void tma_load(void* shared, const CUtensorMap& map, int x, int y, int z,
                                         uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ void tma_load(void* shared, const CUtensorMap& map,
                                         const int (&corner)[5], uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(corner[0]), "r"(corner[1]), "r"(corner[2]), "r"(corner[3]), "r"(corner[4]),
      "r"(shared_address(barrier))
      : "memory");
}

// Writes the box at (x, y), clipped to the tensor, in the thread's current bulk group. Writes of
// threads to shared memory must be fenced before.
__device__ __forceinline__ void tma_store(const CUtensorMap& map, const void* shared, int x,
                                          int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
      "r"(x), "r"(y), "r"(shared_address(shared))
      : "memory");
}

__device__ __forceinline__ void tma_store(const CUtensorMap& map, const void* shared, int x, int y,
                                          int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
      "r"(x), "r"(y), "r"(z), "r"(shared_address(shared))
      : "memory");
}

__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the latest kPending groups of the thread's stores have read shared memory.
template <int kPending>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Makes this thread's writes to shared memory visible to TMA and wgmma.
__device__ __forceinline__ void fence_shared_for_tma() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Copies the box to the same address in every CTA of `ctas` (one bit per rank of the cluster), and
// completes its bytes at the barrier there.
__device__ __forceinline__ void tma_load_multicast(void* shared, const CUtensorMap& map, int x,
                                                   int y, uint64_t* barrier, uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(x), "r"(y), "r"(shared_address(barrier)), "h"(ctas)
      : "memory");
}

__device__ __forceinline__ void tma_load_multicast(void* shared, const CUtensorMap& map, int x,
                                                   int y, int z, uint64_t* barrier, uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "h"(ctas)
      : "memory");
}

}  // namespace ostinato
