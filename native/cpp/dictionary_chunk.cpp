// A column chunk of a Parquet file as its distinct values and, for each row, the number of its value: called from
// headrace.features.arrow.kernels by ctypes, which lets other threads run meanwhile.
//
// Parquet's writers keep repeated values once each, on a dictionary page, and numbers on the data pages, in runs and packed
// bits. Here the numbers are unpacked and nothing else is done to them: no value is hashed for each of its rows. Where a
// writer's dictionary was full and texts follow as they are (PLAIN), these are looked up among the others. What is not like
// that (other compressions, data pages of version 2, lists, integers that follow as they are) is left to Arrow's decoder, as
// is whatever is damaged, so that its words say how.
//
// Format: https://github.com/apache/parquet-format, Encodings.md (PLAIN, RLE and bit-packed hybrid, dictionary); raw Snappy:
// https://github.com/google/snappy/blob/main/format_description.txt.

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "parquet_pages.hpp"
#include "text_hash.hpp"

namespace {

using namespace parquet_pages;

// Type and CompressionCodec of parquet.thrift.
constexpr int kInt32 = 1, kInt64 = 2, kByteArray = 6;
constexpr int kUncompressed = 0, kSnappy = 1;
// Bytes that may be read behind the end of a buffer.
constexpr int64_t kPad = 64;
constexpr uint32_t kNull = UINT32_MAX;
// Numbers of values and offsets of texts have 31 bits.
constexpr int64_t kMost = INT32_MAX;

// Memory that is not filled with zeros, and stays from one use to the next.
class Buffer {
 public:
  uint8_t* room(int64_t size) {
    if (size + kPad > size_) {
      data_.reset(new uint8_t[size_t(size + kPad)]);
      size_ = size + kPad;
    }
    return data_.get();
  }

