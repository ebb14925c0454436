#include "row_launch.cuh"

namespace dandan_norm {
namespace {

// The configurations that folded_tile of routes.h names.
template <typename T>
auto folded_layer_norm_kernel(const Tile& tile) -> void (*)(RowParams) {
  const int warps = tile.threads / 32;
  const auto is = [&](int vectors, int of_warps) { return tile.vectors == vectors && warps == of_warps; };
  constexpr Keep kKept = Keep::kRegisters, kRead = Keep::kNowhere;
  const bool read = tile.keep == static_cast<int>(kRead);
  if (is(2, 1)) return row_layer_norm_kernel<T, 2, kKept, FoldedThread<1>>;
  if (is(2, 2)) return row_layer_norm_kernel<T, 2, kKept, FoldedThread<2>>;
  if (is(4, 1)) return read ? row_layer_norm_kernel<T, 4, kRead, FoldedThread<1>> : row_layer_norm_kernel<T, 4, kKept, FoldedThread<1>>;
  if constexpr (sizeof(T) == 4) {
    if (is(4, 2)) return row_layer_norm_kernel<T, 4, kKept, FoldedThread<2>>;
    if (is(4, 4)) return row_layer_norm_kernel<T, 4, kKept, FoldedThread<4>>;
    if (is(4, 8)) return row_layer_norm_kernel<T, 4, kKept, FoldedThread<8>>;
  } else {
    if (is(1, 4)) return row_layer_norm_kernel<T, 1, kKept, FoldedThread<4>>;
    if (is(2, 4)) return row_layer_norm_kernel<T, 2, kKept, FoldedThread<4>>;
    if (is(2, 8)) return row_layer_norm_kernel<T, 2, kKept, FoldedThread<8>>;
    if (is(4, 4)) return read ? row_layer_norm_kernel<T, 4, kRead, FoldedThread<4>> : row_layer_norm_kernel<T, 4, kKept, FoldedThread<4>>;
  }
  throw std::runtime_error("RuntimeError: no kernel folds rows of " + std::to_string(tile.vectors) + " vectors a thread, " +
                           std::to_string(tile.threads) + " threads");
}

void launch_folded_layer_norm(DType dtype, const Params& params, const Launch& launch) {
  dispatch(dtype, [&](auto element) { launch_row<false>(folded_layer_norm_kernel<decltype(element)>(launch.tile), dtype, params, launch, 2); });
}

}  // namespace

void launch_sm80_row_rms(DType dtype, const Params& params, const Launch& launch) { launch_row_rms<false>(dtype, params, launch); }

void launch_sm80_row_layer_norm(DType dtype, const Params& params, const Launch& launch) {
  if (launch.tile.folded) return launch_folded_layer_norm(dtype, params, launch);
  launch_row_layer_norm<false>(dtype, params, launch);
}

void launch_sm80_row_softmax(DType dtype, const Params& params, const Launch& launch) { launch_row_softmax<false>(dtype, params, launch); }

void launch_sm80_row_argmax(DType dtype, const Params& params, const Launch& launch) { launch_row_argmax<false>(dtype, params, launch); }

}  // namespace dandan_norm
