// The named configurations of the kernels; Tile::config is a place in these arrays. No torch, no CUDA.
#pragma once

namespace dandan_gemm {

struct MmaShape {
  const char* name;
  int tile_m, tile_n, tile_k;  // of a block
  int warp_m, warp_n;          // of a warp
  int stages;                  // slices of K in shared memory
  int threads;
  int shared_bytes;            // at most 99 KB, what a block of sm_86, sm_89 and sm_120 can have
};

inline constexpr int kMaxMmaSharedBytes = 99 * 1024;

inline constexpr MmaShape sm80_mma_shape(const char* name, int tile_m, int tile_n, int tile_k, int warp_m, int warp_n, int stages) {
  return {name, tile_m, tile_n, tile_k, warp_m, warp_n, stages, tile_m / warp_m * (tile_n / warp_n) * 32, stages * (tile_m + tile_n) * tile_k * 2};
}

// Two barriers a stage; stages start at a multiple of 1024 bytes, the period of the swizzle.
inline constexpr MmaShape sm90_tma_mma_shape(const char* name, int tile_m, int tile_n, int tile_k, int warp_m, int warp_n, int stages) {
  MmaShape shape = sm80_mma_shape(name, tile_m, tile_n, tile_k, warp_m, warp_n, stages);
  shape.shared_bytes += 16 * stages + 1024;
  return shape;
}

inline constexpr MmaShape kSm80MmaShapes[] = {
    sm80_mma_shape("128x256", 128, 256, 32, 64, 64, 4),
    sm80_mma_shape("128x128", 128, 128, 64, 64, 64, 3),
    sm80_mma_shape("128x128w8", 128, 128, 32, 64, 32, 4),
    sm80_mma_shape("128x64", 128, 64, 64, 64, 32, 3),
    sm80_mma_shape("64x128", 64, 128, 64, 32, 64, 3),
    sm80_mma_shape("64x64", 64, 64, 64, 32, 32, 4),
    sm80_mma_shape("32x128", 32, 128, 64, 32, 32, 4),
    sm80_mma_shape("16x128", 16, 128, 64, 16, 32, 4),
    sm80_mma_shape("16x64", 16, 64, 64, 16, 32, 6),
};

inline constexpr MmaShape kSm90TmaMmaShapes[] = {
    sm90_tma_mma_shape("128x256", 128, 256, 32, 64, 64, 4),
    sm90_tma_mma_shape("128x128", 128, 128, 64, 64, 64, 3),
    sm90_tma_mma_shape("128x128w8", 128, 128, 64, 64, 32, 3),
    sm90_tma_mma_shape("128x64", 128, 64, 64, 64, 32, 4),
    sm90_tma_mma_shape("64x128", 64, 128, 64, 32, 64, 4),
    sm90_tma_mma_shape("64x64", 64, 64, 64, 32, 32, 6),
    sm90_tma_mma_shape("16x128", 16, 128, 64, 16, 32, 5),
};

inline constexpr int kSm80MmaShapeCount = static_cast<int>(sizeof(kSm80MmaShapes) / sizeof(MmaShape));
inline constexpr int kSm90TmaMmaShapeCount = static_cast<int>(sizeof(kSm90TmaMmaShapes) / sizeof(MmaShape));

// sm90a_wgmma. "w": the rows of the instruction are weights, its columns tokens (rows of a), as it has 64 rows at least.
struct WgmmaShape {
  const char* name;
  int tile_m, tile_n;
  int stages;
  bool swap;
  int blocks_x;       // blocks of 64 rows that a warp group multiplies
  bool persistent;    // a block goes on to its next tile; else one tile, `splits` slices of K
  unsigned splits;    // bit s: s slices, each of a block of a cluster
  // [k, n] weights come in boxes of 64 columns.
  constexpr bool takes_kn() const { return tile_n % 64 == 0; }
};

inline constexpr unsigned split_bits(int a, int b = 0, int c = 0) { return 1u << a | (b != 0 ? 1u << b : 0u) | (c != 0 ? 1u << c : 0u); }

inline constexpr WgmmaShape kSm90aWgmmaShapes[] = {
    {"128x256", 128, 256, 4, false, 1, true, split_bits(1)},
    {"128x200", 128, 200, 4, false, 1, true, split_bits(1)},
    {"128x192", 128, 192, 4, false, 1, true, split_bits(1)},
    {"128x160", 128, 160, 5, false, 1, true, split_bits(1)},
    {"128x128", 128, 128, 6, false, 1, true, split_bits(1)},
    {"256x128", 256, 128, 4, false, 2, true, split_bits(1)},
    {"64x192", 64, 192, 6, false, 1, true, split_bits(1)},
    {"64x128", 64, 128, 8, false, 1, true, split_bits(1)},
    {"128x160s5", 128, 160, 5, false, 1, false, split_bits(2)},
    {"128x80s8", 128, 80, 8, false, 1, false, split_bits(1, 2)},
    {"128x64s8", 128, 64, 8, false, 1, false, split_bits(1, 2)},
    {"64x96s9", 64, 96, 9, false, 1, false, split_bits(1, 2)},
    {"64x40s8", 64, 40, 8, false, 1, false, split_bits(1, 2)},
    {"64x32s8", 64, 32, 8, false, 1, false, split_bits(1, 2, 3)},
    {"128x128w6", 128, 128, 6, true, 1, false, split_bits(1, 2)},
    {"128x64w8", 128, 64, 8, true, 1, false, split_bits(1, 2, 3)},
    {"64x128w8", 64, 128, 8, true, 1, false, split_bits(1, 2)},
    {"64x64w12", 64, 64, 12, true, 1, false, split_bits(1, 2, 4)},
    {"32x128w10", 32, 128, 10, true, 1, false, split_bits(1, 2)},
    {"32x64w8", 32, 64, 8, true, 1, false, split_bits(1, 2, 4)},
    {"32x64w5", 32, 64, 5, true, 1, false, split_bits(1, 3)},
    {"16x128w12", 16, 128, 12, true, 1, false, split_bits(1, 2)},
    {"16x64w10", 16, 64, 10, true, 1, false, split_bits(1, 2)},
    {"16x64w6", 16, 64, 6, true, 1, false, split_bits(1, 2)},
    {"8x64w11", 8, 64, 11, true, 1, false, split_bits(1, 2)},
};
inline constexpr int kSm90aWgmmaShapeCount = static_cast<int>(sizeof(kSm90aWgmmaShapes) / sizeof(WgmmaShape));

// skinny: name = columns of b for a block x elements of K that a warp takes at a time.
struct SkinnyShape {
  const char* name;
  int groups;     // of 8 columns
  int chunks;     // of 32 elements of K
  int warps;
  int depth;      // slices of a warp in flight
  int registers;  // of a thread, up to 8 rows
  // Of an earlier cost model; that of routes.h has its own numbers.
  double ramp, static_ramp, static_split_ramp, tail;
};

inline constexpr int kMaxSkinnySplit = 2;
inline constexpr int kMaxSkinnyRows = 16;

inline constexpr SkinnyShape kSkinnyShapes[] = {
    {"8x128", 1, 4, 16, 1, 64, 2.71, 1.88, 2.60, 0.02},
    {"16x32", 2, 1, 16, 2, 64, 2.57, 2.12, 1.60, 0.40},
    {"16x64", 2, 2, 8, 2, 88, 2.57, 1.68, 1.55, 0.36},
    {"16x128", 2, 4, 4, 2, 132, 2.72, 1.59, 2.20, 0.09},
    {"16x256", 2, 8, 4, 1, 132, 2.84, 1.60, 2.20, 0.03},
    {"32x32", 4, 1, 16, 1, 70, 2.76, 1.90, 2.20, 0.06},
    {"32x128", 4, 4, 4, 1, 132, 3.60, 1.90, 1.30, 0.14},
};
inline constexpr int kSkinnyShapeCount = static_cast<int>(sizeof(kSkinnyShapes) / sizeof(SkinnyShape));

}  // namespace dandan_gemm
