// The items of the greatest dot products with each user's vector: a matrix product whose results are looked at where
// they are made. No score is ever stored but those above the least of the best k so far, which are few: of N items in any
// order some k ln(N / k). So the time is that of the multiplications alone, and memory holds the best of each user.
//
// Items come in blocks of rows, ascending, and a user's best so far are kept between calls. A score is the sum over the
// columns in their order, so its bits depend on nothing but the two vectors; of equal scores the lower row is better.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "threads.hpp"

namespace {

// Users times items of a tile, whose sums are all in registers.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kRows = 12;
#elif defined(__AVX__)
constexpr int kLanes = 8, kRows = 6;
#else
constexpr int kLanes = 4, kRows = 6;
#endif
constexpr int kColumns = 2, kPanel = kLanes * kColumns;
typedef float Lanes __attribute__((vector_size(4 * kLanes)));

inline Lanes load(const float* p) {
  Lanes v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// One bit for each lane that is greater.
inline uint32_t above(Lanes x, float least) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(__m512(x), _mm512_set1_ps(least), _CMP_GT_OQ);
#elif defined(__AVX__)
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(__m256(x), _mm256_set1_ps(least), _CMP_GT_OQ)));
#elif defined(__SSE2__)
  return uint32_t(_mm_movemask_ps(_mm_cmpgt_ps(__m128(x), _mm_set1_ps(least))));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= uint32_t(x[i] > least) << i;
  return bits;
#endif
}

// A score and its item as one number: the greater, the better. Floats sort like integers once negative ones are flipped.
inline uint64_t key_of(float score, uint32_t row) {
  const float plain = score + 0.0f;  // -0 is 0
  uint32_t bits;
  std::memcpy(&bits, &plain, sizeof bits);
  bits ^= uint32_t(int32_t(bits) >> 31) | 0x80000000u;
  return uint64_t(bits) << 32 | uint32_t(~row);
}

inline float score_of(uint64_t key) {
  uint32_t bits = uint32_t(key >> 32);
  bits ^= (bits & 0x80000000u) ? 0x80000000u : 0xffffffffu;
  float score;
  std::memcpy(&score, &bits, sizeof score);
  return score;
}

// The best items of some users so far, one user after the other.
struct Best {
  int64_t k, room;
  uint64_t* keys;    // [users, room]
  int32_t* counts;   // [users]
  float* least;      // [users]: only greater scores are looked at
  const int64_t* offsets;   // [users + 1], of `excluded`; or null
  const int32_t* excluded;  // rows, ascending within a user

  bool is_excluded(int64_t user, int32_t row) const {
    return offsets && std::binary_search(excluded + offsets[user], excluded + offsets[user + 1], row);
  }
  void add(int64_t user, float score, int32_t row) {
    if (!(score > least[user]) || is_excluded(user, row)) return;
    uint64_t* user_keys = keys + user * room;
    user_keys[counts[user]++] = key_of(score, uint32_t(row));
    if (counts[user] == room) shrink(user);
  }
  void shrink(int64_t user) {
    uint64_t* user_keys = keys + user * room;
    std::nth_element(user_keys, user_keys + k - 1, user_keys + counts[user], std::greater<>());
    counts[user] = int32_t(k);
    least[user] = score_of(user_keys[k - 1]);
  }
};

// A tile's scores that are above the least.
__attribute__((noinline)) void add_row(Best& best, int64_t user, const Lanes* sums, uint32_t bits, int64_t row) {
  float scores[kPanel];
  std::memcpy(scores, sums, sizeof scores);
  for (; bits; bits &= bits - 1) {
    const int lane = __builtin_ctz(bits);
    best.add(user, scores[lane], int32_t(row + lane));
  }
}

