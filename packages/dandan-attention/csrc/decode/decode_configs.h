// The named configurations of paged decode; DecodeLaunch::config is a place in the array. No torch, no CUDA.
#pragma once

namespace dandan_attention {

// name: rows of q a block, keys of a warp at a time, warps, places for them.
struct DecodeShape {
  const char* name;
  int head_dim;
  int warp_m, warp_n;
  int warps, stages;
  bool q_in_registers;
  int blocks;  // of a multiprocessor at a time
  int threads;
  int tile_n;  // keys of a block at a time
  int shared_bytes;
  int bytes_in_flight;  // of a multiprocessor
};

inline constexpr DecodeShape sm80_decode_shape(const char* name, int head_dim, int warp_m, int warp_n, int warps, int stages,
                                               bool q_in_registers, int blocks) {
  const int stage_bytes = warp_n * head_dim * 4;
  return {name,   head_dim,   warp_m,         warp_n,
          warps,  stages,     q_in_registers, blocks,
          warps * 32,
          warps * warp_n,
          warps * (stages * (stage_bytes + 4) + warp_m * 8) + (q_in_registers ? 0 : warp_m * head_dim * 2),
          blocks * warps * (stages - 1) * stage_bytes};
}

// A stage holds a warp's result between two stretches of keys: warp_n >= warp_m.
inline constexpr DecodeShape kSm80DecodeShapes[] = {
    sm80_decode_shape("16x16w4s5", 64, 16, 16, 4, 5, true, 2),
    sm80_decode_shape("16x32w4s3", 64, 16, 32, 4, 3, true, 2),
    sm80_decode_shape("32x32w4s3", 64, 32, 32, 4, 3, false, 2),
    sm80_decode_shape("16x16w4s3", 128, 16, 16, 4, 3, true, 2),
    sm80_decode_shape("16x16w8s3", 128, 16, 16, 8, 3, true, 1),
    sm80_decode_shape("32x32w4s3", 128, 32, 32, 4, 3, false, 1),
    sm80_decode_shape("16x16w4s3", 256, 16, 16, 4, 3, false, 1),
    sm80_decode_shape("16x16w2s3", 256, 16, 16, 2, 3, false, 2),
};
inline constexpr int kSm80DecodeShapeCount = static_cast<int>(sizeof(kSm80DecodeShapes) / sizeof(DecodeShape));

}  // namespace dandan_attention
