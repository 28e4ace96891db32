// Random calls of one prefill kernel against attention in fp64: program FIRST COUNT RESULTS, and
// "exact" for scales that are powers of two and no NaN, so that a 16-bit kernel on the dequantised
// cache has the same bits. Writes what the calls return to RESULTS; exit code 1 if any is wrong.
//
// First, since it takes CUDA's own words away from what follows.
#include "emulator.h"
// Then what the cases need, and the kernel.
#include <numeric>
#include <random>
#include <vector>

#include "attention/prefill/prefill_sm90.cu"

namespace {

using namespace ostinato::prefill;
using ostinato::PrefillParams;

constexpr int kQueryLengths[] = {0, 1, 5, 40, 63, 64, 65, 100, 129, 200, 260};
constexpr int kKeyLengths[] = {0, 1, 17, 63, 64, 65, 128, 129, 200, 300, 450};
constexpr bool kPaged = kSource != Source::Packed;
constexpr bool kMayBeNan = !std::is_same_v<CacheType, int8_t>;

struct Case {
  int batch, heads_kv, group, page, max_pages, pages, left, right, pack;
  float scale, softcap;
  bool scale_of_head;
  std::vector<int> q_lens, k_lens, q_ends, k_ends, table;
  std::vector<QueryType> q;
  std::vector<CacheType> keys, values;
  std::vector<float> sinks, k_scale, v_scale;  // with scales of tokens one for each row

