// Lines that are JSON objects to columns: called from headrace.lake.landing.json_lines by ctypes, which lets other threads run
// meanwhile.
//
// An object gives the values of some keys, each of one kind (text, integer, number, boolean). A line that is not plainly so is
// refused, and the caller parses it in another way: a value of another kind, a key twice, an integer of more than 64 bits, half a
// surrogate pair, anything that RFC 8259 does not have. Other keys' values are passed over, nested ones too; which keys
// there were is told. The caller has seen to it that lines are UTF-8, and owns all memory but that of JsonLines.
#include <charconv>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace {

enum Kind : uint8_t { kText = 0, kInteger = 1, kNumber = 2, kBoolean = 3 };

// Objects and lists in each other; more are refused.
constexpr int kDepth = 64;
constexpr size_t kMostOthers = 256;
// So many digits are 64 bits in any case.
constexpr int kDigits = 18;
constexpr uint64_t kOnes = 0x0101010101010101u, kHighs = 0x8080808080808080u;

// Marks bytes of a word that are a quote, a backslash, or a control character. The lowest mark is exact; higher ones may be false.
uint64_t special(uint64_t word) {
  const auto zero = [](uint64_t x) { return (x - kOnes) & ~x & kHighs; };
  return zero(word ^ (kOnes * '"')) | zero(word ^ (kOnes * '\\')) | ((word - kOnes * 0x20) & ~word & kHighs);
}

struct Column {
  std::string name;
  Kind kind;
  // int64, double or uint8 [lines]; of texts the bytes.
  void* values;
  uint8_t* valid;
  // [lines + 1], for texts alone.
  int32_t* offsets;
  int64_t end = 0;
  int64_t seen = -1;
};

class Line {
 public:
  const uint8_t* cursor;
  const uint8_t* end;

  void blanks() {
    while (cursor < end && (*cursor == ' ' || *cursor == '\t' || *cursor == '\r' || *cursor == '\n')) ++cursor;
  }
  bool take(char token) {
    if (cursor == end || *cursor != uint8_t(token)) return false;
    ++cursor;
    return true;
  }
  bool take(std::string_view token) {
    if (size_t(end - cursor) < token.size() || std::memcmp(cursor, token.data(), token.size()) != 0) return false;
    cursor += token.size();
    return true;
  }

  // To the first quote, backslash or control character behind `cursor`.
  const uint8_t* plain() const {
    const uint8_t* p = cursor;
    for (; end - p >= 8; p += 8) {
      uint64_t word;
      std::memcpy(&word, p, 8);
      if (const uint64_t marks = special(word)) return p + (__builtin_ctzll(marks) >> 3);
    }
    while (p < end && *p != '"' && *p != '\\' && *p >= 0x20) ++p;
    return p;
  }

  // A text behind its first quote, to `out` (null: nowhere), which has room for all of the line; its bytes, or -1.
  int64_t text(uint8_t* out) {
    int64_t size = 0;
    while (true) {
      const uint8_t* stop = plain();
      if (stop == end) return -1;
      if (out != nullptr) std::memcpy(out + size, cursor, size_t(stop - cursor));
      size += stop - cursor;
      cursor = stop + 1;
      if (*stop == '"') return size;
      if (*stop != '\\') return -1;
      uint8_t bytes[4];
      const int64_t n = escaped(bytes);
      if (n < 0) return -1;
      if (out != nullptr) std::memcpy(out + size, bytes, size_t(n));
      size += n;
    }
  }

  // Returns true where a number is next; sets whether it is an integer, and its end, `last`.
  bool number(const uint8_t*& last, bool& is_integer) const {
    const uint8_t* p = cursor;
    const auto some = [&] {
      const uint8_t* first = p;
      while (p < end && uint8_t(*p - '0') < 10) ++p;
      return p > first;
    };
    if (p < end && *p == '-') ++p;
    if (p < end && *p == '0') ++p;
    else if (!some()) return false;
    is_integer = true;
    if (p < end && *p == '.') {
      ++p, is_integer = false;
      if (!some()) return false;
    }
    if (p < end && (*p == 'e' || *p == 'E')) {
      ++p, is_integer = false;
      if (p < end && (*p == '+' || *p == '-')) ++p;
      if (!some()) return false;
    }
    last = p;
    return true;
  }

