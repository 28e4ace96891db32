// The scheduler: the CTAs of one cluster at a time, their warps in random order and at different
// speeds, the threads of a warp one after the other between two points where they may wait.
#include "emulator.h"

#include <random>
#include <vector>

#include "common/launch.cuh"
#include "common/mbarrier.cuh"

emulator::Index threadIdx, blockIdx, gridDim, blockDim;

namespace emulator {

int rank;
char* shared;
char* const shared_arena =
    static_cast<char*>(std::aligned_alloc(4096, size_t{kSharedBytes} * kMostClusterCtas));

namespace {

constexpr int kNamedBarriers = 16;
constexpr size_t kStackBytes = 1 << 17, kStackSkew = 9 * 64;
constexpr long kPatience = 400000;  // steps without progress

struct Fiber {
  void* stack_pointer;
  char* stack;
  int x, rank;
  bool done;
  const char* where;
  uint64_t what;
  int cluster_waits, votes;
};
struct Warp {
  Words words[2][kLanes];
  int count[2];
  int generation;
  int lane_generation[kLanes];
};
struct Barrier {
  int count, generation;
};

std::mt19937_64 generator;
std::vector<Fiber> fibers;
std::vector<Warp> warps;
std::vector<std::function<void()>> deferred;
Barrier named[kMostClusterCtas][kNamedBarriers], cluster_barrier;
bool votes[kMostClusterCtas][3];
Fiber* current;
void* scheduler;
std::function<void()> kernel_entry;
long steps, last_progress;
int first_block, cluster_ctas, cta_threads;

extern "C" void emulator_switch(void** save, void* to);
asm(".text\n.globl emulator_switch\nemulator_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");

// Before a fiber runs, and goes on.
void enter(Fiber* fiber) {
  current = fiber;
  threadIdx.x = fiber->x;
  rank = fiber->rank;
  blockIdx.x = first_block + rank;
  shared = shared_of(rank);
}

void run_fiber() {
  kernel_entry();
  current->done = true;
  progress();
  emulator_switch(&current->stack_pointer, scheduler);
}

void reset_fiber(Fiber& fiber, int index) {
  char* const stack = fiber.stack;
  fiber = {};
  fiber.stack = stack;
  fiber.x = index % cta_threads;
  fiber.rank = index / cta_threads;
  // Stacks that end at the same distance from a page would share few lines of the host's caches.
  void** top = reinterpret_cast<void**>(stack + kStackBytes - index % 64 * kStackSkew) - 8;
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(run_fiber);
  top -= 6;  // the registers that a switch restores
  fiber.stack_pointer = top;
}

void do_one_deferred() {
  const size_t i = random_number() % deferred.size();
  const auto what = std::move(deferred[i]);
  deferred.erase(deferred.begin() + static_cast<long>(i));
  what();
}

void give_up() {
  for (const Fiber& fiber : fibers) {
    if (!fiber.done && fiber.x % kLanes == 0 && fiber.stack_pointer != nullptr) {
      std::printf("CTA %d thread %d waits: %s %llx\n", fiber.rank, fiber.x,
                  fiber.where != nullptr ? fiber.where : "?",
                  static_cast<unsigned long long>(fiber.what));
    }
  }
  fail("deadlock");
}

void run_cluster(int cluster) {
  const int threads = cta_threads * cluster_ctas, count = threads / kLanes;
  first_block = cluster * cluster_ctas;
  ostinato::forget_barriers();
  std::memset(shared_of(0), 0xff, size_t{kSharedBytes} * cluster_ctas);
  std::memset(named, 0, sizeof(named));
  std::memset(votes, 0, sizeof(votes));
  cluster_barrier = {};
  warps.assign(count, {});
  while (static_cast<int>(fibers.size()) < threads) {
    fibers.push_back({});
    fibers.back().stack = static_cast<char*>(std::aligned_alloc(64, kStackBytes));
  }
  for (int i = 0; i < threads; ++i) {
    reset_fiber(fibers[i], i);
  }
  std::vector<int> slowness(count, 1);
  int left = threads;
  for (steps = last_progress = 0; left > 0; ++steps) {
    if (steps % 3000 == 0) {
      for (int& slow : slowness) {
        slow = random_number() % 4 == 0 ? 20 : 1;
      }
    }
    const int warp = static_cast<int>(random_number() % count);
    if (random_number() % slowness[warp] != 0) {
      continue;
    }
    const int first = static_cast<int>(random_number() % kLanes);
    for (int i = 0; i < kLanes; ++i) {
      Fiber& fiber = fibers[warp * kLanes + (first + i) % kLanes];
      if (!fiber.done) {
        enter(&fiber);
        emulator_switch(&scheduler, fiber.stack_pointer);
        left -= fiber.done;
      }
    }
    if (!deferred.empty() && random_number() % 4 == 0) {
      do_one_deferred();
    } else if (deferred.empty() && steps - last_progress > kPatience) {
      give_up();
    }
  }
  while (!deferred.empty()) {
    do_one_deferred();
  }
}

}  // namespace

void seed(uint64_t value) { generator.seed(value); }
uint64_t random_number() { return generator(); }
void progress() { last_progress = steps; }

void fail(const char* why) {
  std::printf("%s, CTA %d thread %d\n", why, rank, threadIdx.x);
  std::fflush(stdout);
  std::abort();
}

void yield(const char* where, uint64_t what) {
  Fiber* const fiber = current;
  fiber->where = where;
  fiber->what = what;
  emulator_switch(&fiber->stack_pointer, scheduler);
}

const Words* exchange(const Words& words) {
  Warp& warp = warps[rank * (cta_threads / kLanes) + threadIdx.x / kLanes];
  const int generation = warp.lane_generation[lane()]++, half = generation % 2;
  std::memcpy(warp.words[half][lane()], words, sizeof(Words));
  if (++warp.count[half] == kLanes) {
    warp.count[half] = 0;
    warp.generation = generation + 1;
    progress();
  }
  while (warp.generation <= generation) {
    yield("its warp", generation);
  }
  return warp.words[half];
}

void defer(std::function<void()> what) {
  deferred.push_back(std::move(what));
  progress();
}

void arrive_in_cluster() {
  __syncwarp();
  if (++cluster_barrier.count == cluster_ctas * cta_threads) {
    cluster_barrier.count = 0;
    ++cluster_barrier.generation;
    progress();
  }
}

void wait_for_cluster() {
  const int generation = current->cluster_waits++;
  while (cluster_barrier.generation <= generation) {
    yield("the cluster", generation);
  }
  progress();
}

void arrive_at_named(int barrier, int threads) {
  Barrier& at = named[rank][barrier];
  if (++at.count == threads) {
    at.count = 0;
    ++at.generation;
    progress();
  }
}

void sync_at_named(int barrier, int threads) {
  const int generation = named[rank][barrier].generation;
  arrive_at_named(barrier, threads);
  while (named[rank][barrier].generation == generation) {
    yield("a named barrier", barrier);
  }
}

bool any_thread(bool value) {
  bool (&of_cta)[3] = votes[rank];
  const int vote = current->votes++;
  of_cta[vote % 3] |= value;
  sync_at_named(0, cta_threads);
  of_cta[(vote + 2) % 3] = false;
  return of_cta[vote % 3];
}

void run(int ctas, int cluster, int threads, std::function<void()> kernel) {
  gridDim.x = ctas;
  blockDim.x = threads;
  cluster_ctas = cluster;
  cta_threads = threads;
  kernel_entry = std::move(kernel);
  std::vector<int> order(ctas / cluster);
  for (size_t i = 0; i < order.size(); ++i) {
    order[i] = static_cast<int>(i);
  }
  std::shuffle(order.begin(), order.end(), generator);
  for (const int each : order) {
    run_cluster(each);
  }
}

}  // namespace emulator

// What kernels' host code asks of the runtime, which is not linked.
extern "C" cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
extern "C" cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* /*kernel*/,
                                                      const cudaLaunchConfig_t* /*config*/) {
  *clusters = emulator::clusters;
  return cudaSuccess;
}
