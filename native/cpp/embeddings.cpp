// The loops of an embedding table that torch needs many passes for, called from headrace.embeddings.kernels.cpu by ctypes.
//
// jagged_indices: codes of a batch to indices, bag by bag. bucketize_bags: those by owner. row_pointers,
// gather_pointers: where rows lie in memory. encode_requests, decode_requests: what ranks ask each other for.
// pool_sum: rows of a table, gathered and summed by bag. update: gradients summed by row and applied by the optimizer, in
// one pass over each touched row. Both read ahead by software prefetch: a random row is a cache miss, and the processor
// hides it only if it is told early. Rows are split over threads, each row wholly by one, so the bits do not depend on the
// number of threads. No allocation, no torch: the callers own all memory and have checked all sizes.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "threads.hpp"

namespace {

constexpr int64_t kAhead = 12;   // rows between a prefetch and its use
constexpr int64_t kLine = 16;    // floats of a cache line

inline void prefetch(const float* row, int64_t width) {
  for (int64_t i = 0; i < width; i += kLine) __builtin_prefetch(row + i, 0, 1);
}

// Sixteen columns at once, four of these at a time: sums stay in registers while a bag's rows go by.
typedef float Lanes __attribute__((vector_size(4 * kLine)));

inline Lanes load(const float* p) {
  Lanes v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, const Lanes& v) { std::memcpy(p, &v, sizeof v); }

// body(c, columns) for tiles of 64 columns, then of 16, then of one; `columns` is a constant of its type.
template <class Body>
inline void tiles(int64_t width, const Body& body) {
  int64_t c = 0;
  for (; c + 4 * kLine <= width; c += 4 * kLine) body(c, std::integral_constant<int, 4>());
  for (; c + kLine <= width; c += kLine) body(c, std::integral_constant<int, 1>());
  for (; c < width; ++c) body(c, std::integral_constant<int, 0>());
}

// memcpy of a length that is not known would be a call.
inline void copy(const float* from, float* to, int64_t width) {
  tiles(width, [&](int64_t c, auto columns) {
    constexpr int kTile = decltype(columns)::value;
    if constexpr (kTile == 0) to[c] = from[c];
    else for (int k = 0; k < kTile; ++k) store(to + c + k * kLine, load(from + c + k * kLine));
  });
}

// Without a table `index` has the rows' addresses.
template <class Index>
inline const float* row_of(const float* table, int64_t width, Index index) {
  return table ? table + int64_t(index) * width : reinterpret_cast<const float*>(intptr_t(index));
}

template <class Index>
void pool(const float* table, int64_t width, const Index* index, int64_t n, const int64_t* starts, int64_t bags,
          const float* weights, float* out, int threads) {
  parallel(bags, threads, [&](int64_t from, int64_t to) {
    for (int64_t b = from; b < to; ++b) {
      const int64_t first = starts ? starts[b] : b;
      const int64_t last = starts ? (b + 1 < bags ? starts[b + 1] : n) : b + 1;
      float* row = out + b * width;
      if (first == last) {
        std::fill(row, row + width, 0.0f);
        continue;
      }
      auto ahead = [&](int64_t i) {
        if (i + kAhead < n) prefetch(row_of(table, width, index[i + kAhead]), width);
      };
      if (last == first + 1 && !weights) {
        ahead(first);
        copy(row_of(table, width, index[first]), row, width);
        continue;
      }
      tiles(width, [&](int64_t c, auto columns) {
        constexpr int kTile = decltype(columns)::value;
        auto source = [&](int64_t i) {
          if (c == 0) ahead(i);
          return row_of(table, width, index[i]) + c;
        };
        // The first row is taken as it is, not added to zero: as torch does, the sign of a zero included.
        if constexpr (kTile == 0) {
          auto value_at = [&](int64_t i) { return weights ? weights[i] * *source(i) : *source(i); };
          float sum = value_at(first);
          for (int64_t i = first + 1; i < last; ++i) sum += value_at(i);
          row[c] = sum;
        } else {
          Lanes sum[kTile];
          const float* begin = source(first);
          for (int k = 0; k < kTile; ++k) sum[k] = weights ? weights[first] * load(begin + k * kLine) : load(begin + k * kLine);
          for (int64_t i = first + 1; i < last; ++i) {
            const float* next = source(i);
            if (weights) for (int k = 0; k < kTile; ++k) sum[k] += weights[i] * load(next + k * kLine);
            else for (int k = 0; k < kTile; ++k) sum[k] += load(next + k * kLine);
          }
          for (int k = 0; k < kTile; ++k) store(row + c + k * kLine, sum[k]);
        }
      });
    }
  });
}

// The sum of sixteen numbers: halves, then their halves.
inline float total(const Lanes& v) {
  float part[kLine];
  store(part, v);
  for (int64_t half = kLine / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) part[i] += part[i + half];
  return part[0];
}

enum Kind { kSgd = 0, kAdagrad = 1, kRowwiseAdagrad = 2, kAdam = 3 };

struct Rule {
  int kind;
  float lr, decay, eps, beta1, beta2;
};

// A row of kParts * 16 weights whose gradient is the sum of those of occurrences `first` to `last`: all in registers.
template <int kParts, class GradientOf>
inline void rowwise_adagrad(const Rule& rule, float* weight, float* state, int64_t first, int64_t last,
                            const GradientOf& given) {
  Lanes sum[kParts] = {}, squares = {};
  for (int64_t i = first; i < last; ++i) {
    const float* grad = given(i);
    for (int k = 0; k < kParts; ++k) sum[k] += load(grad + k * kLine);
  }
  for (int k = 0; k < kParts; ++k) {
    if (rule.decay != 0.0f) sum[k] += rule.decay * load(weight + k * kLine);
    squares += sum[k] * sum[k];
  }
  *state += total(squares) / float(kParts * kLine);
  const float step = rule.lr / (std::sqrt(*state) + rule.eps);
  for (int k = 0; k < kParts; ++k) store(weight + k * kLine, load(weight + k * kLine) - step * sum[k]);
}

// `grad` may be changed. States: one number a weight, or (row-wise) one a row.
void apply(const Rule& rule, float* weight, float* grad, float* state, float* second, int64_t width) {
  if (rule.decay != 0.0f)
    for (int64_t c = 0; c < width; ++c) grad[c] += rule.decay * weight[c];
  switch (rule.kind) {
    case kSgd:
      for (int64_t c = 0; c < width; ++c) weight[c] -= rule.lr * grad[c];
      break;
    case kAdagrad:
      for (int64_t c = 0; c < width; ++c) {
        state[c] += grad[c] * grad[c];
        weight[c] -= rule.lr * (grad[c] / (std::sqrt(state[c]) + rule.eps));
      }
      break;
    case kRowwiseAdagrad: {
      Lanes squares = {};
      int64_t c = 0;
      for (; c + kLine <= width; c += kLine) squares += load(grad + c) * load(grad + c);
      for (int64_t k = 0; c < width; ++c, ++k) squares[k] += grad[c] * grad[c];
      *state += total(squares) / float(width);
      const float step = rule.lr / (std::sqrt(*state) + rule.eps);
      for (int64_t i = 0; i < width; ++i) weight[i] -= step * grad[i];
      break;
    }
    case kAdam:  // lr holds the bias correction already
      for (int64_t c = 0; c < width; ++c) {
        state[c] += (grad[c] - state[c]) * (1.0f - rule.beta1);
        second[c] = second[c] * rule.beta2 + (1.0f - rule.beta2) * grad[c] * grad[c];
        weight[c] -= rule.lr * (state[c] / (std::sqrt(second[c]) + rule.eps));
      }
      break;
  }
}

template <class Index>
void step(float* table, float* state, float* second, int64_t width, const Index* rows, const int64_t* starts,
          int64_t distinct, const int64_t* order, int64_t n, const int64_t* bag, const float* weights,
          const float* divisor, const float* grads, const Rule& rule, int threads) {
  const int64_t state_width = rule.kind == kRowwiseAdagrad ? 1 : width;
  if (distinct == 0) return;
  // Popular rows have many gradients and lie side by side: threads share the work, not the rows.
  auto work = [&](int64_t u) { return (u < distinct ? starts[u] : n) - starts[0] + 2 * u; };
  auto bound = [&](int64_t part, int64_t parts) {
    int64_t low = 0, high = distinct;
    const int64_t goal = work(distinct) * part / parts;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (work(middle) < goal) low = middle + 1;
      else high = middle;
    }
    return low;
  };
  const int64_t parts = distinct < 1024 ? 1 : std::max(1, threads);
  parallel_parts(parts, [&](int64_t part) {
    const int64_t from = bound(part, parts), to = bound(part + 1, parts);
    std::vector<float> sum(width);
    const bool is_plain = rule.kind == kRowwiseAdagrad && !weights && !divisor;
    const int64_t in_registers = is_plain && width % kLine == 0 ? width / kLine : 0;
    auto source = [&](int64_t i) { return bag ? bag[order[i]] : order[i]; };
    // Without gradients `order` has their addresses.
    auto given = [&](int64_t i) {
      return grads ? grads + source(i) * width : reinterpret_cast<const float*>(intptr_t(order[i]));
    };
    for (int64_t u = from; u < to; ++u) {
      const int64_t first = starts[u], last = u + 1 < distinct ? starts[u + 1] : n;
      if (u + kAhead < distinct) {
        const int64_t next = int64_t(rows[u + kAhead]);
        prefetch(table + next * width, width);
        if (state) prefetch(state + next * state_width, state_width);
        if (second) prefetch(second + next * width, width);
      }
      const int64_t row = int64_t(rows[u]);
      auto update_row = [&](auto size) {
        rowwise_adagrad<decltype(size)::value>(rule, table + row * width, state + row, first, last, [&](int64_t i) {
          if (i + kAhead < n) prefetch(given(i + kAhead), width);
          return given(i);
        });
      };
      switch (in_registers) {
        case 1: update_row(std::integral_constant<int, 1>()); continue;
        case 2: update_row(std::integral_constant<int, 2>()); continue;
        case 4: update_row(std::integral_constant<int, 4>()); continue;
        case 8: update_row(std::integral_constant<int, 8>()); continue;
      }
      auto scale_of = [&](int64_t i) {
        float scale = weights ? weights[order[i]] : 1.0f;
        if (divisor) scale /= divisor[source(i)];
        return scale;
      };
      tiles(width, [&](int64_t c, auto columns) {
        constexpr int kTile = decltype(columns)::value;
        auto grad_of = [&](int64_t i) {
          if (c == 0 && i + kAhead < n) prefetch(given(i + kAhead), width);
          if (c == 0 && bag && i + 4 * kAhead < n) __builtin_prefetch(bag + order[i + 4 * kAhead], 0, 1);
          return given(i) + c;
        };
        if constexpr (kTile == 0) {
          float total = 0;
          for (int64_t i = first; i < last; ++i) total += scale_of(i) * *grad_of(i);
          sum[c] = total;
        } else {
          Lanes total[kTile] = {};
          for (int64_t i = first; i < last; ++i) {
            const float* grad = grad_of(i);
            const float scale = scale_of(i);
            for (int k = 0; k < kTile; ++k) total[k] += scale * load(grad + k * kLine);
          }
          for (int k = 0; k < kTile; ++k) store(&sum[c + k * kLine], total[k]);
        }
      });
      apply(rule, table + row * width, sum.data(), state ? state + row * state_width : nullptr,
            second ? second + row * width : nullptr, width);
    }
  });
}

