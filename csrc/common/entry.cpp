// Common exports of every kernel library, besides those of entry.h; compiled into each library.
#include <cuda_runtime_api.h>

#include "check.h"

OSTINATO_EXPORT const char* ostinato_error_string(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}
