// Columns as a dictionary and, for each row, the number of its value: called from headrace.features.arrow.kernels by
// ctypes, which lets other threads run meanwhile. Numbers of values are unsigned, of 1, 2 or 4 bytes (those of 4 bytes below
// 2^31). The callers have checked all sizes and own all memory but that of TextCounts.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

#include "text_hash.hpp"

namespace {

bool bit(const uint8_t* bits, int64_t position) { return bits == nullptr || (bits[position >> 3] >> (position & 7) & 1); }

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
    const auto* __restrict numbers = static_cast<const std::remove_pointer_t<decltype(kind)>*>(index);
    for (int64_t i = 0; i < n; ++i) to[places[i]] = from[numbers[i]];
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

  // Prefetches the slot in which a key will be looked up.
  void ahead(const TextKey& key) const { __builtin_prefetch(&slots_[key.hash & (slots_.size() - 1)]); }

  void add(const TextKey& key, const uint8_t* text, int64_t size, int64_t count, int64_t day) {
    const Text entry{size <= kShortText ? key.word : reinterpret_cast<uintptr_t>(text), uint32_t(key.hash), int32_t(size)};
    Slot& slot = find(slots_, entry);
    if (slot.text.size < 0) {
      slot = {entry, count, day};
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
      if (s.text.size >= 0 && s.count >= least) body(s.text.data(), s.text.size, s.count, s.day);
  }

 private:
  struct Text {
    uint64_t word = 0;  // a short text itself; of a longer one the address
    uint32_t hash = 0;
    int32_t size = -1;

    const uint8_t* data() const {
      return size <= kShortText ? reinterpret_cast<const uint8_t*>(&word) : reinterpret_cast<const uint8_t*>(uintptr_t(word));
    }
    bool operator==(const Text& other) const {
      if (hash != other.hash || size != other.size) return false;
      return size <= kShortText ? word == other.word : std::memcmp(data(), other.data(), size_t(size)) == 0;
    }
  };
  struct Slot {
    Text text;
    int64_t count = 0, day = 0;
  };

  static Slot& find(std::vector<Slot>& slots, const Text& text) {
    const size_t mask = slots.size() - 1;
    for (size_t place = text.hash & mask;; place = (place + 1) & mask)
      if (slots[place].text.size < 0 || slots[place].text == text) return slots[place];
  }

  void grow() {
    std::vector<Slot> larger(2 * slots_.size());
    for (const Slot& s : slots_)
      if (s.text.size >= 0) find(larger, s.text) = s;
    slots_.swap(larger);
  }

  std::vector<Slot> slots_;
  size_t used_ = 0;
};

// A hash table from a column's texts to their rows. The column stays the caller's.
class TextRows {
 public:
  TextRows(const int32_t* offsets, const uint8_t* data, int64_t n) : offsets_(offsets), data_(data) {
    size_t places = 16;
    while (int64_t(places) < 2 * n) places *= 2;
    slots_.resize(places);
    const size_t mask = places - 1;
    each(offsets, data, n, [&](int64_t row, const TextKey& key, const uint8_t*, int64_t size) {
      size_t place = key.hash & mask;
      while (slots_[place].row >= 0) place = (place + 1) & mask;
      slots_[place] = {key.word, int32_t(row), int32_t(size)};
    });
  }

  void find(const int32_t* offsets, const uint8_t* data, int64_t n, int32_t* rows) const {
    const size_t mask = slots_.size() - 1;
    each(offsets, data, n, [&](int64_t i, const TextKey& key, const uint8_t* text, int64_t size) {
      for (size_t place = key.hash & mask;; place = (place + 1) & mask) {
        const Slot& s = slots_[place];
        if (s.row >= 0 && (s.word != key.word || s.size != size || !same(s.row, text, size))) continue;
        rows[i] = s.row;
        return;
      }
    });
  }

 private:
  struct Slot {
    uint64_t word = 0;
    int32_t row = -1, size = 0;
  };

  bool same(int32_t row, const uint8_t* text, int64_t size) const {
    return size <= kShortText || std::memcmp(data_ + offsets_[row], text, size_t(size)) == 0;
  }

