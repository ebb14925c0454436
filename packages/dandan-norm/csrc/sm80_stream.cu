#include "sm80_stream.cuh"

#include "launch.h"

namespace dandan_norm {
namespace {

void launch_stream(void (*aligned)(StreamParams), void (*any)(StreamParams), const Params& params, Launch launch) {
  const StreamParams stream = {params, launch.tile.cluster};
  launch.tile.cluster = 1;
  dandan::host::launch(launch.vectorized ? aligned : any, row_config(params.space.rows, launch), stream);
}

}  // namespace

void launch_sm80_stream_rms(DType dtype, const Params& params, const Launch& launch) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    if (params.other.data != nullptr) {
      launch_stream(sm80_stream_rms_kernel<T, true, true>, sm80_stream_rms_kernel<T, true, false>, params, launch);
    } else {
      launch_stream(sm80_stream_rms_kernel<T, false, true>, sm80_stream_rms_kernel<T, false, false>, params, launch);
    }
  });
}

void launch_sm80_stream_layer_norm(DType dtype, const Params& params, const Launch& launch) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    if (launch.tile.folded) {
      launch_stream(sm80_stream_layer_norm_kernel<T, true, true>, sm80_stream_layer_norm_kernel<T, false, true>, params, launch);
    } else {
      launch_stream(sm80_stream_layer_norm_kernel<T, true, false>, sm80_stream_layer_norm_kernel<T, false, false>, params, launch);
    }
  });
}

void launch_sm80_stream_softmax(DType dtype, const Params& params, const Launch& launch) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    launch_stream(sm80_stream_softmax_kernel<T, true>, sm80_stream_softmax_kernel<T, false>, params, launch);
  });
}

void launch_sm80_stream_argmax(DType dtype, const Params& params, const Launch& launch) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    launch_stream(sm80_stream_argmax_kernel<T, true>, sm80_stream_argmax_kernel<T, false>, params, launch);
  });
}

}  // namespace dandan_norm