// users: [width, kRows]; items: [width, kPanel]; `rows` and `columns` of them are real.
inline void tile(const float* users, const float* items, int64_t width, int64_t user, int rows, int64_t row, int columns,
                 const float* least, Best& best) {
  Lanes sum[kRows][kColumns] = {};
  for (int64_t d = 0; d < width; ++d) {
    Lanes item[kColumns];
    for (int c = 0; c < kColumns; ++c) item[c] = load(items + d * kPanel + c * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < kColumns; ++c) sum[r][c] += users[d * kRows + r] * item[c];
  }
  const uint32_t real = columns == 32 ? ~0u : (1u << columns) - 1;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    uint32_t bits = 0;
#pragma GCC unroll 2
    for (int c = 0; c < kColumns; ++c) bits |= above(sum[r][c], least[r]) << (c * kLanes);
    bits &= real;
    if (__builtin_expect(bits != 0, 0) && r < rows) add_row(best, user + r, sum[r], bits, row);
  }
}

// Rows [from, from + n) as columns: [width, lanes], zeros behind the n.
void transpose(const float* rows, int64_t n, int64_t width, int64_t lanes, float* out) {
  for (int64_t i = 0; i < lanes; ++i)
    for (int64_t d = 0; d < width; ++d) out[d * lanes + i] = i < n ? rows[i * width + d] : 0.0f;
}

void scan(const float* queries, int64_t from, int64_t until, int64_t width, const float* items, int64_t count,
          int64_t first, Best& best) {
  const int64_t groups = (until - from + kRows - 1) / kRows;
  std::vector<float> users(size_t(groups * kRows * width)), panel(size_t(width * kPanel));
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t user = from + g * kRows;
    transpose(queries + user * width, std::min<int64_t>(kRows, until - user), width, kRows, users.data() + g * kRows * width);
  }
  for (int64_t begin = 0; begin < count; begin += kPanel) {
    const int columns = int(std::min<int64_t>(kPanel, count - begin));
    transpose(items + begin * width, columns, width, kPanel, panel.data());
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t user = from + g * kRows;
      const int rows = int(std::min<int64_t>(kRows, until - user));
      float least[kRows];
      for (int r = 0; r < kRows; ++r) least[r] = r < rows ? best.least[user + r] : __builtin_inff();
      tile(users.data() + g * kRows * width, panel.data(), width, user, rows, first + begin, columns, least, best);
    }
  }
}

}  // namespace

extern "C" {

int headrace_retrieval_version() { return 1; }

// queries: [users, width]; items: [count, width], rows `first` on, greater than all before. keys: [users, room], room > k;
// counts: zeros at first; least: minus infinity at first. excluded: see Best.
void headrace_top_k_add(const float* queries, int64_t users, int64_t width, const float* items, int64_t count,
                        int64_t first, int64_t k, int64_t room, const int64_t* offsets, const int32_t* excluded,
                        uint64_t* keys, int32_t* counts, float* least, int threads) {
  const int64_t groups = (users + kRows - 1) / kRows, parts = std::max<int64_t>(1, std::min<int64_t>(threads, groups));
  parallel_parts(parts, [&](int64_t part) {
    Best best{k, room, keys, counts, least, offsets, excluded};
    const int64_t from = groups * part / parts * kRows, until = std::min(users, groups * (part + 1) / parts * kRows);
    if (from < until) scan(queries, from, until, width, items, count, first, best);
  });
}

// rows, scores: [users, k], best first; behind what was found: -1, minus infinity.
void headrace_top_k_take(int64_t users, int64_t k, int64_t room, uint64_t* keys, const int32_t* counts, int32_t* rows,
                         float* scores, int threads) {
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(threads, users));
  parallel_parts(parts, [&](int64_t part) {
    for (int64_t user = users * part / parts; user < users * (part + 1) / parts; ++user) {
      uint64_t* user_keys = keys + user * room;
      const int64_t size = std::min<int64_t>(k, counts[user]);
      std::partial_sort(user_keys, user_keys + size, user_keys + counts[user], std::greater<>());
      for (int64_t i = 0; i < k; ++i) {
        rows[user * k + i] = i < size ? int32_t(~uint32_t(user_keys[i])) : -1;
        scores[user * k + i] = i < size ? score_of(user_keys[i]) : -__builtin_inff();
      }
    }
  });
}

}  // extern "C"