 private:
  std::unique_ptr<uint8_t[]> data_;
  int64_t size_ = 0;
};

// Raw Snappy to exactly `size_out` bytes. `out` may be written kPad bytes behind its end.
bool snappy(const uint8_t* in, int64_t size, uint8_t* out, int64_t size_out) {
  const uint8_t* const end = in + size;
  Bytes head{in, end};
  if (head.varint() != uint64_t(size_out) || !head.good) return false;
  in = head.cursor;
  int64_t written = 0;
  while (in < end) {
    const uint8_t tag = *in++;
    if ((tag & 3) == 0) {  // bytes as they are
      int64_t length = tag >> 2;
      if (length >= 60) {
        const int64_t more = length - 59;
        if (end - in < more) return false;
        uint32_t value = 0;
        std::memcpy(&value, in, size_t(more));
        length = value;
        in += more;
      }
      ++length;
      if (length > end - in || length > size_out - written) return false;
      if (length <= 16 && end - in >= 16) std::memcpy(out + written, in, 16);
      else std::memcpy(out + written, in, size_t(length));
      in += length;
      written += length;
      continue;
    }
    int64_t length, offset;  // bytes that are there already
    if ((tag & 3) == 1) {
      if (end - in < 1) return false;
      length = 4 + ((tag >> 2) & 7);
      offset = (tag >> 5) << 8 | in[0];
      in += 1;
    } else {
      length = 1 + (tag >> 2);
      if ((tag & 3) == 2) {
        uint16_t value;
        if (end - in < 2) return false;
        std::memcpy(&value, in, 2);
        offset = value;
        in += 2;
      } else {
        uint32_t value;
        if (end - in < 4) return false;
        std::memcpy(&value, in, 4);
        offset = value;
        in += 4;
      }
    }
    if (offset == 0 || offset > written || length > size_out - written) return false;
    uint8_t* to = out + written;
    const uint8_t* from = to - offset;
    if (offset >= 16) {  // a copy has at most 64 bytes
      for (int64_t i = 0; i < length; i += 16) std::memcpy(to + i, from + i, 16);
    } else if (offset >= 8) {
      for (int64_t i = 0; i < length; i += 8) std::memcpy(to + i, from + i, 8);
    } else {
      for (int64_t i = 0; i < length; ++i) to[i] = from[i];
    }
    written += length;
  }
  return written == size_out;
}

// n numbers of W bits each, a multiple of 8 of them, the first in the lowest bits. 8 bytes behind the end may be read.
template <int W>
void unpack(const uint8_t* in, int64_t n, uint32_t* out) {
  constexpr uint64_t mask = W == 32 ? UINT32_MAX : (uint64_t(1) << W) - 1;
  for (int64_t i = 0; i < n; i += 8, in += W) {
    for (int k = 0; k < 8; ++k) {
      uint64_t word;
      std::memcpy(&word, in + (k * W >> 3), 8);
      out[i + k] = uint32_t(word >> (k * W & 7) & mask);
    }
  }
}

using Unpack = void (*)(const uint8_t*, int64_t, uint32_t*);
template <int... W>
constexpr std::array<Unpack, sizeof...(W)> unpackers(std::integer_sequence<int, W...>) {
  return {unpack<W>...};
}
constexpr auto kUnpack = unpackers(std::make_integer_sequence<int, 33>{});

// n numbers of `width` bits in runs and packed bits. `out` has room for 8 more; behind the end of `b` are kPad bytes.
bool hybrid(Bytes b, int width, int64_t n, uint32_t* out) {
  while (n > 0) {
    const uint64_t head = b.varint();
    if (!b.good || head <= 1) return false;
    if (head & 1) {
      const uint64_t groups = head >> 1;
      // The last group may say more numbers than there are; no writer leaves out its bytes.
      const int64_t some = int64_t(std::min(groups, uint64_t(n + 7) / 8));
      if (uint64_t(b.end - b.cursor) < uint64_t(some) * uint64_t(width)) return false;
      kUnpack[size_t(width)](b.cursor, 8 * some, out);
      if (groups > uint64_t(some)) b.cursor = b.end;
      else b.cursor += some * width;
      out += std::min(n, 8 * some);
      n -= std::min(n, 8 * some);
    } else {
      const int64_t length = int64_t(std::min(head >> 1, uint64_t(n)));
      uint64_t value = 0;
      for (int shift = 0; shift < width; shift += 8) value |= uint64_t(b.byte()) << shift;
      if (!b.good) return false;
      std::fill(out, out + length, uint32_t(value));
      out += length;
      n -= length;
    }
  }
  return true;
}

// Definition levels of one bit as a bitmap, n of them; how many are 1, or -1. Where all are 1 there may be no bitmap.
int64_t levels(Bytes b, int64_t n, std::vector<uint64_t>& bits) {
  int64_t row = 0, valid = 0;
  if (Bytes all = b; n > 0) {  // most columns have no null
    const uint64_t head = all.varint();
    if (!(head & 1) && head >> 1 >= uint64_t(n) && all.byte() == 1 && all.good) return n;
  }
  bits.assign(size_t(n / 64 + 2), 0);
  auto* bytes = reinterpret_cast<uint8_t*>(bits.data());
  const auto set = [&](uint64_t eight, int64_t some) {  // some <= 8
    eight &= (1u << some) - 1;
    valid += __builtin_popcountll(eight);
    uint16_t both;
    std::memcpy(&both, bytes + (row >> 3), 2);
    both = uint16_t(both | eight << (row & 7));
    std::memcpy(bytes + (row >> 3), &both, 2);
    row += some;
  };
  while (row < n) {
    const uint64_t head = b.varint();
    if (!b.good || head <= 1) return -1;
    if (head & 1) {
      for (uint64_t left = head >> 1; left > 0 && row < n; --left) set(b.byte(), std::min<int64_t>(8, n - row));
    } else {
      const uint8_t value = b.byte();
      if (value > 1) return -1;
      for (int64_t left = int64_t(std::min(head >> 1, uint64_t(n - row))); left > 0;) {
        const int64_t some = std::min<int64_t>(left, 8);
        if (value) set(0xff, some);
        else row += some;
        left -= some;
      }
    }
    if (!b.good) return -1;
  }
  return valid;
}

// out[i] = the next of `values` where bit i is set, else kNull; n rows.
void spread(const uint32_t* values, const std::vector<uint64_t>& bits, int64_t n, uint32_t* out) {
  int64_t i = 0;
#ifdef __AVX512F__
  const auto* mask = reinterpret_cast<const uint8_t*>(bits.data());
  for (; i + 16 <= n; i += 16) {
    uint16_t is_valid;
    std::memcpy(&is_valid, mask + i / 8, 2);
    _mm512_storeu_si512(out + i, _mm512_mask_expandloadu_epi32(_mm512_set1_epi32(-1), __mmask16(is_valid), values));
    values += __builtin_popcount(is_valid);
  }
#endif
  for (; i < n; ++i) {
    const bool is_valid = bits[size_t(i / 64)] >> (i % 64) & 1;
    out[i] = is_valid ? *values : kNull;
    values += is_valid;
  }
}

// Texts, each once, in the order in which they came.
class Texts {
 public:
  std::vector<int32_t> offsets{0};
  std::vector<uint8_t> data;

