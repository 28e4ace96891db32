// Grid size of a launch: how many CTAs, or clusters of CTAs, a device runs at the same time.
#pragma once

#include <cuda_runtime.h>

#include "common/check.h"
#include "common/launch.cuh"
#include "shared_storage.cuh"

namespace ostinato::decode {

struct Grid {
  int sms;
  // CTAs (clusters, if there are any) that run at the same time: the scheduler plans for these
  int ctas;
  int most;  // how many of them can have work: the grid of the launch
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

// Number of clusters that a device runs at the same time. Cached, since the query is slow.
class ActiveClusters {
 public:
  template <class Kernel>
  cudaError_t query(Kernel* kernel) {
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

  // The cached number of the current device.
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

// Allows the kernel to run on the current device with its dynamic shared memory.
template <class Kernel>
cudaError_t prepare(Kernel* kernel) {
  OSTINATO_RETURN_IF_ERROR(allow_dynamic_smem(kernel, sizeof(SharedStorage)));
  return kClusterCtas > 1 ? active_clusters.query(kernel) : cudaSuccess;
}

// Grid for `work_tiles` (sequences times KV heads) of at most `tokens` tokens each.
inline cudaError_t grid_size(Grid* grid, int64_t work_tiles, int64_t tokens) {
  OSTINATO_RETURN_IF_ERROR(count_sms(&grid->sms));
  grid->ctas = grid->sms * kCtasPerSm / kClusterCtas;
  if constexpr (kClusterCtas > 1) {
    int* clusters = nullptr;
    OSTINATO_RETURN_IF_ERROR(active_clusters.of_device(&clusters));
    grid->ctas = *clusters < grid->ctas ? *clusters : grid->ctas;
  }
  // On a single line, a work tile has at most as many CTAs as the longest has tiles, and further
  // CTAs have no work. Launching them would cost time.
  const int64_t tiles = work_tiles * ((tokens + kTileTokens - 1) / kTileTokens);
  grid->most =
      work_tiles <= grid->ctas && tiles < grid->ctas ? static_cast<int>(tiles) : grid->ctas;
  return cudaSuccess;
}

}  // namespace ostinato::decode
