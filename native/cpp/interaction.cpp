// DLRM's interaction: the dot products of all pairs of a sample's vectors, and their gradient, sample by sample.
//
// In torch these are a concatenation, a product of small matrices, a selection of its lower triangle and another
// concatenation, each a pass over all samples, and twice as many backward. Here a sample's vectors (7 KiB for 27 of 64)
// stay in the first cache until they are done with. A sample's bits depend on nothing but its own vectors.
//
// The features' vectors are a matrix, or lie anywhere: then their addresses are given, and nobody has to bring them
// together first. So do their gradients: each is stored at its address, or added to what is there, sample by sample.

#include <cstdint>
#include <cstring>
#include <vector>

#include "threads.hpp"

namespace {

constexpr int64_t kLanes = 16;
typedef float Lanes __attribute__((vector_size(4 * kLanes)));

inline Lanes load(const float* p) {
  Lanes v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, Lanes v) { std::memcpy(p, &v, sizeof v); }

inline void prefetch(const float* row, int64_t width) {
  for (int64_t c = 0; c < width; c += kLanes) __builtin_prefetch(row + c, 0, 3);
}

// A sample's vectors: the bottom MLP's, then the features'.
struct Vectors {
  const float* const* row;
  int64_t width;
  const float* operator[](int64_t i) const { return row[i]; }
};

// The samples' vectors in memory.
struct Source {
  const float* bottom;
  const float* features;  // [batch, count, width]
  const int64_t* addresses;  // of rows, in place of features: [batch, count]
  int64_t count, width;

  const float* row_of(int64_t b, int64_t i) const {
    if (i == 0) return bottom + b * width;
    const int64_t place = b * count + i - 1;
    return addresses ? reinterpret_cast<const float*>(intptr_t(addresses[place])) : features + place * width;
  }
  Vectors sample(int64_t b, std::vector<const float*>& rows) const {
    for (int64_t i = 0; i <= count; ++i) rows[size_t(i)] = row_of(b, i);
    return Vectors{rows.data(), width};
  }
};

// The place of a vector's gradient.
struct Place {
  float* row;
  bool adds;
};

// out[j] for j < i: x_i . x_j. `columns`: the vectors as columns, [width, room]; rows `from` to `from + kRows` at once.
template <int kRows>
void rows_of_pairs(const Vectors& x, const float* columns, int64_t room, int64_t from, float* out) {
  const float* row[kRows];
  for (int r = 0; r < kRows; ++r) row[r] = x[from + r];
  for (int64_t j = 0; j < from + kRows - 1; j += kLanes) {
    Lanes sum[kRows] = {};
    for (int64_t k = 0; k < x.width; ++k) {
      const Lanes column = load(columns + k * room + j);
      for (int r = 0; r < kRows; ++r) sum[r] += row[r][k] * column;
    }
    for (int r = 0; r < kRows; ++r) {
      const int64_t i = from + r, remaining = i - j;
      float* place = out + i * (i - 1) / 2 + j;
      if (remaining >= kLanes) store(place, sum[r]);
      else if (remaining > 0) std::memcpy(place, &sum[r], size_t(remaining) * sizeof(float));
    }
  }
}

void forward(const Source& source, int64_t batch, float* out, int threads) {
  const int64_t count = source.count, width = source.width, n = count + 1;
  const int64_t room = (n + kLanes - 1) / kLanes * kLanes, wide = width + n * count / 2;
  parallel(batch, threads, [&](int64_t begin, int64_t end) {
    std::vector<float> columns(size_t(width * room), 0.0f);
    std::vector<const float*> rows(static_cast<size_t>(n));
    for (int64_t b = begin; b < end; ++b) {
      const Vectors x = source.sample(b, rows);
      float* row = out + b * wide;
      std::memcpy(row, x[0], size_t(width) * sizeof(float));
      for (int64_t i = 0; i < n; ++i) {
        const float* from = x[i];
        if (source.addresses && b + 1 < end) prefetch(source.row_of(b + 1, i), width);
        for (int64_t k = 0; k < width; ++k) columns[size_t(k * room + i)] = from[k];
      }
      int64_t i = 1;
      for (; i + 8 <= n; i += 8) rows_of_pairs<8>(x, columns.data(), room, i, row + width);
      for (; i + 2 <= n; i += 2) rows_of_pairs<2>(x, columns.data(), room, i, row + width);
      for (; i < n; ++i) rows_of_pairs<1>(x, columns.data(), room, i, row + width);
    }
  });
}

// The lines of rows that come next: asked for one after the other, for the processor has room for few under way.
struct Prefetched {
  static constexpr int kMost = 64;
  const float* read[kMost];
  const float* write[kMost];
  int reads = 0, writes = 0;

