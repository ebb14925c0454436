// Four-dimensional tensor maps for the tensor memory accelerator (sm_90).
#pragma once

#include <dandan/host/tensor_map.h>

namespace dandan::host {

// A tensor of 16-bit elements [sizes[3], sizes[2], sizes[1], sizes[0]], contiguous along sizes[0], the others strides[0..2] elements apart in any order,
// read in boxes of box_outer x box_inner elements of the first two. What a box covers outside reads as zero. `base` and the strides in bytes are
// multiples of 16.
inline CUtensorMap make_tensor_map_4d(const void* base, CUtensorMapDataType type, const int64_t (&sizes)[4], const int64_t (&strides)[3], int box_inner,
                                      int box_outer, CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  CUtensorMap map;
  cuuint64_t dimensions[4], bytes[3];
  for (int i = 0; i < 4; ++i) dimensions[i] = static_cast<cuuint64_t>(sizes[i]);
  for (int i = 0; i < 3; ++i) bytes[i] = static_cast<cuuint64_t>(strides[i]) * 2;
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(box_inner), static_cast<cuuint32_t>(box_outer), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUresult result = tensor_map_encoder()(&map, type, 4, const_cast<void*>(base), dimensions, bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                               swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    std::string text = "RuntimeError: tensor map of";
    for (int i = 3; i >= 0; --i) text += (i == 3 ? " " : " x ") + std::to_string(sizes[i]);
    text += " elements, strides";
    for (int i = 2; i >= 0; --i) text += " " + std::to_string(strides[i]);
    throw std::runtime_error(text + ": driver error " + std::to_string(static_cast<int>(result)));
  }
  return map;
}

}  // namespace dandan::host