  int64_t size() const { return int64_t(offsets.size()) - 1; }

  // The numbers of the next n texts of `b` (each behind its length), new ones where they are `size()` at the time. Whether
  // they are there, and are not too many. kPad bytes behind the end of `b` may be read.
  bool read(Bytes b, int64_t n, uint32_t* out) {
    const uint8_t* texts[kTextsAhead];
    uint32_t sizes[kTextsAhead];
    TextKey keys[kTextsAhead];
    for (int64_t first = 0; first < n; first += kTextsAhead) {
      const int64_t some = std::min(kTextsAhead, n - first);
      for (int64_t i = 0; i < some; ++i) {
        if (b.end - b.cursor < 4) return false;
        std::memcpy(&sizes[i], b.cursor, 4);
        b.cursor += 4;
        if (sizes[i] > uint64_t(b.end - b.cursor)) return false;
        texts[i] = b.cursor;
        b.cursor += sizes[i];
        keys[i] = text_key(texts[i], sizes[i], b.end + kPad);
        __builtin_prefetch(&slots_[keys[i].hash & (slots_.size() - 1)]);
      }
      for (int64_t i = 0; i < some; ++i)
        if ((out[first + i] = number(keys[i], texts[i], sizes[i])) == kNull) return false;
    }
    return true;
  }

  // Room for n texts, of which not more are expected.
  void expect(int64_t n) {
    size_t places = slots_.size();
    while (int64_t(places) < 2 * n) places *= 2;
    if (places > slots_.size()) grow(places);
    offsets.reserve(size_t(n) + 1);
  }

 private:
  struct Slot {
    uint64_t word = 0;
    uint32_t number = kNull, size = 0;
  };

  uint32_t number(const TextKey& key, const uint8_t* text, uint32_t length) {
    for (size_t place = key.hash & (slots_.size() - 1);; place = (place + 1) & (slots_.size() - 1)) {
      Slot& s = slots_[place];
      if (s.number == kNull) return insert(s, key, text, length);
      if (s.word == key.word && s.size == length &&
          (length <= kShortText || std::memcmp(data.data() + offsets[s.number], text, length) == 0))
        return s.number;
    }
  }

  uint32_t insert(Slot& slot, const TextKey& key, const uint8_t* text, uint32_t length) {
    if (int64_t(data.size()) + length > kMost || size() + 1 >= kMost) return kNull;
    const auto number = uint32_t(size());
    slot = {key.word, number, length};
    data.insert(data.end(), text, text + length);
    offsets.push_back(int32_t(data.size()));
    if (3 * offsets.size() > 2 * slots_.size()) grow(2 * slots_.size());
    return number;
  }

