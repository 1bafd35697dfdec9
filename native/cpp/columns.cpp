// The column functions over host memory.
#include "columns.hpp"

using namespace headrace;

namespace {

// Offsets and validity of the rows that come out. `is_valid` also tells rows that are null; each byte is written once.
template <typename Count, typename There>
int32_t offsets(int64_t rows, int32_t *out, uint8_t *out_validity, Count count, There is_valid) {
  int64_t total = 0;
  out[0] = 0;
  for (int64_t row = 0; row < rows; row++) {
    total += count(row);
    if (total > INT32_MAX) return HEADRACE_TOO_MANY;
    out[row + 1] = static_cast<int32_t>(total);
  }
  if (out_validity == nullptr) return HEADRACE_OK;
  for (int64_t byte = 0; byte < (rows + 7) / 8; byte++) {
    uint8_t bits = 0;
    for (int64_t row = 8 * byte; row < 8 * byte + 8 && row < rows; row++) bits |= (is_valid(row) ? 1 : 0) << (row & 7);
    out_validity[byte] = bits;
  }
  return HEADRACE_OK;
}

}  // namespace

int32_t headrace_columns_version(void) { return HEADRACE_COLUMNS_VERSION; }

const char *headrace_columns_reason(void) { return ""; }

int64_t headrace_offsets_workspace(int64_t) { return 0; }

int32_t headrace_ngrams_offsets(const headrace_column *text, int64_t rows, int32_t n, int32_t most, int32_t *out,
                                uint8_t *out_validity, void *, void *) {
  if (!good_ngrams(text, rows, n, most) || out == nullptr) return HEADRACE_BAD_ARGUMENT;
  return offsets(
      rows, out, out_validity, [&](int64_t row) { return count_ngrams(*text, row, n, most); },
      [&](int64_t row) { return row_is_valid(*text, row); });
}

int32_t headrace_ngrams(const headrace_column *text, int64_t rows, int32_t n, int32_t most, int32_t buckets,
                        const int32_t *offsets, int32_t *out, void *) {
  if (!good_ngrams(text, rows, n, most) || buckets < 1 || offsets == nullptr) return HEADRACE_BAD_ARGUMENT;
  for (int64_t row = 0; row < rows; row++)
    write_ngrams(*text, row, n, buckets, offsets[row + 1] - offsets[row], out + offsets[row]);
  return HEADRACE_OK;
}

int32_t headrace_cross_offsets(const headrace_column *columns, int32_t count, int64_t rows, int32_t most, int32_t *out,
                               uint8_t *out_validity, void *, void *) {
  Columns checked;
  if (const int32_t error = check_cross(columns, count, rows, most, &checked)) return error;
  if (out == nullptr) return HEADRACE_BAD_ARGUMENT;
  return offsets(
      rows, out, out_validity, [&](int64_t row) { return count_cross(checked, row, most); },
      [&](int64_t row) { return all_are_valid(checked, row); });
}

int32_t headrace_cross(const headrace_column *columns, int32_t count, int64_t rows, int32_t most, int32_t buckets,
                       const int32_t *offsets, int32_t *out, void *) {
  Columns checked;
  if (const int32_t error = check_cross(columns, count, rows, most, &checked)) return error;
  if (buckets < 1 || offsets == nullptr) return HEADRACE_BAD_ARGUMENT;
  for (int64_t row = 0; row < rows; row++)
    write_cross(checked, row, buckets, offsets[row + 1] - offsets[row], out + offsets[row]);
  return HEADRACE_OK;
}

int32_t headrace_minhash(const headrace_column *ids, int64_t rows, int32_t hashes, int64_t *out, uint8_t *out_validity,
                         void *) {
  if (!good(ids, rows) || hashes < 1 || hashes > HEADRACE_MOST_HASHES || (out == nullptr && rows > 0))
    return HEADRACE_BAD_ARGUMENT;
  if (rows * hashes > INT32_MAX) return HEADRACE_TOO_MANY;
  uint64_t seeds[HEADRACE_MOST_HASHES];
  for (int32_t j = 0; j < hashes; j++) seeds[j] = hash_integer(j, SEED);
  for (int64_t row = 0; row < rows; row++)
    for (int32_t j = 0; j < hashes; j++) out[row * hashes + j] = least_hash(*ids, row, seeds[j]);
  if (out_validity == nullptr) return HEADRACE_OK;
  for (int64_t byte = 0; byte < (rows + 7) / 8; byte++) {
    uint8_t bits = 0;
    for (int64_t row = 8 * byte; row < 8 * byte + 8 && row < rows; row++)
      bits |= (any_is_valid(*ids, row) ? 1 : 0) << (row & 7);
    out_validity[byte] = bits;
  }
  return HEADRACE_OK;
}
