// Text to instants, digit by digit: called from headrace.lake.landing.convert by ctypes, which says what is read and does the same
// with NumPy where this is not built. The callers own all memory.
#include <cstdint>

namespace {

constexpr int64_t kFirstYear = 1900, kLastYear = 9998;
constexpr int64_t kDate = 10, kMinutes = 16, kSeconds = 19, kOffset = 6, kMostOffset = 17;
constexpr int64_t kSecond = 1'000'000, kMinute = 60 * kSecond, kDay = 24 * 60 * kMinute;

// The number in text[first, last); clears `good` where one is no digit.
int64_t digits(const uint8_t* text, int64_t first, int64_t last, bool& good) {
  int64_t value = 0;
  for (int64_t k = first; k < last; ++k) {
    const auto digit = uint8_t(text[k] - '0');
    good &= digit < 10;
    value = value * 10 + digit;
  }
  return value;
}

// Days since 1970 of a date of the Gregorian calendar: years that begin in March, in eras of 400.
int64_t days_since_1970(int64_t year, int64_t month, int64_t day) {
  year -= month <= 2;
  const int64_t era = year / 400, of_era = year % 400;
  const int64_t of_year = (153 * (month + (month > 2 ? -3 : 9)) + 2) / 5 + day - 1;
  return era * 146'097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719'468;
}

int64_t date(const uint8_t* text, bool& good) {
  static constexpr int64_t lengths[] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
  good &= text[4] == '-' && text[7] == '-';
  const int64_t year = digits(text, 0, 4, good), month = digits(text, 5, 7, good), day = digits(text, 8, 10, good);
  good &= month >= 1 && month <= 12 && day >= 1 && year >= kFirstYear && year <= kLastYear;
  if (!good) return 0;
  const bool leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
  good &= day <= lengths[month - 1] + (leap && month == 2);
  return days_since_1970(year, month, day);
}

// Microseconds since 1970 of the first `length` characters.
int64_t moment(const uint8_t* text, int64_t length, bool may_be_date, bool& good) {
  if (length < kDate) {
    good = false;
    return 0;
  }
  int64_t micros = date(text, good) * kDay;
  if (length == kDate) {
    good &= may_be_date;
    return micros;
  }
  if (length != kMinutes && length != kSeconds && (length < kSeconds + 2 || length > kSeconds + 7)) {
    good = false;
    return 0;
  }
  good &= (text[10] == 'T' || text[10] == ' ') && text[13] == ':';
  const int64_t hours = digits(text, 11, 13, good), minutes = digits(text, 14, 16, good);
  good &= hours < 24 && minutes < 60;
  micros += (hours * 60 + minutes) * kMinute;
  if (length >= kSeconds) {
    good &= text[16] == ':';
    const int64_t seconds = digits(text, 17, 19, good);
    good &= seconds < 60;
    micros += seconds * kSecond;
  }
  if (length > kSeconds) {
    good &= text[19] == '.';
    int64_t part = digits(text, 20, length, good);
    for (int64_t k = length; k < kSeconds + 7; ++k) part *= 10;
    micros += part;
  }
  return micros;
}

}  // namespace

extern "C" {

// n texts (text i is at data[offsets[i]..offsets[i + 1]]) to microseconds since 1970; whether each is a time, and whether it
// has no offset, and so is a time of some zone's.
void headrace_instants(const int64_t* offsets, const uint8_t* data, int64_t n, int64_t* micros, uint8_t* good, uint8_t* local) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t length = offsets[i + 1] - offsets[i];
    micros[i] = 0, good[i] = 0, local[i] = 0;
    if (length < kDate || length > kSeconds + 7 + kOffset) continue;
    const uint8_t* text = data + offsets[i];
    int64_t tail = text[length - 1] == 'Z' ? 1 : 0;
    if (!tail && length >= kMinutes + kOffset && text[length - 3] == ':' &&
        (text[length - kOffset] == '+' || text[length - kOffset] == '-'))
      tail = kOffset;
    bool fine = true;
    int64_t instant = moment(text, length - tail, tail == 0, fine);
    if (tail == kOffset) {
      const int64_t sign = length - kOffset;
      const int64_t hours = digits(text, sign + 1, sign + 3, fine), minutes = digits(text, sign + 4, sign + 6, fine);
      fine &= hours <= kMostOffset && minutes < 60;
      const int64_t shift = (hours * 60 + minutes) * kMinute;
      instant += text[sign] == '-' ? shift : -shift;
    }
    micros[i] = fine ? instant : 0;
    good[i] = fine;
    local[i] = fine && tail == 0;
  }
}

}  // extern "C"
