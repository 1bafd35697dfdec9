// Ends of lines of text, and counts of control characters: called from headrace.lake.landing.blocks by ctypes.
#include <cstdint>
#include <cstring>

extern "C" {

// The places of n newlines.
void headrace_newlines(const uint8_t* data, int64_t size, int64_t n, int64_t* places) {
  const uint8_t* cursor = data;
  for (int64_t i = 0; i < n; ++i) {
    cursor = static_cast<const uint8_t*>(std::memchr(cursor, '\n', size_t(data + size - cursor)));
    places[i] = cursor++ - data;
  }
}

// To counts: the control characters (bytes below 0x20), and the tabs and newlines among them.
void headrace_control_characters(const uint8_t* data, int64_t size, int64_t* counts) {
  int64_t low = 0, tabs = 0, lines = 0;
  for (int64_t start = 0; start < size;) {
    // So few that one byte counts them: the compiler adds many at once.
    const int64_t end = size - start < 255 * 64 ? size : start + 255 * 64;
    uint8_t lows[64] = {}, some[64] = {}, ends[64] = {};
    int64_t i = start;
    for (; i + 64 <= end; i += 64)
      for (int k = 0; k < 64; ++k) {
        lows[k] += data[i + k] < 0x20;
        some[k] += data[i + k] == '\t';
        ends[k] += data[i + k] == '\n';
      }
    for (; i < end; ++i) {
      low += data[i] < 0x20;
      tabs += data[i] == '\t';
      lines += data[i] == '\n';
    }
    for (int k = 0; k < 64; ++k) low += lows[k], tabs += some[k], lines += ends[k];
    start = end;
  }
  counts[0] = low, counts[1] = tabs, counts[2] = lines;
}

}  // extern "C"
