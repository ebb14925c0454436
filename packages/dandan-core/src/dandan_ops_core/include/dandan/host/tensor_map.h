// Tensor maps for the tensor memory accelerator (sm_90). The encoder is a function of the driver, found at run time: nothing links libcuda.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include <dandan/host/launch.h>

namespace dandan::host {

using TensorMapEncoder = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                      const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

inline TensorMapEncoder tensor_map_encoder() {
  static const TensorMapEncoder encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found), "look up the tensor map encoder");
    if (function == nullptr) throw std::runtime_error("RuntimeError: the driver has no cuTensorMapEncodeTiled; CUDA 12.0 or later is needed");
    return reinterpret_cast<TensorMapEncoder>(function);
  }();
  return encoder;
}

// A matrix of 16-bit elements, `outer` rows of `inner` elements, rows `stride` elements apart, read in boxes of box_outer rows of box_inner elements.
// What a box covers outside the matrix reads as zero and is not written. `base` and the stride in bytes are multiples of 16.
inline CUtensorMap make_tensor_map_2d(const void* base, CUtensorMapDataType type, int64_t inner, int64_t outer, int64_t stride, int box_inner, int box_outer,
                                      CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  CUtensorMap map;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(inner), static_cast<cuuint64_t>(outer)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride) * 2};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_inner), static_cast<cuuint32_t>(box_outer)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result = tensor_map_encoder()(&map, type, 2, const_cast<void*>(base), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("RuntimeError: tensor map of " + std::to_string(outer) + " x " + std::to_string(inner) + " elements, stride " +
                             std::to_string(stride) + ": driver error " + std::to_string(static_cast<int>(result)));
  }
  return map;
}

}  // namespace dandan::host
