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

// sm90_decode: name = columns of out for a block x warps; x3: three blocks share a multiprocessor; m: for more than 16 tokens.
struct RingShape {
  const char* name;
  int tiles;     // of 16 columns
  int warps;
  int resident;  // blocks that share a multiprocessor
  int halves;    // of 8 tokens: instantiated for this number and for its doubles up to `tokens`
  int tokens;    // at most
};

inline constexpr int kMaxRingRows = 64;
inline constexpr int kMaxRingSplit = 4;

inline constexpr RingShape kRingShapes[] = {
    {"16x8", 1, 8, 3, 1, 16},  {"16x16", 1, 16, 1, 1, 16},  {"32x8", 2, 8, 2, 1, 16},  {"32x16", 2, 16, 1, 1, 32},  {"64x8", 4, 8, 2, 1, 16},
    {"64x8x3", 4, 8, 3, 1, 8}, {"64x16", 4, 16, 1, 1, 16}, {"128x8", 8, 8, 1, 1, 32}, {"64x12m", 4, 12, 1, 4, 32}, {"64x8m", 4, 8, 1, 4, 64},
};
inline constexpr int kRingShapeCount = static_cast<int>(sizeof(kRingShapes) / sizeof(RingShape));

// sm80_mma: name = tokens x columns of out.
struct MmaShape {
  const char* name;
  int tokens, columns;            // of a block
  int warp_tokens, warp_columns;  // of a warp
  int stages;                     // blocks of 64 k in shared memory
  constexpr int threads() const { return tokens / warp_tokens * (columns / warp_columns) * 32; }
};

inline constexpr int kMaxMmaSharedBytes = 99 * 1024;  // what a block of sm_86, sm_89 and sm_120 can have
inline constexpr int kMaxMmaSplit = 16;

inline constexpr MmaShape kMmaShapes[] = {
    {"32x64", 32, 64, 32, 16, 8},    {"32x128", 32, 128, 32, 32, 6},    {"32x256", 32, 256, 32, 32, 5},    {"64x64", 64, 64, 64, 16, 5},
    {"64x128", 64, 128, 64, 32, 4},  {"64x256", 64, 256, 64, 32, 5},    {"128x128", 128, 128, 128, 32, 3}, {"128x256", 128, 256, 128, 32, 3},
};
inline constexpr int kMmaShapeCount = static_cast<int>(sizeof(kMmaShapes) / sizeof(MmaShape));

// sm90a_wgmma: name = tokens x columns of out.
struct WgmmaShape {
  const char* name;
  int tokens;
  int consumers;    // warp groups of 64 columns each
  int stages;
  unsigned splits;  // bit s: s slices of K
};

inline constexpr WgmmaShape kWgmmaShapes[] = {
    {"16x64", 16, 1, 12, 0b11110},  {"32x64", 32, 1, 12, 0b11110}, {"32x128", 32, 2, 8, 0b11110}, {"64x64", 64, 1, 8, 0b11110},
    {"64x128", 64, 2, 8, 0b11110},  {"128x64", 128, 1, 6, 0b1110},  {"128x128", 128, 2, 8, 0b1110}, {"256x128", 256, 2, 5, 0b1110},
    {"32x256", 32, 4, 8, 0b11110},  {"64x192", 64, 3, 8, 0b11110}, {"128x192", 128, 3, 8, 0b1110}, {"192x128", 192, 2, 6, 0b1110},
};
inline constexpr int kWgmmaShapeCount = static_cast<int>(sizeof(kWgmmaShapes) / sizeof(WgmmaShape));

}  // namespace dandan_w4a16
