// Keys of texts for tables in memory. Their hash: multiplications of 64 to 128 bits, eight bytes at a time.
#pragma once

#include <cstdint>
#include <cstring>

inline uint64_t mixed_bits(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return uint64_t(product) ^ uint64_t(product >> 64);
}

inline uint64_t long_text_hash(const uint8_t* text, int64_t size) {
  uint64_t h = mixed_bits(uint64_t(size) ^ 0x9E3779B97F4A7C15u, 0xC2B2AE3D27D4EB4Fu);
  for (; size >= 8; text += 8, size -= 8) {
    uint64_t word;
    std::memcpy(&word, text, 8);
    h = mixed_bits(h ^ word, 0x9FB21C651E98DF25u);
  }
  if (size > 0) {
    uint64_t word = 0;
    std::memcpy(&word, text, size_t(size));
    h = mixed_bits(h ^ word, 0xA0761D6478BD642Fu);
  }
  return mixed_bits(h, 0xE7037ED1A0B428DBu);
}

// Texts of so many bytes are kept in a table's slots themselves: a look at one reads no other memory.
constexpr int64_t kShortText = 8;
// Texts whose slots are asked for before the first of them is looked at.
constexpr int64_t kTextsAhead = 32;

struct TextKey {
  uint64_t word;  // a short text itself, zeros behind it; of a longer one the hash
  uint64_t hash;
};

// Bytes up to `end` may be read.
inline TextKey text_key(const uint8_t* text, int64_t size, const uint8_t* end) {
  if (size > kShortText) {
    const uint64_t hash = long_text_hash(text, size);
    return {hash, hash};
  }
  uint64_t word = 0;
  if (end - text >= 8) {
    std::memcpy(&word, text, 8);
    if (size < 8) word &= (uint64_t(1) << (8 * size)) - 1;
  } else if (size > 0) {
    std::memcpy(&word, text, size_t(size));
  }
  return {word, mixed_bits(word ^ 0x9E3779B97F4A7C15u, uint64_t(size) ^ 0xE7037ED1A0B428DBu)};
}
