// Debug build modes: device printing and injected delays.
//
//   build --debug-print        defines OSTINATO_DEBUG_PRINT
//   build --inject-delay SITE  defines OSTINATO_DELAY_SITE
//
// A release build defines neither, and both macros below are empty in it.
#pragma once

#include <cstdio>

namespace ostinato {

#ifdef OSTINATO_DEBUG_PRINT
inline constexpr bool kDebugPrint = true;
// Prints from one thread of the calling warps: OSTINATO_PRINT(threadIdx.x == 0, "tile %d\n", tile).
#define OSTINATO_PRINT(condition, ...) \
  do {                                 \
    if (condition) {                   \
      printf(__VA_ARGS__);             \
    }                                  \
  } while (0)
#else
// For kernels that must leave registers for printf: a wider producer and fewer stages.
inline constexpr bool kDebugPrint = false;
#define OSTINATO_PRINT(condition, ...) \
  do {                                 \
  } while (0)
#endif

#ifdef OSTINATO_DELAY_SITE
#define OSTINATO_STRING_OF(text) #text
#define OSTINATO_STRING(macro) OSTINATO_STRING_OF(macro)

__host__ __device__ constexpr bool same_site(const char* a, const char* b) {
  while (*a != '\0' && *a == *b) {
    ++a;
    ++b;
  }
  return *a == *b;
}

// Long enough for every other warp of the CTA to run past a missing synchronisation.
__device__ __forceinline__ void delay() {
  for (int i = 0; i < 8; ++i) {
    __nanosleep(10000);
  }
}

// Delays the threads for which `condition` is true, before a synchronisation between warps, to
// expose races. The site is a bare name, unique in the file: OSTINATO_DELAY(epilogue_store,
// threadIdx.x / 32 == 1).
#define OSTINATO_DELAY(site, condition)                                                 \
  do {                                                                                  \
    if constexpr (::ostinato::same_site(#site, OSTINATO_STRING(OSTINATO_DELAY_SITE))) { \
      if (condition) {                                                                  \
        ::ostinato::delay();                                                            \
      }                                                                                 \
    }                                                                                   \
  } while (0)
#else
#define OSTINATO_DELAY(site, condition) \
  do {                                  \
  } while (0)
#endif

}  // namespace ostinato
