// The launchers of the row kernels, for one block or one cluster a row.
#pragma once

#include "launch.h"
#include "rows.cuh"

namespace dandan_norm {

template <int kVectors>
using Vectors = std::integral_constant<int, kVectors>;
template <Keep kKeep>
using Kept = std::integral_constant<Keep, kKeep>;

// Calls f with the number of vectors a thread keeps and where its weights wait, as constants: the configurations that row_tile and cluster_tile of
// routes.h name. kAffine: how many weight and bias rows the operator has.
template <bool kCluster, int kAffine, typename F>
void dispatch_tile(const Tile& tile, F&& f) {
  if constexpr (!kCluster) {
    const bool shared = tile.keep == static_cast<int>(Keep::kShared);
    const bool nowhere = tile.keep == static_cast<int>(Keep::kNowhere);
    if (tile.vectors == 2) return shared ? f(Vectors<2>{}, Kept<Keep::kShared>{}) : f(Vectors<2>{}, Kept<Keep::kRegisters>{});
    if (tile.vectors == 4 && nowhere) return f(Vectors<4>{}, Kept<Keep::kNowhere>{});
    if (tile.vectors == 4 && shared) return f(Vectors<4>{}, Kept<Keep::kShared>{});
    if constexpr (kAffine < 2) {  // registers hold four vectors of one such row
      if (tile.vectors == 4) return f(Vectors<4>{}, Kept<Keep::kRegisters>{});
    }
  }
  if (tile.vectors == 8) return f(Vectors<8>{}, Kept<Keep::kNowhere>{});
  throw std::runtime_error("RuntimeError: no row kernel keeps " + std::to_string(tile.vectors) + " vectors a thread");
}

// `affine` weight and bias rows. Shared memory beyond what any device grants unasked has to be asked for, on each device.
template <bool kCluster>
void launch_row(void (*kernel)(RowParams), DType dtype, const Params& params, const Launch& launch, int affine) {
  auto config = row_config(params.space.rows, launch);
  const bool shared = launch.tile.keep == static_cast<int>(Keep::kShared);
  config.shared_bytes = static_cast<size_t>(shared ? affine : 0) * launch.tile.vectors * launch.tile.threads * launch.tile.rows * sizeof(uint4);
  if (config.shared_bytes > 40 * 1024) {
    dandan::host::check_cuda(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(config.shared_bytes)), "shared memory");
  }
  if (kCluster && launch.tile.cluster > 8) {
    dandan::host::check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "cluster size");
  }
  dandan::host::launch(kernel, config, row_params(dtype, params));
}

template <bool kCluster>
void launch_row_rms(DType dtype, const Params& params, const Launch& launch) {
  dispatch(dtype, [&](auto element) {
    dispatch_tile<kCluster, 1>(launch.tile, [&](auto vectors, auto keep) {
      using T = decltype(element);
      const bool residual = params.other.data != nullptr;
      launch_row<kCluster>(residual ? row_rms_kernel<T, vectors(), true, keep(), kCluster> : row_rms_kernel<T, vectors(), false, keep(), kCluster>,
                           dtype, params, launch, 1);
    });
  });
}

template <bool kCluster>
void launch_row_layer_norm(DType dtype, const Params& params, const Launch& launch) {
  dispatch(dtype, [&](auto element) {
    dispatch_tile<kCluster, 2>(launch.tile, [&](auto vectors, auto keep) {
      launch_row<kCluster>(row_layer_norm_kernel<decltype(element), vectors(), keep(), RowThread<kCluster>>, dtype, params, launch, 2);
    });
  });
}

template <bool kCluster>
void launch_row_softmax(DType dtype, const Params& params, const Launch& launch) {
  dispatch(dtype, [&](auto element) {
    dispatch_tile<kCluster, 0>(launch.tile, [&](auto vectors, auto) {
      launch_row<kCluster>(row_softmax_kernel<decltype(element), vectors(), kCluster>, dtype, params, launch, 0);
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
