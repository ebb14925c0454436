// Matrices of 16-bit elements as the bindings of products find them: dtypes, rows in memory, leading dimensions as one, results, copies.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include <dandan/host/aten.h>

namespace dandan::host {

inline constexpr int64_t kVectorElements = 8;  // in 16 bytes

// Whether `dtype` is one of the two that the kernels of products compute in, and which.
template <typename DType>
bool is_half_dtype(int32_t dtype, DType* out) {
  static const int32_t half = aoti_torch_dtype_float16(), bfloat16 = aoti_torch_dtype_bfloat16();
  if (dtype != half && dtype != bfloat16) return false;
  *out = dtype == half ? DType::kHalf : DType::kBFloat16;
  return true;
}

// ---------------------------------------------------------------- rows in memory

// Matrix rows in memory. `in_place` false: no such rows, the tensor has to be copied.
struct MatrixRows {
  bool in_place = false;
  int64_t stride = 0;    // elements from row to row
  bool aligned = false;  // rows start at multiples of 16 bytes and do not overlap
};

inline int64_t round_up_to_vector(int64_t elements) { return (elements + kVectorElements - 1) / kVectorElements * kVectorElements; }

// One row dimension instead of `dims` leading ones: true where they have a common stride, 0 for one row.
inline bool merge_rows(const Tensor& t, int64_t dims, int64_t* stride) {
  *stride = 0;
  int64_t span = -1;
  for (int64_t d = dims - 1; d >= 0; --d) {
    if (t.sizes[d] == 1) continue;
    if (span < 0) *stride = t.strides[d];
    if (span >= 0 && t.strides[d] != span) return false;
    span = t.strides[d] * t.sizes[d];
  }
  return true;
}

// TMA takes strides below 2^40 bytes, and rows that do not overlap.
inline MatrixRows matrix_rows(const void* data, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride) {
  if (col_stride != 1 && cols > 1) return {};
  MatrixRows found;
  found.in_place = true;
  found.stride = rows == 1 ? round_up_to_vector(cols) : row_stride;  // nobody steps from one row to the next
  found.aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0 && found.stride % kVectorElements == 0 && found.stride >= cols &&
                  found.stride < (int64_t{1} << 39);
  return found;
}

// Rows of a copy: they start at multiples of 16 bytes.
inline MatrixRows copied_rows(int64_t cols) { return {false, round_up_to_vector(cols), round_up_to_vector(cols) < (int64_t{1} << 39)}; }

// `t` in new memory whose last dimension is `cols` elements apart and the others follow it.
inline Tensor copied(const Tensor& t, int64_t cols) {
  int64_t strides[64];
  int64_t step = cols;
  strides[t.ndim - 1] = 1;
  for (int64_t d = t.ndim - 2; d >= 0; --d) {
    strides[d] = step;
    step *= t.sizes[d] > 1 ? t.sizes[d] : 1;
  }
  AtenTensorHandle handle = nullptr;
  check_shim(aoti_torch_empty_strided(t.ndim, t.sizes, strides, t.dtype, t.device_type, t.device_index, &handle), "allocate a tensor");
  Tensor copy(handle);
  copy_into(copy, t);
  return copy;
}

// ---------------------------------------------------------------- results: the shape of x but for the last dimension, which is n

inline int64_t row_count(const Tensor& x) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.ndim; ++d) rows *= x.sizes[d];
  return rows;
}

inline std::string result_shape(const Tensor& x, int64_t n) {
  std::string text = "[";
  for (int64_t d = 0; d + 1 < x.ndim; ++d) text += std::to_string(x.sizes[d]) + ", ";
  return text + std::to_string(n) + "]";
}

inline bool has_result_shape(const Tensor& x, int64_t n, const Tensor& t) {
  if (t.ndim != x.ndim || t.sizes[t.ndim - 1] != n) return false;
  return std::equal(t.sizes, t.sizes + t.ndim - 1, x.sizes);
}

inline Tensor empty_result(const Tensor& x, int64_t n) {
  int64_t sizes[64];
  std::copy(x.sizes, x.sizes + x.ndim - 1, sizes);
  sizes[x.ndim - 1] = n;
  return empty(x.ndim, sizes, x.dtype, x.device_type, x.device_index);
}

// The result of a product over no K: the bias, or zeros.
inline void fill_empty_sums(const Tensor& out, const Tensor& bias) {
  if (bias) {
    copy_into(out, bias);
  } else {
    fill_zero(out);
  }
}

}  // namespace dandan::host
