// The column functions over device memory: a thread a row, or a number of a signature. Compiled with per-thread default streams
// like cuDF's Java library; `stream` may also be any other.
#include <cuda_runtime.h>

#include <cub/device/device_scan.cuh>

#include "columns.hpp"

using namespace headrace;

namespace {

constexpr int THREADS = 256;

thread_local const char *reason = "";

int32_t answer(cudaError_t error) {
  reason = error == cudaSuccess ? "" : cudaGetErrorString(error);
  return error == cudaSuccess ? HEADRACE_OK : HEADRACE_DEVICE;
}

int blocks(int64_t threads) { return static_cast<int>((threads + THREADS - 1) / THREADS); }

__device__ int64_t thread() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }

// counts[row] = how many come out of the row; bit `row` of `validity` = whether it is there. Blocks are whole warps, so a warp
// has the bits of four bytes.
template <typename Row>
__global__ void describe(Row function, int64_t rows, int32_t *counts, uint8_t *validity) {
  const int64_t row = thread();
  const bool is_row = row < rows;
  if (is_row && counts != nullptr) counts[row] = function.count(row);
  if (validity == nullptr) return;
  const unsigned bits = __ballot_sync(0xFFFFFFFFu, is_row && function.is_valid(row));
  if (is_row && (threadIdx.x & 7) == 0) validity[row >> 3] = static_cast<uint8_t>(bits >> (threadIdx.x & 31 & ~7));
}

template <typename Row>
__global__ void write(Row function, int64_t rows, const int32_t *offsets, int32_t *out) {
  const int64_t row = thread();
  if (row < rows) function.write(row, offsets[row + 1] - offsets[row], out + offsets[row]);
}

struct Ngrams {
  headrace_column text;
  int32_t n, most, buckets;
  __device__ int32_t count(int64_t row) const { return count_ngrams(text, row, n, most); }
  __device__ bool is_valid(int64_t row) const { return row_is_valid(text, row); }
  __device__ void write(int64_t row, int32_t count, int32_t *out) const {
    write_ngrams(text, row, n, buckets, count, out);
  }
};

struct Cross {
  Columns columns;
  int32_t most, buckets;
  __device__ int32_t count(int64_t row) const { return count_cross(columns, row, most); }
  __device__ bool is_valid(int64_t row) const { return all_are_valid(columns, row); }
  __device__ void write(int64_t row, int32_t count, int32_t *out) const {
    write_cross(columns, row, buckets, count, out);
  }
};

struct Signature {
  headrace_column ids;
  __device__ int32_t count(int64_t) const { return 0; }
  __device__ bool is_valid(int64_t row) const { return any_is_valid(ids, row); }
};

__global__ void sign(headrace_column ids, int64_t rows, int32_t hashes, int64_t *out) {
  const int64_t number = thread();
  if (number < rows * hashes) out[number] = least_hash(ids, number / hashes, hash_integer(number % hashes, SEED));
}

template <typename Row>
int32_t offsets(const Row &function, int64_t rows, int32_t *out, uint8_t *out_validity, void *workspace, cudaStream_t stream) {
  if (const cudaError_t error = cudaMemsetAsync(out, 0, sizeof(int32_t), stream)) return answer(error);
  if (rows == 0) return answer(cudaSuccess);
  describe<<<blocks(rows), THREADS, 0, stream>>>(function, rows, out + 1, out_validity);
  if (const cudaError_t error = cudaGetLastError()) return answer(error);
  size_t bytes = static_cast<size_t>(headrace_offsets_workspace(rows));
  return answer(cub::DeviceScan::InclusiveSum(workspace, bytes, out + 1, out + 1, static_cast<int>(rows), stream));
}

template <typename Row>
int32_t values(const Row &function, int64_t rows, const int32_t *offsets, int32_t *out, cudaStream_t stream) {
  if (rows == 0) return answer(cudaSuccess);
  write<<<blocks(rows), THREADS, 0, stream>>>(function, rows, offsets, out);
  return answer(cudaGetLastError());
}

}  // namespace

int32_t headrace_columns_version(void) { return HEADRACE_COLUMNS_VERSION; }

const char *headrace_columns_reason(void) { return reason; }

int64_t headrace_offsets_workspace(int64_t rows) {
  size_t bytes = 0;
  int32_t *none = nullptr;
  if (rows > 0) cub::DeviceScan::InclusiveSum(nullptr, bytes, none, none, static_cast<int>(rows));
  return static_cast<int64_t>(bytes);
}

int32_t headrace_ngrams_offsets(const headrace_column *text, int64_t rows, int32_t n, int32_t most, int32_t *out,
                                uint8_t *out_validity, void *workspace, void *stream) {
  if (!good_ngrams(text, rows, n, most) || out == nullptr || (workspace == nullptr && rows > 0))
    return HEADRACE_BAD_ARGUMENT;
  return offsets(Ngrams{*text, n, most, 1}, rows, out, out_validity, workspace, static_cast<cudaStream_t>(stream));
}

int32_t headrace_ngrams(const headrace_column *text, int64_t rows, int32_t n, int32_t most, int32_t buckets,
                        const int32_t *offsets, int32_t *out, void *stream) {
  if (!good_ngrams(text, rows, n, most) || buckets < 1 || offsets == nullptr) return HEADRACE_BAD_ARGUMENT;
  return values(Ngrams{*text, n, most, buckets}, rows, offsets, out, static_cast<cudaStream_t>(stream));
}

int32_t headrace_cross_offsets(const headrace_column *columns, int32_t count, int64_t rows, int32_t most, int32_t *out,
                               uint8_t *out_validity, void *workspace, void *stream) {
  Cross cross{{}, most, 1};
  if (const int32_t error = check_cross(columns, count, rows, most, &cross.columns)) return error;
  if (out == nullptr || (workspace == nullptr && rows > 0)) return HEADRACE_BAD_ARGUMENT;
  return offsets(cross, rows, out, out_validity, workspace, static_cast<cudaStream_t>(stream));
}

int32_t headrace_cross(const headrace_column *columns, int32_t count, int64_t rows, int32_t most, int32_t buckets,
                       const int32_t *offsets, int32_t *out, void *stream) {
  Cross cross{{}, most, buckets};
  if (const int32_t error = check_cross(columns, count, rows, most, &cross.columns)) return error;
  if (buckets < 1 || offsets == nullptr) return HEADRACE_BAD_ARGUMENT;
  return values(cross, rows, offsets, out, static_cast<cudaStream_t>(stream));
}

int32_t headrace_minhash(const headrace_column *ids, int64_t rows, int32_t hashes, int64_t *out, uint8_t *out_validity,
                         void *stream) {
  if (!good(ids, rows) || hashes < 1 || hashes > HEADRACE_MOST_HASHES || (out == nullptr && rows > 0))
    return HEADRACE_BAD_ARGUMENT;
  if (rows * hashes > INT32_MAX) return HEADRACE_TOO_MANY;
  if (rows == 0) return answer(cudaSuccess);
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  sign<<<blocks(rows * hashes), THREADS, 0, cuda_stream>>>(*ids, rows, hashes, out);
  if (const cudaError_t error = cudaGetLastError()) return answer(error);
  if (out_validity == nullptr) return answer(cudaSuccess);
  describe<<<blocks(rows), THREADS, 0, cuda_stream>>>(Signature{*ids}, rows, nullptr, out_validity);
  return answer(cudaGetLastError());
}
