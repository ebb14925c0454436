// Shared by the launchers of kernels with tensor copies: the tensor map of an operand.
#pragma once

#include <dandan/host/tensor_map.h>

#include "gemm.h"

namespace dandan_gemm {

// A matrix of `rows` rows of `columns` elements, `stride` apart, in boxes of box_rows x box_columns; rows of a box are as wide as its swizzle, 64 or
// 128 bytes. The stride of a single row means nothing and may be anything.
inline CUtensorMap operand_map(DType dtype, const void* data, int64_t rows, int64_t columns, int64_t stride, int box_rows, int box_columns) {
  const auto type = dtype == DType::kHalf ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  if (rows == 1) stride = (columns + 7) / 8 * 8;
  return dandan::host::make_tensor_map_2d(data, type, columns, rows, stride, box_columns, box_rows,
                                          box_columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B);
}

}  // namespace dandan_gemm
