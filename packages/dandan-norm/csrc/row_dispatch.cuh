// Instantiates the row kernels for one block or one cluster a row.
#pragma once

#include "rows.cuh"

namespace dandan_norm {

// Calls f with the number of vectors a thread keeps, as a constant.
template <typename F>
void dispatch_vectors(int vectors, F&& f) {
  switch (vectors) {
    case 2: return f(std::integral_constant<int, 2>{});
    case 4: return f(std::integral_constant<int, 4>{});
    case 8: return f(std::integral_constant<int, 8>{});
    default: throw std::runtime_error("RuntimeError: no row kernel keeps " + std::to_string(vectors) + " vectors a thread");
  }
}

template <bool kCluster>
void launch_row(void (*kernel)(RowParams), DType dtype, const Params& params, const Launch& launch, int affine) {
  if (kCluster && launch.tile.cluster > 8) {  // more than the portable size has to be asked for, on each device
    dandan::host::check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "cluster size");
  }
  dandan::host::launch(kernel, row_launch_config(params, launch, affine), row_params(dtype, params));
}

template <bool kCluster>
void launch_row_rms(DType dtype, const Params& params, const Launch& launch) {
  dispatch(dtype, [&](auto element) {
    dispatch_vectors(launch.tile.vectors, [&](auto vectors) {
      using T = decltype(element);
      constexpr int kVectors = decltype(vectors)::value;
      const bool residual = params.other.data != nullptr;
      launch_row<kCluster>(residual ? row_rms_kernel<T, kVectors, true, kCluster> : row_rms_kernel<T, kVectors, false, kCluster>, dtype, params,
                           launch, 0);
    });
  });
}

template <bool kCluster>
void launch_row_layer_norm(DType dtype, const Params& params, const Launch& launch) {
  dispatch(dtype, [&](auto element) {
    dispatch_vectors(launch.tile.vectors, [&](auto vectors) {
      launch_row<kCluster>(row_layer_norm_kernel<decltype(element), decltype(vectors)::value, kCluster>, dtype, params, launch, 2);
    });
  });
}

template <bool kCluster>
void launch_row_softmax(DType dtype, const Params& params, const Launch& launch) {
  dispatch(dtype, [&](auto element) {
    dispatch_vectors(launch.tile.vectors, [&](auto vectors) {
      launch_row<kCluster>(row_softmax_kernel<decltype(element), decltype(vectors)::value, kCluster>, dtype, params, launch, 0);
    });
  });
}

template <bool kCluster>
void launch_row_argmax(DType dtype, const Params& params, const Launch& launch) {
  dispatch(dtype, [&](auto element) {
    auto kernel = launch.tile.vectors == 4 ? row_argmax_kernel<decltype(element), 4, kCluster> : row_argmax_kernel<decltype(element), 8, kCluster>;
    launch_row<kCluster>(kernel, dtype, params, launch, 0);
  });
}

}  // namespace dandan_norm
