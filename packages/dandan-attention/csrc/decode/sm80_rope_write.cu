// Not built yet: no operator calls it.
#include "sm80_rope_write.cuh"

#include "launch.h"

namespace dandan_attention {

void launch_sm80_rope_write(DType dtype, const RopeWriteParams& params, const DecodeLaunch& launch) {
  const int heads = (params.q != nullptr ? params.num_heads_q : 0) + params.num_heads_kv * (params.v != nullptr ? 2 : 1);
  if (params.tokens == 0 || heads == 0) return;
  const int64_t sets = params.tokens * ((heads + kRopeHeads - 1) / kRopeHeads), threads = sets * (params.head_dim / 8);
  const int64_t blocks = (threads + kRopeThreads - 1) / kRopeThreads;
  if (blocks > 0x7fffffff) throw std::runtime_error("RuntimeError: sm80_rope_write: more than 2^31 - 1 blocks in one call");
  dandan::host::LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(blocks));
  config.block = dim3(kRopeThreads);
  config.stream = launch.stream;
  config.dependent = launch.dependent;
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    switch (params.head_dim) {
      case 64: return dandan::host::launch(sm80_rope_write_kernel<T, 64>, config, params);
      case 128: return dandan::host::launch(sm80_rope_write_kernel<T, 128>, config, params);
      case 256: return dandan::host::launch(sm80_rope_write_kernel<T, 256>, config, params);
    }
    throw std::runtime_error("RuntimeError: sm80_rope_write: head_dim " + std::to_string(params.head_dim));
  });
}

}  // namespace dandan_attention
