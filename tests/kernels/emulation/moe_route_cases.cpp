// Random calls of routing against sorting: program FIRST COUNT. Exit code 1 if any is wrong.
//
// First, since it takes CUDA's own words away from what follows.
#include "emulator.h"
// Then what the cases need, and the kernel.
#include <numeric>
#include <random>
#include <vector>

#include "moe_route/moe_route.cu"

namespace {

using ostinato::MoeRouteParams;
using ostinato::route::Logit;

constexpr int kExpertCounts[] = {1, 4, 8, 60, 128, 160, 512};
constexpr int kTokenCounts[] = {0, 1, 2, 17, 64, 33, 150, 1000};
constexpr int kTileTokens[] = {8, 16, 32};

struct Case {
  int tokens, experts, top_k, active, tile, groups, top_groups;
  bool sigmoid, renormalize, top2, has_bias;
  std::vector<Logit> logits;
  std::vector<float> bias;
};

Case make_case(std::mt19937_64& random) {
  const auto draw = [&](int low, int high) {
    return low + static_cast<int>(random() % static_cast<uint64_t>(high - low + 1));
  };
  Case made = {};
  made.experts = kExpertCounts[draw(0, std::size(kExpertCounts) - 1)];
  // A CTA for each of many experts takes the emulator long.
  const int few = made.experts > 60 ? 5 : static_cast<int>(std::size(kTokenCounts));
  made.tokens = kTokenCounts[draw(0, few - 1)];
  made.tile = kTileTokens[draw(0, 2)];
  made.groups = made.experts % 4 == 0 && draw(0, 1) != 0 ? 4 : 1;
  made.top_groups = draw(1, made.groups);
  made.top_k = draw(1, std::min(9, made.experts / made.groups * made.top_groups));
  made.active = draw(0, 2) == 0 ? draw(0, made.tokens) : made.tokens;
  made.sigmoid = draw(0, 1) != 0;
  made.renormalize = draw(0, 1) != 0;
  made.top2 = draw(0, 1) != 0;
  made.has_bias = draw(0, 1) != 0;
  // Few levels: many experts are equal, also with a bias.
  const int levels = draw(0, 1) != 0 ? 3 : 1000;
  for (int i = 0; i < made.tokens * made.experts; ++i) {
    const int level = draw(-levels, levels);
    const float x = draw(0, 300) == 0 ? -INFINITY : level * (4.0f / levels);
    made.logits.push_back(Logit(draw(0, 1500) == 0 ? NAN : level == 0 && draw(0, 1) ? -0.0f : x));
  }
  for (int expert = 0; expert < made.experts; ++expert) {
    made.bias.push_back(draw(-2, 2) * 0.25f);
  }
  return made;
}

// The experts of a token, best first; none if it has no choice.
std::vector<int> best_experts(const Case& of, int token, std::vector<float>& scores) {
  std::vector<float> x(of.experts);
  float most = -INFINITY, sum = 0;
  for (int expert = 0; expert < of.experts; ++expert) {
    x[expert] = static_cast<float>(of.logits[token * of.experts + expert]);
    if (std::isnan(x[expert])) {
      return {};
    }
    most = std::max(most, x[expert]);
  }
  if (!of.sigmoid && std::isinf(most)) {
    return {};
  }
  for (const float logit : x) {
    sum += std::exp(logit - most);
  }
  std::vector<float> compared(of.experts), worth(of.experts);
  scores.resize(of.experts);
  for (int expert = 0; expert < of.experts; ++expert) {
    const float logit = x[expert];
    scores[expert] = of.sigmoid ? 1 / (1 + std::exp(-logit)) : std::exp(logit - most) / sum;
    compared[expert] = of.has_bias ? scores[expert] + of.bias[expert] : logit;
    worth[expert] = !of.has_bias && of.top2 ? scores[expert] : compared[expert];
  }
  const int size = of.experts / of.groups;
  std::vector<float> of_groups;
  for (int group = 0; group < of.groups; ++group) {
    std::vector<float> sorted(worth.begin() + group * size, worth.begin() + (group + 1) * size);
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    of_groups.push_back(of.top2 && size > 1 ? sorted[0] + sorted[1] : sorted[0]);
  }
  const auto in_order = [](const std::vector<float>& values) {
    std::vector<int> order(values.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return values[a] > values[b]; });
    return order;
  };
  const std::vector<int> groups = in_order(of_groups);
  std::vector<int> chosen;
  for (const int expert : in_order(compared)) {
    const auto kept = groups.begin() + of.top_groups;
    if (std::find(groups.begin(), kept, expert / size) != kept &&
        static_cast<int>(chosen.size()) < of.top_k) {
      chosen.push_back(expert);
    }
  }
  return chosen;
}

