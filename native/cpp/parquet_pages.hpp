// Page headers of Parquet files: Thrift structs in the compact protocol (thrift/doc/specs/thrift-compact-protocol.md).
// Format: https://github.com/apache/parquet-format, README.md (data pages, version 1) and parquet.thrift.
#pragma once

#include <cerrno>
#include <cstdint>

#include <unistd.h>

namespace parquet_pages {

// PageType and Encoding of parquet.thrift.
constexpr int kDataPage = 0, kDictionaryPage = 2;
constexpr int kPlain = 0, kPlainDictionary = 2, kRle = 3, kRleDictionary = 8;

// Reads bytes at an offset of a file; false where the file ends before them.
inline bool read_all(int fd, uint8_t* out, int64_t size, int64_t offset) {
  while (size > 0) {
    const ssize_t got = pread(fd, out, size_t(size), off_t(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    out += got, offset += got, size -= got;
  }
  return true;
}

// Bytes that are there; past their end `good` is false and everything reads as 0.
struct Bytes {
  const uint8_t* cursor;
  const uint8_t* end;
  bool good = true;

  uint8_t byte() {
    if (cursor < end) return *cursor++;
    good = false;
    return 0;
  }
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const uint8_t b = byte();
      value |= uint64_t(b & 0x7f) << shift;
      if (!(b & 0x80)) return value;
    }
    good = false;
    return 0;
  }
  int64_t zigzag() {
    const uint64_t v = varint();
    return int64_t(v >> 1) ^ -int64_t(v & 1);
  }
  void pass(uint64_t n) {
    if (n > uint64_t(end - cursor)) good = false;
    else cursor += n;
  }
};

enum Type { kStop = 0, kTrue = 1, kFalse = 2, kI8 = 3, kI16 = 4, kI32 = 5, kI64 = 6, kDouble = 7, kBinary = 8, kStruct = 12 };

// Structs in each other; more are damage: a page header has two.
constexpr int kDepth = 16;

// Calls body(field, type) for each field of a struct; body reads the field's value.
template <class Body>
void fields(Bytes& b, const Body& body) {
  int64_t field = 0;
  while (b.good) {
    const uint8_t head = b.byte();
    const int type = head & 0x0f;
    if (type == kStop) return;
    field = head >> 4 ? int64_t(uint64_t(field) + (head >> 4)) : b.zigzag();
    body(field, type);
  }
}

inline void skip(Bytes& b, int type, int depth = 0) {
  switch (type) {
    case kTrue: case kFalse: return;
    case kI8: b.byte(); return;
    case kI16: case kI32: case kI64: b.varint(); return;
    case kDouble: b.pass(8); return;
    case kBinary: b.pass(b.varint()); return;
    case kStruct:
      if (depth == kDepth) b.good = false;
      else fields(b, [&](int64_t, int t) { skip(b, t, depth + 1); });
      return;
    default: b.good = false;  // no page header has lists or maps
  }
}

// Header of a page: its type, sizes in bytes, number of values, their encoding and that of definition levels.
struct Page {
  int64_t type = -1, uncompressed = -1, compressed = -1, values = -1, encoding = -1, levels = -1;
};

inline bool parse(Bytes& b, Page& page) {
  fields(b, [&](int64_t field, int type) {
    if (field <= 3 && type == kI32) {
      const int64_t value = b.zigzag();
      (field == 1 ? page.type : field == 2 ? page.uncompressed : page.compressed) = value;
    } else if ((field == 5 || field == 7) && type == kStruct) {
      fields(b, [&](int64_t inner, int t) {
        if (inner > 3 || t != kI32) return skip(b, t);  // of a dictionary page the third says whether it is sorted
        const int64_t value = b.zigzag();
        (inner == 1 ? page.values : inner == 2 ? page.encoding : page.levels) = value;
      });
    } else {
      skip(b, type);
    }
  });
  return b.good;
}

}  // namespace parquet_pages
