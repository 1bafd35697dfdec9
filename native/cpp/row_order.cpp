// The order of rows by part and hash: called from headrace.features.arrow.kernels by ctypes, which lets other threads
// run meanwhile. Hashes are spread evenly, so their highest bits say where each row goes but for a few places: no comparison
// sort of all rows, whose branches nobody predicts. Rows that are not like that are sorted by comparison.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <vector>

namespace {

struct Row {
  uint64_t key;  // the hash, in an order of unsigned numbers
  int32_t number;

  bool operator<(const Row& other) const { return key != other.key ? key < other.key : number < other.number; }
};

constexpr uint64_t kSign = uint64_t(1) << 63;
// More rows whose highest bits are alike are sorted by comparison.
constexpr int64_t kFew = 24;

// Memory that is not filled with zeros.
std::unique_ptr<Row[]> rows_of(int64_t n) { return std::unique_ptr<Row[]>(new Row[size_t(std::max<int64_t>(n, 1))]); }

void sort_few(Row* rows, int64_t n) {
  for (int64_t i = 1; i < n; ++i) {
    const Row row = rows[i];
    int64_t slot = i;
    for (; slot > 0 && row < rows[slot - 1]; --slot) rows[slot] = rows[slot - 1];
    rows[slot] = row;
  }
}

// Sorts n rows, which come in the order of their numbers where keys are alike. Both have room for n; the result is in `to`.
void sort(const Row* from, int64_t n, Row* to, std::vector<int32_t>& ends) {
  int bits = 0;
  while (bits < 18 && (int64_t(2) << bits) < n) ++bits;
  const auto bucket = [bits](const Row& row) { return bits ? size_t(row.key >> (64 - bits)) : 0; };
  ends.assign(size_t(1) << bits, 0);
  for (int64_t i = 0; i < n; ++i) ++ends[bucket(from[i])];
  int32_t preceding = 0;
  for (int32_t& end : ends) {
    const int32_t some = end;
    end = preceding;
    preceding += some;
  }
  for (int64_t i = 0; i < n; ++i) to[ends[bucket(from[i])]++] = from[i];
  int32_t start = 0;
  for (const int32_t end : ends) {
    if (end - start > kFew) std::sort(to + start, to + end);
    else sort_few(to + start, end - start);
    start = end;
  }
}

template <class Part>
void order_by_part(const int64_t* hashes, const Part* part, int64_t n, int64_t parts, int32_t* order, int64_t* sorted,
                   int64_t* edges) {
  std::fill(edges, edges + parts + 1, 0);
  if (part == nullptr) {
    edges[1] = n;
  } else {
    for (int64_t i = 0; i < n; ++i)
      if (int64_t(part[i]) < parts) ++edges[int64_t(part[i]) + 1];
  }
  int64_t most = 0;
  for (int64_t p = 0; p < parts; ++p) {
    most = std::max(most, edges[p + 1]);
    edges[p + 1] += edges[p];
  }
  const auto all = rows_of(edges[parts]), some = rows_of(most);
  std::vector<int64_t> next(edges, edges + parts);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t p = part == nullptr ? 0 : int64_t(part[i]);
    if (p < parts) all[size_t(next[size_t(p)]++)] = {uint64_t(hashes[i]) ^ kSign, int32_t(i)};
  }
  std::vector<int32_t> ends;
  for (int64_t p = 0; p < parts; ++p) {
    const int64_t start = edges[p], size = edges[p + 1] - start;
    sort(all.get() + start, size, some.get(), ends);
    for (int64_t i = 0; i < size; ++i) {
      order[start + i] = some[size_t(i)].number;
      sorted[start + i] = int64_t(some[size_t(i)].key ^ kSign);
    }
  }
}

}  // namespace

extern "C" {

// The n rows of parts 0..parts-1 by part, hash and number: `order` [n], and their hashes, `sorted` [n]; where each part begins
// and the last one ends, `edges` [parts + 1]. A row's part is a number of `width` bytes (1, 2 or 4); rows of other numbers are
// left out. Null: all rows are of part 0. Whether there was memory for it.
int headrace_row_order(const int64_t* hashes, const void* part, int64_t width, int64_t n, int64_t parts, int32_t* order,
                       int64_t* sorted, int64_t* edges) {
  try {
    if (part == nullptr || width == 1) {
      order_by_part(hashes, static_cast<const uint8_t*>(part), n, parts, order, sorted, edges);
    } else if (width == 2) {
      order_by_part(hashes, static_cast<const uint16_t*>(part), n, parts, order, sorted, edges);
    } else {
      order_by_part(hashes, static_cast<const uint32_t*>(part), n, parts, order, sorted, edges);
    }
  } catch (const std::exception&) {
    return 0;
  }
  return 1;
}

}  // extern "C"