  // Passes over a value; false where none is next.
  bool pass(int depth) {
    if (cursor == end || depth == kDepth) return false;
    const uint8_t* last;
    bool is_integer;
    switch (*cursor) {
      case '"': ++cursor; return text(nullptr) >= 0;
      case 't': return take("true");
      case 'f': return take("false");
      case 'n': return take("null");
      case '[': case '{': return pass_all(depth);
      default:
        if (!number(last, is_integer)) return false;
        cursor = last;
        return true;
    }
  }

 private:
  // The elements of a list, the keys and values of an object.
  bool pass_all(int depth) {
    const bool keyed = *cursor++ == '{';
    const char close = keyed ? '}' : ']';
    blanks();
    if (take(close)) return true;
    do {
      blanks();
      if (keyed) {
        if (!take('"') || text(nullptr) < 0) return false;
        blanks();
        if (!take(':')) return false;
        blanks();
      }
      if (!pass(depth + 1)) return false;
      blanks();
    } while (take(','));
    return take(close);
  }

  // Four hexadecimal digits, or -1.
  int64_t hexadecimal() {
    if (end - cursor < 4) return -1;
    int64_t value = 0;
    for (int k = 0; k < 4; ++k) {
      const uint8_t c = *cursor++;
      const int64_t digit = c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
      if (digit < 0) return -1;
      value = value << 4 | digit;
    }
    return value;
  }

  // Writes the character behind a backslash as UTF-8; returns its bytes, or -1.
  int64_t escaped(uint8_t* out) {
    if (cursor == end) return -1;
    const uint8_t sign = *cursor++;
    switch (sign) {
      case '"': case '\\': case '/': *out = sign; return 1;
      case 'b': *out = '\b'; return 1;
      case 'f': *out = '\f'; return 1;
      case 'n': *out = '\n'; return 1;
      case 'r': *out = '\r'; return 1;
      case 't': *out = '\t'; return 1;
      case 'u': break;
      default: return -1;
    }
    int64_t code = hexadecimal();
    if (code < 0 || (code >= 0xdc00 && code < 0xe000)) return -1;
    if (code >= 0xd800 && code < 0xdc00) {
      if (!take("\\u")) return -1;
      const int64_t low = hexadecimal();
      if (low < 0xdc00 || low >= 0xe000) return -1;
      code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    if (code < 0x80) {
      out[0] = uint8_t(code);
      return 1;
    }
    const int64_t n = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (int64_t k = n - 1; k > 0; --k, code >>= 6) out[k] = uint8_t(0x80 | (code & 0x3f));
    out[0] = uint8_t((n == 2 ? 0xc0 : n == 3 ? 0xe0 : 0xf0) | code);
    return n;
  }
};

// The columns of some lines.
class JsonLines {
 public:
  std::vector<Column> columns;
  std::vector<std::string> other_keys;

  // Parses n lines (line i is data[offsets[i]..offsets[i + 1]]); whether each was parsed to `taken`. How many were: the rows.
  int64_t parse(const uint8_t* data, const int64_t* offsets, int64_t n, bool pass_others, uint8_t* taken) {
    int64_t row = 0;
    for (Column& c : columns) {
      c.end = 0, c.seen = -1;
      if (c.kind == kText) c.offsets[0] = 0;
    }
    for (int64_t i = 0; i < n; ++i) {
      Line line{data + offsets[i], data + offsets[i + 1]};
      const size_t keys_before = other_keys.size();
      taken[i] = object(line, row, i, pass_others);
      if (!taken[i]) {
        other_keys.resize(keys_before);
        continue;
      }
      for (Column& c : columns) {
        if (c.seen != i) c.valid[row] = 0;
        if (c.kind != kText) continue;
        if (c.seen != i || !c.valid[row]) c.end = c.offsets[row];
        c.offsets[row + 1] = int32_t(c.end);
      }
      ++row;
    }
    return row;
  }

 private:
  bool object(Line& line, int64_t row, int64_t number, bool pass_others) {
    line.blanks();
    if (!line.take('{')) return false;
    line.blanks();
    size_t next = 0;
    if (!line.take('}')) {
      do {
        line.blanks();
        if (!line.take('"')) return false;
        const uint8_t* stop = line.plain();
        if (stop == line.end || *stop != '"') return false;
        const std::string_view key(reinterpret_cast<const char*>(line.cursor), size_t(stop - line.cursor));
        line.cursor = stop + 1;
        line.blanks();
        if (!line.take(':')) return false;
        line.blanks();
        Column* column = find(key, next);
        if (column == nullptr) {
          if (!pass_others || !note(key) || !line.pass(1)) return false;
        } else if (column->seen == number || !value(line, *column, row)) {
          return false;
        } else {
          column->seen = number;
        }
        line.blanks();
      } while (line.take(','));
      if (!line.take('}')) return false;
    }
    line.blanks();
    return line.cursor == line.end;
  }

