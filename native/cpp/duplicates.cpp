// Duplicates in a vector: headrace.embeddings.kernels.duplicates, by ctypes. No torch: the callers own what goes in and comes out.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace {

// Places of equal keys together, in their order (a counting sort), or values in their place. Counts of 32 bits stay in
// the cache longer.
template <class Count>
void group(const int64_t* keys, const int64_t* values, int64_t n, int64_t groups, int64_t* order, int64_t* starts) {
  std::vector<Count> place(size_t(groups + 1), 0);
  for (int64_t i = 0; i < n; ++i) ++place[keys[i] + 1];
  for (int64_t g = 0; g < groups; ++g) {
    starts[g] = place[g];
    place[g + 1] += place[g];
  }
  for (int64_t i = 0; i < n; ++i) order[place[keys[i]]++] = values ? values[i] : i;
}

// Distinct values of a vector, none negative, and the place of each of its elements among them. They ascend, or they come
// range by range (range g ends before value ends[g]), each range's as the vector has them first.

struct Ranges {
  const int64_t* ends;
  int64_t count;

  int64_t range_of(int64_t value) const {
    if (count > 16) return std::upper_bound(ends, ends + count, value) - ends;
    int64_t range = 0;  // of few: counted, for which way a search turns is hardly to be guessed
    for (int64_t g = 0; g + 1 < count; ++g) range += value >= ends[g];
    return range;
  }
};

// Counts a bit for each number up to the largest value, by words. Returns -1, with nothing done, where the bits would be many
// more than the values.
int64_t distinct(const int32_t* values, int64_t n, const Ranges* ranges, int32_t* unique, int64_t* inverse) {
  int32_t highest = 0;
  for (int64_t i = 0; i < n; ++i) highest = std::max(highest, values[i]);
  const int64_t words = int64_t(highest) / 64 + 1;
  if (words > 2 * n + 1024) return -1;
  std::vector<uint64_t> bits(size_t(words), 0);
  std::vector<uint32_t> distinct_before(static_cast<size_t>(words));
  for (int64_t i = 0; i < n; ++i) bits[size_t(values[i] >> 6)] |= uint64_t(1) << (values[i] & 63);
  int64_t count = 0;
  for (int64_t w = 0; w < words; ++w) {
    distinct_before[size_t(w)] = uint32_t(count);
    count += __builtin_popcountll(bits[size_t(w)]);
  }
  auto below = [&](int64_t value) {  // how many distinct values are
    const size_t w = size_t(value >> 6);
    return distinct_before[w] + uint32_t(__builtin_popcountll(bits[w] & ((uint64_t(1) << (value & 63)) - 1)));
  };
  if (!ranges) {
    for (int64_t w = 0, to = 0; w < words; ++w)
      for (uint64_t left = bits[size_t(w)]; left != 0; left &= left - 1)
        unique[to++] = int32_t(w * 64 + __builtin_ctzll(left));
    for (int64_t i = 0; i < n; ++i) inverse[i] = below(values[i]);
    return count;
  }
  std::vector<uint32_t> next(size_t(ranges->count), 0), place(size_t(count), UINT32_MAX);
  for (int64_t g = 1; g < ranges->count; ++g) {
    const int64_t end = ranges->ends[g - 1];
    next[size_t(g)] = end > highest ? uint32_t(count) : below(end);
  }
  for (int64_t i = 0; i < n; ++i) {
    uint32_t& to = place[below(values[i])];
    if (to == UINT32_MAX) {
      to = next[size_t(ranges->range_of(values[i]))]++;
      unique[to] = values[i];
    }
    inverse[i] = to;
  }
  return count;
}

