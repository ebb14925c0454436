// What a device is and which machine code of this library it can run. Host code without torch.
#pragma once

#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

#include <dandan/host/launch.h>

namespace dandan::host {

struct DeviceFacts {
  int arch = 0;  // 10 * major + minor
  int sm_count = 0;
};

// Facts of a device, asked once. Creates no context.
inline const DeviceFacts& device_facts(int index) {
  constexpr int kMaxDevices = 64;
  if (index < 0 || index >= kMaxDevices) throw std::runtime_error("RuntimeError: no CUDA device " + std::to_string(index));
  struct Entry {
    DeviceFacts facts;
    explicit Entry(int device) {
      int major = 0, minor = 0;
      check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "device capability");
      check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "device capability");
      check_cuda(cudaDeviceGetAttribute(&facts.sm_count, cudaDevAttrMultiProcessorCount, device), "multiprocessor count");
      facts.arch = 10 * major + minor;
    }
  };
  static std::once_flag once[kMaxDevices];
  static DeviceFacts facts[kMaxDevices];
  std::call_once(once[index], [&] { facts[index] = Entry(index).facts; });
  return facts[index];
}

// The architecture of the code that a device of architecture `arch` would run, 0 if there is none: machine code of its major version and of its
// minor version or a lower one ("90a" fits 90 alone), else PTX of any lower architecture.
inline int code_architecture(int arch, const char* machine_code = DANDAN_SASS_ARCHS, const char* ptx = DANDAN_PTX_ARCHS) {
  int best = 0;
  for (const char* list : {machine_code, ptx}) {
    for (const char* at = list; *at != '\0';) {
      char* end = nullptr;
      const int built = static_cast<int>(std::strtol(at, &end, 10));
      if (end == at) break;
      const bool exact = *end == 'a' || *end == 'f';
      const bool fits = exact ? built == arch : list == ptx ? built <= arch : built / 10 == arch / 10 && built <= arch;
      if (fits && built > best) best = built;
      at = std::strchr(end, ',');
      if (at == nullptr) break;
      ++at;
    }
    if (best != 0) break;
  }
  return best;
}

}  // namespace dandan::host
