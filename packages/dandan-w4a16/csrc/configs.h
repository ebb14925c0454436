// The named configurations of the kernels; Tile::config is a place in these arrays. No torch, no CUDA.
#pragma once

namespace dandan_w4a16 {

// sm80_decode: name = columns of out for a block x warps.
struct DecodeShape {
  const char* name;
  int tiles;  // of 16 columns
  int warps;
  int depth;  // blocks of 64 k of a warp in flight
};

inline constexpr int kMaxDecodeRows = 16;
inline constexpr int kMaxDecodeSplit = 4;

inline constexpr DecodeShape kDecodeShapes[] = {
    {"16x8", 1, 8, 4}, {"16x16", 1, 16, 2}, {"32x8", 2, 8, 2}, {"32x16", 2, 16, 2}, {"64x8", 4, 8, 2}, {"64x4", 4, 4, 3},
};
inline constexpr int kDecodeShapeCount = static_cast<int>(sizeof(kDecodeShapes) / sizeof(DecodeShape));

// sm90a_wgmma: name = tokens x columns of out.
struct WgmmaShape {
  const char* name;
  int tokens;
  int consumers;    // warp groups of 64 columns each
  int stages;
  unsigned splits;  // bit s: s slices of K
};

inline constexpr WgmmaShape kWgmmaShapes[] = {
    {"16x64", 16, 1, 12, 0b10110},  {"32x64", 32, 1, 12, 0b10110}, {"32x128", 32, 2, 8, 0b10110}, {"64x64", 64, 1, 8, 0b10110},
    {"64x128", 64, 2, 8, 0b10110},  {"128x64", 128, 1, 8, 0b110},  {"128x128", 128, 2, 8, 0b110}, {"256x128", 256, 2, 5, 0b110},
};
inline constexpr int kWgmmaShapeCount = static_cast<int>(sizeof(kWgmmaShapes) / sizeof(WgmmaShape));

}  // namespace dandan_w4a16
