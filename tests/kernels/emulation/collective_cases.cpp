// Random series of collectives, ranks side by side, each at its own speed: program FIRST COUNT
// DEAD. With DEAD one rank ends before the others, which must end, too. Exit code 1 if any is
// wrong.
//
// First, since it takes CUDA's own words away from what follows.
#include "emulator.h"
// Then what the cases need, and the kernel.
#include <random>
#include <vector>

#include "collective/exchange.cuh"
#include "common/launch.cuh"

namespace {

using bf16 = __nv_bfloat16;
using fp16 = __half;
using fp32 = float;
using Element = OSTINATO_DTYPE;
using ostinato::CollectiveControl;
using ostinato::CollectiveParams;
using ostinato::Part;
constexpr int kRanks = OSTINATO_RANKS;
constexpr int kVectors = OSTINATO_VECTORS;  // of a thread
constexpr int kElements = 16 / static_cast<int>(sizeof(Element));
constexpr int kThreads = 32;
constexpr int kGuard = 64;  // elements behind each output
constexpr uint32_t kPoison = 0xabababab;

enum class Form { one_shot, two_shots, gather };

struct Launch {
  Form form;
  int rows, active, vectors;                 // rows, those that are real, vectors of a row
  std::vector<std::vector<Element>> x, out;  // of each rank

  int64_t outputs(int size) const {
    return int64_t{rows} * vectors * kElements * (form == Form::gather ? size : 1);
  }
};

struct Case {
  int size, ctas, dead,
      lives;  // the rank that ends early, -1 for none, and after how many launches
  std::vector<Launch> launches;
};

bool is_nan(Element x) { return std::isnan(static_cast<float>(x)); }

Case make_case(std::mt19937_64& random, bool with_dead) {
  const auto draw = [&](int low, int high) {
    return low + static_cast<int>(random() % static_cast<uint64_t>(high - low + 1));
  };
  Case made = {};
  made.size = draw(with_dead ? 2 : 1, kRanks);
  made.ctas = draw(1, 8 / made.size);
  made.dead = with_dead ? draw(0, made.size - 1) : -1;
  const int count = draw(4, 8);
  made.lives = with_dead ? draw(0, count - 1) : count;
  for (int i = 0; i < count; ++i) {
    Launch launch = {};
    launch.form = static_cast<Form>(draw(0, 2));
    launch.rows = draw(1, 8);
    // None as often as some: a rank that has nothing to wait for gets ahead of the others.
    const int kind = draw(0, 5);
    launch.active = kind == 0 ? 0 : kind == 1 ? draw(1, launch.rows) : launch.rows;
    launch.vectors = draw(0, 2) == 0 ? draw(1, kVectors * kThreads) : kVectors * kThreads;
    for (int rank = 0; rank < made.size; ++rank) {
      std::vector<Element> x(launch.rows * launch.vectors * kElements);
      for (Element& value : x) {
        const float magnitude = std::ldexp(1.0f, draw(-20, 20));
        value = Element(magnitude * (draw(-1000, 1000) / 1000.0f));
      }
      if (draw(0, 1) != 0) {  // a NaN that looks like what has not arrived
        std::memset(x.data() + draw(0, static_cast<int>(x.size()) - 2) / 2 * 2, 0xff, 4);
      }
      launch.x.push_back(x);
      launch.out.emplace_back(launch.outputs(made.size) + kGuard);
      std::memset(launch.out.back().data(), 0xab, launch.out.back().size() * sizeof(Element));
    }
    made.launches.push_back(launch);
  }
  return made;
}

Element expected(const Launch& launch, int size, int64_t i) {
  const int64_t each = int64_t{launch.rows} * launch.vectors * kElements;
  if (launch.form == Form::gather) {
    return launch.x[i / each][i % each];
  }
  float sum = static_cast<float>(launch.x[0][i]);
  for (int rank = 1; rank < size; ++rank) {
    sum += static_cast<float>(launch.x[rank][i]);
  }
  return Element(sum);
}

int wrong_outputs(const Case& of, const Launch& launch, int rank, bool complete) {
  int wrong = 0;
  const std::vector<Element>& out = launch.out[rank];
  const int64_t width = int64_t{launch.vectors} * kElements;
  for (int64_t i = 0; i < static_cast<int64_t>(out.size()); ++i) {
    uint32_t bits = kPoison;
    std::memcpy(&bits, &out[i], sizeof(Element));
    const bool inside = i < launch.outputs(of.size) && i / width % launch.rows < launch.active;
    if (!inside) {
      wrong += bits != kPoison ? 1 : 0;
      continue;
    }
    const Element want = expected(launch, of.size, i);
    const bool same = std::memcmp(&out[i], &want, sizeof(Element)) == 0;
    wrong += same || (is_nan(out[i]) && (is_nan(want) || !complete)) ? 0 : 1;
  }
  return wrong;
}

struct Rank {
  CollectiveControl control;
  std::vector<uint4> memory;
  uint32_t host[2];
  std::vector<int> ended;  // threads, of each launch
};

// A launch as one thread takes part in it: what collective.cu does around it.
void take_part(const CollectiveParams& p, const Part& part, Form form) {
  if (part.rows == 0) {
    return;
  }
  ostinato::Mailbox<kRanks> mailbox(p);
  uint4* const out = static_cast<uint4*>(p.out);
  const auto finish = [&](int32_t row, const uint4(&sums)[kVectors]) {
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t vector = v * part.threads + part.thread;
      if (vector < part.vectors) {
        out[row * part.vectors + vector] = sums[v];
      }
    }
  };
  if (form == Form::gather) {
    ostinato::all_to_all<Element, kRanks, kVectors>(
        p, part, mailbox,
        [&](int, int32_t row, uint32_t vector, uint32_t index, uint32_t segment, const uint4& own) {
          mailbox.receive_each(index, segment, own, [&](int rank, const uint4& words) {
            out[(rank * p.m + row) * part.vectors + vector] = words;
          });
        },
        [](int32_t) {});
  } else if (form == Form::two_shots) {
    ostinato::sum_in_two_shots<Element, kRanks, kVectors>(p, part, mailbox, finish);
  } else {
    ostinato::sum_in_one_shot<Element, kRanks, kVectors>(p, part, mailbox, finish);
  }
  mailbox.close(static_cast<uint32_t>(ostinato::used_vectors(p, part.vectors)), part.ctas);
}

