// Columns as a dictionary and, for each row, the number of its value: called from headrace.features.engines.arrow.kernels by
// ctypes, which lets other threads run meanwhile. Numbers of values are unsigned, of 1, 2 or 4 bytes (those of 4 bytes below
// 2^31). The callers have checked all sizes and own all memory but that of TextCounts.
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

#include "text_hash.hpp"

namespace {

bool bit(const uint8_t* bits, int64_t at) { return bits == nullptr || (bits[at >> 3] >> (at & 7) & 1); }

// Calls body with a null pointer of the type that `width` bytes stand for; false for another width.
template <class Body>
bool typed(int64_t width, const Body& body) {
  switch (width) {
    case 1: body(static_cast<uint8_t*>(nullptr)); return true;
    case 2: body(static_cast<uint16_t*>(nullptr)); return true;
    case 4: body(static_cast<uint32_t*>(nullptr)); return true;
    default: return false;
  }
}

template <class Value>
bool scatter(const void* values, const void* index, int64_t width, const int32_t* __restrict places, int64_t n, void* out) {
  const auto* __restrict from = static_cast<const Value*>(values);
  auto* __restrict to = static_cast<Value*>(out);
  if (index == nullptr) {
    for (int64_t i = 0; i < n; ++i) to[places[i]] = from[i];
    return true;
  }
  return typed(width, [&](auto* kind) {
    const auto* __restrict of = static_cast<const std::remove_pointer_t<decltype(kind)>*>(index);
    for (int64_t i = 0; i < n; ++i) to[places[i]] = from[of[i]];
  });
}

template <class Value>
void take(const void* values, const int32_t* __restrict rows, int64_t n, void* out) {
  const auto* __restrict from = static_cast<const Value*>(values);
  auto* __restrict to = static_cast<Value*>(out);
  for (int64_t i = 0; i < n; ++i) to[i] = from[rows[i]];
}

template <class Value>
int64_t encode(const Value* values, const uint8_t* validity, int64_t offset, int64_t n, int64_t lowest, int32_t* numbers,
               int64_t most, int32_t* index, Value* dictionary, int64_t* null_at) {
  int64_t size = 0;
  *null_at = -1;
  for (int64_t i = 0; i < n; ++i) {
    if (!bit(validity, offset + i)) {
      if (*null_at < 0) {
        if (size == most) return -1;
        *null_at = size;
        dictionary[size++] = 0;
      }
      index[i] = int32_t(*null_at);
      continue;
    }
    int32_t& number = numbers[int64_t(values[i]) - lowest];
    if (number < 0) {
      if (size == most) return -1;
      number = int32_t(size);
      dictionary[size++] = values[i];
    }
    index[i] = number;
  }
  return size;
}

// The sums of texts' counts and the first of their days. Texts are where the caller has them, until it is done.
class TextCounts {
 public:
  explicit TextCounts(int64_t expected) {
    size_t places = 1024;
    while (int64_t(places) < 2 * expected) places *= 2;
    slots_.resize(places);
  }

  void add(const uint8_t* text, int64_t size, uint64_t hash, int64_t count, int64_t day) {
    Slot& slot = find(slots_, text, size, uint32_t(hash));
    if (slot.text == nullptr) {
      slot = {text, count, day, uint32_t(hash), int32_t(size)};
      if (4 * ++used_ > 3 * slots_.size()) grow();
    } else {
      slot.count += count;
      if (day < slot.day) slot.day = day;
    }
  }

  // Calls body(text, size, count, day) for each text that is there often enough.
  template <class Body>
  void each(int64_t least, const Body& body) const {
    for (const Slot& s : slots_)
      if (s.text != nullptr && s.count >= least) body(s.text, s.size, s.count, s.day);
  }

 private:
  struct Slot {
    const uint8_t* text = nullptr;
    int64_t count = 0, day = 0;
    uint32_t hash = 0;
    int32_t size = 0;
  };

  static Slot& find(std::vector<Slot>& slots, const uint8_t* text, int64_t size, uint32_t hash) {
    const size_t mask = slots.size() - 1;
    for (size_t at = hash & mask;; at = (at + 1) & mask) {
      Slot& s = slots[at];
      if (s.text == nullptr || (s.hash == hash && s.size == size && std::memcmp(s.text, text, size_t(size)) == 0)) return s;
    }
  }

  void grow() {
    std::vector<Slot> larger(2 * slots_.size());
    for (const Slot& s : slots_)
      if (s.text != nullptr) find(larger, s.text, s.size, s.hash) = s;
    slots_.swap(larger);
  }

  std::vector<Slot> slots_;
  size_t used_ = 0;
};

}  // namespace