// Source of a part of a sample's output: codes but for `padding`, int32 or (wide) int64, in memory as they lie.
// Sample b has values[offsets[b]] to values[offsets[b + 1]]; without offsets `length` from values[b * stride] on. `count`:
// values that there are.
struct Piece {
  int64_t values, wide, offsets, weights, length, stride, count, padding;
};

// Codes of a block are dealt to `ranks` shards: code c is in shard c % ranks, at c / ranks.
struct Block {
  int64_t rows, first_shard, ranks;
};

constexpr int64_t kOutside = -1, kBadOffsets = -2;

// Returns the number of codes that are looked up; kOutside where one is outside its table.
template <class Index>
int64_t jagged_indices(int64_t batch, const Piece* all, const Block* blocks, int64_t pieces, const int64_t* shard_offsets,
                       Index* indices, int64_t* bag, int64_t* starts, float* weights) {
  int64_t n = 0;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t p = 0; p < pieces; ++p) {
      const Piece& piece = all[p];
      const Block& block = blocks[p];
      int64_t first = b * piece.stride, last = first + piece.length;
      if (piece.offsets) {
        const auto* offsets = reinterpret_cast<const int64_t*>(intptr_t(piece.offsets));
        first = offsets[b];
        last = offsets[b + 1];
        if (first < 0 || last < first || last > piece.count) return kBadOffsets;
      }
      if (starts) starts[b * pieces + p] = n;
      const auto* given = reinterpret_cast<const float*>(intptr_t(piece.weights));
      auto look_up = [&](const auto* values) {
        for (int64_t i = first; i < last; ++i) {
          const int64_t code = values[i];
          if (uint64_t(code) >= uint64_t(block.rows)) return false;
          if (code == piece.padding) continue;
          if (block.ranks == 1) {
            indices[n] = Index(shard_offsets[block.first_shard] + code);
          } else {
            const bool narrow = block.rows <= UINT32_MAX;
            const int64_t quotient = narrow ? int64_t(uint32_t(code) / uint32_t(block.ranks)) : code / block.ranks;
            indices[n] = Index(shard_offsets[block.first_shard + code - quotient * block.ranks] + quotient);
          }
          if (bag) bag[n] = b * pieces + p;
          if (weights) weights[n] = given ? given[i] : 1.0f;
          ++n;
        }
        return true;
      };
      const bool inside = piece.wide ? look_up(reinterpret_cast<const int64_t*>(intptr_t(piece.values)))
                                 : look_up(reinterpret_cast<const int32_t*>(intptr_t(piece.values)));
      if (!inside) return kOutside;
    }
  return n;
}

