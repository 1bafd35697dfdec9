// The column functions' work on one row, for host and device: the only place where a result is computed.
// Integer arithmetic only, so that both give the same bits. headrace_columns.h says what is computed.
#pragma once

#include <stdint.h>

#include "headrace_columns.h"

#ifdef __CUDACC__
#define HEADRACE_BOTH __host__ __device__ __forceinline__
#else
#define HEADRACE_BOTH inline
#endif

namespace headrace {

// XXH64 (Collet), as Spark's xxhash64 uses it.
constexpr uint64_t P1 = 0x9E3779B185EBCA87ull, P2 = 0xC2B2AE3D27D4EB4Full, P3 = 0x165667B19E3779F9ull,
                   P4 = 0x85EBCA77C2B2AE63ull, P5 = 0x27D4EB2F165667C5ull, SEED = 42;

HEADRACE_BOTH uint64_t rotl(uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }

HEADRACE_BOTH uint64_t lane(uint64_t acc, uint64_t word) { return rotl(acc + word * P2, 31) * P1; }

HEADRACE_BOTH uint64_t finish(uint64_t h) {
  h = (h ^ (h >> 33)) * P2;
  h = (h ^ (h >> 29)) * P3;
  return h ^ (h >> 32);
}

HEADRACE_BOTH uint64_t with_word(uint64_t h, uint64_t word) { return rotl(h ^ lane(0, word), 27) * P1 + P4; }

// The hash of a bigint.
HEADRACE_BOTH uint64_t hash_integer(int64_t value, uint64_t seed) {
  return finish(with_word(seed + P5 + 8, static_cast<uint64_t>(value)));
}

HEADRACE_BOTH int32_t bucket(uint64_t hash, int32_t buckets) {
  const int64_t rest = static_cast<int64_t>(hash) % buckets;
  return static_cast<int32_t>(rest < 0 ? rest + buckets : rest) + 1;
}

HEADRACE_BOTH bool bit(const uint8_t *bits, int64_t position) {
  return bits == nullptr || (bits[position >> 3] >> (position & 7) & 1);
}

HEADRACE_BOTH bool row_is_valid(const headrace_column &c, int64_t row) { return bit(c.validity, c.validity_offset + row); }

HEADRACE_BOTH bool value_is_valid(const headrace_column &c, int64_t position) {
  // Without offsets the rows' validity is the values'.
  return c.offsets == nullptr || bit(c.value_validity, c.value_validity_offset + position);
}

// The values of a row, within the array whatever the offsets say.
struct Span {
  int64_t begin, end;
};

HEADRACE_BOTH int64_t clamped(int64_t position, int64_t length) {
  return position < 0 ? 0 : position > length ? length : position;
}

HEADRACE_BOTH Span span_of(const headrace_column &c, int64_t row) {
  if (!row_is_valid(c, row)) return {0, 0};
  if (c.offsets == nullptr) return {clamped(row, c.length), clamped(row + 1, c.length)};
  const int64_t begin = clamped(c.offsets[row], c.length), end = clamped(c.offsets[row + 1], c.length);
  return {begin, end < begin ? begin : end};
}

// A character as the bytes of its UTF-8, the first lowest; of an ill-formed sequence U+FFFD.
struct Character {
  uint32_t bytes;
  int size;      // of `bytes`
  int consumed;  // of the text
};

HEADRACE_BOTH bool follows(const uint8_t *text, const uint8_t *end, uint8_t least = 0x80, uint8_t most = 0xBF) {
  return text < end && *text >= least && *text <= most;
}

// The next character of a text that is not at its end. Well-formed sequences are those of table 3-7 of the Unicode Standard.
HEADRACE_BOTH Character next_character(const uint8_t *text, const uint8_t *end) {
  const uint32_t replacement = 0xBDBFEF;  // EF BF BD
  const uint8_t first = *text;
  if (first < 0x80) return {first, 1, 1};
  if (first < 0xC2 || first > 0xF4) return {replacement, 3, 1};
  const uint8_t least = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
  const uint8_t most = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
  if (!follows(text + 1, end, least, most)) return {replacement, 3, 1};
  uint32_t bytes = first | static_cast<uint32_t>(text[1]) << 8;
  if (first < 0xE0) return {bytes, 2, 2};
  if (!follows(text + 2, end)) return {replacement, 3, 2};
  bytes |= static_cast<uint32_t>(text[2]) << 16;
  if (first < 0xF0) return {bytes, 3, 3};
  if (!follows(text + 3, end)) return {replacement, 3, 3};
  return {bytes | static_cast<uint32_t>(text[3]) << 24, 4, 4};
}

// Up to HEADRACE_MOST_N characters in registers: 32 bytes, the first lowest; zero behind them.
struct Gram {
  uint64_t word[4] = {0, 0, 0, 0};
  int size = 0;