  // Calls body(i, key, text, size) for each of n texts, with its slot on the way.
  template <class Body>
  void each(const int32_t* offsets, const uint8_t* data, int64_t n, const Body& body) const {
    TextKey keys[kTextsAhead];
    for (int64_t first = 0; first < n; first += kTextsAhead) {
      const int64_t last = std::min(n, first + kTextsAhead);
      for (int64_t i = first; i < last; ++i) {
        keys[i - first] = text_key(data + offsets[i], offsets[i + 1] - offsets[i], data + offsets[n]);
        __builtin_prefetch(&slots_[keys[i - first].hash & (slots_.size() - 1)]);
      }
      for (int64_t i = first; i < last; ++i) body(i, keys[i - first], data + offsets[i], offsets[i + 1] - offsets[i]);
    }
  }

  const int32_t* offsets_;
  const uint8_t* data_;
  std::vector<Slot> slots_;
};

const uint8_t kNothing = 0;  // the data of texts that are all empty

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

// counts[index[i]] += 1 of the rows that `mask` (a byte a row; null: all) has. In 4 tables, where there are few values, so
// that a value that repeats does not wait for its own count; else in 1. counts has tables * size places, the sums come to
// the first `size`.
int headrace_count(const void* index, int64_t width, const uint8_t* mask, int64_t n, int64_t size, int64_t tables,
                   int64_t* counts) {
  const int64_t table_mask = tables - 1;  // tables is a power of 2
  return typed(width, [&](auto* kind) {
    const auto* numbers = static_cast<const std::remove_pointer_t<decltype(kind)>*>(index);
    if (mask == nullptr) {
      for (int64_t i = 0; i < n; ++i) counts[(i & table_mask) * size + numbers[i]] += 1;
    } else {
      for (int64_t i = 0; i < n; ++i) counts[(i & table_mask) * size + numbers[i]] += mask[i];
    }
    for (int64_t table = 1; table < tables; ++table)
      for (int64_t k = 0; k < size; ++k) counts[k] += counts[table * size + k];
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
  if (data == nullptr) data = &kNothing;
  try {
    TextKey keys[kTextsAhead];
    for (int64_t first = 0; first < n; first += kTextsAhead) {
      const int64_t last = std::min(n, first + kTextsAhead);
      for (int64_t i = first; i < last; ++i) {
        keys[i - first] = text_key(data + offsets[i], offsets[i + 1] - offsets[i], data + offsets[n]);
        sums.ahead(keys[i - first]);
      }
      for (int64_t i = first; i < last; ++i) {
        const TextKey& key = keys[i - first];
        if (parts == 1 || int64_t((key.hash >> 32) % uint64_t(parts)) == part)
          sums.add(key, data + offsets[i], offsets[i + 1] - offsets[i], counts[i], days[i]);
      }
    }
  } catch (const std::bad_alloc&) {
    return 0;
  }
  return 1;
}

// Returns the number of texts that are there at least `least` times; the sum of their bytes goes to `bytes`.
int64_t headrace_text_counts_size(const void* handle, int64_t least, int64_t* bytes) {
  int64_t n = 0;
  *bytes = 0;
  static_cast<const TextCounts*>(handle)->each(least, [&](const uint8_t*, int64_t size, int64_t, int64_t) {
    ++n;
    *bytes += size;
  });
  return n;
}

// These texts, in any order: offsets [n + 1], data [bytes], counts [n], days [n].
void headrace_text_counts_take(const void* handle, int64_t least, int32_t* offsets, uint8_t* data, int64_t* counts,
                               int64_t* days) {
  int64_t i = 0, end = 0;
  offsets[0] = 0;
  static_cast<const TextCounts*>(handle)->each(least, [&](const uint8_t* text, int64_t size, int64_t count, int64_t day) {
    std::memcpy(data + end, text, size_t(size));
    end += size;
    counts[i] = count;
    days[i] = day;
    offsets[++i] = int32_t(end);
  });
}

// A table of n texts in Arrow's layout, none twice, which stay there until it is freed; null where there is no memory.
void* headrace_text_rows(const int32_t* offsets, const uint8_t* data, int64_t n) {
  try {
    return new TextRows(offsets, data == nullptr ? &kNothing : data, n);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void headrace_text_rows_free(void* table) { delete static_cast<TextRows*>(table); }

// Looks up n texts: the row of each in the table, -1 where it is not there.
void headrace_text_rows_find(const void* table, const int32_t* offsets, const uint8_t* data, int64_t n, int32_t* rows) {
  static_cast<const TextRows*>(table)->find(offsets, data == nullptr ? &kNothing : data, n, rows);
}

}  // extern "C"
