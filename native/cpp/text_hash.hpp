// A hash of texts for tables in memory: multiplications of 64 to 128 bits, eight bytes at a time.
#pragma once

#include <cstdint>
#include <cstring>

inline uint64_t mixed_bits(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return uint64_t(product) ^ uint64_t(product >> 64);
}

inline uint64_t text_hash(const uint8_t* text, int64_t size) {
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
