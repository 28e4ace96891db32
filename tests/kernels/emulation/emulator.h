// CUDA's words, as the host's compiler is to understand them: every thread is a fiber, and what the
// hardware does in its own time (copies, stores to other CTAs) is done at a random one.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <type_traits>
#include <utility>

#undef __device__
#undef __host__
#undef __global__
#undef __forceinline__
#undef __grid_constant__
#undef __launch_bounds__
#undef __shared__
#undef __align__
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

namespace emulator {

constexpr int kLanes = 32;
constexpr int kSharedBytes = 228 * 1024;
constexpr int kMostClusterCtas = 8;

struct Index {
  int x;
};
extern int rank;      // of the CTA in its cluster
extern char* shared;  // its shared memory

using Words = uint32_t[6];

extern char* const shared_arena;  // of all CTAs of a cluster

inline char* shared_of(int rank) { return shared_arena + static_cast<size_t>(rank) * kSharedBytes; }
uint64_t random_number();
// Lets other threads run. `where` and `what` are shown if nobody ever can.
void yield(const char* where, uint64_t what = 0);
// Says that some thread may have less to wait for than before.
void progress();
[[noreturn]] void fail(const char* why);
// Of a warp: gives this lane's words, returns all lanes'.
const Words* exchange(const Words& words);
// Does something at some time, in any order.
void defer(std::function<void()> what);
void arrive_in_cluster();
void wait_for_cluster();
void arrive_at_named(int barrier, int threads);
void sync_at_named(int barrier, int threads);
bool any_thread(bool value);  // of the CTA; all of it meets

}  // namespace emulator

extern emulator::Index threadIdx, blockIdx, gridDim, blockDim;

namespace emulator {

// Runs the random cases of `FIRST COUNT`, a program's first arguments; returns its exit code.
template <class RunCase>
int run_cases(char** arguments, RunCase run_case) {
  const int first = std::atoi(arguments[1]), count = std::atoi(arguments[2]);
  bool right = true;
  for (int seed = first; seed < first + count; ++seed) {
    right &= run_case(seed);
  }
  return right ? 0 : 1;
}

inline int lane() { return threadIdx.x % kLanes; }

template <class T>
T shuffle(T value, int source) {
  Words words = {};
  static_assert(sizeof(T) <= sizeof(Words));
  std::memcpy(words, &value, sizeof(T));
  std::memcpy(&value, exchange(words)[source % kLanes], sizeof(T));
  return value;
}

}  // namespace emulator

using std::max;
using std::min;

template <class T>
T __shfl_sync(unsigned, T value, int source) {
  return emulator::shuffle(value, source);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulator::shuffle(value, emulator::lane() ^ mask);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int delta) {
  const int lane = emulator::lane();
  return emulator::shuffle(value, lane >= delta ? lane - delta : lane);
}
inline unsigned __ballot_sync(unsigned, bool value) {
  const emulator::Words* const all = emulator::exchange({value});
  unsigned bits = 0;
  for (int i = 0; i < emulator::kLanes; ++i) {
    bits |= (all[i][0] != 0 ? 1u : 0u) << i;
  }
  return bits;
}
inline bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline bool __all_sync(unsigned mask, bool value) { return !__any_sync(mask, !value); }
inline int __reduce_max_sync(unsigned, int value) {
  const emulator::Words* const all = emulator::exchange({static_cast<uint32_t>(value)});
  for (int i = 0; i < emulator::kLanes; ++i) {
    value = std::max(value, static_cast<int>(all[i][0]));
  }
  return value;
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t value) {
  const emulator::Words* const all = emulator::exchange({value});
  for (int i = 0; i < emulator::kLanes; ++i) {
    value = std::max(value, static_cast<uint32_t>(all[i][0]));
  }
  return value;
}
inline uint32_t __reduce_min_sync(unsigned mask, uint32_t value) {
  return ~__reduce_max_sync(mask, ~value);
}
inline unsigned __match_any_sync(unsigned, int value) {
  const emulator::Words* const all = emulator::exchange({static_cast<uint32_t>(value)});
  unsigned bits = 0;
  for (int i = 0; i < emulator::kLanes; ++i) {
    bits |= (static_cast<int>(all[i][0]) == value ? 1u : 0u) << i;
  }
  return bits;
}
inline int __reduce_min_sync(unsigned mask, int value) { return -__reduce_max_sync(mask, -value); }
inline int __reduce_add_sync(unsigned, int value) {
  const emulator::Words* const all = emulator::exchange({static_cast<uint32_t>(value)});
  int sum = 0;
  for (int i = 0; i < emulator::kLanes; ++i) {
    sum += static_cast<int>(all[i][0]);
  }
  return sum;
}
inline void __syncwarp() { emulator::exchange({}); }
inline int __syncthreads_or(int value) { return emulator::any_thread(value != 0); }
inline void __syncthreads() { emulator::any_thread(false); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __saturatef(float x) { return x > 0 ? std::min(x, 1.0f) : 0.0f; }
// Rounds down; the sum is exact in fp64 as its users have it.
inline float __fmaf_rd(float a, float b, float c) {
  const double exact = std::fma(static_cast<double>(a), b, c);
  const float near = static_cast<float>(exact);
  return near <= exact ? near : std::nextafter(near, -std::numeric_limits<float>::infinity());
}
inline int __float2int_rn(float x) { return std::isnan(x) ? 0 : static_cast<int>(std::rint(x)); }
inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
inline float __int_as_float(int bits) { return __uint_as_float(static_cast<unsigned>(bits)); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selection) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  unsigned picked = 0;
  for (int i = 0; i < 4; ++i) {
    picked |= static_cast<unsigned>(bytes >> (8 * (selection >> (4 * i) & 7)) & 0xff) << (8 * i);
  }
  return picked;
}
template <class T>
T __ldcg(const T* from) {
  return *from;
}
template <class T>
T __ldcs(const T* from) {
  return *from;
}
inline unsigned atomicCAS(unsigned* at, unsigned expected, unsigned value) {
  const unsigned before = *at;
  *at = before == expected ? value : before;
  return before;
}
inline unsigned atomicAdd(unsigned* at, unsigned by) {
  const unsigned before = *at;
  *at += by;
  return before;
}
inline int atomicAdd(int* at, int by) { return std::exchange(*at, *at + by); }
inline int atomicSub(int* at, int by) { return atomicAdd(at, -by); }
inline unsigned atomicExch(unsigned* at, unsigned value) { return std::exchange(*at, value); }
inline void __threadfence() {}
// Time, for those who wait for it to pass: it does when they sleep.
inline long clock() {
  static long now = 0;
  return now += 500;
}
inline void __nanosleep(unsigned /*nanoseconds*/) { emulator::yield("nanosleep"); }
// As atom.inc: to the bound, and then from zero again.
inline unsigned atomicInc(unsigned* at, unsigned bound) {
  const unsigned before = *at;
  *at = before >= bound ? 0 : before + 1;
  return before;
}
