// DLRM's interaction: the dot products of all pairs of a sample's vectors, and their gradient, sample by sample.
//
// In torch these are a concatenation, a product of small matrices, a selection of its lower triangle and another
// concatenation, each a pass over all samples, and twice as many backward. Here a sample's vectors (7 KiB for 27 of 64)
// stay in the first cache until they are done with. A sample's bits depend on nothing but its own vectors.

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

// A sample's vectors: the bottom MLP's, then the features'.
struct Vectors {
  const float* bottom;
  const float* features;
  int64_t width;
  const float* operator[](int64_t i) const { return i == 0 ? bottom : features + (i - 1) * width; }
};

// out[j] for j < i: x_i . x_j. `turned`: the vectors as columns, [width, room]; rows `from` to `from + kRows` at once.
template <int kRows>
void rows_of_pairs(const Vectors& x, const float* turned, int64_t room, int64_t from, float* out) {
  const float* row[kRows];
  for (int r = 0; r < kRows; ++r) row[r] = x[from + r];
  for (int64_t j = 0; j < from + kRows - 1; j += kLanes) {
    Lanes sum[kRows] = {};
    for (int64_t k = 0; k < x.width; ++k) {
      const Lanes column = load(turned + k * room + j);
      for (int r = 0; r < kRows; ++r) sum[r] += row[r][k] * column;
    }
    for (int r = 0; r < kRows; ++r) {
      const int64_t i = from + r, wanted = i - j;
      float* place = out + i * (i - 1) / 2 + j;
      if (wanted >= kLanes) store(place, sum[r]);
      else if (wanted > 0) std::memcpy(place, &sum[r], size_t(wanted) * sizeof(float));
    }
  }
}

void forward(const float* bottom, const float* features, int64_t batch, int64_t count, int64_t width, float* out,
             int threads) {
  const int64_t n = count + 1, room = (n + kLanes - 1) / kLanes * kLanes, wide = width + n * count / 2;
  parallel(batch, threads, [&](int64_t begin, int64_t end) {
    std::vector<float> turned(size_t(width * room), 0.0f);
    for (int64_t b = begin; b < end; ++b) {
      const Vectors x{bottom + b * width, features + b * count * width, width};
      float* row = out + b * wide;
      std::memcpy(row, x.bottom, size_t(width) * sizeof(float));
      for (int64_t i = 0; i < n; ++i) {
        const float* from = x[i];
        for (int64_t k = 0; k < width; ++k) turned[size_t(k * room + i)] = from[k];
      }
      int64_t i = 1;
      for (; i + 8 <= n; i += 8) rows_of_pairs<8>(x, turned.data(), room, i, row + width);
      for (; i + 2 <= n; i += 2) rows_of_pairs<2>(x, turned.data(), room, i, row + width);
      for (; i < n; ++i) rows_of_pairs<1>(x, turned.data(), room, i, row + width);
    }
  });
}

// The gradient of vectors `from` to `from + kRows`, columns c to c + kColumns * kLanes: sum over j of g[i][j] x_j.
template <int kRows, int kColumns>
void gradient_tile(const Vectors& x, const float* g, int64_t n, int64_t from, int64_t c, float* const* out) {
  Lanes sum[kRows][kColumns] = {};
  for (int64_t j = 0; j < n; ++j) {
    const float* other = x[j] + c;
    Lanes part[kColumns];
    for (int k = 0; k < kColumns; ++k) part[k] = load(other + k * kLanes);
    for (int r = 0; r < kRows; ++r)
      for (int k = 0; k < kColumns; ++k) sum[r][k] += g[(from + r) * n + j] * part[k];
  }
  for (int r = 0; r < kRows; ++r)
    for (int k = 0; k < kColumns; ++k) store(out[r] + c + k * kLanes, sum[r][k]);
}

template <int kRows>
void gradient_rows(const Vectors& x, const float* g, int64_t n, int64_t from, float* const* out) {
  int64_t c = 0;
  for (; c + 4 * kLanes <= x.width; c += 4 * kLanes) gradient_tile<kRows, 4>(x, g, n, from, c, out);
  for (; c + kLanes <= x.width; c += kLanes) gradient_tile<kRows, 1>(x, g, n, from, c, out);
  for (; c < x.width; ++c)
    for (int r = 0; r < kRows; ++r) {
      float sum = 0;
      for (int64_t j = 0; j < n; ++j) sum += g[(from + r) * n + j] * x[j][c];
      out[r][c] = sum;
    }
}

void backward(const float* bottom, const float* features, const float* grad, int64_t batch, int64_t count,
              int64_t width, float* grad_bottom, float* grad_features, int threads) {
  const int64_t n = count + 1, wide = width + n * count / 2;
  parallel(batch, threads, [&](int64_t begin, int64_t end) {
    std::vector<float> g(size_t(n * n), 0.0f);  // symmetric, zero on the diagonal
    for (int64_t b = begin; b < end; ++b) {
      const Vectors x{bottom + b * width, features + b * count * width, width};
      const float* given = grad + b * wide;
      const float* pair = given + width;
      for (int64_t i = 1; i < n; ++i)
        for (int64_t j = 0; j < i; ++j) g[size_t(i * n + j)] = g[size_t(j * n + i)] = *pair++;
      auto place = [&](int64_t i) {
        return i == 0 ? grad_bottom + b * width : grad_features + (b * count + i - 1) * width;
      };
      int64_t i = 0;
      for (; i + 4 <= n; i += 4) {
        float* const out[] = {place(i), place(i + 1), place(i + 2), place(i + 3)};
        gradient_rows<4>(x, g.data(), n, i, out);
      }
      for (; i < n; ++i) {
        float* const out[] = {place(i)};
        gradient_rows<1>(x, g.data(), n, i, out);
      }
      for (int64_t k = 0; k < width; ++k) grad_bottom[b * width + k] += given[k];
    }
  });
}

}  // namespace

extern "C" {

void headrace_interact(const float* bottom, const float* features, int64_t batch, int64_t count, int64_t width,
                       float* out, int threads) {
  forward(bottom, features, batch, count, width, out, threads);
}

void headrace_interact_gradient(const float* bottom, const float* features, const float* grad, int64_t batch,
                                int64_t count, int64_t width, float* grad_bottom, float* grad_features, int threads) {
  backward(bottom, features, grad, batch, count, width, grad_bottom, grad_features, threads);
}

}  // extern "C"
