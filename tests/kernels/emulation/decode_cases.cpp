// Random calls of one decode kernel against attention in fp64: program FIRST COUNT RESULTS, and
// "dynamic" for loads whose work tiles are scheduled dynamically, "throttled" for shares so large
// that warps wait for each other. Writes what the calls return to RESULTS, so that kernels can be
// compared; exit code 1 if any is wrong.
//
// First, since it takes CUDA's own words away from what follows.
#include "emulator.h"
// Then what the cases need, and the kernel.
#include <numeric>
#include <random>
#include <vector>

#include "attention/decode/decode_sm90.cu"

namespace {

using namespace ostinato::decode;
using ostinato::PagedDecodeParams;

constexpr int kLengths[] = {0,   1,   15,  16,  17,  63,  64,   65,   128,  200,  255,  256, 257,
                            272, 300, 511, 512, 513, 700, 1000, 1023, 1024, 1025, 1300, 2049};
constexpr int kChoices = static_cast<int>(std::size(kLengths));
constexpr int kShortLengths = 15;  // of these; for many sequences
constexpr int kLongOfMany = 2;     // of them are long
constexpr int kFirstLong = 20;
constexpr int kFirstDynamic = 9;        // where work tiles may be scheduled dynamically
constexpr int kThrottledTokens = 8000;  // at most
constexpr int kTwoBatchTokens = 2049;   // page ids of a work tile are read in two turns from here

enum class Loads { kAny, kDynamic, kThrottled };

struct Case {
  int batch, heads_kv, group, queries, left, page, max_pages, pages;
  bool pdl;
  ostinato::L2Partition l2_partition;
  std::vector<int> lengths, table;
  std::vector<Type> q, keys, values;

