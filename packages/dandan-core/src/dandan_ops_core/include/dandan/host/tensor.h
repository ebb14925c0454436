// PyTorch's stable ABI for bindings: tensors, arguments of a boxed kernel, the current stream. Bindings alone include this file.
//
// Only C functions of torch/csrc/inductor/aoti_torch/c/shim.h that exist since torch 2.9, so one library serves every later version; the boxing is
// our own because the headers of 2.9 have none. An error is a std::runtime_error whose text begins with the name of the Python exception.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#ifdef _WIN32
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace dandan::host {

[[noreturn]] inline void raise(const char* exception, const std::string& text) { throw std::runtime_error(std::string(exception) + ": " + text); }
[[noreturn]] inline void value_error(const std::string& text) { raise("ValueError", text); }
[[noreturn]] inline void type_error(const std::string& text) { raise("TypeError", text); }
[[noreturn]] inline void backend_unavailable(const std::string& text) { raise("BackendUnavailableError", text); }

inline void check_shim(AOTITorchError status, const char* what) {
  if (status != 0) raise("RuntimeError", std::string("torch could not ") + what);
}

// A tensor of torch, owned; its description is read once.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {
    check_shim(aoti_torch_get_dim(handle, &ndim), "read a tensor");
    check_shim(aoti_torch_get_sizes(handle, &sizes), "read a tensor");
    check_shim(aoti_torch_get_strides(handle, &strides), "read a tensor");
    check_shim(aoti_torch_get_dtype(handle, &dtype), "read a tensor");
    check_shim(aoti_torch_get_device_type(handle, &device_type), "read a tensor");
    check_shim(aoti_torch_get_device_index(handle, &device_index), "read a tensor");
    check_shim(aoti_torch_get_data_ptr(handle, &data), "read a tensor");
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  Tensor(Tensor&& other) noexcept { swap(other); }
  Tensor& operator=(Tensor&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Tensor() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }

  explicit operator bool() const { return handle_ != nullptr; }
  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }
  // Another owned handle of the same tensor.
  AtenTensorHandle share() const {
    AtenTensorHandle other = nullptr;
    check_shim(aoti_torch_new_tensor_handle(handle_, &other), "share a tensor");
    return other;
  }
  bool on(int32_t type, int32_t index) const { return device_type == type && device_index == index; }

  int64_t ndim = 0;
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  void* data = nullptr;
  int32_t dtype = 0;
  int32_t device_type = 0;
  int32_t device_index = 0;

 private:
  void swap(Tensor& other) noexcept {
    std::swap(handle_, other.handle_);
    std::swap(ndim, other.ndim);
    std::swap(sizes, other.sizes);
    std::swap(strides, other.strides);
    std::swap(data, other.data);
    std::swap(dtype, other.dtype);
    std::swap(device_type, other.device_type);
    std::swap(device_index, other.device_index);
  }
  AtenTensorHandle handle_ = nullptr;
};

// Uninitialised contiguous tensor from torch's allocator.
inline Tensor empty(int64_t ndim, const int64_t* sizes, int32_t dtype, int32_t device_type, int32_t device_index) {
  constexpr int64_t kMaxDims = 64;  // torch's own limit
  int64_t strides[kMaxDims];
  int64_t step = 1;
  for (int64_t d = ndim - 1; d >= 0; --d) {
    strides[d] = step;
    step *= sizes[d] > 1 ? sizes[d] : 1;
  }
  AtenTensorHandle handle = nullptr;
  check_shim(aoti_torch_empty_strided(ndim, sizes, strides, dtype, device_type, device_index, &handle), "allocate a tensor");
  return Tensor(handle);
}

// Arguments of a boxed kernel in the order of the schema; reading one takes its ownership from the stack.
class Arguments {
 public:
  explicit Arguments(StableIValue* stack) : next_(stack) {}
  Tensor tensor() { return Tensor(take<AtenTensorHandle>()); }
  Tensor optional_tensor() {
    std::unique_ptr<StableIValue> value(take<StableIValue*>());
    if (value == nullptr) return Tensor();
    AtenTensorHandle handle;
    std::memcpy(&handle, value.get(), sizeof(handle));
    return Tensor(handle);
  }
  int64_t integer() { return take<int64_t>(); }
  double number() { return take<double>(); }