extern "C" {

// out[places[i]] = values[index[i]]; without an index, values[i]. Values of 4 or 8 bytes. Whether it was done.
int headrace_scatter(const void* values, int64_t value_width, const void* index, int64_t index_width, const int32_t* places,
                     int64_t n, void* out) {
  if (value_width == 4) return scatter<uint32_t>(values, index, index_width, places, n, out);
  if (value_width == 8) return scatter<uint64_t>(values, index, index_width, places, n, out);
  return 0;
}

// out[i] = values[rows[i]]. Values of 1, 2, 4 or 8 bytes. Whether it was done.
int headrace_take(const void* values, int64_t width, const int32_t* rows, int64_t n, void* out) {
  switch (width) {
    case 1: take<uint8_t>(values, rows, n, out); return 1;
    case 2: take<uint16_t>(values, rows, n, out); return 1;
    case 4: take<uint32_t>(values, rows, n, out); return 1;
    case 8: take<uint64_t>(values, rows, n, out); return 1;
    default: return 0;
  }
}

// counts[index[i]] += 1 of the rows that `mask` (a byte a row; null: all) has. Four tables, so that a value that repeats does
// not wait for its own count: counts has 4 * size places, the sums come to the first `size`.
int headrace_count(const void* index, int64_t width, const uint8_t* mask, int64_t n, int64_t size, int64_t* counts) {
  return typed(width, [&](auto* kind) {
    const auto* of = static_cast<const std::remove_pointer_t<decltype(kind)>*>(index);
    if (mask == nullptr) {
      for (int64_t i = 0; i < n; ++i) counts[(i & 3) * size + of[i]] += 1;
    } else {
      for (int64_t i = 0; i < n; ++i) counts[(i & 3) * size + of[i]] += mask[i];
    }
    for (int64_t k = 0; k < size; ++k) counts[k] += counts[size + k] + counts[2 * size + k] + counts[3 * size + k];
  });
}

// Numbers of 4 bytes in `width` bytes, that of a null being `null`.
int headrace_narrow(const int32_t* index, const uint8_t* validity, int64_t offset, int64_t n, int64_t null, int64_t width,
                    void* out) {
  return typed(width, [&](auto* kind) {
    using Out = std::remove_pointer_t<decltype(kind)>;
    auto* to = static_cast<Out*>(out);
    if (validity == nullptr) {
      for (int64_t i = 0; i < n; ++i) to[i] = Out(index[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) to[i] = bit(validity, offset + i) ? Out(index[i]) : Out(null);
    }
  });
}

// Integers (4 or 8 bytes) as numbers in the order in which they first appear, the null among them. `numbers` has a place for
// each integer from `lowest` on, all -1. Returns how many there are; -1 where they are more than `most`.
int64_t headrace_encode_integers(const void* values, int64_t value_width, const uint8_t* validity, int64_t offset, int64_t n,
                                 int64_t lowest, int32_t* numbers, int64_t most, int32_t* index, void* dictionary,
                                 int64_t* null_at) {
  if (value_width == 4)
    return encode(static_cast<const int32_t*>(values), validity, offset, n, lowest, numbers, most, index,
                  static_cast<int32_t*>(dictionary), null_at);
  return encode(static_cast<const int64_t*>(values), validity, offset, n, lowest, numbers, most, index,
                static_cast<int64_t*>(dictionary), null_at);
}

// Sums of texts' counts; null where there is no memory.
void* headrace_text_counts(int64_t expected) {
  try {
    return new TextCounts(expected);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void headrace_text_counts_free(void* counts) { delete static_cast<TextCounts*>(counts); }

// Add n texts (Arrow's layout: text i is at data[offsets[i]..offsets[i + 1]]) of which each is there counts[i] times, first on
// days[i]: those of them whose hash is `part` of `parts`. Whether there was memory for it.
int headrace_text_counts_add(void* to, const int32_t* offsets, const uint8_t* data, const int64_t* counts, const int64_t* days,
                             int64_t n, int64_t part, int64_t parts) {
  auto& sums = *static_cast<TextCounts*>(to);
  static const uint8_t nothing = 0;
  if (data == nullptr) data = &nothing;  // all texts are empty
  try {
    for (int64_t i = 0; i < n; ++i) {
      const uint8_t* text = data + offsets[i];
      const int64_t size = offsets[i + 1] - offsets[i];
      const uint64_t hash = text_hash(text, size);
      if (int64_t((hash >> 32) % uint64_t(parts)) == part) sums.add(text, size, hash, counts[i], days[i]);
    }
  } catch (const std::bad_alloc&) {
    return 0;
  }
  return 1;
}

// How many texts are there at least `least` times; their bytes together to `bytes`.
int64_t headrace_text_counts_size(const void* of, int64_t least, int64_t* bytes) {
  int64_t n = 0;
  *bytes = 0;
  static_cast<const TextCounts*>(of)->each(least, [&](const uint8_t*, int64_t size, int64_t, int64_t) {
    ++n;
    *bytes += size;
  });
  return n;
}

// These texts, in any order: offsets [n + 1], data [bytes], counts [n], days [n].
void headrace_text_counts_take(const void* of, int64_t least, int32_t* offsets, uint8_t* data, int64_t* counts,
                               int64_t* days) {
  int64_t i = 0, at = 0;
  offsets[0] = 0;
  static_cast<const TextCounts*>(of)->each(least, [&](const uint8_t* text, int64_t size, int64_t count, int64_t day) {
    std::memcpy(data + at, text, size_t(size));
    at += size;
    counts[i] = count;
    days[i] = day;
    offsets[++i] = int32_t(at);
  });
}

}  // extern "C"
