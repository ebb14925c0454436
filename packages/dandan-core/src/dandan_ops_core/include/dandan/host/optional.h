// Optional numbers in schemas ("int?", "SymInt?", "float?"): on a stack, a pointer to the value or nothing. Bindings alone include this file.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>

#include <dandan/host/tensor.h>

namespace dandan::host {

namespace detail {

template <typename T>
std::optional<T> take_optional(Arguments& arguments) {
  static_assert(sizeof(T) == sizeof(StableIValue));
  const std::unique_ptr<StableIValue> value(reinterpret_cast<StableIValue*>(static_cast<uintptr_t>(arguments.integer())));
  if (value == nullptr) return std::nullopt;
  T number;
  std::memcpy(&number, value.get(), sizeof(number));
  return number;
}

template <typename T>
void put_optional(Values& values, const std::optional<T>& number) {
  static_assert(sizeof(T) == sizeof(StableIValue));
  StableIValue* value = nullptr;
  if (number) {
    value = new StableIValue{};
    std::memcpy(value, &*number, sizeof(T));
  }
  values.integer(static_cast<int64_t>(reinterpret_cast<uintptr_t>(value)));
}

}  // namespace detail

// The next argument; reading it takes its ownership from the stack.
inline std::optional<int64_t> optional_integer(Arguments& arguments) { return detail::take_optional<int64_t>(arguments); }
inline std::optional<double> optional_number(Arguments& arguments) { return detail::take_optional<double>(arguments); }

// A bool fills the first byte of its place.
inline bool flag(Arguments& arguments) { return (arguments.integer() & 0xff) != 0; }

inline void put_optional_integer(Values& values, const std::optional<int64_t>& number) { detail::put_optional(values, number); }
inline void put_optional_number(Values& values, const std::optional<double>& number) { detail::put_optional(values, number); }

}  // namespace dandan::host
