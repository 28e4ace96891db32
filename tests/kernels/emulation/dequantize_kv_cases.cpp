// Random calls of dequantisation against indexing: program FIRST COUNT. Exit code 1 if any is
// wrong.
//
// First, since it takes CUDA's own words away from what follows.
#include "emulator.h"
// Then what the cases need, and the kernel.
#include <random>
#include <vector>

#include "attention/dequantize/dequantize_kv.cu"

namespace {

using ostinato::Code;
using ostinato::DequantizeKvParams;
using ostinato::Slots;
using ostinato::Type;

constexpr int kHeads[] = {1, 2, 3, 8};
constexpr int kDims[] = {16, 48, 64, 128};
constexpr int kPageSizes[] = {1, 7, 16, 33};
constexpr int kBatches[] = {1, 2, 5, 33, 300, 512};

// 8-bit numbers of some shape, their scales, and what is written for them.
struct Part {
  std::vector<Code> codes;
  std::vector<float> scales;
  std::vector<Type> out;
  Slots code_slots, scale_slots;
  int dim;

  float number(int64_t page, int64_t slot, int head, int i) const {
    const auto at = [&](const Slots& of) {
      return page * of.page_stride + slot * of.stride + head * of.head_stride;
    };
    return static_cast<float>(codes[at(code_slots) + i]) * scales[at(scale_slots)];
  }
};

struct Draw {
  std::mt19937_64 random;
  int operator()(int low, int high) {
    return low + static_cast<int>(random() % static_cast<uint64_t>(high - low + 1));
  }
  template <int N>
  int one_of(const int (&values)[N]) {
    return values[(*this)(0, N - 1)];
  }
};

// `kind` of scales: one, of each head, of each token.
Part make_part(Draw& draw, int pages, int page_size, int heads, int dim, int kind, int room) {
  Part part = {};
  part.dim = dim;
  const int64_t row = dim + 16 * draw(0, 1);  // heads may lie apart
  part.codes.resize(pages * page_size * heads * row);
  for (Code& code : part.codes) {
    const auto bits = static_cast<uint8_t>(draw(0, 255));
    std::memcpy(static_cast<void*>(&code), &bits, 1);
  }
  part.code_slots = {part.codes.data(), page_size * heads * row, heads * row, row};
  const int counts[] = {1, heads, pages * page_size * heads};
  for (int i = 0; i < counts[kind]; ++i) {
    part.scales.push_back(draw(0, 40) == 0 ? NAN : 0.01f * draw(-300, 300));
  }
  void* const scales = part.scales.data();
  part.scale_slots = kind == 0   ? Slots{scales, 0, 0, 0}
                     : kind == 1 ? Slots{scales, 0, 0, 1}
                                 : Slots{scales, int64_t{page_size} * heads, heads, 1};
  part.out.assign(size_t{1} * (room + 1) * heads * dim, Type(99.0f));
  return part;
}

bool same(Type got, float expected) {
  const float x = static_cast<float>(got), y = static_cast<float>(Type(expected));
  return std::isnan(y) ? std::isnan(x) : x == y;
}

// Wrong elements of a token, or of one that must be left as it was.
int wrong_of(const Part& part, int heads, int token, bool seen, int64_t page, int64_t slot) {
  int wrong = 0;
  for (int head = 0; head < heads; ++head) {
    for (int i = 0; i < part.dim; ++i) {
      const Type got = part.out[(int64_t{token} * heads + head) * part.dim + i];
      wrong += same(got, seen ? part.number(page, slot, head, i) : 99.0f) ? 0 : 1;
    }
  }
  return wrong;
}

bool run_case(int seed) {
  Draw draw = {std::mt19937_64(seed)};
  emulator::seed(seed);
  emulator::sms = draw(1, 3);
  const bool paged = draw(0, 3) != 0;
  const int heads = draw.one_of(kHeads), dim = draw.one_of(kDims), value_dim = draw.one_of(kDims);
  const int page_size = paged ? draw.one_of(kPageSizes) : 1, batch = draw.one_of(kBatches);
  const int max_pages = draw(1, 100 / batch + 3), pages = paged ? max_pages + 5 : draw(1, 90);
  std::vector<int32_t> lens, offsets = {0}, begins = {0}, table;
  for (int b = 0; b < batch; ++b) {
    lens.push_back(draw(-2, max_pages * page_size + 2));  // clamped
    offsets.push_back(offsets.back() + (draw(0, 2) == 0 ? 0 : draw(1, 9)));
    for (int i = 0; i < max_pages; ++i) {
      table.push_back(draw(0, pages - 1));
    }
  }
  const bool uniform = draw(0, 3) == 0;
  const int left = draw(0, 1) == 0 ? -1 : draw(0, 20), queries_each = draw(1, 4);
  const auto queries = [&](int b) { return uniform ? queries_each : offsets[b + 1] - offsets[b]; };
  const auto length = [&](int b) {
    return queries(b) == 0 ? 0 : std::min(std::max(lens[b], 0), max_pages * page_size);
  };
  for (int b = 0; b < batch; ++b) {
    begins.push_back(begins.back() + length(b));
  }
  const int all = paged ? begins.back() : pages;
  const int room = paged ? std::max(0, all + draw(-3, 3)) : pages;  // sometimes too little
  Part k = make_part(draw, pages, page_size, heads, dim, draw(0, 2), room);
  Part v = make_part(draw, pages, page_size, heads, value_dim, draw(0, 2), room);
  std::vector<int32_t> written(batch + 2, -77);
  DequantizeKvParams params = {};
  params.k = k.code_slots;
  params.v = v.code_slots;
  params.k_scale = k.scale_slots;
  params.v_scale = v.scale_slots;
  if (!paged) {  // packed: one page, whose slots are tokens
    for (Slots* slots : {&params.k, &params.v, &params.k_scale, &params.v_scale}) {
      slots->stride = slots->page_stride;
    }
  }
  params.k_out = k.out.data();
  params.v_out = v.out.data();
  params.tokens = room;
  params.heads = heads;
  params.dim = dim;
  params.value_dim = value_dim;
  params.left = left;
  if (paged) {
    params.page_table = table.data();
    params.page_table_stride = max_pages;
    params.seq_lens = lens.data();
    params.cu_seqlens_q = uniform ? nullptr : offsets.data();
    params.max_seqlen_q = queries_each;
    params.cu_seqlens_k = written.data();
    params.batch = batch;
    params.page_size = page_size;
    params.max_pages = max_pages;
  }
  std::printf("seed %d: %d sequences, %d tokens, room for %d, pages of %d, %d heads of %d and %d",
              seed, paged ? batch : 0, all, room, page_size, heads, dim, value_dim);
  std::fflush(stdout);
  if (ostinato_launch(&params, nullptr) != 0) {
    std::printf(": refused\n");
    return false;
  }
  int wrong = 0;
  for (int b = 0; paged && b <= batch; ++b) {
    wrong += written[b] != std::min(begins[b], room) ? 1 : 0;
  }
  wrong += written[batch + 1] != -77 || (!paged && written[0] != -77) ? 1 : 0;
  for (int token = 0; token < room; ++token) {
    bool seen = token < all;
    int64_t page = 0, slot = token;
    if (paged && seen) {
      int b = 0;
      while (begins[b + 1] <= token) {
        ++b;
      }
      const int position = token - begins[b];
      seen = left < 0 || position >= length(b) - queries(b) - left;
      page = table[b * max_pages + position / page_size];
      slot = position % page_size;
    } else if (!paged) {
      page = token;
      slot = 0;
    }
    wrong += wrong_of(k, heads, token, seen, page, slot);
    wrong += wrong_of(v, heads, token, seen, page, slot);
  }
  // Nothing is written behind the end.
  wrong += wrong_of(k, heads, room, false, 0, 0) + wrong_of(v, heads, room, false, 0, 0);
  std::printf(", wrong: %d\n", wrong);
  return wrong == 0;
}

}  // namespace

int main(int /*argc*/, char** arguments) { return emulator::run_cases(arguments, run_case); }
