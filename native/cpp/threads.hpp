// A loop's range, split over threads that live as long as the loop. What is computed never depends on their number.
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

template <class Body>
void parallel_parts(int64_t parts, const Body& body) {
  std::vector<std::thread> workers;
  for (int64_t part = 1; part < parts; ++part) workers.emplace_back([&, part] { body(part); });
  body(0);
  for (auto& w : workers) w.join();
}

// body(from, to), each call with a range of 0..n.
template <class Body>
void parallel(int64_t n, int threads, const Body& body) {
  const int64_t parts = n < 1024 ? 1 : std::max(1, threads);
  parallel_parts(parts, [&](int64_t part) { body(n * part / parts, n * (part + 1) / parts); });
}