// Occurrences by owner, then in their order; a part is a bag's occurrences at one owner. Returns the number of parts.
template <class Index>
int64_t bucketize_bags(const Index* indices, const int64_t* bag, const float* weights, int64_t n, const int64_t* rank_starts,
                       int64_t world, Index* out, float* out_weights, uint8_t* begins, int64_t* part_bag, int64_t* ids,
                       int64_t* parts) {
  std::vector<int32_t> owner(n);
  std::vector<int64_t> last(world, -1), place(world), part(world);
  std::fill(ids, ids + world, 0);
  std::fill(parts, parts + world, 0);
  for (int64_t i = 0; i < n; ++i) {
    const auto w = std::upper_bound(rank_starts + 1, rank_starts + world, int64_t(indices[i])) - rank_starts - 1;
    owner[i] = int32_t(w);
    ++ids[w];
    parts[w] += bag[i] != last[w];
    last[w] = bag[i];
  }
  int64_t id = 0, total = 0;
  for (int64_t w = 0; w < world; ++w) {
    place[w] = id;
    part[w] = total;
    id += ids[w];
    total += parts[w];
    last[w] = -1;
  }
  for (int64_t i = 0; i < n; ++i) {
    const int32_t w = owner[i];
    const int64_t to = place[w]++;
    const bool first = bag[i] != last[w];
    out[to] = indices[i];
    if (weights) out_weights[to] = weights[i];
    begins[to] = first;
    if (first) part_bag[part[w]++] = last[w] = bag[i];
  }
  return total;
}