  void add(const float* from, const float* to, int64_t width) {
    for (int64_t c = 0; c < width; c += kLanes) {
      if (from && reads < kMost) read[reads++] = from + c;
      if (to && writes < kMost) write[writes++] = to + c;
    }
  }
  void ask(int64_t i) const {
    if (i < reads) __builtin_prefetch(read[i], 0, 3);
    if (i < writes) __builtin_prefetch(write[i], 1, 3);
  }
};

// The gradient of vectors `from` to `from + kRows`, columns c to c + kColumns * kLanes: sum over j of g[i][j] x_j.
template <int kRows, int kColumns>
void gradient_tile(const Vectors& x, const float* g, int64_t n, int64_t from, int64_t c, const Place* out,
                   const Prefetched& ahead) {
  Lanes sum[kRows][kColumns] = {};
  for (int64_t j = 0; j < n; ++j) {
    if (c == 0) ahead.ask(j);
    const float* factors = x[j] + c;
    Lanes part[kColumns];
    for (int k = 0; k < kColumns; ++k) part[k] = load(factors + k * kLanes);
    for (int r = 0; r < kRows; ++r)
      for (int k = 0; k < kColumns; ++k) sum[r][k] += g[(from + r) * n + j] * part[k];
  }
  for (int r = 0; r < kRows; ++r)  // one after the other: two may be the same
    for (int k = 0; k < kColumns; ++k) {
      float* place = out[r].row + c + k * kLanes;
      store(place, out[r].adds ? load(place) + sum[r][k] : sum[r][k]);
    }
}

template <int kRows>
void gradient_rows(const Vectors& x, const float* g, int64_t n, int64_t from, const Place* out,
                   const Prefetched& ahead) {
  int64_t c = 0;
  for (; c + 4 * kLanes <= x.width; c += 4 * kLanes) gradient_tile<kRows, 4>(x, g, n, from, c, out, ahead);
  for (; c + kLanes <= x.width; c += kLanes) gradient_tile<kRows, 1>(x, g, n, from, c, out, ahead);
  for (; c < x.width; ++c)
    for (int r = 0; r < kRows; ++r) {
      float sum = 0;
      for (int64_t j = 0; j < n; ++j) sum += g[(from + r) * n + j] * x[j][c];
      float* place = out[r].row + c;
      *place = out[r].adds ? *place + sum : sum;
    }
}

// `to`: addresses of the features' gradients, [batch, count], for one thread; the lowest bit: the first that goes there.
// Null: the gradients go to grad_features, [batch, count, width].
void backward(const Source& source, const float* grad, int64_t batch, float* grad_bottom, float* grad_features,
              const int64_t* to, int threads) {
  const int64_t count = source.count, width = source.width, n = count + 1, wide = width + n * count / 2;
  parallel(batch, threads, [&](int64_t begin, int64_t end) {
    std::vector<float> g(size_t(n * n), 0.0f);  // symmetric, zero on the diagonal
    std::vector<const float*> rows(static_cast<size_t>(n));
    std::vector<Place> places(static_cast<size_t>(n));
    auto place = [&](int64_t b, int64_t i) -> Place {
      if (i == 0) return {grad_bottom + b * width, false};
      const int64_t feature = b * count + i - 1;
      if (!to) return {grad_features + feature * width, false};
      return {reinterpret_cast<float*>(intptr_t(to[feature] & ~int64_t(1))), (to[feature] & 1) == 0};
    };
    for (int64_t b = begin; b < end; ++b) {
      const Vectors x = source.sample(b, rows);
      for (int64_t i = 0; i < n; ++i) places[size_t(i)] = place(b, i);
      const float* sample_grad = grad + b * wide;
      const float* pair = sample_grad + width;
      for (int64_t i = 1; i < n; ++i)
        for (int64_t j = 0; j < i; ++j) g[size_t(i * n + j)] = g[size_t(j * n + i)] = *pair++;
      auto following = [&](int64_t from, int64_t until) {
        Prefetched prefetched;
        for (int64_t i = from; b + 1 < end && i < until; ++i)
          prefetched.add(source.addresses ? source.row_of(b + 1, i) : nullptr, to ? place(b + 1, i).row : nullptr, width);
        return prefetched;
      };
      int64_t i = 0;
      for (; i + 4 <= n; i += 4) gradient_rows<4>(x, g.data(), n, i, &places[size_t(i)], following(i, i + 4));
      for (; i < n; ++i) gradient_rows<1>(x, g.data(), n, i, &places[size_t(i)], following(i, i + 1));
      for (int64_t k = 0; k < width; ++k) grad_bottom[b * width + k] += sample_grad[k];
    }
  });
}

}  // namespace

extern "C" {

void headrace_dot_interaction(const float* bottom, const float* features, const int64_t* at, int64_t batch, int64_t count,
                              int64_t width, float* out, int threads) {
  forward(Source{bottom, features, at, count, width}, batch, out, threads);
}

void headrace_dot_interaction_backward(const float* bottom, const float* features, const int64_t* at, const float* grad,
                                       int64_t batch, int64_t count, int64_t width, float* grad_bottom, float* grad_features,
                                       const int64_t* to, int threads) {
  backward(Source{bottom, features, at, count, width}, grad, batch, grad_bottom, grad_features, to, threads);
}

}  // extern "C"
