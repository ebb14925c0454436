// What the bindings of operator packages share beside tensors: JSON text, the lines of route tables, the switch of dependent launches.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <dandan/host/tensor.h>

namespace dandan::host {

// `text` as a JSON string. Names and sentences of this project: no control characters.
inline std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

inline const char* json(bool value) { return value ? "true" : "false"; }

// Whether kernels are launched as dependent ones where the device has it: DANDAN_DEPENDENT_LAUNCH unless it is 0, until set_dependent_launch.
inline std::atomic<bool>& dependent_launch() {
  static std::atomic<bool> enabled{[] {
    const char* value = std::getenv("DANDAN_DEPENDENT_LAUNCH");
    return value == nullptr || std::string(value) != "0";
  }()};
  return enabled;
}

// set_dependent_launch(int enabled) -> int
inline void boxed_set_dependent_launch(StableIValue* stack, uint64_t, uint64_t) {
  const bool before = dependent_launch().exchange(Arguments(stack).integer() != 0);
  Values(stack).integer(before ? 1 : 0);
}

// One row of a route table as Python hands it over: "op;dtype;name=size,name=size;kernel".
struct ProfileLine {
  std::string text, op, dtype, kernel;
  std::vector<std::pair<std::string, int64_t>> sizes;

  // The size called `name`, or -1.
  int64_t size(const char* name) const {
    for (const auto& each : sizes) {
      if (each.first == name) return each.second;
    }
    return -1;
  }
};

[[noreturn]] inline void bad_profile_line(const std::string& line, const char* form) { value_error("profile row \"" + line + "\" is not " + form); }

inline std::vector<std::string> split_text(const std::string& text, char separator) {
  std::vector<std::string> fields;
  for (size_t from = 0; from <= text.size();) {
    size_t to = text.find(separator, from);
    if (to == std::string::npos) to = text.size();
    fields.push_back(text.substr(from, to - from));
    from = to + 1;
  }
  return fields;
}

// A whole number of 0 or more and nothing else, or -1.
inline int64_t whole_number(const std::string& text) {
  if (text.empty() || text.size() > 18) return -1;
  for (const char c : text) {
    if (c < '0' || c > '9') return -1;
  }
  return std::strtoll(text.c_str(), nullptr, 10);
}

// The lines of a route table. Raises ValueError for one of another form; `form` says which the package takes.
inline std::vector<ProfileLine> parse_profile(const std::string& text, const char* form) {
  std::vector<ProfileLine> lines;
  for (const std::string& line : split_text(text, '\n')) {
    if (line.empty()) continue;
    const std::vector<std::string> fields = split_text(line, ';');
    if (fields.size() != 4) bad_profile_line(line, form);
    ProfileLine row;
    row.text = line;
    row.op = fields[0];
    row.dtype = fields[1];
    row.kernel = fields[3];
    for (const std::string& each : split_text(fields[2], ',')) {
      const size_t equals = each.find('=');
      const int64_t size = equals == std::string::npos ? -1 : whole_number(each.substr(equals + 1));
      if (size < 0 || equals == 0) bad_profile_line(line, form);
      row.sizes.emplace_back(each.substr(0, equals), size);
    }
    lines.push_back(std::move(row));
  }
  return lines;
}

// Whether this library has machine code with the instructions of one architecture alone, such as "90a", and `arch` is that architecture.
inline bool has_own_code(int arch, const char* name, const char* machine_code = DANDAN_SASS_ARCHS) {
  if (std::atoi(name) != arch) return false;
  const size_t size = std::strlen(name);
  for (const char* at = machine_code; at != nullptr; at = std::strchr(at, ',')) {
    if (*at == ',') ++at;
    if (std::strncmp(at, name, size) == 0 && (at[size] == ',' || at[size] == '\0')) return true;
  }
  return false;
}

}  // namespace dandan::host
