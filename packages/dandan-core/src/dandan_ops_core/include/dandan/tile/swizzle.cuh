// Where the 16-byte chunks of a tile's rows lie in shared memory.
#pragma once

#include <cstdint>

namespace dandan::tile {

// Rows of 64 or 128 bytes, one after the other; chunk c of row r lies at place c ^ key(r). Eight rows at one c, as ldmatrix reads them, and the chunks
// of neighbouring rows, as copies write them, cover all 32 banks once. The layouts are those of the copy engine's 64-byte and 128-byte swizzles for
// tiles that start at a multiple of 512 or 1024 bytes.
//
//   128 bytes   row 0: 0 1 2 3 4 5 6 7     64 bytes   row 0: 0 1 2 3   row 1: 0 1 2 3     (a line is 128 bytes: every bank once)
//               row 1: 1 0 3 2 5 4 7 6                row 2: 1 0 3 2   row 3: 1 0 3 2
//               row 2: 2 3 0 1 6 7 4 5                row 4: 2 3 0 1   row 5: 2 3 0 1
template <int kRowBytes>
struct Swizzle {
  static_assert(kRowBytes == 64 || kRowBytes == 128);

  static __device__ __forceinline__ int key(int row) { return kRowBytes == 128 ? row & 7 : (row >> 1) & 3; }
  static __device__ __forceinline__ uint32_t offset(int row, int chunk) { return static_cast<uint32_t>(row * kRowBytes + ((chunk ^ key(row)) << 4)); }
};

}  // namespace dandan::tile
