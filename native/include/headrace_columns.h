/* Column functions that Spark lacks, over plain pointers. Two libraries have this interface: libheadrace_columns.so takes
 * pointers to host memory, libheadrace_columns_cuda.so pointers to device memory and a CUDA stream. Their results are equal
 * bit for bit: both compile the functions of columns.hpp.
 *
 * Layouts are those of Arrow and cuDF: values, int32 offsets, validity with the least significant bit first. A slice is
 * given by moved `offsets` and by the bit at which its validity begins. Every function returns 0 or an error code, writes
 * what it is asked for only, and reads nothing outside the arrays it was given: an offset that points outside
 * `values` is brought to its edge.
 */
#ifndef HEADRACE_COLUMNS_H
#define HEADRACE_COLUMNS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HEADRACE_COLUMNS_VERSION 1
/* Characters of an n-gram, at most. */
#define HEADRACE_MOST_N 8
/* Columns of a cross, at most. */
#define HEADRACE_MOST_COLUMNS 8
/* Hash functions of a MinHash signature, at most. */
#define HEADRACE_MOST_HASHES 1024

enum {
  HEADRACE_OK = 0,
  HEADRACE_BAD_ARGUMENT = 1, /* a parameter outside its range, or a pointer missing */
  HEADRACE_TOO_MANY = 2,     /* rows x results could exceed int32 offsets: use fewer rows, or a smaller limit */
  HEADRACE_DEVICE = 3        /* the CUDA runtime refused; headrace_columns_reason() says why */
};

/* One column: text (values uint8) or ids (values int64). Without offsets, row i is value i, else
 * values[offsets[i] .. offsets[i + 1]). The struct itself is always in host memory. Seven words of 8 bytes. */
typedef struct {
  const int32_t *offsets;        /* [rows + 1], or NULL */
  const void *values;            /* [length] */
  int64_t length;                /* of `values`: nothing at or behind it is read */
  const uint8_t *validity;       /* of the rows: bit validity_offset + i; NULL: all are there */
  int64_t validity_offset;
  const uint8_t *value_validity; /* of the values of a list, likewise */
  int64_t value_validity_offset;
} headrace_column;

int32_t headrace_columns_version(void);
/* The reason why the last call of this thread returned HEADRACE_DEVICE, or "". */
const char *headrace_columns_reason(void);
/* Bytes of scratch memory that the *_offsets functions want for so many rows; 0 on the host. */
int64_t headrace_offsets_workspace(int64_t rows);

/* Hashed n-grams of text: each n characters that follow each other, as 1 + pmod(xxhash64(their UTF-8, seed 42), buckets); a text of
 * fewer characters is one n-gram, an empty one has none. Each ill-formed sequence counts as U+FFFD, split as Unicode (3.9, "maximal
 * subpart") recommends. The first `most` of a row; 0: all. 1 <= n <= HEADRACE_MOST_N, 1 <= buckets.
 * First call _offsets (out [rows + 1], out_validity [(rows + 7) / 8] or NULL), then the other with out [offsets[rows]]. */
int32_t headrace_ngrams_offsets(const headrace_column *text, int64_t rows, int32_t n, int32_t most, int32_t *out,
                                uint8_t *out_validity, void *workspace, void *stream);
int32_t headrace_ngrams(const headrace_column *text, int64_t rows, int32_t n, int32_t most, int32_t buckets,
                        const int32_t *offsets, int32_t *out, void *stream);

/* Every combination of one value of each column, the first column's slowest, as 1 + pmod(xxhash64(a, b, ...), buckets), where the hash
 * of a column is the seed of the next as in Spark. Null values are left out; a row in which a column is null is null. The
 * first `most` of a row, at least 1; rows x most must fit int32. 1 <= count <= HEADRACE_MOST_COLUMNS. */
int32_t headrace_cross_offsets(const headrace_column *columns, int32_t count, int64_t rows, int32_t most, int32_t *out,
                               uint8_t *out_validity, void *workspace, void *stream);
int32_t headrace_cross(const headrace_column *columns, int32_t count, int64_t rows, int32_t most, int32_t buckets,
                       const int32_t *offsets, int32_t *out, void *stream);

/* MinHash signature of a list of ids as a set (Broder 1997): out[row * hashes + j] is the least, as signed numbers, of
 * xxhash64(j, id) over the row's ids. Null ids are left out; where none is left the row is null and its numbers are 0. */
int32_t headrace_minhash(const headrace_column *ids, int64_t rows, int32_t hashes, int64_t *out, uint8_t *out_validity,
                         void *stream);

/* Spark's xxhash64 (XXH64) of text and of numbers: of each row with seeds[row], or with 42 where `seeds` is NULL; of a null the seed
 * itself. out [rows]. In libheadrace_columns.so alone. */
int32_t headrace_xxhash64_text(const headrace_column *text, int64_t rows, const int64_t *seeds, int64_t *out);
int32_t headrace_xxhash64_integers(const int64_t *values, int64_t rows, const int64_t *seeds, int64_t *out);

#ifdef __cplusplus
}
#endif
#endif
