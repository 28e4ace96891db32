// What every kernel library exports beside ostinato_prepare and ostinato_launch; the compiler adds
// this file to each one.
#include <cuda_runtime_api.h>

#include <cstdint>

#include "check.h"

// OSTINATO_ABI is a hash of the params.h beside the kernel's source, given to this file and to the
// loader alike: a loader built from another one would pass arguments in the wrong places.
OSTINATO_EXPORT uint64_t ostinato_abi_version(void) { return OSTINATO_ABI; }

OSTINATO_EXPORT const char* ostinato_error_string(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}
