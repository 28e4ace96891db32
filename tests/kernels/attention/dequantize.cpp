// Prints how many pairs of 8-bit codes were converted to 16 bits, and those that were converted
// wrong (csrc/attention/common/dequant.cuh).
#include "emulator.h"
// The emulator has the functions of the device.
#include "attention/common/dequant.cuh"
#include "attention/common/ptx.cuh"

namespace {

int tried = 0;

bool same(float got, float expected) {
  return std::isnan(expected) ? std::isnan(got)
                              : std::memcmp(&got, &expected, sizeof(got)) == 0 || got == expected;
}

template <class Code>
float number_of(uint8_t bits) {
  Code code;
  std::memcpy(static_cast<void*>(&code), &bits, 1);
  return static_cast<float>(code);
}

template <class Code, class T>
void check(const char* what) {
  for (uint32_t low = 0; low < 256; ++low) {
    for (uint32_t high = 0; high < 256; ++high) {
      const uint32_t words[2] = {low | high << 8 | 0x55aa0000u, low << 16 | high << 24 | 0x55aau};
      const uint32_t got[2] = {ostinato::dequantize<Code, T>(words[0]).first,
                               ostinato::dequantize<Code, T>(words[1]).second};
      for (const uint32_t pair : got) {
        ++tried;
        if (!same(ostinato::half_of<T>(pair, 0), number_of<Code>(low)) ||
            !same(ostinato::half_of<T>(pair, 1), number_of<Code>(high))) {
          std::printf("%s %02x %02x: got %08x\n", what, low, high, pair);
        }
      }
    }
  }
}

}  // namespace

int main() {
  check<__nv_fp8_e4m3, __half>("e4m3 to fp16");
  check<__nv_fp8_e4m3, __nv_bfloat16>("e4m3 to bf16");
  check<int8_t, __half>("int8 to fp16");
  check<int8_t, __nv_bfloat16>("int8 to bf16");
  std::printf("%d\n", tried);
}
