// Random calls of the linear layer that quantises x itself. Program FIRST COUNT FOLDER.
//
// Without an activation function: keeps each call's results in FOLDER and, if x is quantised as it
// is, compares them with those of the kernels that it stands for. With one: compares what it
// leaves, bit by bit, with the function of the results in FOLDER, and its maxima with the largest.
// Exit code 1 if any differs.
//
// First, since it takes CUDA's own words away from what follows.
#include "emulator.h"
// Then what the cases need, and the kernel.
#include <random>
#include <string>
#include <vector>

#include "gemm_w8a8/fused/fused_linear_sm90.cu"
#include "int8_rows.h"

namespace {

using namespace ostinato;
using namespace ostinato::fused_linear;
using Gate = small_m::Output;

constexpr int kDepths[] = {16, 112, 1024, 1040, 2064, kMaxK > 4096 ? 5376 : 4096};

template <class T>
T* aligned(size_t count) {
  return static_cast<T*>(std::aligned_alloc(256, (count * sizeof(T) + 511) / 256 * 256));
}

// Counts the results that are not those of one scale, codes, int32 sums, one fma, one rounding.
int count_wrong(const FusedLinearParams& p, int blocks) {
  std::vector<float> x(p.k);
  float largest = 0.0f;
  for (int i = 0; i < p.k; ++i) {
    x[i] = static_cast<float>(static_cast<const In*>(p.x)[i]);
    largest = max_magnitude(largest, x[i]);
  }
  const float x_scale = dynamic_scale<dtype::int8>(largest);
  const std::vector<int8_t> codes = emulator::codes_of(x.data(), p.k, x_scale);
  const int8_t* const w = static_cast<const int8_t*>(p.w);
  int wrong = 0;
  for (int row = 0; row < p.n; ++row) {
    int32_t sum = 0;
    for (int i = 0; i < p.k; ++i) {
      sum += codes[i] * w[emulator::place_of(row, i, blocks)];
    }
    const float scale = p.w_scale[row * p.w_scale_stride] * static_cast<float>(sum);
    const float added =
        p.bias == nullptr ? 0.0f : static_cast<float>(static_cast<const Gate*>(p.bias)[row]);
    const Gate want = static_cast<Gate>(std::fma(x_scale, scale, added));
    const Gate& found = static_cast<const Gate*>(p.out)[row];
    const bool same = std::isnan(static_cast<float>(want))
                          ? std::isnan(static_cast<float>(found))
                          : std::memcmp(&want, &found, sizeof(Gate)) == 0;
    wrong += same ? 0 : 1;
  }
  return wrong;
}

bool run_case(int seed, const std::string& folder) {
  std::mt19937_64 random(seed * 7919 + 1);
  std::normal_distribution<float> normal;
  const auto draw = [&](int low, int high) {
    return low + static_cast<int>(random() % static_cast<uint64_t>(high - low + 1));
  };
  const int width = 16 * draw(1, 9), n = 2 * width, k = kDepths[draw(0, 5)];
  const int blocks = ceil_div(k, kPackedDepthUnit) * 2, ctas = draw(1, std::min(width / 16, 4));
  const bool has_residual = kKind == Kind::rms_norm && draw(0, 1) != 0, has_bias = draw(0, 1) != 0;
  const float spread[] = {1.0f, 1.0f, 100.0f, 0.0f};  // of gates: also beyond the fast limit
  const float factor = spread[draw(0, 3)];
  In* const x = aligned<In>(k);
  In* const residual = aligned<In>(k);
  In* const total = aligned<In>(k);
  Weight* const norm = aligned<Weight>(k);
  uint8_t* const w = aligned<uint8_t>(size_t{1} * n / 16 * blocks * kPackedBlockBytes);
  float* const scale = aligned<float>(n);
  Gate* const bias = aligned<Gate>(n);
  for (int i = 0; i < k; ++i) {
    x[i] = static_cast<In>(normal(random));
    residual[i] = static_cast<In>(normal(random));
    norm[i] = static_cast<Weight>(1.0f + 0.1f * normal(random));
  }
  if (seed % 7 == 3) {
    x[draw(0, k - 1)] = static_cast<In>(seed % 2 != 0 ? NAN : INFINITY);
  }
  for (int i = 0; i < n / 16 * blocks * kPackedBlockBytes; ++i) {
    w[i] = static_cast<uint8_t>(random());
  }
  for (int i = 0; i < n; ++i) {
    scale[i] = factor * (0.5f + draw(0, 9) * 0.1f) / 4096.0f;
    bias[i] = static_cast<Gate>(normal(random));
  }
  // What lies behind the last result is not to be written.
  constexpr float kPoison = 77.0f;
  std::vector<float> made(width + 8, kPoison), maxima(ctas + 1, kPoison);
  std::vector<Gate> stored(n + 8, Gate(kPoison));
  FusedLinearParams params = {};
  params.x = x;
  params.residual = has_residual ? residual : nullptr;
  params.residual_out = has_residual ? total : nullptr;
  params.norm_weight = kKind == Kind::rms_norm ? norm : nullptr;
  params.eps = 1e-5f;
  params.w = w;
  params.w_scale = scale;
  params.w_scale_stride = seed % 3 != 0 ? 1 : 0;
  params.bias = has_bias ? bias : nullptr;
  params.out = kPairedTiles ? static_cast<void*>(made.data()) : stored.data();
  params.maxima = kPairedTiles ? maxima.data() : nullptr;
  params.n_maxima = ctas;
  params.n = n;
  params.k = k;
  emulator::seed(seed * 31 + (kPairedTiles ? 1 : 0));
  emulator::sms = ctas;
  std::printf("seed %d: width %d, k %d, %d CTAs, residual %d, bias %d, factor %g", seed, width, k,
              ctas, has_residual, has_bias, factor);
  std::fflush(stdout);
  if (ostinato_launch(&params, nullptr) != 0) {
    std::printf(": refused\n");
    return false;
  }
  int wrong = 0;
  const std::string path = folder + "/" + std::to_string(seed);
  if constexpr (!kPairedTiles) {
    std::FILE* const file = std::fopen(path.c_str(), "wb");
    wrong += std::fwrite(stored.data(), sizeof(Gate), n, file) == static_cast<size_t>(n) ? 0 : 1;
    std::fclose(file);
    wrong += static_cast<float>(stored[n]) == kPoison ? 0 : 1;
    wrong += kKind == Kind::per_token ? count_wrong(params, blocks) : 0;
  } else {
    std::FILE* const file = std::fopen(path.c_str(), "rb");
    wrong += std::fread(stored.data(), sizeof(Gate), n, file) == static_cast<size_t>(n) ? 0 : 1;
    std::fclose(file);
    float largest = 0.0f, found = 0.0f;
    for (int i = 0; i < width; ++i) {
      const float gate = static_cast<float>(stored[i]);
      const float value = activate_gate(gate) * static_cast<float>(stored[width + i]);
      const bool same = std::isnan(value) ? std::isnan(made[i])
                                          : std::memcmp(&value, &made[i], sizeof(float)) == 0;
      wrong += same ? 0 : 1;
      largest = max_magnitude(largest, value);
    }
    for (int cta = 0; cta < ctas; ++cta) {
      found = max_magnitude(found, maxima[cta]);
    }
    wrong += found == largest || (std::isnan(found) && std::isnan(largest)) ? 0 : 1;
    wrong += made[width] == kPoison && maxima[ctas] == kPoison ? 0 : 1;
  }
  for (void* memory : {static_cast<void*>(x), static_cast<void*>(residual),
                       static_cast<void*>(total), static_cast<void*>(norm), static_cast<void*>(w),
                       static_cast<void*>(scale), static_cast<void*>(bias)}) {
    std::free(memory);
  }
  std::printf(wrong == 0 ? ": right\n" : ": %d wrong\n", wrong);
  return wrong == 0;
}

}  // namespace

int main(int /*argc*/, char** arguments) {
  return emulator::run_cases(arguments, [&](int seed) { return run_case(seed, arguments[3]); });
}