  void grow(size_t places) {
    std::vector<Slot> larger(places);
    for (const Slot& s : slots_) {
      if (s.number == kNull) continue;
      const uint8_t* text = data.data() + offsets[s.number];
      size_t place = text_key(text, s.size, data.data() + data.size()).hash & (places - 1);
      while (larger[place].number != kNull) place = (place + 1) & (places - 1);
      larger[place] = s;
    }
    slots_.swap(larger);
  }

  std::vector<Slot> slots_ = std::vector<Slot>(1024);
};

// A decoded column chunk.
class Chunk {
 public:
  Chunk(int64_t rows, int physical) : physical_(physical), index_(new uint32_t[size_t(rows) + 16]), rows_(rows) {}

  // Returns true where all of the chunk was read.
  bool read(const uint8_t* begin, const uint8_t* end, int codec, bool optional) {
    Bytes b{begin, end};
    Buffer plain;
    int64_t row = 0;
    bool begun = false;
    while (row < rows_) {
      Page page;
      if (!parse(b, page) || page.compressed < 0 || page.compressed > b.end - b.cursor || page.uncompressed < 0 ||
          page.uncompressed > kMost || page.values < 0 || page.values > kMost)
        return false;
      const uint8_t* body = b.cursor;
      b.pass(uint64_t(page.compressed));
      if (codec == kSnappy) {
        uint8_t* out = plain.room(page.uncompressed);
        if (!snappy(body, page.compressed, out, page.uncompressed)) return false;
        body = out;
      } else if (page.compressed != page.uncompressed) {
        return false;
      }
      const Bytes values{body, body + page.uncompressed};
      if (page.type == kDictionaryPage) {
        if (begun || (page.encoding != kPlain && page.encoding != kPlainDictionary)) return false;
        begun = true;
        if (!dictionary(values, page.values)) return false;
      } else if (page.type == kDataPage) {
        if (!begun || page.values > rows_ - row || !data_page(values, page, optional, index_.get() + row)) return false;
        row += page.values;
      } else {
        return false;
      }
    }
    return true;
  }

  int64_t size() const { return physical_ == kByteArray ? texts_.size() : int64_t(integers_.size()) / width(); }
  int64_t bytes() const { return int64_t(physical_ == kByteArray ? texts_.data.size() : integers_.size()); }
  int64_t nulls() const { return nulls_; }

  // The rows' numbers, a null's being size().
  template <class Number>
  void take(Number* out) const {
    const auto none = Number(size());
    if (!nulls_) {
      for (int64_t i = 0; i < rows_; ++i) out[i] = Number(index_[i]);
    } else {
      for (int64_t i = 0; i < rows_; ++i) out[i] = index_[i] == kNull ? none : Number(index_[i]);
    }
  }
  void take_values(int32_t* offsets, uint8_t* data) const {
    if (physical_ == kByteArray) {
      std::copy(texts_.offsets.begin(), texts_.offsets.end(), offsets);
      std::copy(texts_.data.begin(), texts_.data.end(), data);
    } else {
      std::copy(integers_.begin(), integers_.end(), data);
    }
  }

 private:
  int64_t width() const { return physical_ == kInt32 ? 4 : 8; }

  bool dictionary(Bytes values, int64_t n) {
    if (physical_ == kByteArray) {
      if (n > (values.end - values.cursor) / 4) return false;  // each has its length before it
      texts_.expect(n);
      some_.resize(size_t(n));
      return texts_.read(values, n, some_.data()) && texts_.size() == n;  // else damaged, or one is there twice
    }
    if (values.end - values.cursor < n * width()) return false;
    integers_.assign(values.cursor, values.cursor + n * width());
    return physical_ == kInt32 ? distinct<int32_t>() : distinct<int64_t>();
  }

  template <class Value>
  bool distinct() const {
    std::vector<Value> sorted(integers_.size() / sizeof(Value));
    if (!sorted.empty()) std::memcpy(sorted.data(), integers_.data(), integers_.size());
    std::sort(sorted.begin(), sorted.end());
    return std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
  }

