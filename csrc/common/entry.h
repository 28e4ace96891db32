// What a kernel's source exports: ostinato_prepare(), ostinato_launch() and, where launches need
// memory of their own, ostinato_workspace_bytes(). Plain C++17.
#pragma once

#include <cstdint>

#include "fields.h"

// Makes a C function visible in the kernel library, which hides everything else.
#define OSTINATO_EXPORT extern "C" __attribute__((visibility("default")))

// Begins the definition of the launch, which takes `const Params* params` and `void* stream` and
// returns a cudaError_t. The library says itself which fields these arguments have.
#define OSTINATO_LAUNCH(Params)                                       \
  OSTINATO_EXPORT const ostinato::FieldTable* ostinato_fields(void) { \
    return ostinato::field_table<Params>();                           \
  }                                                                   \
  OSTINATO_EXPORT int ostinato_launch(const Params* params, void* stream)

// Begins the definition of how much workspace launches of some `const Capacities* capacities` need:
// it writes `int64_t* bytes` and returns a cudaError_t.
#define OSTINATO_WORKSPACE(Capacities)                                          \
  OSTINATO_EXPORT const ostinato::FieldTable* ostinato_workspace_fields(void) { \
    return ostinato::field_table<Capacities>();                                 \
  }                                                                             \
  OSTINATO_EXPORT int ostinato_workspace_bytes(const Capacities* capacities, int64_t* bytes)
