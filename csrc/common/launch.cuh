// The one way to launch a kernel, and the device side of programmatic dependent launch (PDL).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

#include "check.h"
#include "target.cuh"

namespace ostinato {

struct LaunchConfig {
  dim3 grid;
  dim3 block;
  std::size_t dynamic_smem = 0;  // bytes
  dim3 cluster = dim3(1, 1, 1);
  // The grid may start before its predecessor on the stream has ended: the kernel must call
  // wait_for_predecessor() before it touches anything that an earlier kernel reads or writes. A GPU
  // without programmatic launches starts it afterwards, as any other.
  bool pdl = false;
};

// Enqueues kernel(args...) on the stream; returns at once. Bytes of the arguments that belong to no
// member are zero: what happens to lie there could look like an address to who reads a graph, as
// the audit of ostinato.graphs does.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), const LaunchConfig& config, cudaStream_t stream,
                   Arguments&&... args) {
  cudaLaunchAttribute attributes[2];
  unsigned int count = 0;
  if (kHasProgrammaticLaunch && config.pdl) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count].val.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  if (config.cluster.x * config.cluster.y * config.cluster.z > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = config.cluster.x;
    attributes[count].val.clusterDim.y = config.cluster.y;
    attributes[count].val.clusterDim.z = config.cluster.z;
    ++count;
  }
  cudaLaunchConfig_t native = {};
  native.gridDim = config.grid;
  native.blockDim = config.block;
  native.dynamicSmemBytes = config.dynamic_smem;
  native.stream = stream;
  native.attrs = attributes;
  native.numAttrs = count;
  return [&](Parameters... values) {
    (__builtin_clear_padding(&values), ...);
    void* addresses[] = {&values...};
    return cudaLaunchKernelExC(&native, reinterpret_cast<const void*>(kernel), addresses);
  }(std::forward<Arguments>(args)...);
}

// Of the current device.
inline cudaError_t count_sms(int* sms) {
  int device = 0;
  OSTINATO_RETURN_IF_ERROR(cudaGetDevice(&device));
  return cudaDeviceGetAttribute(sms, cudaDevAttrMultiProcessorCount, device);
}

// Lets the current device run the kernel with this much dynamic shared memory, beyond 48 KB too.
template <typename... Parameters>
cudaError_t allow_dynamic_smem(void (*kernel)(Parameters...), std::size_t bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bytes));
}

// Waits until every earlier kernel of the stream has ended and its writes are visible. Without a
// programmatic launch it returns at once. Memory clobber: no load may be hoisted above it.
__device__ __forceinline__ void wait_for_predecessor() {
  if constexpr (kHasProgrammaticLaunch) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
  }
}

// Lets the next kernel of the stream start when all CTAs have said so or ended. It says nothing
// about this kernel's writes: the successor's wait_for_predecessor() does.
__device__ __forceinline__ void let_successor_start() {
  if constexpr (kHasProgrammaticLaunch) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  }
}

}  // namespace ostinato
