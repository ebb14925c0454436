// The few functions of ATen that a torch route inside an operator needs: views, copies, matrix products.
#pragma once

#include <dandan/host/tensor.h>

namespace dandan::host {

// A view of the memory of `t`, from its first element on.
inline Tensor view(const Tensor& t, int64_t ndim, const int64_t* sizes, const int64_t* strides) {
  AtenTensorHandle handle = nullptr;
  check_shim(aoti_torch__reinterpret_tensor(t.get(), ndim, sizes, strides, 0, &handle), "make a view");
  return Tensor(handle);
}

inline Tensor matrix_view(const Tensor& t, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride) {
  const int64_t sizes[2] = {rows, cols}, strides[2] = {row_stride, col_stride};
  return view(t, 2, sizes, strides);
}

// out[...] = source[...], broadcast, on the current stream.
inline void copy_into(const Tensor& out, const Tensor& source) { check_shim(aoti_torch_copy_(out.get(), source.get(), 0), "copy a tensor"); }

inline void fill_zero(const Tensor& t) { check_shim(aoti_torch_zero_(t.get()), "fill a tensor"); }

namespace detail {

// A function of torch's CUDA library, or nullptr: a CPU build of torch does not have that library.
inline void* cuda_library_symbol(const char* name) {
#ifdef _WIN32
  HMODULE module = GetModuleHandleA("torch_cuda.dll");
  return module == nullptr ? nullptr : reinterpret_cast<void*>(GetProcAddress(module, name));
#else
  if (void* module = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY)) {
    if (void* symbol = dlsym(module, name)) return symbol;
  }
  return dlsym(RTLD_DEFAULT, name);
#endif
}

}  // namespace detail

// out = a b, or a b + bias with a bias row; matrices on one CUDA device. What torch.mm and torch.addmm launch, without their way through the
// dispatcher: the C functions that torch keeps for its ahead-of-time compiler. Where a torch has them no longer, linear through the dispatcher.
inline void matrix_product(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias) {
  using Mm = AOTITorchError (*)(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle);
  using Addmm = AOTITorchError (*)(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, double, double);
  static const Mm mm = reinterpret_cast<Mm>(detail::cuda_library_symbol("aoti_torch_cuda_mm_out"));
  static const Addmm addmm = reinterpret_cast<Addmm>(detail::cuda_library_symbol("aoti_torch_cuda_addmm_out"));
  if (!bias && mm != nullptr) return check_shim(mm(out.get(), a.get(), b.get()), "multiply matrices");
  if (bias && addmm != nullptr) return check_shim(addmm(out.get(), bias.get(), a.get(), b.get(), 1.0, 1.0), "multiply matrices");
  const Tensor weight = matrix_view(b, b.sizes[1], b.sizes[0], b.strides[1], b.strides[0]);
  StableIValue stack[3] = {};
  Values(stack).tensor(a.share()).tensor(weight.share()).optional_tensor(bias ? bias.share() : nullptr);
  check_shim(aoti_torch_call_dispatcher("aten::linear", "", stack), "multiply matrices");
  copy_into(out, Arguments(stack).tensor());
}

}  // namespace dandan::host