  HEADRACE_BOTH void append(const Character &c) {
    const uint64_t bytes = c.bytes;
    const int shift = 8 * (size & 7), first_word = size >> 3;
    const uint64_t low = bytes << shift, high = shift == 0 ? 0 : bytes >> (64 - shift);
    for (int i = 0; i < 4; i++) word[i] |= i == first_word ? low : i == first_word + 1 ? high : 0;
    size += c.size;
  }

  // Forget the first `bytes`, 1 to 4.
  HEADRACE_BOTH void drop(int bytes) {
    const int shift = 8 * bytes;
    for (int i = 0; i < 3; i++) word[i] = word[i] >> shift | word[i + 1] << (64 - shift);
    word[3] >>= shift;
    size -= bytes;
  }

  HEADRACE_BOTH uint64_t hash() const {
    uint64_t h;
    int words = size >> 3;
    if (size == 32) {
      uint64_t v[4] = {SEED + P1 + P2, SEED + P2, SEED, SEED - P1};
      for (int i = 0; i < 4; i++) v[i] = lane(v[i], word[i]);
      h = rotl(v[0], 1) + rotl(v[1], 7) + rotl(v[2], 12) + rotl(v[3], 18);
      for (int i = 0; i < 4; i++) h = (h ^ lane(0, v[i])) * P1 + P4;
      return finish(h + 32);
    }
    h = SEED + P5 + static_cast<uint64_t>(size);
    uint64_t rest = word[0];
    for (int i = 0; i < 3; i++) {
      if (i < words) {
        h = with_word(h, word[i]);
        rest = word[i + 1];
      }
    }
    int left = size & 7;
    if (left >= 4) {
      h = rotl(h ^ (rest & 0xFFFFFFFFull) * P1, 23) * P2 + P3;
      rest >>= 32;
      left -= 4;
    }
    for (; left > 0; left--, rest >>= 8) h = rotl(h ^ (rest & 0xFF) * P5, 11) * P1;
    return finish(h);
  }
};

// The number of n-grams of a row.
HEADRACE_BOTH int32_t count_ngrams(const headrace_column &text, int64_t row, int32_t n, int32_t most) {
  const Span span = span_of(text, row);
  const uint8_t *values = static_cast<const uint8_t *>(text.values);
  // Enough characters for `most` n-grams are counted, no more.
  const int64_t enough = most > 0 ? static_cast<int64_t>(most) + n - 1 : INT64_MAX;
  int64_t characters = 0;
  for (int64_t position = span.begin; position < span.end && characters < enough; characters++)
    position += next_character(values + position, values + span.end).consumed;
  if (characters == 0) return 0;
  return characters < n ? 1 : static_cast<int32_t>(characters - n + 1);
}

// Write them: `count` of them, which count_ngrams has told.
HEADRACE_BOTH void write_ngrams(const headrace_column &text, int64_t row, int32_t n, int32_t buckets, int32_t count,
                                int32_t *out) {
  const Span span = span_of(text, row);
  const uint8_t *values = static_cast<const uint8_t *>(text.values), *cursor = values + span.begin, *end = values + span.end;
  const uint8_t *oldest = cursor;  // the text of the gram's first character
  Gram gram;
  int held = 0;
  int32_t written = 0;
  while (cursor < end && written < count) {
    const Character c = next_character(cursor, end);
    cursor += c.consumed;
    if (held == n) {
      const Character first = next_character(oldest, end);
      gram.drop(first.size);
      oldest += first.consumed;
    } else {
      held++;
    }
    gram.append(c);
    if (held == n) out[written++] = bucket(gram.hash(), buckets);
  }
  if (written < count) out[written] = bucket(gram.hash(), buckets);  // a text of fewer than n characters
}

struct Columns {
  headrace_column column[HEADRACE_MOST_COLUMNS];
  int32_t count;
};

HEADRACE_BOTH bool all_are_valid(const Columns &columns, int64_t row) {
  for (int i = 0; i < columns.count; i++)
    if (!row_is_valid(columns.column[i], row)) return false;
  return true;
}

HEADRACE_BOTH int32_t count_cross(const Columns &columns, int64_t row, int32_t most) {
  if (!all_are_valid(columns, row)) return 0;
  // The smaller of the product and `most`; a later column without values makes it 0, so all are looked at.
  int64_t product = 1;
  for (int i = 0; i < columns.count; i++) {
    const headrace_column &c = columns.column[i];
    const Span span = span_of(c, row);
    int64_t valid_values = 0;
    for (int64_t position = span.begin; position < span.end && valid_values < most; position++)
      valid_values += value_is_valid(c, position);
    product *= valid_values;
    if (product > most) product = most;
  }
  return static_cast<int32_t>(product);
}

// The position of the first valid value at or behind `position`, or the span's end.
HEADRACE_BOTH int64_t next_valid(const headrace_column &c, int64_t position, int64_t end) {
  while (position < end && !value_is_valid(c, position)) position++;
  return position;
}

HEADRACE_BOTH void write_cross(const Columns &columns, int64_t row, int32_t buckets, int32_t count, int32_t *out) {
  if (count == 0) return;
  int64_t position[HEADRACE_MOST_COLUMNS], end[HEADRACE_MOST_COLUMNS];
  // hash[i]: of the values chosen in the columns before i.
  uint64_t hash[HEADRACE_MOST_COLUMNS + 1];
  hash[0] = SEED;
  int level = 0;
  const int last = columns.count - 1;
  for (int i = 0; i <= last; i++) {
    const headrace_column &c = columns.column[i];
    const Span span = span_of(c, row);
    position[i] = next_valid(c, span.begin, span.end);
    end[i] = span.end;
  }
  for (int32_t written = 0; written < count;) {
    const headrace_column &c = columns.column[level];
    if (position[level] >= end[level]) {
      // Through: begin this column again, and go on in the one before it.
      if (level == 0) return;
      const Span span = span_of(c, row);
      position[level] = next_valid(c, span.begin, span.end);
      level--;
      position[level] = next_valid(columns.column[level], position[level] + 1, end[level]);
      continue;
    }
    hash[level + 1] = hash_integer(static_cast<const int64_t *>(c.values)[position[level]], hash[level]);
    if (level < last) {
      level++;
      continue;
    }
    out[written++] = bucket(hash[level + 1], buckets);
    position[level] = next_valid(c, position[level] + 1, end[level]);
  }
}

HEADRACE_BOTH bool any_is_valid(const headrace_column &ids, int64_t row) {
  const Span span = span_of(ids, row);
  return next_valid(ids, span.begin, span.end) < span.end;
}

// One number of a signature.
HEADRACE_BOTH int64_t least_hash(const headrace_column &ids, int64_t row, uint64_t seed) {
  const Span span = span_of(ids, row);
  const int64_t *values = static_cast<const int64_t *>(ids.values);
  bool any = false;
  int64_t least = 0;
  for (int64_t position = span.begin; position < span.end; position++) {
    if (!value_is_valid(ids, position)) continue;
    const int64_t hash = static_cast<int64_t>(hash_integer(values[position], seed));
    least = !any || hash < least ? hash : least;
    any = true;
  }
  return least;
}

// Checks of arguments in both libraries.

inline bool good(const headrace_column *c, int64_t rows) {
  return c != nullptr && rows >= 0 && rows < INT32_MAX && c->length >= 0 && (c->values != nullptr || c->length == 0);
}

inline bool good_ngrams(const headrace_column *text, int64_t rows, int32_t n, int32_t most) {
  // Text without offsets would be single bytes.
  return good(text, rows) && (text->offsets != nullptr || rows == 0) && n >= 1 && n <= HEADRACE_MOST_N && most >= 0;
}

inline int32_t check_cross(const headrace_column *columns, int32_t count, int64_t rows, int32_t most, Columns *out) {
  if (columns == nullptr || count < 1 || count > HEADRACE_MOST_COLUMNS || most < 1) return HEADRACE_BAD_ARGUMENT;
  for (int i = 0; i < count; i++) {
    if (!good(columns + i, rows)) return HEADRACE_BAD_ARGUMENT;
    out->column[i] = columns[i];
  }
  out->count = count;
  return rows * most > INT32_MAX ? HEADRACE_TOO_MANY : HEADRACE_OK;
}

}  // namespace headrace
