// The two warps of an sm90a_wgmma block that copy: one chooses tiles of queries and copies q, one copies k and v.
#pragma once

#include <dandan/ptx/mbarrier.cuh>
#include <dandan/ptx/tma.cuh>
#include <dandan/ptx/tma_4d.cuh>

#include "sm90a_storage.cuh"

namespace dandan_attention {

// ---------------------------------------------------------------- the warp that chooses tiles and copies q

// All lanes call it, lane 0 writes and copies.
template <class C>
struct TileWriter {
  const WgmmaParams& p;
  const Shared<C>& s;
  const int lane;
  Ring<C::kTiles> info;
  Ring<C::kQueries> query;

  __device__ __forceinline__ void write(const TileInfo& tile) {
    ptx::mbarrier_wait(s.info_empty(info.at), info.parity ^ 1);
    s.control->info[info.at] = tile;
    ptx::mbarrier_arrive(s.info_full(info.at));
    info.next();
  }
  __device__ __forceinline__ void tile(int b, const Sequence& q, int head, int index) {
    TileInfo t;
    t.row0 = index * C::kTileM, t.length_q = q.length_q, t.batch = b, t.head = head;
    t.first_q = q.first_q, t.first_k = q.first_k, t.live = q.live, t.start = q.start, t.unused = 0;
    const TileRange range = key_tiles<C::kTileN>(p.sequences, q, t.row0, min(t.row0 + C::kTileM, q.length_q));
    t.begin = range.begin, t.end = range.end, t.full_begin = range.full_begin, t.full_end = range.full_end;
    if (range.empty()) return zeros(t);
    if (lane == 0) {
      write(t);
      copy_q(q.first_q + t.row0, head * p.q_head, b * p.q_batch);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void copy_q(int row, int head, int b) {
    for (int group = 0; group < C::kConsumers; ++group) {
      const uint32_t full = s.q_full(query.at, group), to = s.q(query.at, group);
      ptx::mbarrier_wait(s.q_empty(query.at, group), query.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, C::kBytesQ);
#pragma unroll
      for (int panel = 0; panel < C::kPanels; ++panel) {
        ptx::cp_async_bulk_tensor_4d(to + panel * C::kPanelQ, &p.q, panel * 64, row + group * 64, head, b, full, ptx::kEvictFirst);
      }
    }
    query.next();
  }
  // A tile that sees no key: nobody else hears of it.
  __device__ __forceinline__ void zeros(const TileInfo& t) const {
    constexpr int kChunks = C::kHeadDim / 8;
    const int rows = min(C::kTileM, t.length_q - t.row0);
    for (int i = lane; i < rows * kChunks; i += 32) {
      *reinterpret_cast<uint4*>(out_row<uint16_t>(p, t, i / kChunks) + i % kChunks * 8) = make_uint4(0, 0, 0, 0);
    }
    if (p.lse != nullptr) {
      for (int i = lane; i < rows; i += 32) *lse_row(p, t, i) = -INFINITY;
    }
  }
};

template <class C>
__device__ __forceinline__ void choose_tiles(const WgmmaParams& p, const Shared<C>& s, int lane) {
  TileWriter<C> writer{p, s, lane, {}, {}};
  const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  const Schedule& schedule = p.schedule;
  int round = 0;
  if (p.sequences.cu_seqlens_q == nullptr) {
    for (int at; (at = tile_number(round, block, blocks)) < schedule.total; ++round) {
      const TilePlace place = tile_at(schedule, at, p.sequences.batch * schedule.heads, schedule.tiles_m, true);
      const int b = place.pair / schedule.heads;
      writer.tile(b, sequence_at(p.sequences, b), place.pair - b * schedule.heads, place.tile);
    }
  } else {
    SequenceTable& table = s.control->table;
    for (int from = 0; from < p.sequences.batch; from += SequenceTable::kCapacity) {
      const int count = min(p.sequences.batch - from, SequenceTable::kCapacity);
      if (from > 0) {
        const int number = table.first[SequenceTable::kCapacity];
        __syncwarp();
        table.template build<C::kTileM>(p.sequences, schedule, from, count, number, lane);
      }
      TableWalk walk{table, count, schedule.heads, lane};
      const int total = table.first[count];
      for (int at; (at = tile_number(round, block, blocks)) < total; ++round) {
        const TableWalk::Place found = walk.find(at);
        const int b = from + table.order[found.place];
        const Sequence q = sequence_at(p.sequences, b);
        if (found.level > 0) {
          writer.tile(b, q, found.head, table.rows[found.place] - 1 - (table.top[found.place] - found.level));
        } else {
          const TilePlace place = tile_at(schedule, found.rest, schedule.heads, (q.length_q + C::kTileM - 1) / C::kTileM, found.last_descends);
          writer.tile(b, q, place.pair, place.tile);
        }
      }
      __syncwarp();
    }
  }
  if (lane == 0) {
    TileInfo none = {};
    none.end = -1;
    writer.write(none);
  }
}

// ---------------------------------------------------------------- the warp that copies k and v

template <class C>
__device__ __forceinline__ void copy_keys(const WgmmaParams& p, const Shared<C>& s) {
  Ring<C::kTiles> info;
  Ring<C::kSlots> ring;
  const auto copy = [&](const CUtensorMap& map, int row, int head, int batch) {
    const uint32_t full = s.full(ring.at), to = s.slot(ring.at);
    ptx::mbarrier_wait(s.empty(ring.at), ring.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, C::kSlotBytes);
#pragma unroll
    for (int panel = 0; panel < C::kPanels; ++panel) {
      ptx::cp_async_bulk_tensor_4d(to + panel * C::kPanelKv, &map, panel * 64, row, head, batch, full, ptx::kEvictNormal);
    }
    ring.next();
  };
  int v_row = 0, v_head = 0, v_batch = 0;
  bool behind = false;  // v goes one tile of keys behind k, from one tile of queries to the next too
  while (true) {
    ptx::mbarrier_wait(s.info_full(info.at), info.parity);
    const TileInfo& t = s.control->info[info.at];
    const int begin = t.begin, end = t.end, first = t.first_k, head = t.head / p.group, batch = t.batch;
    ptx::mbarrier_arrive(s.info_empty(info.at));
    info.next();
    if (end < 0) break;
    for (int n = end - 1; n >= begin; --n) {
      copy(p.k, first + n * C::kTileN, head * p.k_head, batch * p.k_batch);
      if (behind) copy(p.v, v_row, v_head, v_batch);
      v_row = first + n * C::kTileN, v_head = head * p.v_head, v_batch = batch * p.v_batch, behind = true;
    }
  }
  if (behind) copy(p.v, v_row, v_head, v_batch);
}

}  // namespace dandan_attention