 private:
  template <typename T>
  T take() {
    static_assert(sizeof(T) == sizeof(StableIValue));
    T value;
    std::memcpy(&value, next_++, sizeof(value));
    return value;
  }
  StableIValue* next_;
};

// Values for a stack: results of a boxed kernel, or arguments of a call through the dispatcher.
class Values {
 public:
  explicit Values(StableIValue* stack) : next_(stack) {}
  Values& tensor(AtenTensorHandle owned) { return put(owned); }
  Values& optional_tensor(AtenTensorHandle owned) {
    StableIValue* value = nullptr;
    if (owned != nullptr) {
      value = new StableIValue{};
      std::memcpy(value, &owned, sizeof(owned));
    }
    return put(value);
  }
  Values& integer(int64_t value) { return put(value); }
  Values& number(double value) { return put(value); }

 private:
  template <typename T>
  Values& put(T value) {
    static_assert(sizeof(T) == sizeof(StableIValue));
    std::memcpy(next_++, &value, sizeof(value));
    return *this;
  }
  StableIValue* next_;
};

// A CPU uint8 tensor that holds `text`: how a string leaves a kernel under the ABI of torch 2.9.
inline Tensor text_tensor(const std::string& text) {
  const int64_t size = static_cast<int64_t>(text.size());
  Tensor out = empty(1, &size, aoti_torch_dtype_uint8(), aoti_torch_device_type_cpu(), 0);
  std::memcpy(out.data, text.data(), text.size());
  return out;
}

inline std::string tensor_text(const Tensor& t) {
  if (t.dtype != aoti_torch_dtype_uint8() || t.device_type != aoti_torch_device_type_cpu() || t.ndim != 1 || (t.sizes[0] > 1 && t.strides[0] != 1)) {
    type_error("a contiguous 1-d uint8 tensor on the CPU is needed");
  }
  return std::string(static_cast<const char*>(t.data), static_cast<size_t>(t.sizes[0]));
}

// torch's current CUDA stream on a device. The function lives in torch's CUDA library, which a CPU build of torch does not have, so it is looked
// up in the loaded libraries at the first call.
inline void* current_cuda_stream(int32_t device_index) {
  using Function = AOTITorchError (*)(int32_t, void**);
  static const Function function = [] {
    constexpr const char* kName = "aoti_torch_get_current_cuda_stream";
#ifdef _WIN32
    HMODULE module = GetModuleHandleA("torch_cuda.dll");
    return module == nullptr ? nullptr : reinterpret_cast<Function>(GetProcAddress(module, kName));
#else
    if (void* module = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY)) {
      if (void* symbol = dlsym(module, kName)) return reinterpret_cast<Function>(symbol);
    }
    return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, kName));
#endif
  }();
  if (function == nullptr) backend_unavailable("this torch was built without CUDA");
  void* stream = nullptr;
  check_shim(function(device_index, &stream), "name its current CUDA stream");
  return stream;
}

// Makes a device current for a scope; costs nothing when it is current already.
class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device_index) {
    int32_t current = -1;
    check_shim(aoti_torch_get_current_device_index(&current), "name its current device");
    if (current != device_index) check_shim(aoti_torch_create_device_guard(device_index, &guard_), "change its current device");
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard() {
    if (guard_ != nullptr) aoti_torch_delete_device_guard(guard_);
  }

 private:
  DeviceGuardHandle guard_ = nullptr;
};

inline const char* dtype_name(int32_t dtype) {
  if (dtype == aoti_torch_dtype_float16()) return "float16";
  if (dtype == aoti_torch_dtype_bfloat16()) return "bfloat16";
  if (dtype == aoti_torch_dtype_float32()) return "float32";
  if (dtype == aoti_torch_dtype_float64()) return "float64";
  if (dtype == aoti_torch_dtype_int64()) return "int64";
  if (dtype == aoti_torch_dtype_int32()) return "int32";
  if (dtype == aoti_torch_dtype_int16()) return "int16";
  if (dtype == aoti_torch_dtype_int8()) return "int8";
  if (dtype == aoti_torch_dtype_uint8()) return "uint8";
  if (dtype == aoti_torch_dtype_bool()) return "bool";
  if (dtype == aoti_torch_dtype_complex64()) return "complex64";
  if (dtype == aoti_torch_dtype_complex128()) return "complex128";
  if (dtype == aoti_torch_dtype_complex32()) return "complex32";
  if (dtype == aoti_torch_dtype_uint16()) return "uint16";
  if (dtype == aoti_torch_dtype_uint32()) return "uint32";
  if (dtype == aoti_torch_dtype_uint64()) return "uint64";
  if (dtype == aoti_torch_dtype_float8_e4m3fn()) return "float8_e4m3fn";
  if (dtype == aoti_torch_dtype_float8_e4m3fnuz()) return "float8_e4m3fnuz";
  if (dtype == aoti_torch_dtype_float8_e5m2()) return "float8_e5m2";
  if (dtype == aoti_torch_dtype_float8_e5m2fnuz()) return "float8_e5m2fnuz";
  return "another dtype";
}