// Whether ids and weights are right. Where rounding makes a choice, either is: a score of softmax
// is summed in another order.
int wrong_choices(const Case& of, const std::vector<int>& ids, const std::vector<float>& weights) {
  int wrong = 0;
  for (int token = 0; token < of.tokens; ++token) {
    std::vector<float> scores;
    const bool real = token < of.active;
    const std::vector<int> chosen = real ? best_experts(of, token, scores) : std::vector<int>();
    float total = 0;
    for (const int expert : chosen) {
      total += scores[expert];
    }
    for (int slot = 0; slot < of.top_k; ++slot) {
      const int id = ids[token * of.top_k + slot];
      const float weight = weights[token * of.top_k + slot];
      if (chosen.empty()) {
        wrong += id != -1 || (real ? !std::isnan(weight) : weight != 0) ? 1 : 0;
        continue;
      }
      const float want = scores[chosen[slot]] / (of.renormalize ? total + 1e-20f : 1) * 2.5f;
      wrong += id != chosen[slot] || !(std::abs(weight - want) <= 1e-5f * want) ? 1 : 0;
    }
  }
  return wrong;
}

bool run_case(int seed) {
  std::mt19937_64 random(seed * 7919 + 1);
  const Case made = make_case(random);
  emulator::seed(seed * 31);
  const int slots = made.tokens * made.top_k;
  const int capacity = std::min(made.experts, slots) + slots / made.tile;
  std::vector<int> ids(slots + 1, 99), rows(slots + 1, 99), offsets(made.experts + 2, 99);
  std::vector<int> tiles(4 * (capacity + 1), 99), n_tiles(1, 99);
  std::vector<float> weights(slots + 1, 99);
  MoeRouteParams params = {};
  params.logits = made.logits.data();
  params.logits_stride = made.experts;
  params.correction_bias = made.has_bias ? made.bias.data() : nullptr;
  params.n_active = &made.active;
  params.ids = ids.data();
  params.weights = weights.data();
  params.rows = rows.data();
  params.offsets = offsets.data();
  params.tiles = tiles.data();
  params.n_tiles = n_tiles.data();
  // Tokens of a segment: of few tokens there may be one, of many two that are planned in rounds.
  const bool in_rounds = made.tokens > 900, may_be_one = made.tokens <= 32;
  const int size = in_rounds                         ? made.tokens / 2
                   : may_be_one && random() % 2 != 0 ? std::max(1, made.tokens)
                   : made.tokens <= 64 && random() % 2 != 0
                       ? made.tokens / 4 + 1  // a cluster has them
                       : 1 + static_cast<int>(random() % 32);
  params.segments = std::max(1, (made.tokens + size - 1) / size);
  std::vector<uint32_t> counts(params.segments * ((made.experts + 1) / 2) + 1, 0x77777777);
  params.counts = params.segments > 1 ? reinterpret_cast<uint16_t*>(counts.data()) : nullptr;
  params.tokens = made.tokens;
  params.experts = made.experts;
  params.top_k = made.top_k;
  params.tile_tokens = made.tile;
  params.sigmoid = made.sigmoid ? 1 : 0;
  params.renormalize = made.renormalize ? 1 : 0;
  params.routed_scale = 2.5f;
  params.groups = made.groups;
  params.top_groups = made.top_groups;
  params.top2 = made.top2 ? 1 : 0;
  std::printf("seed %d: %d of %d tokens, %d of %d experts, groups %d/%d, sigmoid %d", seed,
              made.active, made.tokens, made.top_k, made.experts, made.top_groups, made.groups,
              made.sigmoid);
  std::fflush(stdout);
  if (ostinato_launch(&params, nullptr) != 0) {
    std::printf(": refused\n");
    return false;
  }
  int wrong = wrong_choices(made, ids, weights);
  std::vector<int> expected_rows, expected_tiles;
  for (int expert = 0; expert < made.experts; ++expert) {
    const int first = static_cast<int>(expected_rows.size());
    wrong += offsets[expert] != first ? 1 : 0;
    for (int slot = 0; slot < slots; ++slot) {
      if (ids[slot] == expert) {
        expected_rows.push_back(slot);
      }
    }
    const int stop = static_cast<int>(expected_rows.size());
    for (int row = first; row < stop; row += made.tile) {
      const int entry[] = {expert, row, std::min(row + made.tile, stop), 0};
      expected_tiles.insert(expected_tiles.end(), entry, entry + 4);
    }
  }
  wrong += offsets[made.experts] != static_cast<int>(expected_rows.size()) ? 1 : 0;
  for (int slot = 0; slot < slots; ++slot) {
    if (ids[slot] < 0) {
      expected_rows.push_back(slot);
    }
  }
  wrong += n_tiles[0] != static_cast<int>(expected_tiles.size()) / 4 ? 1 : 0;
  // Nothing is written behind the end of any.
  expected_rows.push_back(99);
  expected_tiles.resize(tiles.size(), 99);
  wrong += rows != expected_rows || tiles != expected_tiles || ids[slots] != 99 ||
                   weights[slots] != 99 || offsets[made.experts + 1] != 99
               ? 1
               : 0;
  std::printf(", wrong: %d\n", wrong);
  return wrong == 0;
}

}  // namespace

int main(int /*argc*/, char** arguments) { return emulator::run_cases(arguments, run_case); }
