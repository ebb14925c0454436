// What bindings need around the selection of products: profile rows by exact shape, remembered routes, the JSON of routes.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <dandan/host/binding.h>

namespace dandan::host {

// Rows of a route table by their exact key.
template <typename Key, typename Choice>
class ProfileTable {
 public:
  // The row of `key`, or a Choice that names nothing.
  Choice find(const Key& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = rows_.find(key);
    return found == rows_.end() ? Choice{} : found->second;
  }
  void replace(std::map<Key, Choice> rows) {
    const std::lock_guard<std::mutex> lock(mutex_);
    rows_ = std::move(rows);
    generation_.fetch_add(1, std::memory_order_release);
  }
  // Changes with the rows.
  uint64_t generation() const { return generation_.load(std::memory_order_acquire); }

 private:
  std::mutex mutex_;
  std::map<Key, Choice> rows_;
  std::atomic<uint64_t> generation_{1};
};

// select(asked), remembered: decoding asks for the same few shapes again and again, and the estimates of all candidates take microseconds. What was
// remembered of another generation is forgotten.
template <typename Route, typename Problem, typename Select>
Route remembered(const Problem& asked, uint64_t generation, Select&& select) {
  struct Entry {
    Problem problem;
    uint64_t generation = 0;
    Route route;
  };
  constexpr size_t kEntries = 256;
  static thread_local std::vector<Entry> entries(kEntries);
  uint64_t hash = 0;
  for (const int64_t value : {asked.m, asked.n, asked.k, static_cast<int64_t>(asked.backend)}) {
    hash = (hash ^ static_cast<uint64_t>(value)) * 0x9e3779b97f4a7c15u;
  }
  Entry& entry = entries[(hash >> 32) % kEntries];
  if (entry.generation == generation && entry.problem == asked) return entry.route;
  entry.generation = 0;
  entry.route = select(asked);
  entry.problem = asked;
  entry.generation = generation;
  return entry.route;
}

inline std::string microseconds(double us) {
  const int64_t ns = static_cast<int64_t>(std::min(us, 1e12) * 1000.0 + 0.5);
  const std::string digits = std::to_string(ns % 1000);
  return std::to_string(ns / 1000) + "." + std::string(3 - digits.size(), '0') + digits;
}

// Names as a JSON list.
inline std::string json(const std::vector<const char*>& list) {
  std::string text = "[";
  for (size_t i = 0; i < list.size(); ++i) text += (i > 0 ? ", " : "") + quoted(list[i]);
  return text + "]";
}

}  // namespace dandan::host