// Indices of owners' rows, owner by owner, in the owners' own numbering; v that begins a bag's part becomes -1 - v.
template <class In, class Out>
void encode_requests(const In* indices, const int64_t* ids, const int64_t* shift, int64_t world, const uint8_t* begins,
                     Out* out) {
  int64_t i = 0;
  for (int64_t w = 0; w < world; ++w)
    for (const int64_t end = i + ids[w]; i < end; ++i) {
      const int64_t row = int64_t(indices[i]) + shift[w];
      out[i] = Out(begins && begins[i] ? -1 - row : row);
    }
}

// The reverse: rows, where each part begins, and the part of each. Returns the number of parts.
template <class Index>
int64_t decode_requests(const Index* requests, int64_t n, Index* rows, int64_t* starts, int64_t* part) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    const bool begins = requests[i] < 0;
    rows[i] = begins ? Index(-1 - requests[i]) : requests[i];
    if (begins) starts[count++] = i;
    part[i] = count - 1;
  }
  return count;
}

// out[i]: address row index[i] of those whose addresses are `rows`. With `mark_first` its lowest bit, which the address of a
// number has free, says that it is the first of its row.
void gather_pointers(const int64_t* rows, int64_t count, const int64_t* index, int64_t n, int mark_first, int64_t* out) {
  if (!mark_first) {
    for (int64_t i = 0; i < n; ++i) out[i] = rows[index[i]];
    return;
  }
  std::vector<uint8_t> is_new(size_t(count), 1);
  for (int64_t i = 0; i < n; ++i) {
    auto& mark = is_new[size_t(index[i])];
    out[i] = rows[index[i]] | int64_t(mark);
    mark = 0;
  }
}

}  // namespace

