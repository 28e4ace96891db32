// Register allocation of a warp-specialised CTA, between one producer warpgroup, which copies, and
// its consumer warpgroups, which multiply.
#pragma once

#include <cuda_runtime.h>

namespace ostinato {

// Registers per thread after setmaxnreg.
struct RegisterSplit {
  int producer, consumer;
};

__host__ __device__ constexpr bool valid_register_count(int registers) {
  return registers % 8 == 0 && registers >= 24 && registers <= 256;
}

// Registers per thread at launch, for one CTA per SM: the most that ptxas can give to all
// warpgroups alike. setmaxnreg redistributes these registers and adds none.
constexpr int launch_registers(int warpgroups) {
  constexpr int kRegistersPerSm = 64 * 1024;
  constexpr int kThreadsPerWarpgroup = 128;
  return kRegistersPerSm / (kThreadsPerWarpgroup * warpgroups) / 8 * 8;
}

constexpr bool fits(RegisterSplit split, int consumers) {
  return split.producer + consumers * split.consumer <=
         (consumers + 1) * launch_registers(consumers + 1);
}

// Register splits by number of consumer warpgroups. (With one, every thread can have 255 registers
// without a split.) A printf in a producer with 24 or 32 registers ends in "illegal instruction" or
// a hang, so a debug build gives it more, and the kernel has fewer stages.
template <int Consumers, bool DebugPrint>
struct RegisterTable {
  static_assert(Consumers == 2 || Consumers == 3,
                "registers are divided among two or three consumer warpgroups");
  static constexpr RegisterSplit kRelease =
      Consumers == 2 ? RegisterSplit{40, 232} : RegisterSplit{32, 160};
  static constexpr RegisterSplit kDebug =
      Consumers == 2 ? RegisterSplit{128, 184} : RegisterSplit{80, 144};
  static constexpr RegisterSplit kSplit = DebugPrint ? kDebug : kRelease;
  static_assert(valid_register_count(kSplit.producer) && valid_register_count(kSplit.consumer),
                "setmaxnreg takes multiples of 8 from 24 to 256");
  static_assert(fits(kSplit, Consumers), "the split needs more registers than the launch has");
};

// Executed by every warp of a warpgroup.
template <int Registers>
__device__ __forceinline__ void give_up_registers() {
  static_assert(valid_register_count(Registers), "setmaxnreg takes multiples of 8 from 24 to 256");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(Registers));
}

// Waits until another warpgroup of the CTA has released enough registers.
template <int Registers>
__device__ __forceinline__ void take_registers() {
  static_assert(valid_register_count(Registers), "setmaxnreg takes multiples of 8 from 24 to 256");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(Registers));
}

}  // namespace ostinato
