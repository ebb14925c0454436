// Strided tensors of one shape as rows of their last dimension. Pure host code.
#pragma once

#include <cstdint>

namespace dandan {

inline constexpr int kMaxRowLevels = 4;

// Leading dimensions that several tensors share, after merging those that lie evenly in every one of them: row r is found by dividing r by the
// inner sizes, once for all tensors.
struct RowSpace {
  int levels = 1;
  int64_t sizes[kMaxRowLevels] = {};
  int64_t rows = 1;
};

// One tensor over a RowSpace: the distance, in elements, of neighbours along each level and within a row.
struct RowStrides {
  int64_t level[kMaxRowLevels] = {};
  int64_t element = 1;
};

// Merges `ndim` leading sizes with the strides (in elements) of `count` tensors; strides[t][ndim] is the stride within a row. False when
// more than kMaxRowLevels levels remain.
inline bool make_row_space(const int64_t* sizes, int64_t ndim, const int64_t* const* strides, int count, RowSpace* space,
                           RowStrides* out) {
  int levels = 0;
  space->rows = 1;
  for (int64_t d = 0; d < ndim; ++d) space->rows *= sizes[d];
  for (int64_t d = 0; d < ndim; ++d) {
    if (sizes[d] == 1) continue;
    bool even = levels > 0;
    for (int t = 0; even && t < count; ++t) even = out[t].level[levels - 1] == strides[t][d] * sizes[d];
    if (!even && levels == kMaxRowLevels) return false;
    if (!even) ++levels;
    space->sizes[levels - 1] = even ? space->sizes[levels - 1] * sizes[d] : sizes[d];
    for (int t = 0; t < count; ++t) out[t].level[levels - 1] = strides[t][d];
  }
  if (levels == 0) {
    levels = 1;
    space->sizes[0] = 1;
    for (int t = 0; t < count; ++t) out[t].level[0] = 0;
  }
  space->levels = levels;
  for (int t = 0; t < count; ++t) out[t].element = strides[t][ndim];
  return true;
}

// Division of n < 2^31 by a constant d >= 1: quotient = (n * magic) >> shift (Granlund and Montgomery, 1994).
struct FastDivisor {
  uint32_t magic = 0;
  uint32_t shift = 0;
  uint32_t divisor = 1;
};

inline FastDivisor make_fast_divisor(uint32_t d) {
  uint32_t s = 0;
  while ((uint64_t{1} << s) < d) ++s;
  return {static_cast<uint32_t>(((uint64_t{1} << (31 + s)) + d - 1) / d), 31 + s, d};
}

}  // namespace dandan