  int heads_q() const { return heads_kv * group; }
  size_t row(int sequence, int token, int head) const {
    const int64_t page_id = table[sequence * max_pages + token / page];
    return static_cast<size_t>(((page_id * page + token % page) * heads_kv + head) * kDim);
  }
};

Case make_case(std::mt19937_64& random, Loads loads) {
  const bool dynamic = loads == Loads::kDynamic, throttled = loads == Loads::kThrottled;
  const auto draw = [&](int low, int high) {
    return low + static_cast<int>(random() % static_cast<uint64_t>(high - low + 1));
  };
  std::normal_distribution<float> normal;
  Case made = {};
  const bool many = dynamic || draw(0, 3) == 0;
  made.batch = many && !throttled ? draw(33, 40) : draw(1, 5);
  made.heads_kv = made.batch > kFewSequences ? 1 << draw(0, 2) : draw(1, 2);
  if (draw(0, 3) != 0) {  // a hint, right or wrong
    made.l2_partition.sms[0] = static_cast<uint32_t>(random()) & (draw(0, 5) == 0 ? 0 : ~0u);
    made.l2_partition.pages = static_cast<uint32_t>(random());
    made.l2_partition.heads = draw(0, 3);
  }
  made.queries = draw(0, 3) == 0 ? 2 : 1;
  made.group = draw(1, kColumns / made.queries);
  made.left = !dynamic && draw(0, 3) == 0 ? draw(0, 600) : -1;
  made.page = kCopyPages ? 16 * draw(1, 4) : draw(1, 40);
  made.pdl = draw(0, 1) != 0;
  const int first = dynamic ? kFirstDynamic : 0;
  const bool in_turns = dynamic && draw(0, 5) == 0;
  for (int b = 0; b < made.batch; ++b) {
    const bool many_tokens = made.batch > 5 && b < kLongOfMany && !dynamic;
    const int choices = made.batch <= 5 || many_tokens ? kChoices : kShortLengths;
    const bool empty = loads != Loads::kAny && draw(0, 7) == 0;
    const int some = kLengths[draw(many_tokens ? kFirstLong : first, choices - 1)];
    made.lengths.push_back(empty       ? 0
                           : throttled ? draw(kThrottledTokens / 2, kThrottledTokens)
                           : in_turns  ? draw(kTwoBatchTokens, kTwoBatchTokens + 100)
                                       : some);
    made.pages += ostinato::ceil_div(made.lengths[b], made.page);
  }
  const int longest = *std::max_element(made.lengths.begin(), made.lengths.end());
  made.max_pages = ostinato::ceil_div(longest, made.page) + draw(0, 2);
  made.max_pages = std::max(made.max_pages, 1);
  made.pages += 1;
  std::vector<int> order(made.pages);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  // What nobody sees: NaN, and ids of pages that do not exist.
  const size_t elements = size_t{1} * made.pages * made.page * made.heads_kv * kDim;
  made.keys.assign(elements, Type(NAN));
  made.values.assign(elements, Type(NAN));
  made.table.assign(made.batch * made.max_pages, 1 << 20);
  for (int b = 0, used = 0; b < made.batch; ++b) {
    for (int token = 0; token < made.lengths[b]; ++token) {
      if (token % made.page == 0) {
        made.table[b * made.max_pages + token / made.page] = order[used++];
      }
      for (int i = 0; i < made.heads_kv * kDim; ++i) {
        made.keys[made.row(b, token, 0) + i] = Type(normal(random));
        made.values[made.row(b, token, 0) + i] = Type(normal(random));
      }
    }
  }
  for (int i = 0; i < made.batch * made.queries * made.heads_q() * kDim; ++i) {
    made.q.push_back(Type(normal(random)));
  }
  return made;
}

// Attention of one query and head: the output, and LSE last.
std::vector<double> exact(const Case& of, int sequence, int query, int head) {
  const int length = of.lengths[sequence], position = length - of.queries + query;
  const size_t row = (sequence * of.queries + query) * of.heads_q() + head;
  const int first = of.left < 0 ? 0 : std::max(position - of.left, 0);
  std::vector<double> scores, out(kDim + 1);
  double most = -INFINITY, sum = 0;
  for (int token = first; token <= position; ++token) {
    const size_t key = of.row(sequence, token, head / of.group);
    double score = 0;
    for (int d = 0; d < kDim; ++d) {
      score +=
          double{static_cast<float>(of.q[row * kDim + d])} * static_cast<float>(of.keys[key + d]);
    }
    scores.push_back(score / std::sqrt(double{kDim}));
    most = std::max(most, scores.back());
  }
  for (size_t i = 0; i < scores.size(); ++i) {
    const double weight = std::exp(scores[i] - most);
    const size_t value = of.row(sequence, first + static_cast<int>(i), head / of.group);
    sum += weight;
    for (int d = 0; d < kDim; ++d) {
      out[d] += weight * static_cast<float>(of.values[value + d]);
    }
  }
  for (int d = 0; d < kDim && sum > 0; ++d) {
    out[d] /= sum;
  }
  out[kDim] = sum > 0 ? most + std::log(sum) : -INFINITY;
  return out;
}

// Of all rows.
std::vector<std::vector<double>> exact_rows(const Case& of) {
  std::vector<std::vector<double>> rows;
  for (int row = 0; row < of.batch * of.queries * of.heads_q(); ++row) {
    const int token = row / of.heads_q();
    rows.push_back(exact(of, token / of.queries, token % of.queries, row % of.heads_q()));
  }
  return rows;
}

// How many rows are wrong.
int count_wrong(const std::vector<std::vector<double>>& all_expected, const std::vector<Type>& out,
                const std::vector<float>& lse) {
  int wrong = 0;
  for (size_t row = 0; row < all_expected.size(); ++row) {
    const std::vector<double>& expected = all_expected[row];
    double error = 0, norm = 0;
    for (int d = 0; d < kDim; ++d) {
      const double difference = static_cast<float>(out[row * kDim + d]) - expected[d];
      error += difference * difference;
      norm += expected[d] * expected[d];
    }
    const double want = expected[kDim];
    const bool right =
        error <= 4e-4 * norm && (lse[row] == want || std::abs(lse[row] - want) < 1e-3);
    wrong += !right;
  }
  return wrong;
}

template <class T>
T* aligned_copy(const std::vector<T>& from) {
  const size_t bytes = (from.size() * sizeof(T) + 255) / 256 * 256 + 256;
  T* const to = static_cast<T*>(std::aligned_alloc(256, bytes));
  std::copy(from.begin(), from.end(), to);
  return to;
}

bool run_case(int seed, Loads loads, std::FILE* results) {
  std::mt19937_64 random(seed * 7919 + 1);
  const Case made = make_case(random, loads);
  emulator::seed(seed * 31 + kClusterCtas);
  emulator::clusters = 1 + seed * 5 % (loads == Loads::kThrottled ? 3 : 7);
  emulator::sms = ostinato::ceil_div(emulator::clusters * kClusterCtas, kCtasPerSm);
  ostinato_prepare();
  Type* const q = aligned_copy(made.q);
  Type* const keys = aligned_copy(made.keys);
  Type* const values = aligned_copy(made.values);
  std::vector<Type> out(made.q.size(), Type(NAN));
  Type* const out_data = aligned_copy(out);
  std::vector<float> lse(made.q.size() / kDim, NAN);
  const int64_t slot = int64_t{1} * made.heads_kv * kDim;

  PagedDecodeParams params = {};
  params.q = {q, int64_t{1} * made.heads_q() * kDim, kDim};
  params.out = {out_data, int64_t{1} * made.heads_q() * kDim, kDim};
  params.lse = {lse.data(), made.heads_q(), 1};
  params.k_cache = {keys, made.page * slot, slot, kDim};
  params.v_cache = {values, made.page * slot, slot, kDim};
  params.page_table = made.table.data();
  params.page_table_stride = made.max_pages;
  params.seq_lens = made.lengths.data();
  params.batch = made.batch;
  params.heads_q = made.heads_q();
  params.heads_kv = made.heads_kv;
  params.pages = made.pages;
  params.page_size = made.page;
  params.max_pages = made.max_pages;
  params.max_seqlen_q = made.queries;
  params.left = made.left;
  params.scale = 1 / std::sqrt(static_cast<float>(kDim));
  params.pdl = made.pdl;
  params.l2_partition = made.l2_partition;
  int64_t bytes = 0;
  const ostinato::DecodeCapacities most = {made.queries * made.group,
                                           int64_t{1} * made.batch * made.heads_kv,
                                           int64_t{1} * made.max_pages * made.page};
  ostinato_workspace_bytes(&most, &bytes);
  char* const workspace = aligned_copy(std::vector<char>(bytes));
  params.workspace = workspace;

  std::printf("seed %d: %d sequences, heads %d/%d, %d queries, window %d, pages of %d", seed,
              made.batch, made.heads_q(), made.heads_kv, made.queries, made.left, made.page);
  std::fflush(stdout);
  int wrong = 0;
  const std::vector<std::vector<double>> expected = exact_rows(made);
  // The second launch finds the counters of the first; the third has no hint, and the same bits.
  std::vector<Type> hinted;
  std::vector<float> hinted_lse;
  const int launches = kMayPartitionL2 && made.l2_partition.heads != 0 ? 3 : 2;
  for (int launch = 0; launch < launches; ++launch) {
    if (launch == 2) {
      hinted = out;
      hinted_lse = lse;
      params.l2_partition = {};
    }
    std::fill(out_data, out_data + out.size(), Type(NAN));
    std::fill(lse.begin(), lse.end(), NAN);
    if (ostinato_launch(&params, nullptr) != cudaSuccess) {
      std::printf(", refused\n");
      return false;
    }
    std::copy(out_data, out_data + out.size(), out.begin());
    wrong += count_wrong(expected, out, lse);
    const auto counters = counter_bytes(emulator::sms);
    wrong += std::any_of(workspace, workspace + counters, [](char byte) { return byte != 0; });
  }
  if (launches == 3) {
    wrong += std::memcmp(out.data(), hinted.data(), out.size() * sizeof(Type)) != 0;
    wrong += std::memcmp(lse.data(), hinted_lse.data(), lse.size() * sizeof(float)) != 0;
  }
  std::printf(", wrong: %d\n", wrong);
  std::fwrite(out.data(), sizeof(Type), out.size(), results);
  std::fwrite(lse.data(), sizeof(float), lse.size(), results);
  for (void* const block :
       {static_cast<void*>(q), static_cast<void*>(keys), static_cast<void*>(values),
        static_cast<void*>(out_data), static_cast<void*>(workspace)}) {
    std::free(block);
  }
  return wrong == 0;
}

}  // namespace

int main(int argc, char** argv) {
  Loads loads = Loads::kAny;
  if (argc == 5) {
    loads = std::strcmp(argv[4], "dynamic") == 0 ? Loads::kDynamic : loads;
    loads = std::strcmp(argv[4], "throttled") == 0 ? Loads::kThrottled : loads;
  }
  if (argc != (loads == Loads::kAny ? 4 : 5)) {
    std::fprintf(stderr, "got %d arguments, expected FIRST COUNT RESULTS [dynamic|throttled]\n",
                 argc - 1);
    return 2;
  }
  std::FILE* const results = std::fopen(argv[3], "wb");
  const int code =
      emulator::run_cases(argv, [&](int seed) { return run_case(seed, loads, results); });
  std::fclose(results);
  return code;
}
