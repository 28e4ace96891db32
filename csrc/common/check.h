// How host code of a kernel library reports a CUDA error: by returning it.
#pragma once

#include <cuda_runtime_api.h>

#include "entry.h"

#ifndef NDEBUG
#error "kernels are compiled with -DNDEBUG: a device assert is a call, and a call serialises wgmma"
#endif

// Returns the error of a CUDA call from the enclosing function, if there is one.
#define OSTINATO_RETURN_IF_ERROR(call)         \
  do {                                         \
    const cudaError_t ostinato_error = (call); \
    if (ostinato_error != cudaSuccess) {       \
      return ostinato_error;                   \
    }                                          \
  } while (0)