// Counts with a hash table: for values that are far apart.
int64_t distinct_far(const int32_t* values, int64_t n, const Ranges& ranges, int32_t* unique, int64_t* inverse) {
  int bits = 4;
  while ((int64_t(1) << bits) < 2 * n) ++bits;
  const size_t last = (size_t(1) << bits) - 1;
  std::vector<uint32_t> slots(last + 1, UINT32_MAX);
  std::vector<int32_t> seen(static_cast<size_t>(n));
  std::vector<uint32_t> size(size_t(ranges.count), 0);
  uint32_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    size_t slot = size_t((uint64_t(uint32_t(values[i])) * 0x9E3779B97F4A7C15u) >> (64 - bits));
    while (slots[slot] != UINT32_MAX && seen[slots[slot]] != values[i]) slot = (slot + 1) & last;
    if (slots[slot] == UINT32_MAX) {
      slots[slot] = count;
      seen[count++] = values[i];
      ++size[size_t(ranges.range_of(values[i]))];
    }
    inverse[i] = slots[slot];
  }
  uint32_t sum = 0;
  for (auto& s : size) s = std::exchange(sum, sum + s);
  std::vector<uint32_t> place(count);
  for (uint32_t u = 0; u < count; ++u) {
    place[u] = size[size_t(ranges.range_of(seen[u]))]++;
    unique[place[u]] = seen[u];
  }
  for (int64_t i = 0; i < n; ++i) inverse[i] = place[size_t(inverse[i])];
  return count;
}

// Sorts values (not negative) with their places: least digit first, so equal values keep their order.
int64_t duplicates(const int32_t* values, int64_t n, int32_t* unique, int64_t* order, int64_t* starts, int64_t* group) {
  constexpr int kBits = 11, kSize = 1 << kBits;
  std::unique_ptr<uint64_t[]> from(new uint64_t[n]), to(new uint64_t[n]);
  uint32_t highest = 0;
  for (int64_t i = 0; i < n; ++i) {
    highest = std::max(highest, uint32_t(values[i]));
    from[i] = uint64_t(uint32_t(values[i])) << 32 | uint64_t(i);
  }
  for (int shift = 0; shift < 32 && (highest >> shift) != 0; shift += kBits) {
    std::vector<int64_t> place(kSize, 0);
    for (int64_t i = 0; i < n; ++i) ++place[(from[i] >> (32 + shift)) & (kSize - 1)];
    int64_t next = 0;
    for (auto& p : place) {
      const int64_t size = p;
      p = next;
      next += size;
    }
    for (int64_t i = 0; i < n; ++i) to[place[(from[i] >> (32 + shift)) & (kSize - 1)]++] = from[i];
    from.swap(to);
  }
  int64_t distinct = 0;
  for (int64_t i = 0; i < n; ++i) {
    const auto value = uint32_t(from[i] >> 32);
    if (i == 0 || value != uint32_t(unique[distinct - 1])) {
      unique[distinct] = int32_t(value);
      starts[distinct++] = i;
    }
    order[i] = int64_t(from[i] & UINT32_MAX);
    group[i] = distinct - 1;
  }
  return distinct;
}

}  // namespace

extern "C" {

int64_t headrace_distinct(const int32_t* values, int64_t n, const int64_t* ends, int64_t count, int32_t* unique,
                          int64_t* inverse) {
  const Ranges ranges{ends, count};
  const int64_t distinct_values = distinct(values, n, ends ? &ranges : nullptr, unique, inverse);
  return distinct_values < 0 && ends ? distinct_far(values, n, ranges, unique, inverse) : distinct_values;
}

int64_t headrace_duplicates(const int32_t* values, int64_t n, int32_t* unique, int64_t* order, int64_t* starts,
                            int64_t* group) {
  return duplicates(values, n, unique, order, starts, group);
}

void headrace_group(const int64_t* keys, const int64_t* values, int64_t n, int64_t groups, int64_t* order,
                    int64_t* starts) {
  if (n <= UINT32_MAX) group<uint32_t>(keys, values, n, groups, order, starts);
  else group<int64_t>(keys, values, n, groups, order, starts);
}

}  // extern "C"
