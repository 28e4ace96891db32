// Random calls of one grouped GEMM against products in fp64: program FIRST COUNT. It ends at the
// first that is wrong, with exit code 1.
//
// With -DCASES_X=bf16|fp16 rows of x are made in 16 bits, some of them zero, tiny or no numbers,
// and quantised here, unless the kernel does it: kernels that differ only in that print the same.
//
// First, since it takes CUDA's own words away from what follows.
#include "emulator.h"
// Then what the cases need, and the kernel.
#include <numeric>
#include <random>
#include <vector>

#include "gemm_w8a8/moe/moe_linear_sm90.cu"
#include "moe_linear_rows.h"

namespace {

using namespace ostinato::moe;
using ostinato::ceil_div;
using ostinato::MoeLinearParams;
using ostinato::round_up;

constexpr int kChannelCounts[] = {1, 8, 16, 24, 30, 64, 130, 272};
constexpr int kDepths[] = {1, 16, 100, 128, 200, kPairs ? 1060 : 520};  // more than the ring has
#ifdef CASES_X
using WideX = ostinato::tiled::dtype::CASES_X;
#endif
constexpr float kPoison = 77.0f;

struct Case {
  int tokens, top_k, experts, n, k, stride, tile_channels;
  bool gated, to_experts;
  std::vector<int> ids, rows, tiles;  // an expert of each slot, or -1
  int n_tiles, n_rows;
  std::vector<uint8_t> x, w;     // rows of x, and [experts][n][k]
  std::vector<uint16_t> wide_x;  // rows of x in 16 bits, if any
  bool power_of_two;
  std::vector<float> x_scale, w_scale;
  int scale_stride;