  // The column of a key: most often the one behind the last.
  Column* find(std::string_view key, size_t& next) {
    for (size_t k = 0; k < columns.size(); ++k, ++next) {
      if (next >= columns.size()) next = 0;
      if (columns[next].name == key) return &columns[next++];
    }
    return nullptr;
  }

  bool note(std::string_view key) {
    for (const std::string& name : other_keys)
      if (name == key) return true;
    if (other_keys.size() == kMostOthers) return false;
    other_keys.emplace_back(key);
    return true;
  }

  bool value(Line& line, Column& c, int64_t row) {
    if (line.take("null")) {
      c.valid[row] = 0;
      return true;
    }
    c.valid[row] = 1;
    if (c.kind == kText) {
      if (!line.take('"')) return false;
      const int64_t size = line.text(static_cast<uint8_t*>(c.values) + c.offsets[row]);
      c.end = c.offsets[row] + size;
      return size >= 0 && c.end <= INT32_MAX;
    }
    if (c.kind == kBoolean) {
      auto& out = static_cast<uint8_t*>(c.values)[row];
      out = line.take("true");
      return out || line.take("false");
    }
    const uint8_t* last;
    bool is_integer;
    if (!line.number(last, is_integer)) return false;
    const auto* first = reinterpret_cast<const char*>(line.cursor);
    const auto* number_end = reinterpret_cast<const char*>(last);
    line.cursor = last;
    if (c.kind == kNumber) {
      auto& out = static_cast<double*>(c.values)[row];
      const auto parsed = std::from_chars(first, number_end, out);
      return parsed.ec == std::errc() && parsed.ptr == number_end;
    }
    const bool negative = *first == '-';
    first += negative;
    if (!is_integer || (negative && *first == '0')) return false;
    auto& out = static_cast<int64_t*>(c.values)[row];
    if (number_end - first > kDigits) {
      const auto parsed = std::from_chars(first - negative, number_end, out);
      return parsed.ec == std::errc() && parsed.ptr == number_end;
    }
    int64_t number = 0;
    for (; first < number_end; ++first) number = number * 10 + (*first - '0');
    out = negative ? -number : number;
    return true;
  }
};

}  // namespace

extern "C" {

int headrace_lines_version() { return 1; }

// For columns whose names (UTF-8) lie in `names` one behind the other, ends[k] behind the k-th; null where there is no memory.
void* headrace_json_lines(const char* names, const int64_t* ends, const uint8_t* kinds, int64_t columns) {
  try {
    auto lines = std::make_unique<JsonLines>();
    int64_t start = 0;
    for (int64_t k = 0; k < columns; start = ends[k++])
      lines->columns.push_back({std::string(names + start, names + ends[k]), Kind(kinds[k]), nullptr, nullptr, nullptr});
    return lines.release();
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void headrace_json_lines_free(void* lines) { delete static_cast<JsonLines*>(lines); }

// Sets where column k's values go: for each line int64, a double or a byte; of texts the bytes, at most those of all lines, and
// offsets [lines + 1]. valid: a byte a line.
void headrace_json_lines_column(void* lines, int64_t k, void* values, uint8_t* valid, int32_t* offsets) {
  Column& c = static_cast<JsonLines*>(lines)->columns[size_t(k)];
  c.values = values, c.valid = valid, c.offsets = offsets;
}

// See JsonLines::parse; -1 where there is no memory.
int64_t headrace_json_lines_parse(void* lines, const uint8_t* data, const int64_t* offsets, int64_t n, int pass_others,
                                  uint8_t* taken) {
  try {
    return static_cast<JsonLines*>(lines)->parse(data, offsets, n, pass_others != 0, taken);
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

// The k-th of the other keys that lines had, and its bytes; null behind the last.
const char* headrace_json_lines_other(const void* lines, int64_t k, int64_t* bytes) {
  const auto& other_keys = static_cast<const JsonLines*>(lines)->other_keys;
  if (size_t(k) >= other_keys.size()) return nullptr;
  *bytes = int64_t(other_keys[size_t(k)].size());
  return other_keys[size_t(k)].data();
}

}  // extern "C"
