// Prints how many floats were rounded to e4m3, and those whose code is not that of CUDA's own
// conversion on the host.
#include <cuda_fp8.h>

#include "emulator.h"
// The emulator has the functions of the device.
#include "common/e4m3.cuh"

namespace {

uint64_t tried = 0;

void check(uint32_t bits) {
  const float x = __uint_as_float(bits);
  const uint32_t expected = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
  const uint32_t got = ostinato::round_to_e4m3(x);
  ++tried;
  if (got != expected) {
    std::printf("%08x: got %02x, expected %02x\n", bits, got, expected);
  }
}

}  // namespace

int main() {
  for (uint32_t half = 0; half < 1u << 16; ++half) {
    check(half << 16);  // bf16
    __half_raw raw;
    raw.x = static_cast<unsigned short>(half);
    check(__float_as_uint(__half2float(raw)));
    // A mantissa that ends in a tie or beside one. (Of subnormals, ties are bf16 numbers.)
    for (uint32_t step : {1u, 2u}) {
      check((half << 16) + step);
      check((half << 16) - step);
    }
  }
  constexpr uint32_t kStride = 1021;  // odd: every low bit takes both values
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += kStride) {
    check(static_cast<uint32_t>(bits));
  }
  std::printf("%llu\n", static_cast<unsigned long long>(tried));
}
