// Random calls of the linear layer that quantises fp32 activations as it multiplies them, against
// the steps of the kernels that it stands for: scale, codes, int32 sums, one fma, one rounding. The
// bits are the same. Program FIRST COUNT. Exit code 1 if any is not.
//
// First, since it takes CUDA's own words away from what follows.
#include "emulator.h"
// Then what the cases need, and the kernel.
#include <random>
#include <vector>

#include "gemm_w8a8/fused/activated_linear_sm90.cu"
#include "int8_rows.h"

namespace {

using namespace ostinato;
using emulator::codes_of;
using emulator::place_of;
using small_m::Output;

constexpr int kDepths[] = {16, 112, 128, 1040, 1536, 3072, 9232, 17920};

template <class T>
T* aligned(size_t count) {
  return static_cast<T*>(std::aligned_alloc(256, (count * sizeof(T) + 511) / 256 * 256));
}

bool run_case(int seed) {
  std::mt19937_64 random(seed * 7919 + 1);
  std::normal_distribution<float> normal;
  const auto draw = [&](int low, int high) {
    return low + static_cast<int>(random() % static_cast<uint64_t>(high - low + 1));
  };
  const int k = kDepths[draw(0, 7)], n = k > 4096 ? draw(1, 60) : draw(1, 200);
  const int blocks = ceil_div(k, kPackedDepthUnit) * 2, tiles = ceil_div(n, kPackedRows);
  const int parts = draw(1, 5) == 1 ? draw(150, 300) : draw(1, 150);
  float* const x = aligned<float>(k);
  uint8_t* const w = aligned<uint8_t>(size_t{1} * tiles * blocks * kPackedBlockBytes);
  const float factors[] = {0.0f, 1e-40f, 1e36f, 1.0f};
  const float factor = factors[std::min(draw(0, 15), 3)];
  for (int i = 0; i < k; ++i) {
    x[i] = factor * normal(random);
  }
  if (seed % 9 == 4) {
    x[draw(0, k - 1)] = seed % 2 != 0 ? NAN : INFINITY;
  }
  std::vector<float> maxima(parts, 0.0f);
  for (int i = 0; i < k; ++i) {
    float& part = maxima[i % parts];
    part = max_magnitude(part, x[i]);
  }
  std::memset(w, 0, size_t{1} * tiles * blocks * kPackedBlockBytes);
  std::vector<int8_t> plain(size_t{1} * n * k);
  for (int row = 0; row < n; ++row) {
    for (int i = 0; i < k; ++i) {
      const int8_t value = static_cast<int8_t>(random());
      plain[size_t{1} * row * k + i] = value;
      w[place_of(row, i, blocks)] = static_cast<uint8_t>(value);
    }
  }
  std::vector<float> scale(n);
  std::vector<Output> bias(n), out(n + 8, Output(77.0f));
  for (int i = 0; i < n; ++i) {
    scale[i] = (0.5f + draw(0, 9) * 0.1f) / 4096.0f;
    bias[i] = static_cast<Output>(normal(random));
  }
  ActivatedLinearParams params = {};
  params.x = x;
  params.maxima = maxima.data();
  params.n_maxima = parts;
  params.w = w;
  params.w_scale = scale.data();
  params.w_scale_stride = seed % 3 != 0 ? 1 : 0;
  params.bias = seed % 2 != 0 ? bias.data() : nullptr;
  params.out = out.data();
  params.n = n;
  params.k = k;
  emulator::seed(seed * 31);
  emulator::sms = draw(1, 4);
  std::printf("seed %d: n %d, k %d, %d SMs, %d maxima, factor %g", seed, n, k, emulator::sms, parts,
              factor);
  std::fflush(stdout);
  if (ostinato_launch(&params, nullptr) != 0) {
    std::printf(": refused\n");
    return false;
  }
  float largest = 0.0f;
  for (int i = 0; i < k; ++i) {
    largest = max_magnitude(largest, x[i]);
  }
  const float x_scale = dynamic_scale<dtype::int8>(largest);
  const std::vector<int8_t> codes = codes_of(x, k, x_scale);
  int wrong = static_cast<float>(out[n]) == 77.0f ? 0 : 1;
  for (int row = 0; row < n; ++row) {
    int32_t sum = 0;
    for (int i = 0; i < k; ++i) {
      sum += codes[i] * plain[size_t{1} * row * k + i];
    }
    const float added = params.bias != nullptr ? static_cast<float>(bias[row]) : 0.0f;
    const float w_scale = scale[row * params.w_scale_stride];
    const Output want =
        static_cast<Output>(std::fma(x_scale, w_scale * static_cast<float>(sum), added));
    const bool same = std::isnan(static_cast<float>(want))
                          ? std::isnan(static_cast<float>(out[row]))
                          : std::memcmp(&want, &out[row], sizeof(Output)) == 0;
    wrong += same ? 0 : 1;
  }
  std::free(x);
  std::free(w);
  std::printf(wrong == 0 ? ": right\n" : ": %d wrong\n", wrong);
  return wrong == 0;
}

}  // namespace

int main(int /*argc*/, char** arguments) { return emulator::run_cases(arguments, run_case); }
