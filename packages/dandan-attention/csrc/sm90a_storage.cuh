// What the warps of an sm90a_wgmma block share: configuration, parameters, the tiles that are known ahead, shared memory and its barriers.
#pragma once

#include <cuda.h>

#include <dandan/ptx/mbarrier.cuh>

#include "mask.cuh"
#include "sm90a_schedule.cuh"
#include "sm90a_softmax.cuh"

namespace dandan_attention {

template <int kHeadDim_, int kTileN_, int kConsumers_, int kSlots_, int kQueries_>
struct WgmmaConfig {
  static constexpr int kHeadDim = kHeadDim_, kTileN = kTileN_, kConsumers = kConsumers_, kSlots = kSlots_, kQueries = kQueries_;
  static constexpr int kTileM = 64 * kConsumers, kThreads = (kConsumers + 1) * 128, kPanels = kHeadDim / 64;
  static constexpr int kPanelQ = 64 * 128, kPanelKv = kTileN * 128;  // bytes
  static constexpr int kBytesQ = kPanels * kPanelQ, kSlotBytes = kPanels * kPanelKv;  // of a warp group, of a tile of keys
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32, kConsumerRegisters = kConsumers == 2 ? 232 : 160;
  static constexpr int kTiles = 4;  // tiles of queries that are known ahead
  static constexpr int kDataBytes = kQueries * kConsumers * kBytesQ + kSlots * kSlotBytes;
};

struct WgmmaParams {
  CUtensorMap q, k, v;
  void* out;
  float* lse;
  Strides out_strides;
  int64_t lse_batch, lse_head;
  Sequences sequences;
  Schedule schedule;
  Transform transform;
  float exponent;   // log2(e) times what a logit lacks after the transform: above 0
  float slack;      // 8 / exponent
  int group;        // heads of q that share one of k and v
  int q_batch, q_head, k_batch, k_head, v_batch, v_head;  // 0 where a dimension is 1 for the tensor map: of size 1 or expanded
  bool clear_tail;  // beyond a sequence's last key lies what the tensor map does not know to be outside
};

// A tile of queries that sees keys, as the warp that chooses it hands it to the others.
struct alignas(16) TileInfo {
  int row0, length_q;   // the tile's first row in its sequence, the sequence's rows
  int batch, head;
  int first_q, first_k, live;
  int begin, end, full_begin, full_end;  // tiles of keys, see TileRange; end < 0: no tile, no more will come
  int unused;
  int64_t start;
};

// Behind the data: 8 bytes a barrier.
template <class C>
struct ControlStorage {
  uint64_t full[C::kSlots], empty[C::kSlots];
  uint64_t q_full[C::kQueries * C::kConsumers], q_empty[C::kQueries * C::kConsumers];
  uint64_t info_full[C::kTiles], info_empty[C::kTiles];
  TileInfo info[C::kTiles];
  SequenceTable table;
};
template <class C>
inline constexpr int kSharedBytes = 1024 + C::kDataBytes + static_cast<int>(sizeof(ControlStorage<C>));

template <int kCount>
struct Ring {
  int at = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++at == kCount) at = 0, parity ^= 1;
  }
};

template <class C>
struct Shared {
  uint32_t data;
  ControlStorage<C>* control;
  uint32_t control_address;

  __device__ __forceinline__ explicit Shared(unsigned char* raw) {
    const uint32_t base = ptx::shared_address(raw);
    data = (base + 1023) & ~1023u;
    control_address = data + C::kDataBytes;
    control = reinterpret_cast<ControlStorage<C>*>(raw + (control_address - base));
  }
  __device__ __forceinline__ uint32_t q(int buffer, int group) const { return data + (buffer * C::kConsumers + group) * C::kBytesQ; }
  __device__ __forceinline__ uint32_t slot(int i) const { return data + C::kQueries * C::kConsumers * C::kBytesQ + i * C::kSlotBytes; }
  __device__ __forceinline__ uint32_t full(int i) const { return control_address + 8 * i; }
  __device__ __forceinline__ uint32_t empty(int i) const { return full(C::kSlots + i); }
  __device__ __forceinline__ uint32_t q_full(int buffer, int group) const { return full(2 * C::kSlots + buffer * C::kConsumers + group); }
  __device__ __forceinline__ uint32_t q_empty(int buffer, int group) const { return full(2 * C::kSlots + (C::kQueries + buffer) * C::kConsumers + group); }
  __device__ __forceinline__ uint32_t info_full(int i) const { return full(2 * C::kSlots + 2 * C::kQueries * C::kConsumers + i); }
  __device__ __forceinline__ uint32_t info_empty(int i) const { return info_full(C::kTiles + i); }
};

// Row r of a tile of queries in out, and its logarithm.
template <typename T>
__device__ __forceinline__ T* out_row(const WgmmaParams& p, const TileInfo& t, int r) {
  return static_cast<T*>(p.out) + t.batch * p.out_strides.batch + t.head * p.out_strides.head + (int64_t{t.first_q} + t.row0 + r) * p.out_strides.row;
}
__device__ __forceinline__ float* lse_row(const WgmmaParams& p, const TileInfo& t, int r) {
  return p.lse + t.batch * p.lse_batch + t.head * p.lse_head + t.first_q + t.row0 + r;
}

}  // namespace dandan_attention
