// The parts of a ring of bulk copies: mbarriers, and the copy engine's global-to-shared copy.
// Names and semantics: PTX ISA, "mbarrier" and "cp.async.bulk".
#pragma once

#include <cstdint>

namespace ostinato {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void init_barrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ void arrive_expecting(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

__device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni finished;\n"
      "bra.uni again;\n"
      "finished:\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Whether the phase of this parity is over.
__device__ __forceinline__ bool is_complete(uint64_t* barrier, uint32_t parity) {
  uint32_t complete;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(complete)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return complete != 0;
}

// Weights are read once a launch: they should not push activations out of the L2 cache.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Copies `bytes` (a multiple of 16, between 16-byte aligned addresses); `barrier` counts them.
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, uint32_t bytes,
                                          uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// A position in a ring of `kStages` slots, and how often the ring has gone round (its parity).
template <int kStages>
struct RingPosition {
  int slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++slot == kStages) {
      slot = 0;
      parity ^= 1;
    }
  }
};

}  // namespace ostinato
