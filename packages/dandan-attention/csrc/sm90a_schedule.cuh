// Which tile of queries a block of sm90a_wgmma works on, and when. For a grid of as many blocks as there are multiprocessors.
//
// Tiles are numbered so that costs rise and fall without a jump: heads whose keys and values fit in L2 together are a group; a group goes through its
// tiles by rows of queries, all its heads side by side, the longest first; the group before it has the longest last, and so on, so that the last group of all
// ends with its shortest tiles. Block c of G takes the tiles c, 2G - 1 - c, 2G + c, .. of this order: what a round gives to the first blocks, the next gives
// to the last.
//
// Packed sequences are sorted by their longest tile first; neighbours that are too few heads or too few bytes to be a group are one together, a bundle. A
// bundle goes through its tiles by levels: how many tiles of rows the keys reach that the tile's last row sees, counted down from the sequence's end. A
// sequence that is a bundle by itself is numbered as a dense one, in groups of its heads.
#pragma once

#include <cstdint>

#include "mask.cuh"

namespace dandan_attention {

struct Schedule {
  int heads;      // of q, of one sequence
  int per_group;  // heads (dense: of all sequences) of a group
  int tiles_m;    // dense: of a head
  int total;      // dense
  int full_keys, full_heads;  // packed: keys of a bundle, heads of q of a bundle
  bool by_rows;   // costs differ by rows; else a head's tiles follow each other
};

struct TilePlace {
  int pair, tile;  // head (dense: batch * heads + head), tile of queries
};

// Tile `at` of `pairs` heads that have `tiles_m` tiles each.
__host__ __device__ __forceinline__ TilePlace tile_at(const Schedule& s, int at, int pairs, int tiles_m, bool last_descends) {
  if (!s.by_rows) return {at / tiles_m, at % tiles_m};
  const int of_group = s.per_group * tiles_m, groups = (pairs + s.per_group - 1) / s.per_group;
  const int group = at / of_group, rest = at - group * of_group, first = group * s.per_group;
  const int wide = pairs - first < s.per_group ? pairs - first : s.per_group;
  const int row = rest / wide, column = rest - row * wide;
  const bool descends = ((groups - 1 - group) % 2 == 0) == last_descends;
  return {first + column, descends ? tiles_m - 1 - row : row};
}

// The number of the tile that block `block` of `blocks` takes in round `round`.
__host__ __device__ __forceinline__ int tile_number(int round, int block, int blocks) {
  return round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
}

// Packed sequences, kCapacity at a time: the numbers of their tiles. The first kCapacity are sorted and bundled, by all threads of the block.
struct SequenceTable {
  static constexpr int kCapacity = 128, kFull = 4096, kMost = 0xffff;
  int first[kCapacity + 1];  // number of a place's first tile, as if sequences followed each other
  uint16_t top[kCapacity], rows[kCapacity];    // the level of its last tile, its tiles of rows; 0: it is not bundled
  uint8_t order[kCapacity], bundle[kCapacity];  // the sequence at a place, the bundle it is in

  struct Scratch {
    int tiles, cost, share;  // share: of a bundle, in parts of kFull
    uint16_t top, rows;
  };

  template <int kTileM, int kTileN>
  static __device__ __forceinline__ Scratch measure(const Sequences& s, const Schedule& schedule, int b) {
    const Sequence q = sequence_at(s, b);
    const int rows = (q.length_q + kTileM - 1) / kTileM;
    if (rows == 0) return {0, -1, 0, 0, 0};
    Scratch r = {rows * schedule.heads, 0, kFull, 0, 0};
    const TileRange range = key_tiles<kTileN>(s, q, (rows - 1) * kTileM, q.length_q);
    r.cost = range.empty() ? 0 : range.end - range.begin;
    if (!schedule.by_rows || rows > kMost) return r;
    r.rows = static_cast<uint16_t>(rows);
    r.top = static_cast<uint16_t>(min(max((visible_keys(s, q, q.length_q - 1).end - 1) / kTileM + 1, rows), kMost));
    r.share = static_cast<int>(min(int64_t{q.live} * kFull / schedule.full_keys, int64_t{schedule.heads} * kFull / schedule.full_heads));
    r.share = min(max(r.share, 1), kFull);
    return r;
  }