inline std::string shape_text(const Tensor& t) {
  std::string text = "[";
  for (int64_t d = 0; d < t.ndim; ++d) text += (d > 0 ? ", " : "") + std::to_string(t.sizes[d]);
  return text + "]";
}

inline std::string device_text(const Tensor& t) {
  if (t.device_type == aoti_torch_device_type_cpu()) return "cpu";
  if (t.device_type == aoti_torch_device_type_cuda()) return "cuda:" + std::to_string(t.device_index);
  if (t.device_type == aoti_torch_device_type_meta()) return "meta";
  return "device type " + std::to_string(t.device_type);
}

inline bool same_shape(const Tensor& a, const Tensor& b) {
  if (a.ndim != b.ndim) return false;
  for (int64_t d = 0; d < a.ndim; ++d) {
    if (a.sizes[d] != b.sizes[d]) return false;
  }
  return true;
}

// True when two elements of `t` share memory (as far as strides tell: dimensions sorted by stride must each step over the one before).
inline bool overlaps_itself(const Tensor& t) {
  int64_t order[64], count = 0;
  for (int64_t d = 0; d < t.ndim; ++d) {
    if (t.sizes[d] == 0) return false;
    if (t.sizes[d] == 1) continue;
    int64_t at = count++;
    for (; at > 0 && t.strides[order[at - 1]] > t.strides[d]; --at) order[at] = order[at - 1];
    order[at] = d;
  }
  int64_t extent = 1;
  for (int64_t i = 0; i < count; ++i) {
    if (t.strides[order[i]] < extent) return true;
    extent = t.strides[order[i]] * (t.sizes[order[i]] - 1) + extent;
  }
  return false;
}

// Whether two tensors of one shape share memory: not at all, element for element, or otherwise. Slices of one tensor whose rows lie in turn (as q and
// k of a qkv tensor) are told apart by their columns.
enum class Overlap { kNone, kSame, kPartial };

inline Overlap overlap(const Tensor& a, int64_t a_size, const Tensor& b, int64_t b_size) {
  const auto extent = [](const Tensor& t) {
    int64_t last = 1;
    for (int64_t d = 0; d < t.ndim; ++d) {
      if (t.sizes[d] == 0) return int64_t{0};
      last += (t.sizes[d] - 1) * t.strides[d];
    }
    return last;
  };
  const auto begin_a = reinterpret_cast<intptr_t>(a.data), begin_b = reinterpret_cast<intptr_t>(b.data);
  const intptr_t end_a = begin_a + extent(a) * a_size, end_b = begin_b + extent(b) * b_size;
  if (begin_a >= end_b || begin_b >= end_a) return Overlap::kNone;
  bool same = a.data == b.data && a_size == b_size && same_shape(a, b);
  for (int64_t d = 0; same && d < a.ndim; ++d) same = a.sizes[d] == 1 || a.strides[d] == b.strides[d];
  if (same) return Overlap::kSame;
  // Both walk memory with the same outer stride, and inside one such step their windows do not meet.
  if (a_size == b_size && a.ndim == b.ndim && a.ndim >= 2) {
    const int64_t step = a.strides[0] * a_size;
    int64_t width_a = 1, width_b = 1;
    for (int64_t d = 1; d < a.ndim; ++d) {
      width_a += (a.sizes[d] - 1) * a.strides[d];
      width_b += (b.sizes[d] - 1) * b.strides[d];
    }
    if (step > 0 && a.strides[0] == b.strides[0]) {
      const int64_t shift = ((begin_b - begin_a) % step + step) % step;
      if (width_a * a_size <= shift && shift + width_b * b_size <= step) return Overlap::kNone;
    }
  }
  return Overlap::kPartial;
}

}  // namespace dandan::host
