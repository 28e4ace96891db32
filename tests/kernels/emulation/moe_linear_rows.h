// Rows of x in 16 bits, and what ops.quantize_per_token and ops.quantize_per_group make of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "emulator.h"

namespace rows {

struct Shape {
  int rows, k, stride, scale_stride;
};

template <class X>
float number(uint16_t bits) {
  X x;
  std::memcpy(static_cast<void*>(&x), &bits, sizeof(bits));
  return static_cast<float>(x);
}

// Random rows, of which some are zero, tiny, large, or hold a NaN; NaN behind each.
template <class X>
std::vector<uint16_t> random_rows(const Shape& shape, std::mt19937_64& random) {
  constexpr float kSizes[] = {1.0F, 1.0F, 1.0F, 4.0F, 1e-3F, 1e-30F, 2e-39F, 0.0F};
  std::vector<uint16_t> made(size_t{1} * shape.rows * shape.stride, 0x7fff);
  std::normal_distribution<float> normal;
  for (int row = 0; row < shape.rows; ++row) {
    const float size = kSizes[random() % std::size(kSizes)];
    for (int i = 0; i < shape.k; ++i) {
      const X x(normal(random) * size);
      std::memcpy(&made[size_t{1} * row * shape.stride + i], static_cast<const void*>(&x), 2);
    }
    if (random() % 16 == 0) {
      made[size_t{1} * row * shape.stride + random() % shape.k] = 0x7fff;
    }
  }
  return made;
}

inline float scale_of(float largest, float grid_max, bool power_of_two) {
  float scale = largest / grid_max;
  scale = scale < std::numeric_limits<float>::min() ? std::numeric_limits<float>::min() : scale;
  if (power_of_two && std::isfinite(scale)) {
    int exponent;
    const float mantissa = std::frexp(scale, &exponent);
    scale = std::ldexp(1.0F, exponent - (mantissa == 0.5F ? 1 : 0));
  }
  return scale;
}

template <bool kInt8>
uint8_t code_of(float quotient) {
  if constexpr (kInt8) {
    const float rounded = std::clamp(std::nearbyint(quotient), -128.0F, 127.0F);
    return std::isnan(quotient) ? 0 : static_cast<uint8_t>(static_cast<int8_t>(rounded));
  } else {
    return __nv_cvt_float_to_fp8(quotient, __NV_SATFINITE, __NV_E4M3);
  }
}

// Groups of 128 with scales [groups][rows], or whole rows.
template <class X, bool kInt8, bool kGroups>
void quantize(const std::vector<uint16_t>& x, const Shape& shape, bool power_of_two,
              std::vector<uint8_t>& codes, std::vector<float>& scales) {
  const int group = kGroups ? 128 : shape.k;
  for (int row = 0; row < shape.rows; ++row) {
    for (int first = 0; first < shape.k; first += group) {
      const size_t begin = size_t{1} * row * shape.stride;
      const int stop = std::min(first + group, shape.k);
      float largest = 0;
      for (int i = first; i < stop; ++i) {
        const float magnitude = std::abs(number<X>(x[begin + i]));
        largest = std::isnan(magnitude) || magnitude > largest ? magnitude : largest;
        if (std::isnan(largest)) {
          break;
        }
      }
      const float scale = scale_of(largest, kInt8 ? 127.0F : 448.0F, power_of_two);
      scales[kGroups ? first / group * shape.scale_stride + row : row] = scale;
      for (int i = first; i < stop; ++i) {
        codes[begin + i] = code_of<kInt8>(number<X>(x[begin + i]) / scale);
      }
    }
  }
}

// Of bytes (FNV-1a).
inline uint64_t hash(const void* from, size_t bytes) {
  uint64_t value = 0xcbf29ce484222325;
  for (size_t i = 0; i < bytes; ++i) {
    value = (value ^ static_cast<const uint8_t*>(from)[i]) * 0x100000001b3;
  }
  return value;
}

}  // namespace rows
