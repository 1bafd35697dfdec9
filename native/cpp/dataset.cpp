// Reading a dataset's row groups, called from headrace.dataset.native by ctypes, which lets other threads run meanwhile.
//
// read_plain: a column of a row group as Parquet's PLAIN encoding has it, neither compressed nor with nulls, read from the
// file to where it is wanted: no copy but the kernel's. A chunk that is anything else is left to Arrow's decoder.
// gather: values of a column in another order, each to the batch that it belongs to. permutation: such an order.
// gather_lists: lists in another order. pad_lists: lists to the columns of a batch.
// No allocation: the callers own all memory and have checked all sizes.
//
// Format: https://github.com/apache/parquet-format, README.md (data pages, version 1) and Encodings.md (PLAIN, RLE).

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <utility>

#include "parquet_pages.hpp"

namespace {

using namespace parquet_pages;

constexpr int64_t kHead = 1024;  // bytes in which a page's header and levels must fit

// Returns true where n definition levels, in runs of one bit a level, are all 1: no value is null.
bool all_valid(Bytes b, int64_t n) {
  while (b.good && n > 0) {
    const uint64_t head = b.varint();
    if (head & 1) {  // bit-packed, 8 levels a byte
      for (uint64_t left = head >> 1; left > 0 && n > 0; --left, n -= 8) {
        const unsigned expected = n >= 8 ? 0xffu : (1u << n) - 1;
        if ((b.byte() & expected) != expected) return false;
      }
    } else {
      if (head == 0 || b.byte() != 1) return false;
      n -= std::min(int64_t(std::min(head >> 1, uint64_t(INT64_MAX))), n);
    }
  }
  return b.good;
}

bool read_chunk(int fd, int64_t offset, int64_t end, int64_t values, int64_t width, bool optional, uint8_t* out) {
  uint8_t head[kHead];
  while (values > 0) {
    const int64_t size = std::min(kHead, end - offset);
    if (size <= 0 || !read_all(fd, head, size, offset)) return false;
    Bytes b{head, head + size};
    Page page;
    if (!parse(b, page) || page.type != kDataPage || page.encoding != kPlain || page.compressed != page.uncompressed ||
        page.values <= 0 || page.values > values)
      return false;
    const int64_t body = offset + (b.cursor - head);
    int64_t level_bytes = 0;  // bytes of levels
    if (optional) {
      if (page.levels != kRle) return false;
      uint64_t length = 0;
      for (int shift = 0; shift < 32; shift += 8) length |= uint64_t(b.byte()) << shift;
      if (!b.good || length > uint64_t(b.end - b.cursor)) return false;
      if (!all_valid({b.cursor, b.cursor + length}, page.values)) return false;
      level_bytes = 4 + int64_t(length);
    }
    const int64_t bytes = page.values * width;
    if (page.compressed != level_bytes + bytes || page.compressed > end - body) return false;
    if (!read_all(fd, out, bytes, body + level_bytes)) return false;
    out += bytes;
    values -= page.values;
    offset = body + page.compressed;
  }
  return true;
}

// out[i] = source[order[i]]; returns the largest, as unsigned numbers.
template <class In, class Out, class Unsigned>
Unsigned gather(const In* __restrict source, const int32_t* __restrict order, int64_t n, Out* __restrict out) {
  Unsigned largest = 0;
  int64_t i = 0;
#ifdef __AVX512F__
  if constexpr (sizeof(In) == 4) {
    __m512i most = _mm512_setzero_si512();
    for (; i + 16 <= n; i += 16) {
      const __m512i gathered = _mm512_i32gather_epi32(_mm512_loadu_si512(order + i), source, 4);
      most = _mm512_max_epu32(most, gathered);
      if constexpr (sizeof(Out) == 4) {
        _mm512_storeu_si512(out + i, gathered);
      } else {
        _mm512_storeu_si512(out + i, _mm512_cvtepi32_epi64(_mm512_castsi512_si256(gathered)));
        _mm512_storeu_si512(out + i + 8, _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(gathered, 1)));
      }
    }
    largest = _mm512_reduce_max_epu32(most);
  }
#endif
  for (; i < n; ++i) {
    const In value = source[order[i]];
    largest = std::max(largest, Unsigned(value));
    out[i] = Out(value);
  }
  return largest;
}

// Rows of lists that are padded at a time: a cache line of the widest numbers.
constexpr int64_t kRows = 8;
// Longer lists are padded column after column, with zeros first: blocks of rows would be on too many pages.
constexpr int64_t kShort = 64;

template <class Value>
void gather_lists(const int32_t* offsets, const Value* __restrict values, const int32_t* order, int64_t n,
                  const int32_t* out_offsets, Value* __restrict out) {
  for (int64_t i = 0; i < n; ++i) {
    const Value* from = values + offsets[order[i]];
    for (int32_t position = out_offsets[i]; position < out_offsets[i + 1]; ++position) out[position] = *from++;
  }
}

template <class In, class Out>
void pad_lists(const int32_t* offsets, const In* __restrict values, int64_t rows, int64_t length, Out* __restrict out,
               int64_t stride) {
  if (length > kShort) {
    for (int64_t place = 0; place < length; ++place) std::fill_n(out + place * stride, rows, Out(0));
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t position = offsets[row], place = row; position < offsets[row + 1]; ++position, place += stride)
        out[place] = Out(values[position]);
    return;
  }
  for (int64_t first = 0; first < rows; first += kRows) {
    const int64_t count = std::min(kRows, rows - first);
    for (int64_t place = 0; place < length; ++place)
      for (int64_t row = first; row < first + count; ++row) {
        const int64_t position = offsets[row] + place;
        out[place * stride + row] = position < offsets[row + 1] ? Out(values[position]) : Out(0);
      }
  }
}

}  // namespace

