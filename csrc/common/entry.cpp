// What every kernel library exports beside what entry.h lists; the compiler adds this file to each
// one.
#include <cuda_runtime_api.h>

#include "check.h"

OSTINATO_EXPORT const char* ostinato_error_string(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}
