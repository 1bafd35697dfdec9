// A hash table from 64-bit ids to small numbers: headrace.embeddings.kernels.id_map, whose arrays these loops read and fill.
// Open addressing with linear probing; `slots` is a power of two, at most half of them taken; number -1: free.

#include <cstdint>

namespace {

// SplitMix64 (Steele, Lea and Flood, 2014).
inline uint64_t mix(int64_t id) {
  uint64_t x = static_cast<uint64_t>(id) + 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Slots of so many ids are prefetched before the first is read: a slot is mostly a miss of the caches.
constexpr int64_t kBlock = 32;

template <class Look>
inline void in_blocks(const int64_t* keys, const int64_t* numbers, int64_t slots, const int64_t* ids, int64_t n,
                      Look look) {
  const uint64_t mask = static_cast<uint64_t>(slots) - 1;
  uint64_t first[kBlock];
  for (int64_t from = 0; from < n; from += kBlock) {
    const int64_t size = n - from < kBlock ? n - from : kBlock;
    for (int64_t i = 0; i < size; ++i) {
      first[i] = mix(ids[from + i]) & mask;
      __builtin_prefetch(keys + first[i]);
      __builtin_prefetch(numbers + first[i]);
    }
    for (int64_t i = 0; i < size; ++i) look(from + i, first[i], mask);
  }
}

}  // namespace

extern "C" {

// found[i]: the number of ids[i]; -1: it has none.
void headrace_id_map_find(const int64_t* keys, const int64_t* numbers, int64_t slots, const int64_t* ids, int64_t n,
                          int64_t* out) {
  in_blocks(keys, numbers, slots, ids, n, [&](int64_t i, uint64_t slot, uint64_t mask) {
    while (numbers[slot] >= 0 && keys[slot] != ids[i]) slot = (slot + 1) & mask;
    out[i] = numbers[slot];
  });
}

// Distinct ids that are not there yet get the numbers that are given. There is room for them.
void headrace_id_map_insert(int64_t* keys, int64_t* numbers, int64_t slots, const int64_t* ids, const int64_t* new_numbers,
                            int64_t n) {
  in_blocks(keys, numbers, slots, ids, n, [&](int64_t i, uint64_t slot, uint64_t mask) {
    while (numbers[slot] >= 0) slot = (slot + 1) & mask;
    keys[slot] = ids[i];
    numbers[slot] = new_numbers[i];
  });
}

}  // extern "C"