  bool data_page(Bytes values, const Page& page, bool optional, uint32_t* out) {
    int64_t n = page.values;
    if (optional) {
      if (page.levels != kRle || values.end - values.cursor < 4) return false;
      uint32_t length;
      std::memcpy(&length, values.cursor, 4);
      values.cursor += 4;
      if (length > uint64_t(values.end - values.cursor)) return false;
      n = levels({values.cursor, values.cursor + length}, page.values, bits_);
      if (n < 0) return false;
      values.cursor += length;
    }
    uint32_t* to = out;
    if (n < page.values) {
      some_.resize(size_t(page.values) + 16);
      to = some_.data();
    }
    if (!numbers(values, int(page.encoding), n, to)) return false;
    if (n < page.values) {
      nulls_ += page.values - n;
      spread(to, bits_, page.values, out);
    }
    return true;
  }

  bool numbers(Bytes values, int encoding, int64_t n, uint32_t* out) {
    if (encoding == kPlain) {
      return physical_ == kByteArray && texts_.read(values, n, out);
    }
    if (encoding != kPlainDictionary && encoding != kRleDictionary) return false;
    if (n == 0) return true;
    const int width = values.byte();
    if (width > 32 || !values.good || !hybrid(values, width, n, out)) return false;
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; ++i) largest = std::max(largest, out[i]);
    return int64_t(largest) < size();
  }

  int physical_;
  std::unique_ptr<uint32_t[]> index_;
  int64_t rows_, nulls_ = 0;
  Texts texts_;
  std::vector<uint8_t> integers_;
  std::vector<uint64_t> bits_;
  std::vector<uint32_t> some_;
};

}  // namespace

extern "C" {

// A column chunk of `size` bytes at `offset` of a file, which begins with its dictionary page. Parquet's numbers of types and
// codecs: int32, int64 or byte array; none or Snappy. Null where it is none that is read here.
void* headrace_chunk_read(int fd, int64_t offset, int64_t size, int64_t rows, int physical, int codec, int optional) {
  if (codec != kUncompressed && codec != kSnappy) return nullptr;
  if (physical != kInt32 && physical != kInt64 && physical != kByteArray) return nullptr;
  if (offset < 0 || size < 0 || size > INT64_MAX - kPad || rows < 0 || rows > kMost) return nullptr;
  try {
    Buffer stored;
    uint8_t* data = stored.room(size);
    if (!read_all(fd, data, size, offset)) return nullptr;
    auto chunk = std::make_unique<Chunk>(rows, physical);
    return chunk->read(data, data + size, codec, optional != 0) ? chunk.release() : nullptr;
  } catch (const std::exception&) {  // no memory, or more than a vector holds
    return nullptr;
  }
}

void headrace_chunk_free(void* chunk) { delete static_cast<Chunk*>(chunk); }

// Returns the number of values; sets their bytes, and the number of rows that are null.
int64_t headrace_chunk_size(const void* handle, int64_t* bytes, int64_t* nulls) {
  const auto& chunk = *static_cast<const Chunk*>(handle);
  *bytes = chunk.bytes();
  *nulls = chunk.nulls();
  return chunk.size();
}

// Takes for each row the number of its value, in 1, 2 or 4 bytes, that of a null behind all values; the values: of texts the offsets
// [n + 1] and the data, of integers the data alone.
void headrace_chunk_take(const void* handle, int64_t width, void* index, int32_t* offsets, void* data) {
  const auto& chunk = *static_cast<const Chunk*>(handle);
  if (width == 1) chunk.take(static_cast<uint8_t*>(index));
  else if (width == 2) chunk.take(static_cast<uint16_t*>(index));
  else chunk.take(static_cast<uint32_t*>(index));
  chunk.take_values(offsets, static_cast<uint8_t*>(data));
}

}  // extern "C"