  // `scratch`: kCapacity places that nothing else uses yet.
  template <int kTileM, int kTileN, int kThreads>
  __device__ __forceinline__ void build_sorted(const Sequences& s, const Schedule& schedule, Scratch* scratch) {
    const int count = min(s.batch, kCapacity);
    for (int b = static_cast<int>(threadIdx.x); b < count; b += kThreads) scratch[b] = measure<kTileM, kTileN>(s, schedule, b);
    __syncthreads();
    for (int b = static_cast<int>(threadIdx.x); b < count; b += kThreads) {
      const Scratch own = scratch[b];
      int place = 0, before = 0, shares = 0;
      for (int u = 0; u < count; ++u) {
        const Scratch& other = scratch[u];
        if (other.cost > own.cost || (other.cost == own.cost && u < b)) ++place, before += other.tiles, shares += other.share;
      }
      first[place] = before;
      top[place] = own.top, rows[place] = own.rows;
      order[place] = static_cast<uint8_t>(b), bundle[place] = static_cast<uint8_t>((own.tiles > 0 ? shares : max(shares - 1, 0)) / kFull);
      if (place == count - 1) first[count] = before + own.tiles;
    }
    __syncthreads();
  }

  // By one warp, in the order of the batch: sequences [from, from + count), whose tiles begin at number `number`, each a bundle by itself.
  template <int kTileM>
  __device__ __forceinline__ void build(const Sequences& s, const Schedule& schedule, int from, int count, int number, int lane) {
    for (int start = 0; start < count; start += 32) {
      const int i = start + lane;
      int tiles = 0;
      if (i < count) tiles = (sequence_at(s, from + i).length_q + kTileM - 1) / kTileM * schedule.heads;
      int sum = tiles;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += other;
      }
      if (i < count) first[i] = number + sum - tiles, order[i] = bundle[i] = static_cast<uint8_t>(i), rows[i] = 0;
      number += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (lane == 0) first[count] = number;
    __syncwarp();
  }
};

// Goes through the bundles of a table; its numbers only rise. All lanes of a warp call it, with the same arguments.
struct TableWalk {
  const SequenceTable& table;
  const int count, heads, lane;
  int begin = 0, end = 0;     // the places of the bundle in work
  int level = 0, before = 0;  // a level of it, the tiles of levels above

  struct Place {
    int place, head, level;  // level: above 0 in a bundle of several sequences, -1: tile `rest` of the sequence
    int rest;
    bool last_descends;
  };

  // Sequences of place `i` and its 31 neighbours that have a tile at this level, a bit each.
  __device__ __forceinline__ uint32_t present(int i, int at_level) const {
    i += lane;
    const int top = i < end ? table.top[i] : 0;
    return __ballot_sync(0xffffffffu, i < end && at_level <= top && at_level > top - table.rows[i]);
  }
  __device__ __forceinline__ int tiles_at(int at_level) const {
    int n = 0;
    for (int i = begin; i < end; i += 32) n += __popc(present(i, at_level));
    return n * heads;
  }

  __device__ __forceinline__ Place find(int number) {
    while (end == 0 || table.first[end] <= number) {
      begin = end;
      while (++end < count && table.bundle[end] == table.bundle[begin] && table.rows[end] != 0 && table.rows[begin] != 0) {}
      level = -1;
    }
    const bool last_descends = (table.bundle[count - 1] - table.bundle[begin]) % 2 == 0;
    const int offset = number - table.first[begin];
    if (end - begin == 1) return {begin, 0, -1, offset, last_descends};
    const int total = table.first[end] - table.first[begin], at = last_descends ? offset : total - 1 - offset;
    if (level < 0) {  // from the end that comes first
      int highest = 0;
      for (int i = begin; i < end; ++i) highest = max(highest, static_cast<int>(table.top[i]));
      level = highest, before = 0;
      if (!last_descends) {
        level = 1, before = total - tiles_at(1);
      }
    }
    while (at < before) before -= tiles_at(++level);
    for (int n; at >= before + (n = tiles_at(level));) before += n, --level;
    int nth = (at - before) / heads, i = begin;
    for (uint32_t bits;; i += 32) {
      bits = present(i, level);
      if (nth >= __popc(bits)) {
        nth -= __popc(bits);
        continue;
      }
      while (nth-- > 0) bits &= bits - 1;
      i += __ffs(static_cast<int>(bits)) - 1;
      break;
    }
    return {i, (at - before) % heads, level, 0, last_descends};
  }
};

}  // namespace dandan_attention