extern "C" {

int headrace_dataset_version() { return 7; }

// Returns 1 where the chunk was read, else 0.
int headrace_read_plain(int fd, int64_t start, int64_t end, int64_t width, int optional, int64_t values, uint8_t* out) {
  return read_chunk(fd, start, end, values, width, optional != 0, out);
}

// The order that NumPy's Generator.permutation(n) gives, with PCG64 in this state: the same numbers, 32 bits each. (O'Neill,
// PCG, 2014: XSL-RR 128/64; Fisher and Yates' shuffle; numbers up to i by as many bits, drawn again where they are above.)
void headrace_permutation(uint64_t state_high, uint64_t state_low, uint64_t step_high, uint64_t step_low, int64_t n,
                          int32_t* out) {
  using Wide = unsigned __int128;
  const Wide factor = Wide(0x2360ED051FC65DA4u) << 64 | 0x4385DF649FCCF645u, step = Wide(step_high) << 64 | step_low;
  Wide state = Wide(state_high) << 64 | state_low;
  uint64_t both = 0;
  bool has_half = false;
  auto draw = [&]() -> uint64_t {  // 32 bits: of each number the lower half first
    if (has_half) {
      has_half = false;
      return both >> 32;
    }
    state = state * factor + step;
    const auto mixed = uint64_t(state >> 64) ^ uint64_t(state);
    const auto rotation = unsigned(state >> 122);
    both = mixed >> rotation | mixed << (-rotation & 63);
    has_half = true;
    return both & UINT32_MAX;
  };
  for (int64_t i = 0; i < n; ++i) out[i] = int32_t(i);
  uint64_t mask = UINT32_MAX;
  for (int64_t i = n - 1; i > 0; --i) {
    while (uint64_t(i) <= mask >> 1) mask >>= 1;  // the fewest bits that hold i
    uint64_t chosen = draw() & mask;
    while (chosen > uint64_t(i)) chosen = draw() & mask;
    std::swap(out[i], out[chosen]);
  }
}

// Values of a column in another order, to several places: part p, which ends at ends[p] of `order`, to column `column` of
// a matrix at bases[p] whose columns are strides[p] bytes apart. Bytes of a value: 4 to 4, 8 to 8, or int32 to int64.
// Returns the largest, as unsigned numbers.
uint64_t headrace_gather(const void* source, int64_t width, const int32_t* order, int64_t parts, const int64_t* ends,
                         const int64_t* bases, const int64_t* strides, int64_t column, int64_t wide) {
  uint64_t largest = 0;
  int64_t start = 0;
  for (int64_t p = 0; p < parts; ++p) {
    char* out = reinterpret_cast<char*>(bases[p]) + column * strides[p];
    const int64_t n = ends[p] - start;
    const int32_t* part_order = order + start;
    uint64_t part_largest = 0;
    if (width == 8)
      part_largest = gather<uint64_t, uint64_t, uint64_t>(static_cast<const uint64_t*>(source), part_order, n,
                                                   reinterpret_cast<uint64_t*>(out));
    else if (wide == 8)
      part_largest = gather<int32_t, int64_t, uint32_t>(static_cast<const int32_t*>(source), part_order, n,
                                                 reinterpret_cast<int64_t*>(out));
    else
      part_largest = gather<uint32_t, uint32_t, uint32_t>(static_cast<const uint32_t*>(source), part_order, n,
                                                   reinterpret_cast<uint32_t*>(out));
    largest = std::max(largest, part_largest);
    start = ends[p];
  }
  return largest;
}

// Lists of int32 offsets, values of 4 or 8 bytes: list i of `out` is list order[i], as long as `out_offsets` [n + 1] says.
void headrace_gather_lists(const int32_t* offsets, const void* values, int64_t width, const int32_t* order, int64_t n,
                           const int32_t* out_offsets, void* out) {
  if (width == 8)
    gather_lists(offsets, static_cast<const uint64_t*>(values), order, n, out_offsets, static_cast<uint64_t*>(out));
  else
    gather_lists(offsets, static_cast<const uint32_t*>(values), order, n, out_offsets, static_cast<uint32_t*>(out));
}

// Element `place` of list `row`, or 0 behind the list's end, to out[place * stride + row], for all places below `length`.
// Bytes of a value: 4 to 4, 8 to 8, or int32 to int64.
void headrace_pad_lists(const int32_t* offsets, const void* values, int64_t width, int64_t rows, int64_t length, void* out,
                        int64_t wide, int64_t stride) {
  if (width == 8)
    pad_lists(offsets, static_cast<const uint64_t*>(values), rows, length, static_cast<uint64_t*>(out), stride);
  else if (wide == 8)
    pad_lists(offsets, static_cast<const int32_t*>(values), rows, length, static_cast<int64_t*>(out), stride);
  else
    pad_lists(offsets, static_cast<const uint32_t*>(values), rows, length, static_cast<uint32_t*>(out), stride);
}

}  // extern "C"
