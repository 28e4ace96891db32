// How many CTAs, or clusters of them, a device runs at the same time: the size of every launch.
#pragma once

#include <cuda_runtime.h>

#include "common/check.h"
#include "common/launch.cuh"
#include "shared_storage.cuh"

namespace ostinato::decode {

struct Grid {
  int sms;
  int ctas;  // or clusters: so many are counted on
  int most;  // of them that can have work
};

inline LaunchConfig launch_config(int ctas, bool pdl) {
  LaunchConfig config;
  config.grid = dim3(ctas * kClusterCtas);
  config.block = dim3(kThreads);
  config.dynamic_smem = sizeof(SharedStorage);
  config.cluster = dim3(kClusterCtas);
  config.pdl = pdl;
  return config;
}

// Clusters that a device runs at the same time; asking takes long.
class ActiveClusters {
 public:
  template <class Kernel>
  cudaError_t ask(Kernel* kernel) {
    int* most = nullptr;
    OSTINATO_RETURN_IF_ERROR(of_device(&most));
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {kClusterCtas, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(kClusterCtas);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = sizeof(SharedStorage);
    config.attrs = &cluster;
    config.numAttrs = 1;
    int clusters = 0;
    OSTINATO_RETURN_IF_ERROR(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
    *most = *most == 0 || clusters < *most ? clusters : *most;
    return clusters > 0 ? cudaSuccess : cudaErrorInvalidConfiguration;
  }

  // Of the current device.
  cudaError_t of_device(int** clusters) {
    int device = 0;
    OSTINATO_RETURN_IF_ERROR(cudaGetDevice(&device));
    *clusters = &of_[device % kMostDevices];
    return device < kMostDevices ? cudaSuccess : cudaErrorInvalidDevice;
  }

 private:
  static constexpr int kMostDevices = 64;
  int of_[kMostDevices] = {};
};

inline ActiveClusters active_clusters;

// Allows the current device to run the kernel.
template <class Kernel>
cudaError_t prepare(Kernel* kernel) {
  OSTINATO_RETURN_IF_ERROR(allow_dynamic_smem(kernel, sizeof(SharedStorage)));
  return kClusterCtas > 1 ? active_clusters.ask(kernel) : cudaSuccess;
}

// For `work tiles` sequences times KV heads, of up to so many tokens.
inline cudaError_t grid_size(Grid* grid, int64_t work_tiles, int64_t tokens) {
  OSTINATO_RETURN_IF_ERROR(count_sms(&grid->sms));
  grid->ctas = grid->sms * kCtasPerSm / kClusterCtas;
  if constexpr (kClusterCtas > 1) {
    int* clusters = nullptr;
    OSTINATO_RETURN_IF_ERROR(active_clusters.of_device(&clusters));
    grid->ctas = *clusters < grid->ctas ? *clusters : grid->ctas;
  }
  // On a single line no work tile has room for more CTAs than the longest has tiles, and the last
  // ones get nothing. Their start would be felt.
  const int64_t tiles = work_tiles * ((tokens + kTileTokens - 1) / kTileTokens);
  grid->most =
      work_tiles <= grid->ctas && tiles < grid->ctas ? static_cast<int>(tiles) : grid->ctas;
  return cudaSuccess;
}

}  // namespace ostinato::decode
