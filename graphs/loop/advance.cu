// What happens between two steps of a burst, on the device: every row's token goes to the host,
// rows that have ended become padding, the others' inputs move on, and the loop is told whether to
// go around again.
//
// Compiled at run time by NVRTC (loop/cuda.py), so that it includes nothing. All memory is
// made of 64-bit words, laid out as in loop/memory.py and loop/plan.py.

using Word = long long;

// Of the driver, which links it when it loads the code.
extern "C" __device__ __cudart_builtin__ void cudaGraphSetConditional(unsigned long long handle,
                                                                      unsigned int value);

namespace {

enum Kind : Word { kKeep, kFeed, kAdd, kSlot };
enum Reason : Word { kRunning, kStop, kLimit, kFull, kCancelled };

// How the input buffer of one name changes from step to step.
struct Rule {
  Word kind;
  Word buffer;  // address of its first row
  Word element_bytes;
  Word elements;  // of a row
  Word padding;   // the bits of an element
  // kFeed: address of the output's first row, and bytes from row to row. kAdd: the amount.
  // kSlot: address of the page table's first row, and its columns.
  Word source;
  Word source_stride;
  // kSlot only.
  Word table_bytes;  // of an element
  Word table_padding;
  Word page_size;
  Word positions;  // address
  Word position_bytes;
};

struct Plan {
  Word num_rules;
  Word tokens;  // address of the output that is recorded
  Word token_bytes;
  Word token_stride;
  Word max_batch;
  Word max_stops;
  Rule rules[1];
};

// In device memory, written anew for each burst; then come `n` rows of a limit, a number of stop
// tokens and `max_stops` of those. A limit of 0 says that the row has ended.
struct Control {
  Word step;
  Word n;
  Word rows[1];
};

// In the host's memory. Then come `max_batch` numbers of tokens of rows that have ended, as many
// reasons for that, and for each step the time at which it was done and `max_batch` tokens.
struct Ring {
  volatile Word published;  // steps
  volatile Word done;
  volatile Word cancel;  // written by the host
  Word reserved;
  Word words[1];
};

__device__ Word load(Word address, Word bytes) {
  return bytes == 8   ? *reinterpret_cast<const long long*>(address)
         : bytes == 4 ? *reinterpret_cast<const int*>(address)
         : bytes == 2 ? *reinterpret_cast<const short*>(address)
                      : *reinterpret_cast<const signed char*>(address);
}

__device__ void store(Word address, Word bytes, Word value) {
  if (bytes == 8) {
    *reinterpret_cast<long long*>(address) = value;
  } else if (bytes == 4) {
    *reinterpret_cast<int*>(address) = static_cast<int>(value);
  } else if (bytes == 2) {
    *reinterpret_cast<short*>(address) = static_cast<short>(value);
  } else {
    *reinterpret_cast<signed char*>(address) = static_cast<signed char>(value);
  }
}

__device__ Word nanoseconds() {
  Word time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

__device__ Word place_of(const Rule& rule, Word row, Word element = 0) {
  return rule.buffer + (row * rule.elements + element) * rule.element_bytes;
}

// Moves a row's inputs on, but for slots, which follow the positions. Single numbers are shared out
// among the lanes of the warp; so are the elements of longer rows.
__device__ void feed_and_add(const Plan& plan, Word row, int lane) {
  for (Word i = 0; i < plan.num_rules; ++i) {
    const Rule& rule = plan.rules[i];
    const bool is_number = rule.elements == 1;
    if (is_number && i % 32 != lane) {
      continue;
    }
    if (rule.kind == kAdd) {
      const Word place = place_of(rule, row);
      store(place, rule.element_bytes, load(place, rule.element_bytes) + rule.source);
    } else if (rule.kind == kFeed) {
      const Word source = rule.source + row * rule.source_stride;
      for (Word e = is_number ? 0 : lane; e < rule.elements; e += is_number ? 1 : 32) {
        const Word value = load(source + e * rule.element_bytes, rule.element_bytes);
        store(place_of(rule, row, e), rule.element_bytes, value);
      }
    }
  }
}

// Writes the slots of a row's new positions. Returns whether the page table has pages for them.
__device__ bool find_slots(const Plan& plan, Word row, int lane) {
  bool found = true;
  for (Word i = lane; i < plan.num_rules; i += 32) {
    const Rule& rule = plan.rules[i];
    if (rule.kind != kSlot) {
      continue;
    }
    const Word position = load(rule.positions + row * rule.position_bytes, rule.position_bytes);
    const Word column = position / rule.page_size;
    if (position < 0 || column >= rule.source_stride) {
      found = false;
      continue;
    }
    const Word entry = rule.source + (row * rule.source_stride + column) * rule.table_bytes;
    const Word page = load(entry, rule.table_bytes);
    if (page == rule.table_padding) {
      found = false;
      continue;
    }
    store(place_of(rule, row), rule.element_bytes,
          page * rule.page_size + position % rule.page_size);
  }
  return __all_sync(0xffffffffu, found);
}

__device__ void pad(const Plan& plan, Word row, int lane) {
  for (Word i = 0; i < plan.num_rules; ++i) {
    const Rule& rule = plan.rules[i];
    for (Word e = lane; e < rule.elements; e += 32) {
      store(place_of(rule, row, e), rule.element_bytes, rule.padding);
    }
  }
}

// Returns why a row ends with `token`; kRunning if it does not. `state` is its row of `Control`.
__device__ Word reason_to_end(const Word* state, Word step, Word token, int lane) {
  bool stops = false;
  for (Word i = lane; i < state[1]; i += 32) {
    stops |= state[2 + i] == token;
  }
  if (__any_sync(0xffffffffu, stops)) {
    return kStop;
  }
  return step + 1 >= state[0] ? kLimit : kRunning;
}

}  // namespace

// One CTA; a warp takes every 32nd row. Runs after all kernels of the step, and before the next.
extern "C" __global__ void __launch_bounds__(1024)
    ostinato_advance(unsigned long long handle, const Plan* plan_address, Control* control,
                     Ring* ring) {
  const Plan& plan = *plan_address;
  __shared__ unsigned int running;  // rows that go on
  __shared__ bool cancelled;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    running = 0;
    cancelled = ring->cancel != 0;
    ring->words[2 * plan.max_batch + control->step * (1 + plan.max_batch)] = nanoseconds();
  }
  __syncthreads();
  const Word step = control->step;
  Word* const lengths = ring->words;
  Word* const reasons = lengths + plan.max_batch;
  Word* const line = reasons + plan.max_batch + step * (1 + plan.max_batch);
  for (Word row = warp; row < control->n; row += blockDim.x / 32) {
    Word* const state = control->rows + row * (2 + plan.max_stops);
    if (state[0] == 0) {
      continue;
    }
    const Word token = load(plan.tokens + row * plan.token_stride, plan.token_bytes);
    Word reason = reason_to_end(state, step, token, lane);
    if (reason == kRunning && cancelled) {
      reason = kCancelled;
    }
    if (reason == kRunning) {
      feed_and_add(plan, row, lane);
      __syncwarp();
      if (!find_slots(plan, row, lane)) {
        reason = kFull;
      }
    }
    if (reason != kRunning) {
      __syncwarp();
      pad(plan, row, lane);
    }
    if (lane == 0) {
      line[1 + row] = token;
      if (reason == kRunning) {
        atomicAdd(&running, 1u);
      } else {
        state[0] = 0;
        lengths[row] = step + 1;
        reasons[row] = reason;
      }
    }
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) {
    control->step = step + 1;
    ring->published = step + 1;
    if (running == 0) {
      __threadfence_system();
      ring->done = 1;
    }
    cudaGraphSetConditional(handle, running != 0);
  }
}
