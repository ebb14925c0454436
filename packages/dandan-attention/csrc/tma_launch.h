// The tensor map of an operand, for the launchers of kernels with tensor copies.
#pragma once

#include <algorithm>

#include <dandan/host/tensor_map_4d.h>

#include "attention.h"

namespace dandan_attention {

struct Operand {
  CUtensorMap map;
  int batch, head;  // 0: the map has one of them, for all
};

// A tensor [batch, heads, rows, head_dim] in boxes of box_rows x 64. Dimensions of size 1 and expanded ones have one place in the map: its strides are
// above 0. Packed: one batch.
inline Operand operand_of(DType dtype, const void* data, const Strides& strides, int64_t batch, int64_t heads, int64_t rows, int head_dim, int box_rows) {
  const auto type = dtype == DType::kHalf ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const bool many = batch > 1 && strides.batch != 0, many_heads = heads > 1 && strides.head != 0;
  const int64_t sizes[4] = {head_dim, std::max<int64_t>(rows, 1), many_heads ? heads : 1, many ? batch : 1};
  const int64_t steps[3] = {rows > 1 ? strides.row : head_dim, many_heads ? strides.head : head_dim, many ? strides.batch : head_dim};
  return {dandan::host::make_tensor_map_4d(data, type, sizes, steps, 64, box_rows), many, many_heads};
}

}  // namespace dandan_attention