  int heads_q() const { return heads_kv * group; }
  size_t row(int sequence, int token, int head) const {
    int64_t slot = k_ends[sequence] + token;
    if (kPaged) {
      slot = int64_t{table[sequence * max_pages + token / page]} * page + token % page;
    }
    return static_cast<size_t>(slot * heads_kv + head);
  }
  // Of a row of a KV head, which is the row modulo their number.
  float scale_of(const std::vector<float>& scales, size_t row) const {
    const size_t i = kTokenScales ? row : scale_of_head ? row % heads_kv : 0;
    return scales.empty() ? 1.0f : scales[i];
  }
  int first_key(int sequence, int query) const {
    const int position = k_lens[sequence] - q_lens[sequence] + query;
    return left < 0 ? 0 : std::clamp(position - left, 0, k_lens[sequence]);
  }
  int stop_key(int sequence, int query) const {
    const int position = k_lens[sequence] - q_lens[sequence] + query;
    return right < 0 ? k_lens[sequence] : std::clamp(position + right + 1, 0, k_lens[sequence]);
  }
};

// A random element of the cache. A kernel of 16 bits gets dequantised ones.
CacheType element(std::mt19937_64& random, float scale) {
  const float x = std::normal_distribution<float>()(random);
  if constexpr (std::is_same_v<CacheType, int8_t>) {
    return CacheType(std::clamp(std::round(x * 40), -128.0f, 127.0f));
  } else {
    const __nv_fp8_e4m3 code(x);
    return CacheType(kDequantizes ? x : static_cast<float>(code) * scale);
  }
}

Case make_case(std::mt19937_64& random, bool exact) {
  const auto draw = [&](int low, int high) {
    return low + static_cast<int>(random() % static_cast<uint64_t>(high - low + 1));
  };
  std::normal_distribution<float> normal;
  Case made = {};
  made.batch = draw(1, 3);
  made.heads_kv = draw(1, 2);
  made.group = draw(1, 3);
  made.page = draw(0, 1) != 0 ? 16 * draw(1, 4) : draw(1, 40);
  made.pack = draw(0, 1);
  const int rule = draw(0, 4);
  made.left = rule == 1 || rule == 2 ? draw(0, 200) : -1;
  made.right = rule == 3 ? -1 : rule == 2 ? draw(0, 30) : 0;
  made.scale = (draw(0, 2) == 0 ? 3.0f : 1.0f) / std::sqrt(static_cast<float>(kDim));
  made.softcap = draw(0, 3) == 0 ? 5.0f : 0.0f;
  made.scale_of_head = draw(0, 1) != 0;
  const float unit = std::is_same_v<CacheType, int8_t> ? 1.0f / 64 : 1.0f;
  for (int head = 0; !kTokenScales && head < made.heads_kv; ++head) {
    const float k =
        unit * (exact ? std::exp2(static_cast<float>(draw(-1, 1))) : 0.5f + draw(0, 9) * 0.1f);
    made.k_scale.push_back(!exact && draw(0, 5) == 0 ? -k : k);
    made.v_scale.push_back(
        unit * (exact ? std::exp2(static_cast<float>(draw(-3, 3))) : 0.1f + draw(0, 9)));
  }
  if (draw(0, 2) == 0) {
    for (int head = 0; head < made.heads_q(); ++head) {
      made.sinks.push_back(normal(random));
    }
  }
  made.q_ends = made.k_ends = {0};
  for (int b = 0; b < made.batch; ++b) {
    made.q_lens.push_back(kQueryLengths[draw(0, std::size(kQueryLengths) - 1)]);
    made.k_lens.push_back(kKeyLengths[draw(0, std::size(kKeyLengths) - 1)]);
    made.q_ends.push_back(made.q_ends[b] + made.q_lens[b]);
    made.k_ends.push_back(made.k_ends[b] + made.k_lens[b]);
    made.pages += ostinato::ceil_div(made.k_lens[b], made.page);
  }
  const int longest = *std::max_element(made.k_lens.begin(), made.k_lens.end());
  made.max_pages = std::max(ostinato::ceil_div(longest, made.page) + draw(0, 2), 1);
  made.pages += 1;
  std::vector<int> order(made.pages);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  // What nobody sees: NaN, or the extreme of INT8, and ids of pages that do not exist.
  const size_t slots = kPaged ? size_t{1} * made.pages * made.page : made.k_ends.back() + 5;
  const CacheType unseen(kMayBeNan ? static_cast<float>(NAN) : -128.0f);
  made.keys.assign(slots * made.heads_kv * kDim, unseen);
  made.values.assign(slots * made.heads_kv * kValueDim, unseen);
  made.table.assign(made.batch * made.max_pages, 1 << 20);
  if (kTokenScales) {
    made.k_scale.assign(slots * made.heads_kv, NAN);
    made.v_scale.assign(slots * made.heads_kv, NAN);
  }
  // The greatest of the values' scales: far from 1, if the output's type has the range.
  const int most = std::is_same_v<OutType, __half> ? 6 : 20;
  const float magnitude = std::exp2(static_cast<float>(draw(-most, most)));
  // By which they rise or fall in 32 tokens, likewise.
  const float drift = most == 6 ? 0.0f : static_cast<float>(draw(-1, 1));
  for (int b = 0, used = 0; b < made.batch; ++b) {
    const int first = made.q_lens[b] > 0 ? made.first_key(b, 0) : made.k_lens[b];
    const int stop = made.q_lens[b] > 0 ? made.stop_key(b, made.q_lens[b] - 1) : 0;
    const bool some_nan = (kMayBeNan || kTokenScales) && !exact && draw(0, 3) == 0;
    for (int token = 0; token < made.k_lens[b]; ++token) {
      if (token % made.page == 0) {
        const int page = order[used++];
        if (token + made.page > first && token < stop) {
          made.table[b * made.max_pages + token / made.page] = page;
        }
      }
      if (token < first || token >= stop) {
        continue;
      }
      const bool is_nan = some_nan && draw(0, 99) == 0;
      for (int head = 0; head < made.heads_kv; ++head) {
        const size_t row = made.row(b, token, head);
        if (kTokenScales) {
          made.k_scale[row] = unit * (0.2f + draw(0, 9) * 0.2f);
          const float usual = magnitude * std::exp2(drift * static_cast<float>(token) / 32);
          made.v_scale[row] = draw(0, 40) == 0 ? 0.0f : usual * (0.05f + draw(0, 9) * 0.1f);
        }
        for (int i = 0; i < kDim; ++i) {
          made.keys[row * kDim + i] = element(random, made.scale_of(made.k_scale, row));
          made.values[row * kValueDim + i] = element(random, made.scale_of(made.v_scale, row));
        }
        if (is_nan && kTokenScales && (!kMayBeNan || draw(0, 1) == 0)) {
          made.v_scale[row] = draw(0, 1) == 0 ? NAN : INFINITY;
        } else if (is_nan && kMayBeNan) {
          made.values[row * kValueDim + draw(0, kValueDim - 1)] = unseen;
        }
      }
    }
  }
  for (int i = 0; i < made.q_ends.back() * made.heads_q() * kDim; ++i) {
    made.q.push_back(QueryType(normal(random)));
  }
  if (!kDequantizes) {
    made.k_scale.clear();
    made.v_scale.clear();
  }
  return made;
}

// Attention of one query and head: the output, and LSE last.
std::vector<double> exact_row(const Case& of, int sequence, int query, int head) {
  const size_t row = size_t{1} * (of.q_ends[sequence] + query) * of.heads_q() + head;
  const int first = of.first_key(sequence, query), stop = of.stop_key(sequence, query);
  const int kv_head = head / of.group;
  std::vector<double> scores, out(kValueDim + 1);
  double most = -INFINITY, sum = 0;
  for (int token = first; token < stop; ++token) {
    const size_t key = of.row(sequence, token, kv_head) * kDim;
    const double k_scale = of.scale_of(of.k_scale, key / kDim);
    double score = 0;
    for (int d = 0; d < kDim; ++d) {
      score +=
          double{static_cast<float>(of.q[row * kDim + d])} * static_cast<float>(of.keys[key + d]);
    }
    score *= k_scale * of.scale;
    scores.push_back(of.softcap > 0 ? of.softcap * std::tanh(score / of.softcap) : score);
    most = std::max(most, scores.back());
  }
  if (!scores.empty() && !of.sinks.empty()) {
    most = std::max<double>(most, of.sinks[head]);
    sum = std::exp(of.sinks[head] - most);
  }
  for (size_t i = 0; i < scores.size(); ++i) {
    const double weight = std::exp(scores[i] - most);
    const size_t value = of.row(sequence, first + static_cast<int>(i), kv_head) * kValueDim;
    // A scale that is infinite makes even 0 NaN.
    const double given = of.scale_of(of.v_scale, value / kValueDim);
    const double v_scale = kTokenScales && std::isinf(given) ? NAN : given;
    sum += weight;
    for (int d = 0; d < kValueDim; ++d) {
      out[d] += weight * v_scale * static_cast<float>(of.values[value + d]);
    }
  }
  for (int d = 0; d < kValueDim && sum > 0; ++d) {
    out[d] /= sum;
  }
  out[kValueDim] = sum > 0 ? most + std::log(sum) : -INFINITY;
  return out;
}

// Whether a row is right; a NaN must be where there is one.
bool is_right(const std::vector<double>& expected, const OutType* out, float lse) {
  double error = 0, norm = 0;
  for (int d = 0; d < kValueDim; ++d) {
    const double got = static_cast<float>(out[d]);
    if (std::isnan(got) != std::isnan(expected[d])) {
      return false;
    }
    if (!std::isnan(got)) {
      error += (got - expected[d]) * (got - expected[d]);
      norm += expected[d] * expected[d];
    }
  }
  const double want = expected[kValueDim];
  return error <= 4e-4 * norm + 1e-12 && (lse == want || std::abs(lse - want) < 2e-3);
}

template <class T>
T* aligned_copy(const std::vector<T>& from) {
  const size_t bytes = (from.size() * sizeof(T) + 255) / 256 * 256 + 256;
  T* const to = static_cast<T*>(std::aligned_alloc(256, bytes));
  std::copy(from.begin(), from.end(), to);
  return to;
}

void set_token_scales(PrefillParams& params, const Case& made) {
#if OSTINATO_TOKEN_SCALES
  const int64_t page = kPaged ? int64_t{made.page} * made.heads_kv : 0;
  params.k_token_scale = {const_cast<float*>(made.k_scale.data()), page, made.heads_kv, 1};
  params.v_token_scale = {const_cast<float*>(made.v_scale.data()), page, made.heads_kv, 1};
#endif
}

bool run_case(int seed, bool exact, std::FILE* results) {
  std::mt19937_64 random(seed * 7919 + 1);
  const Case made = make_case(random, exact);
  if (made.q.empty()) {
    return true;
  }
  emulator::seed(seed * 31 + kConsumers);
  emulator::sms = 1 + seed % 3;
  ostinato_prepare();
  QueryType* const q = aligned_copy(made.q);
  CacheType* const keys = aligned_copy(made.keys);
  CacheType* const values = aligned_copy(made.values);
  const int rows = made.q_ends.back() * made.heads_q();
  OutType* const out =
      aligned_copy(std::vector<OutType>(size_t{1} * rows * kValueDim, OutType(NAN)));
  std::vector<float> lse(rows, NAN);
  uint32_t workspace[2] = {};
  const int64_t slot = int64_t{1} * made.heads_kv * kDim;
  const int64_t value_slot = int64_t{1} * made.heads_kv * kValueDim;

  PrefillParams params = {};
  params.q = {q, int64_t{1} * made.heads_q() * kDim, kDim};
  params.out = {out, int64_t{1} * made.heads_q() * kValueDim, kValueDim};
  params.lse = {lse.data(), made.heads_q(), 1};
  params.k = {keys, kPaged ? made.page * slot : 0, slot, kDim};
  params.v = {values, kPaged ? made.page * value_slot : 0, value_slot, kValueDim};
  params.cu_seqlens_q = made.q_ends.data();
  params.batch = made.batch;
  params.heads_q = made.heads_q();
  params.heads_kv = made.heads_kv;
  params.tokens_q = made.q_ends.back();
  params.max_seqlen_q = *std::max_element(made.q_lens.begin(), made.q_lens.end());
  if (kPaged) {
    params.page_table = made.table.data();
    params.page_table_stride = made.max_pages;
    params.seq_lens = made.k_lens.data();
    params.pages = made.pages;
    params.page_size = made.page;
    params.max_pages = made.max_pages;
  } else {
    params.cu_seqlens_k = made.k_ends.data();
    params.tokens_k = made.k_ends.back();
    params.max_seqlen_k = *std::max_element(made.k_lens.begin(), made.k_lens.end());
  }
  params.left = made.left;
  params.right = made.right;
  params.scale = made.scale;
  params.softcap = made.softcap;
  params.sinks = made.sinks.empty() ? nullptr : made.sinks.data();
  params.pack = made.pack;
  params.workspace = seed % 2 != 0 ? workspace : nullptr;
  if constexpr (kTokenScales) {
    set_token_scales(params, made);
  } else if (kDequantizes) {
    params.k_scale = made.k_scale.data();
    params.v_scale = made.v_scale.data();
    params.k_scale_stride = params.v_scale_stride = made.scale_of_head ? 1 : 0;
  }
  std::printf("seed %d: %d sequences, heads %d/%d, window %d %d, pages of %d", seed, made.batch,
              made.heads_q(), made.heads_kv, made.left, made.right, made.page);
  std::fflush(stdout);
  if (ostinato_launch(&params, nullptr) != cudaSuccess) {
    std::printf(", refused\n");
    return false;
  }
  int wrong = workspace[0] != 0 || workspace[1] != 0;
  for (int b = 0; b < made.batch; ++b) {
    for (int i = 0; i < made.q_lens[b] * made.heads_q(); ++i) {
      const int query = i / made.heads_q(), head = i % made.heads_q();
      const size_t row = size_t{1} * (made.q_ends[b] + query) * made.heads_q() + head;
      wrong += !is_right(exact_row(made, b, query, head), out + row * kValueDim, lse[row]);
    }
  }
  std::printf(", wrong: %d\n", wrong);
  std::fwrite(out, sizeof(OutType), size_t{1} * rows * kValueDim, results);
  std::fwrite(lse.data(), sizeof(float), lse.size(), results);
  for (void* const block : {static_cast<void*>(q), static_cast<void*>(keys),
                            static_cast<void*>(values), static_cast<void*>(out)}) {
    std::free(block);
  }
  return wrong == 0;
}

}  // namespace

int main(int argc, char** argv) {
  const bool exact = argc == 5 && std::strcmp(argv[4], "exact") == 0;
  if (argc != (exact ? 5 : 4)) {
    std::fprintf(stderr, "got %d arguments, expected FIRST COUNT RESULTS [exact]\n", argc - 1);
    return 2;
  }
  const int first = std::atoi(argv[1]), count = std::atoi(argv[2]);
  std::FILE* const results = std::fopen(argv[3], "wb");
  bool right = true;
  for (int seed = first; seed < first + count; ++seed) {
    right &= run_case(seed, exact, results);
  }
  std::fclose(results);
  return right ? 0 : 1;
}