extern "C" {

int64_t headrace_jagged_indices(int64_t batch, const void* pieces, const void* blocks, int64_t count,
                                const int64_t* shard_offsets, void* indices, int wide, int64_t* bag, int64_t* starts,
                                float* weights) {
  const auto* p = static_cast<const Piece*>(pieces);
  const auto* b = static_cast<const Block*>(blocks);
  if (wide)
    return jagged_indices(batch, p, b, count, shard_offsets, static_cast<int64_t*>(indices), bag, starts, weights);
  return jagged_indices(batch, p, b, count, shard_offsets, static_cast<int32_t*>(indices), bag, starts, weights);
}

void headrace_encode_requests(const void* indices, int wide, const int64_t* ids, const int64_t* shift, int64_t world,
                              const uint8_t* begins, void* out, int out_wide) {
  auto to = [&](const auto* from) {
    if (out_wide) encode_requests(from, ids, shift, world, begins, static_cast<int64_t*>(out));
    else encode_requests(from, ids, shift, world, begins, static_cast<int32_t*>(out));
  };
  if (wide) to(static_cast<const int64_t*>(indices));
  else to(static_cast<const int32_t*>(indices));
}

int64_t headrace_decode_requests(const void* requests, int wide, int64_t n, void* rows, int64_t* starts, int64_t* part) {
  if (wide) return decode_requests(static_cast<const int64_t*>(requests), n, static_cast<int64_t*>(rows), starts, part);
  return decode_requests(static_cast<const int32_t*>(requests), n, static_cast<int32_t*>(rows), starts, part);
}

void headrace_row_pointers(const void* base, int64_t stride, const void* rows, int wide, int64_t n, int64_t* out) {
  const int64_t first = int64_t(reinterpret_cast<intptr_t>(base));
  if (!rows) for (int64_t i = 0; i < n; ++i) out[i] = first + i * stride;
  else if (wide) for (int64_t i = 0; i < n; ++i) out[i] = first + static_cast<const int64_t*>(rows)[i] * stride;
  else for (int64_t i = 0; i < n; ++i) out[i] = first + int64_t(static_cast<const int32_t*>(rows)[i]) * stride;
}

void headrace_gather_pointers(const int64_t* rows, int64_t count, const int64_t* index, int64_t n, int mark_first,
                              int64_t* out) {
  gather_pointers(rows, count, index, n, mark_first, out);
}

int64_t headrace_bucketize_bags(const void* indices, int wide, const int64_t* bag, const float* weights, int64_t n,
                                const int64_t* rank_starts, int64_t world, void* out, float* out_weights, uint8_t* begins,
                                int64_t* part_bag, int64_t* ids, int64_t* parts) {
  if (wide)
    return bucketize_bags(static_cast<const int64_t*>(indices), bag, weights, n, rank_starts, world,
                          static_cast<int64_t*>(out), out_weights, begins, part_bag, ids, parts);
  return bucketize_bags(static_cast<const int32_t*>(indices), bag, weights, n, rank_starts, world,
                        static_cast<int32_t*>(out), out_weights, begins, part_bag, ids, parts);
}

int headrace_embeddings_version() { return 9; }

void headrace_pool_sum(const float* table, int64_t width, const void* index, int wide, int64_t n, const int64_t* starts,
                       int64_t bags, const float* weights, float* out, int threads) {
  if (wide) pool(table, width, static_cast<const int64_t*>(index), n, starts, bags, weights, out, threads);
  else pool(table, width, static_cast<const int32_t*>(index), n, starts, bags, weights, out, threads);
}

void headrace_update(float* table, float* state, float* second, int64_t width, const void* rows, int wide,
                     const int64_t* starts, int64_t distinct, const int64_t* order, int64_t n, const int64_t* bag,
                     const float* weights, const float* divisor, const float* grads, int kind, float lr, float decay,
                     float eps, float beta1, float beta2, int threads) {
  const Rule rule{kind, lr, decay, eps, beta1, beta2};
  if (wide)
    step(table, state, second, width, static_cast<const int64_t*>(rows), starts, distinct, order, n, bag, weights,
         divisor, grads, rule, threads);
  else
    step(table, state, second, width, static_cast<const int32_t*>(rows), starts, distinct, order, n, bag, weights,
         divisor, grads, rule, threads);
}

}  // extern "C"
