// Spark's xxhash64 of whole columns over host memory: the hashes of features that need no vocabulary, and of rows.
#include <string.h>

#include "columns.hpp"

using namespace headrace;

namespace {

template <typename Word>
uint64_t read(const uint8_t *cursor) {
  Word word;
  memcpy(&word, cursor, sizeof(word));  // the bytes may begin anywhere
  return word;
}

uint64_t hash_bytes(const uint8_t *cursor, int64_t size, uint64_t seed) {
  const uint8_t *const end = cursor + size;
  uint64_t h = seed + P5;
  if (size >= 32) {
    uint64_t v[4] = {seed + P1 + P2, seed + P2, seed, seed - P1};
    for (; end - cursor >= 32; cursor += 32)
      for (int i = 0; i < 4; i++) v[i] = lane(v[i], read<uint64_t>(cursor + 8 * i));
    h = rotl(v[0], 1) + rotl(v[1], 7) + rotl(v[2], 12) + rotl(v[3], 18);
    for (int i = 0; i < 4; i++) h = (h ^ lane(0, v[i])) * P1 + P4;
  }
  h += static_cast<uint64_t>(size);
  for (; end - cursor >= 8; cursor += 8) h = with_word(h, read<uint64_t>(cursor));
  if (end - cursor >= 4) {
    h = rotl(h ^ read<uint32_t>(cursor) * P1, 23) * P2 + P3;
    cursor += 4;
  }
  for (; cursor < end; cursor++) h = rotl(h ^ *cursor * P5, 11) * P1;
  return finish(h);
}

uint64_t seed_of(const int64_t *seeds, int64_t row) {
  return seeds == nullptr ? SEED : static_cast<uint64_t>(seeds[row]);
}

}  // namespace

int32_t headrace_xxhash64_text(const headrace_column *text, int64_t rows, const int64_t *seeds, int64_t *out) {
  if (!good(text, rows) || (rows > 0 && (text->offsets == nullptr || out == nullptr))) return HEADRACE_BAD_ARGUMENT;
  const uint8_t *values = static_cast<const uint8_t *>(text->values);
  for (int64_t row = 0; row < rows; row++) {
    const uint64_t seed = seed_of(seeds, row);
    const Span span = span_of(*text, row);
    out[row] = static_cast<int64_t>(
        row_is_valid(*text, row) ? hash_bytes(values + span.begin, span.end - span.begin, seed) : seed);
  }
  return HEADRACE_OK;
}

int32_t headrace_xxhash64_integers(const int64_t *values, int64_t rows, const int64_t *seeds, int64_t *out) {
  if (rows < 0 || (rows > 0 && (values == nullptr || out == nullptr))) return HEADRACE_BAD_ARGUMENT;
  for (int64_t row = 0; row < rows; row++)
    out[row] = static_cast<int64_t>(hash_integer(values[row], seed_of(seeds, row)));
  return HEADRACE_OK;
}