bool run_case(int seed, bool with_dead) {
  std::mt19937_64 random(seed * 7919 + 1);
  Case made = make_case(random, with_dead);
  emulator::seed(seed * 31);
  const auto params_of = [&](Launch& launch, Rank* ranks, int rank) {
    CollectiveParams p = {};
    p.x = launch.x[rank].data();
    p.x_stride = launch.vectors * kElements;
    p.out = launch.out[rank].data();
    p.m = launch.rows;
    p.k = launch.vectors * kElements;
    p.control = &ranks[rank].control;
    p.rank = rank;
    p.size = made.size;
    p.two_shot = launch.form == Form::two_shots ? 1 : 0;
    p.timeout_ns = with_dead ? 100000 : int64_t{1} << 60;
    return p;
  };
  int64_t region = 0;
  std::vector<Rank> ranks(made.size);
  for (Launch& launch : made.launches) {
    const CollectiveParams p = params_of(launch, ranks.data(), 0);
    region = std::max(region, ostinato::used_vectors(p, launch.vectors));
  }
  for (int rank = 0; rank < made.size; ++rank) {
    ranks[rank].memory.assign(3 * region + 1, make_uint4(-1u, -1u, -1u, -1u));
    ranks[rank].memory.back().x = kPoison;
    ranks[rank].ended.assign(made.launches.size(), 0);
    ranks[rank].control.host = ranks[rank].host;
    for (int to = 0; to < made.size; ++to) {
      ranks[to].control.buffers[rank] = reinterpret_cast<uint8_t*>(ranks[rank].memory.data());
    }
  }
  std::printf("seed %d: %d ranks of %d CTAs, %zu launches, rank %d ends after %d", seed, made.size,
              made.ctas, made.launches.size(), made.dead, made.lives);
  std::fflush(stdout);
  const int all = made.size * made.ctas;
  emulator::run(all, all, kThreads, [&] {
    const int rank = blockIdx.x / made.ctas, cta = blockIdx.x % made.ctas;
    for (size_t i = 0; i < made.launches.size(); ++i) {
      if (rank == made.dead && static_cast<int>(i) == made.lives) {
        return;
      }
      Launch& launch = made.launches[i];
      CollectiveParams p = params_of(launch, ranks.data(), rank);
      p.region_vectors = region;
      const Part part = {cta,           made.ctas,
                         kThreads,      static_cast<uint32_t>(threadIdx.x),
                         launch.active, static_cast<uint32_t>(launch.vectors)};
      take_part(p, part, launch.form);
      // The next launch of a rank begins when this one has ended.
      ++ranks[rank].ended[i];
      emulator::progress();
      while (ranks[rank].ended[i] < made.ctas * kThreads) {
        emulator::yield("the end of a launch", i);
      }
    }
  });
  int wrong = 0;
  for (int rank = 0; rank < made.size; ++rank) {
    const uint32_t error = ranks[rank].control.error;
    wrong += ranks[rank].memory.back().x != kPoison || ranks[rank].host[1] != error ? 1 : 0;
    const bool waits = with_dead && rank != made.dead;
    for (int i = 0; i < static_cast<int>(made.launches.size()); ++i) {
      if (rank != made.dead || i < made.lives) {
        wrong += wrong_outputs(made, made.launches[i], rank, i < made.lives);
      }
    }
    bool needed = false;  // whether another rank waits for what this one did not send
    for (size_t i = made.lives; i < made.launches.size(); ++i) {
      needed |= made.launches[i].active >= made.size;
    }
    wrong += !waits && error != 0 ? 1 : 0;
    // Of rows that one rank adds up, another rank may name that one, which then names the lost one.
    int named = rank;
    for (int i = 0; i < made.size && named != made.dead && named >= 0; ++i) {
      named = static_cast<int>(ranks[named].control.error) - 1;
    }
    wrong += waits && needed && named != made.dead ? 1 : 0;
  }
  std::printf(", wrong: %d\n", wrong);
  return wrong == 0;
}

}  // namespace

int main(int /*argc*/, char** arguments) {
  const bool with_dead = std::atoi(arguments[3]) != 0;
  return emulator::run_cases(arguments, [&](int seed) { return run_case(seed, with_dead); });
}