  int x_rows() const { return to_experts ? tokens : tokens * top_k; }
  int width() const { return gated ? n / 2 : n; }
  int groups() const { return ceil_div(k, 128); }
  int scales() const { return ceil_div(n, kScaleChannels); }
};

void put(uint8_t* at, float value) {
  if constexpr (kInt8) {
    *reinterpret_cast<int8_t*>(at) = static_cast<int8_t>(value * 40);
  } else if constexpr (kOperandType == OperandType::bf16) {
    const __nv_bfloat16 x(value);
    std::memcpy(at, &x, 2);
  } else if constexpr (kOperandType == OperandType::fp16) {
    const __half x(value);
    std::memcpy(at, &x, 2);
  } else {
    const __nv_fp8_e4m3 x(value);
    std::memcpy(at, &x, 1);
  }
}

double get(const uint8_t* at) {
  if constexpr (kInt8) {
    return *reinterpret_cast<const int8_t*>(at);
  } else if constexpr (kOperandType == OperandType::bf16) {
    __nv_bfloat16 x;
    std::memcpy(static_cast<void*>(&x), at, 2);
    return static_cast<float>(x);
  } else if constexpr (kOperandType == OperandType::fp16) {
    __half x;
    std::memcpy(static_cast<void*>(&x), at, 2);
    return static_cast<float>(x);
  } else {
    __nv_fp8_e4m3 x;
    std::memcpy(static_cast<void*>(&x), at, 1);
    return static_cast<float>(x);
  }
}

Case make_case(std::mt19937_64& random) {
  const auto draw = [&](int low, int high) {
    return low + static_cast<int>(random() % static_cast<uint64_t>(high - low + 1));
  };
  Case made = {};
  made.experts = draw(1, 5);
  made.top_k = draw(1, std::min(3, made.experts));
  made.tokens = draw(0, 3) == 0 ? draw(1, 3 * kTokens) : draw(1, 20);
  made.gated = draw(0, 1) != 0;
  made.to_experts = draw(0, 1) != 0;
  made.n = kChannelCounts[draw(0, std::size(kChannelCounts) - 1)];
  if (made.gated) {
    made.n = kBlockScales ? round_up(made.n, 2 * kScaleChannels) : 2 * made.n;
  }
  made.k = kDepths[draw(0, std::size(kDepths) - 1)];
  made.tile_channels = draw(0, 1) != 0 ? 0 : kTileStep * draw(1, kChannels / kTileStep);
  made.stride = round_up(made.k, 16) + 16 * draw(0, 1);
  // The slots of a token have different experts; some have none, and some experts no token.
  const int first = draw(0, made.experts - made.top_k), spread = draw(made.top_k, made.experts);
  for (int token = 0; token < made.tokens; ++token) {
    const int start = draw(0, spread - 1);
    const bool none = draw(0, 5) == 0;
    for (int slot = 0; slot < made.top_k; ++slot) {
      made.ids.push_back(none ? -1 : (first + (start + slot) % spread) % made.experts);
    }
  }
  for (int expert = 0; expert < made.experts; ++expert) {
    const int begin = static_cast<int>(made.rows.size());
    for (int slot = 0; slot < made.tokens * made.top_k; ++slot) {
      if (made.ids[slot] == expert) {
        made.rows.push_back(slot);
      }
    }
    const int end = static_cast<int>(made.rows.size());
    for (int row = begin; row < end; row += kTokens) {
      made.tiles.insert(made.tiles.end(), {expert, row, std::min(row + kTokens, end), 0});
    }
  }
  made.n_tiles = static_cast<int>(made.tiles.size()) / 4;
  made.n_rows = static_cast<int>(made.rows.size());
  // Beyond the last of each: what would be found at once.
  made.rows.resize(made.tokens * made.top_k, 1 << 30);
  made.tiles.insert(made.tiles.end(), {1 << 30, 1 << 30, 1 << 30, 0});
  std::normal_distribution<float> normal;
  const auto value = [&] { return std::clamp(normal(random), -3.0f, 3.0f); };
  made.scale_stride = round_up(made.x_rows(), 4);
  made.x_scale.resize(kBlockScales ? made.groups() * made.scale_stride : made.x_rows());
#ifdef CASES_X
  made.k = round_up(made.k, 8);
  made.stride = round_up(made.k, 16) + 16 * draw(0, 1);
  made.power_of_two = kBlockScales && draw(0, 1) != 0;
  const rows::Shape shape = {made.x_rows(), made.k, made.stride, made.scale_stride};
  made.wide_x = rows::random_rows<WideX>(shape, random);
  made.x.assign(size_t{1} * made.x_rows() * made.stride, 0x7f);
  rows::quantize<WideX, kInt8, kBlockScales>(made.wide_x, shape, made.power_of_two, made.x,
                                             made.x_scale);
#else
  made.x.assign(size_t{1} * made.x_rows() * made.stride * kOperandBytes, 0x7f);  // NaN in e4m3
  for (int row = 0; row < made.x_rows(); ++row) {
    for (int i = 0; i < made.k; ++i) {
      put(&made.x[(size_t{1} * row * made.stride + i) * kOperandBytes], value());
    }
  }
#endif
  made.w.resize(size_t{1} * made.experts * made.n * made.k * kOperandBytes);
  for (size_t i = 0; i < made.w.size(); i += kOperandBytes) {
    put(&made.w[i], k16Bit ? value() / 16 : value());
  }
  const auto scale = [&] { return (0.5f + draw(0, 9) * 0.1f) / (kInt8 ? 4096.0f : 4.0f); };
#ifndef CASES_X
  std::generate(made.x_scale.begin(), made.x_scale.end(), scale);
#endif
  made.w_scale.resize(made.experts * (kBlockScales ? made.groups() * made.scales() : made.n));
  std::generate(made.w_scale.begin(), made.w_scale.end(), scale);
  return made;
}

// The weights of all experts as runtime/ops/moe/packed_experts.py lays them out.
std::vector<uint8_t> packed(const Case& of) {
  const int tiles = of.gated ? ceil_div(of.width(), 8) : ceil_div(of.n, 16);
  const int row_bytes = of.k * kOperandBytes, blocks = round_up(row_bytes, 128) / 64;
  std::vector<uint8_t> data(size_t{1} * of.experts * tiles * blocks * 1024, 0);
  for (int expert = 0; expert < of.experts; ++expert) {
    for (int channel = 0; channel < of.n; ++channel) {
      const int in_half = channel % of.width(), half = channel / of.width();
      const int place = of.gated ? in_half / 8 * 16 + half * 8 + in_half % 8 : channel;
      const int tile = expert * tiles + place / 16, row = place % 16;
      for (int byte = 0; byte < row_bytes; ++byte) {
        const int vector = byte % 64 / 16 ^ row / 2 % 4;
        data[(size_t{1} * tile * blocks + byte / 64) * 1024 + row * 64 + vector * 16 + byte % 16] =
            of.w[(size_t{1} * expert * of.n + channel) * row_bytes + byte];
      }
    }
  }
  return data;
}

double exact(const Case& of, int expert, int x_row, int channel) {
  double sum = 0;
  for (int i = 0; i < of.k; ++i) {
    double scale = 1;
    if (kBlockScales) {
      scale = double{of.x_scale[i / 128 * of.scale_stride + x_row]} *
              of.w_scale[(expert * of.groups() + i / 128) * of.scales() + channel / kScaleChannels];
    }
    sum += scale * get(&of.x[(size_t{1} * x_row * of.stride + i) * kOperandBytes]) *
           get(&of.w[((size_t{1} * expert * of.n + channel) * of.k + i) * kOperandBytes]);
  }
  return kResultScales ? sum * of.w_scale[expert * of.n + channel] * of.x_scale[x_row] : sum;
}

template <class T>
T* aligned_copy(const std::vector<T>& from) {
  const size_t bytes = (from.size() * sizeof(T) + 255) / 256 * 256 + 256;
  T* const to = static_cast<T*>(std::aligned_alloc(256, bytes));
  std::copy(from.begin(), from.end(), to);
  return to;
}

// The bits of a launch whose CTAs share weights in pairs.
uint64_t pairs_bits(MoeLinearParams params, const std::vector<Output>& before) {
  Output* const out = aligned_copy(before);
  params.out = out;
  params.pairs = 1;
  ostinato::forget_barriers();
  const bool launched = ostinato_launch(&params, nullptr) == 0;
  const uint64_t bits = rows::hash(out, before.size() * sizeof(Output));
  std::free(out);
  return launched ? bits : 0;
}

bool run_case(int seed) {
  std::mt19937_64 random(seed * 7919 + 1);
  const Case made = make_case(random);
  emulator::seed(seed * 31 + kConsumers);
  emulator::sms = 2 + seed % 3;
  const int slots = made.tokens * made.top_k, width = made.width();
  const int out_stride = seed % 4 == 0 ? width + 3 : ostinato::round_up(width, 8) + seed % 2 * 8;
  const std::vector<Output> before(size_t{1} * slots * out_stride, Output(kPoison));
  Output* const out = aligned_copy(before);
  uint8_t* const x = aligned_copy(made.x);
  uint16_t* const wide_x = aligned_copy(made.wide_x);
  uint8_t* const w = aligned_copy(packed(made));
  MoeLinearParams params = {};
  params.x = kQuantizes ? static_cast<const void*>(wide_x) : x;
  params.power_of_two = kQuantizes && made.power_of_two ? 1 : 0;
  params.x_stride = made.stride;
  params.w = w;
  params.x_scale = k16Bit || kQuantizes ? nullptr : made.x_scale.data();
  params.x_scale_stride = made.scale_stride;
  params.w_scale = k16Bit ? nullptr : made.w_scale.data();
  params.rows = made.rows.data();
  params.tiles = made.tiles.data();
  params.n_tiles = &made.n_tiles;
  params.out = out;
  params.out_stride = out_stride;
  params.experts = made.experts;
  params.n = made.n;
  params.k = made.k;
  params.top_k = made.top_k;
  params.max_tiles = made.n_tiles + 1;
  params.to_experts = made.to_experts ? 1 : 0;
  params.gated = made.gated ? 1 : 0;
  params.tile_channels = made.tile_channels;
  params.early = seed % 2;
  std::printf("seed %d: %d tokens, %d of %d experts, n %d, k %d, gated %d, to experts %d, tile %d",
              seed, made.tokens, made.top_k, made.experts, made.n, made.k, made.gated,
              made.to_experts, made.tile_channels);
  std::fflush(stdout);
  ostinato::forget_barriers();
  if (ostinato_launch(&params, nullptr) != 0) {
    std::printf(": refused\n");
    return false;
  }
  std::vector<bool> written(size_t{1} * slots * out_stride, false);
  int wrong = 0;
  for (int row = 0; row < made.n_rows; ++row) {
    const int slot = made.rows[row], expert = made.ids[slot];
    const int x_row = made.to_experts ? slot / made.top_k : row;
    const int out_row = made.to_experts ? row : slot;
    for (int channel = 0; channel < width; ++channel) {
      double want = exact(made, expert, x_row, channel);
      if (made.gated) {
        want = want / (1 + std::exp(-want)) * exact(made, expert, x_row, width + channel);
      }
      const size_t at = size_t{1} * out_row * out_stride + channel;
      written[at] = true;
      const double got = static_cast<float>(out[at]);
      const double unit = sizeof(Output) == 4 ? 1e-5 : 8e-3;
      const double most = unit * (std::abs(want) + (sizeof(Output) == 4 ? 1 : 0.1));
      wrong += std::isnan(want) ? !std::isnan(got) : !(std::abs(got - want) <= most);
    }
  }
  int outside = 0;
  for (size_t i = 0; i < written.size(); ++i) {
    outside += !written[i] && static_cast<float>(out[i]) != kPoison ? 1 : 0;
  }
  const uint64_t bits = rows::hash(out, size_t{1} * slots * out_stride * sizeof(Output));
  const bool same = !kPairs || pairs_bits(params, before) == bits;
  std::free(out);
  std::free(wide_x);
  std::free(x);
  std::free(w);
  std::printf(": %d wrong, %d outside, %s, bits %016lx\n", wrong, outside,
              same ? "the same by pairs" : "others by pairs", bits);
  return same && wrong + outside == 0;
}

}  // namespace

int main(int /*argc*/, char** arguments) {
  ostinato_prepare();
  const int first = std::atoi(arguments[1]), count = std::atoi(arguments[2]);
  bool right = true;
  for (int seed = first; right && seed < first + count; ++seed) {
    right = run_case(seed);
  }
  return right ? 0 : 1;
}
