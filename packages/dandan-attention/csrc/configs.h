// The named configurations of the kernels; Launch::config is a place in the kernel's array. No torch, no CUDA.
#pragma once

namespace dandan_attention {

// sm80_mma. name: rows of q x keys of a tile, warps, places for tiles of k and v.
struct MmaShape {
  const char* name;
  int head_dim;
  int tile_m, tile_n;
  int warps, slots;
  bool q_in_registers;
  int blocks;  // of a multiprocessor at a time, as far as registers go
  int threads;
  int shared_bytes;  // at most 99 KB are what a block of sm_86, sm_89 and sm_120 can have
};

inline constexpr int kSmallSharedBytes = 99 * 1024;

inline constexpr int kPlanBytes = 64;  // of a warp, behind the slots

inline constexpr MmaShape sm80_mma_shape(const char* name, int head_dim, int tile_m, int tile_n, int warps, int slots, bool q_in_registers, int blocks) {
  return {name, head_dim, tile_m, tile_n, warps, slots, q_in_registers, blocks, warps * 32,
          (tile_m + slots * tile_n) * head_dim * 2 + warps * kPlanBytes};
}

inline constexpr MmaShape kSm80MmaShapes[] = {
    sm80_mma_shape("128x64w4s4", 64, 128, 64, 4, 4, true, 2),
    sm80_mma_shape("128x64w4s3", 64, 128, 64, 4, 3, false, 3),
    sm80_mma_shape("64x64w4s4", 64, 64, 64, 4, 4, true, 4),
    sm80_mma_shape("128x64w4s4", 128, 128, 64, 4, 4, false, 2),
    sm80_mma_shape("128x64w4s3", 128, 128, 64, 4, 3, false, 2),
    sm80_mma_shape("128x64w4s2", 128, 128, 64, 4, 2, false, 2),
    sm80_mma_shape("128x64w8s4", 128, 128, 64, 8, 4, true, 1),
    sm80_mma_shape("64x64w4s2", 128, 64, 64, 4, 2, true, 3),
    sm80_mma_shape("64x64w4s2", 256, 64, 64, 4, 2, false, 2),
    sm80_mma_shape("64x32w4s4", 256, 64, 32, 4, 4, false, 2),
    sm80_mma_shape("128x64w8s2", 256, 128, 64, 8, 2, false, 1),
    sm80_mma_shape("128x32w8s4", 256, 128, 32, 8, 4, false, 1),
};
inline constexpr int kSm80MmaShapeCount = static_cast<int>(sizeof(kSm80MmaShapes) / sizeof(MmaShape));

// sm90a_wgmma. name: rows of q x keys of a tile, slots for tiles of k and v, tiles of q in shared memory.
struct WgmmaShape {
  const char* name;
  int head_dim;
  int tile_m, tile_n;
  int slots, queries;
  bool takes_all, takes_masks;  // calls that mask by length alone; causal, window, softcap
  int threads;
};

inline constexpr WgmmaShape sm90a_wgmma_shape(const char* name, int head_dim, int tile_m, int tile_n, int slots, int queries, bool takes_all,
                                              bool takes_masks) {
  return {name, head_dim, tile_m, tile_n, slots, queries, takes_all, takes_masks, tile_m * 2 + 128};
}

inline constexpr WgmmaShape kSm90aWgmmaShapes[] = {
    sm90a_wgmma_shape("192x128s8q2", 64, 192, 128, 8, 2, true, true),
    sm90a_wgmma_shape("128x128s4q2", 128, 128, 128, 4, 2, true, true),
    sm90a_wgmma_shape("128x176s4q1", 128, 128, 176, 4, 1, true, false),
    sm90a_wgmma_shape("128x80s4q1", 256, 128, 80, 4, 1, true, true),
    sm90a_wgmma_shape("128x192s6q2", 64, 128, 192, 6, 2, true, true),
    sm90a_wgmma_shape("128x128s5q2", 128, 128, 128, 5, 2, true, true),
    sm90a_wgmma_shape("128x160s4q2", 128, 128, 160, 4, 2, true, false),
    sm90a_wgmma_shape("128x64s5q1", 256, 128, 64, 5, 1, true, true),
};
inline constexpr int kSm90aWgmmaShapeCount = static_cast<int>(sizeof(kSm90aWgmmaShapes) / sizeof(WgmmaShape));

}  // namespace dandan_attention
