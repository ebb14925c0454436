// Schemas, checks, selection and the filling of Params for torch.ops.dandan_norm. The only file that sees torch.
//
// Each operator has five forms: NAME allocates its result, NAME_out writes into tensors, NAME_info tells the route of a call without launching
// anything, NAME_reference and NAME_reference_out (registered in Python) are the torch route. The schemas stand once more in dandan_norm/_ops.py for
// machines where this library cannot be loaded; a test holds both against each other.
#include <dandan/host/binding.h>
#include <dandan/host/device.h>
#include <dandan/host/tensor.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <mutex>
#include <unordered_map>

#include "norm.h"
#include "routes.h"

namespace dandan_norm {
namespace {

namespace host = dandan::host;
using host::Tensor;

// ---------------------------------------------------------------- the arguments of a call

struct Call {
  Op op;
  Tensor x;       // gate for silu_and_mul
  Tensor other;   // residual, up
  Tensor weight, bias;
  double eps = 0;
  int64_t backend = 0;
  Tensor out;     // given by the caller or allocated
  Tensor second;  // the sum of residual_rms_norm
  bool affine() const { return op == Op::kRmsNorm || op == Op::kResidualRmsNorm || op == Op::kLayerNorm; }
  bool binary() const { return op == Op::kResidualRmsNorm || op == Op::kSiluAndMul; }
  const char* name() const { return kOpNames[static_cast<int>(op)]; }
  const char* x_name() const { return op == Op::kSiluAndMul ? "gate" : "x"; }
  const char* other_name() const { return op == Op::kSiluAndMul ? "up" : "residual"; }
  const char* out_name() const { return op == Op::kResidualRmsNorm ? "out[0]" : "out"; }
};

enum class Form { kAllocate, kOut, kInfo };

// Reads the stack in the order of the schemas at the end of this file.
Call read_call(Op op, Form form, host::Arguments& arguments, int64_t* arch) {
  Call call;
  call.op = op;
  call.x = arguments.tensor();
  if (call.binary()) call.other = arguments.tensor();
  if (call.affine()) call.weight = arguments.optional_tensor();
  if (op == Op::kLayerNorm) call.bias = arguments.optional_tensor();
  if (call.affine()) call.eps = arguments.number();
  call.backend = arguments.integer();
  if (form == Form::kOut) {
    call.out = arguments.tensor();
    if (op == Op::kResidualRmsNorm) call.second = arguments.tensor();
  } else if (form == Form::kInfo) {
    call.out = arguments.optional_tensor();
    if (op == Op::kResidualRmsNorm) call.second = arguments.optional_tensor();
    *arch = arguments.integer();
  }
  return call;
}

// ---------------------------------------------------------------- the rules

bool supported_dtype(int32_t dtype, DType* out = nullptr) {
  static const int32_t half = aoti_torch_dtype_float16(), bfloat16 = aoti_torch_dtype_bfloat16(), single = aoti_torch_dtype_float32();
  if (dtype != half && dtype != bfloat16 && dtype != single) return false;
  if (out != nullptr) *out = dtype == half ? DType::kHalf : dtype == bfloat16 ? DType::kBFloat16 : DType::kFloat;
  return true;
}

void check_dtype(const Call& call, const char* argument, const Tensor& t) {
  if (supported_dtype(t.dtype)) return;
  host::type_error(std::string(call.name()) + ": " + argument + " has dtype " + host::dtype_name(t.dtype) +
                   "; float16, bfloat16 and float32 are supported");
}

void check_device(const Call& call, const char* argument, const Tensor& t) {
  if (t.on(call.x.device_type, call.x.device_index)) return;
  host::value_error(std::string(call.name()) + ": " + argument + " is on " + host::device_text(t) + " but " + call.x_name() + " is on " +
                    host::device_text(call.x));
}

void check_row_vector(const Call& call, const char* argument, const Tensor& t) {
  if (!t) return;
  check_device(call, argument, t);
  check_dtype(call, argument, t);
  const int64_t cols = call.x.sizes[call.x.ndim - 1];
  if (t.ndim == 1 && t.sizes[0] == cols) return;
  host::value_error(std::string(call.name()) + ": " + argument + " has shape " + host::shape_text(t) + " but " + call.x_name() + " has " +
                    std::to_string(cols) + " columns");
}

void check_like(const Call& call, const char* argument, const Tensor& t) {
  check_device(call, argument, t);
  if (t.dtype != call.x.dtype) {
    host::type_error(std::string(call.name()) + ": " + argument + " has dtype " + host::dtype_name(t.dtype) + " but " + call.x_name() +
                     " has dtype " + host::dtype_name(call.x.dtype));
  }
  if (host::same_shape(t, call.x)) return;
  host::value_error(std::string(call.name()) + ": " + argument + " has shape " + host::shape_text(t) + " but " + call.x_name() + " has shape " +
                    host::shape_text(call.x));
}

int64_t element_size(int32_t dtype) {
  DType t;
  return supported_dtype(dtype, &t) ? dtype_size(t) : 8;
}

void check_overlap(const Call& call, const char* argument, const Tensor& out, const char* input, const Tensor& t, bool same_allowed) {
  if (!t) return;
  const host::Overlap found = host::overlap(out, element_size(out.dtype), t, element_size(t.dtype));
  if (found == host::Overlap::kNone || (found == host::Overlap::kSame && same_allowed)) return;
  host::value_error(std::string(call.name()) + ": " + argument + " overlaps " + input +
                    (same_allowed ? " without being the same elements" : ""));
}

void check_out(const Call& call, const char* argument, const Tensor& out) {
  check_device(call, argument, out);
  const int64_t ndim = call.op == Op::kArgmax ? call.x.ndim - 1 : call.x.ndim;
  const int32_t dtype = call.op == Op::kArgmax ? aoti_torch_dtype_int64() : call.x.dtype;
  if (out.dtype != dtype) {
    host::type_error(std::string(call.name()) + ": " + argument + " has dtype " + host::dtype_name(out.dtype) + "; " + host::dtype_name(dtype) +
                     " is needed");
  }
  bool same = out.ndim == ndim;
  for (int64_t d = 0; same && d < ndim; ++d) same = out.sizes[d] == call.x.sizes[d];
  if (!same) {
    std::string needed = "[";
    for (int64_t d = 0; d < ndim; ++d) needed += (d > 0 ? ", " : "") + std::to_string(call.x.sizes[d]);
    host::value_error(std::string(call.name()) + ": " + argument + " has shape " + host::shape_text(out) + "; " + needed + "] is needed");
  }
  if (host::overlaps_itself(out)) host::value_error(std::string(call.name()) + ": elements of " + argument + " share memory");
  const bool like_x = call.op != Op::kArgmax;
  check_overlap(call, argument, out, call.x_name(), call.x, like_x);
  check_overlap(call, argument, out, call.other_name(), call.other, like_x);
  check_overlap(call, argument, out, "weight", call.weight, false);
  check_overlap(call, argument, out, "bias", call.bias, false);
}

void validate(const Call& call) {
  if (call.x.ndim < 1) host::value_error(std::string(call.name()) + ": " + call.x_name() + " has 0 dimensions; at least 1 is needed");
  check_dtype(call, call.x_name(), call.x);
  if (call.other) check_like(call, call.other_name(), call.other);
  check_row_vector(call, "weight", call.weight);
  check_row_vector(call, "bias", call.bias);
  if (call.affine() && !(call.eps >= std::numeric_limits<float>::min() && call.eps <= std::numeric_limits<float>::max())) {
    char text[32];
    std::snprintf(text, sizeof(text), "%g", call.eps);
    host::value_error(std::string(call.name()) + ": eps is " + text + "; a positive normal float32 number is needed");
  }
  if (call.op == Op::kArgmax && call.x.sizes[call.x.ndim - 1] == 0) {
    host::value_error("argmax: x has 0 columns; the maximum of nothing is undefined");
  }
  if (call.backend < 0 || call.backend >= kBackendCount) {
    host::value_error(std::string(call.name()) + ": backend number " + std::to_string(call.backend) + " is unknown");
  }
  if (call.out) check_out(call, call.out_name(), call.out);
  if (call.second) {
    check_out(call, "out[1]", call.second);
    check_overlap(call, "out[1]", call.second, "out[0]", call.out, false);
  }
}

// ---------------------------------------------------------------- profile rows

struct ProfileTable {
  std::mutex mutex;
  std::unordered_map<uint64_t, Backend> rows;
  std::atomic<bool> empty{true};
};

ProfileTable& profiles() {
  static ProfileTable table;
  return table;
}

uint64_t profile_key(Op op, DType dtype, int64_t cols) {
  return (static_cast<uint64_t>(cols) << 8) | (static_cast<uint64_t>(op) << 4) | static_cast<uint64_t>(dtype);
}

Backend profile_row(Op op, DType dtype, int64_t cols) {
  ProfileTable& table = profiles();
  if (table.empty.load(std::memory_order_relaxed)) return Backend::kAuto;
  const std::lock_guard<std::mutex> lock(table.mutex);
  const auto found = table.rows.find(profile_key(op, dtype, cols));
  return found == table.rows.end() ? Backend::kAuto : found->second;
}

constexpr const char* kProfileForm = "op;dtype;cols=N;kernel";

// A row names no number of rows: which kernel a width takes may not depend on the batch around it.
void set_profile(const std::string& text) {
  std::unordered_map<uint64_t, Backend> rows;
  for (const host::ProfileLine& line : host::parse_profile(text, kProfileForm)) {
    int op = -1, dtype = -1, kernel = -1;
    for (int i = 0; i < kOpCount; ++i) op = line.op == kOpNames[i] ? i : op;
    for (int i = 0; i < 3; ++i) dtype = line.dtype == dtype_name(static_cast<DType>(i)) ? i : dtype;
    for (int i = 1; i < kBackendCount; ++i) kernel = line.kernel == kBackendNames[i] && i != static_cast<int>(Backend::kCuda) ? i : kernel;
    const int64_t cols = line.sizes.size() == 1 ? line.size("cols") : -1;
    if (op < 0 || dtype < 0 || kernel < 0 || cols < 0) host::bad_profile_line(line.text, kProfileForm);
    rows[profile_key(static_cast<Op>(op), static_cast<DType>(dtype), cols)] = static_cast<Backend>(kernel);
  }
  ProfileTable& table = profiles();
  const std::lock_guard<std::mutex> lock(table.mutex);
  table.empty.store(rows.empty(), std::memory_order_relaxed);
  table.rows = std::move(rows);
}

// ---------------------------------------------------------------- from a call to a launch

struct Plan {
  DType dtype;
  Problem problem;
  Params params;
  Route route;
};

// Marks the operands that are not rows of whole aligned vectors with 32-bit strides.
bool aligned_operand(const Params& p, const Rows& t, int per_vector) {
  if (t.data == nullptr) return true;
  if (t.strides.element != 1 && p.cols > 1) return false;
  if (reinterpret_cast<uintptr_t>(t.data) % 16 != 0) return false;
  for (int level = 0; level < p.space.levels; ++level) {
    const int64_t stride = t.strides.level[level];
    if (stride % per_vector != 0 || stride > std::numeric_limits<int32_t>::max() / (16 / per_vector)) return false;
  }
  return true;
}

Affine affine_of(const Tensor& t) {
  Affine a;
  if (!t) return a;
  a.data = t.data;
  a.stride = t.strides[0];
  supported_dtype(t.dtype, &a.dtype);
  return a;
}

bool plain_affine(const Affine& a, DType dtype, int64_t cols) {
  return a.data == nullptr || (a.dtype == dtype && (a.stride == 1 || cols <= 1) && reinterpret_cast<uintptr_t>(a.data) % 16 == 0);
}

// Everything that the shapes, strides and addresses of a call decide. `out` may be absent (info of a call that allocates): then it is contiguous.
Plan make_plan(const Call& call, int arch, int code_arch, int sm_count) {
  Plan plan;
  supported_dtype(call.x.dtype, &plan.dtype);
  Params& p = plan.params;
  const int64_t ndim = call.x.ndim;
  p.cols = call.x.sizes[ndim - 1];
  p.eps = static_cast<float>(call.eps);
  p.weight = affine_of(call.weight);
  p.bias = affine_of(call.bias);

  int64_t contiguous[64];
  int64_t step = call.op == Op::kArgmax ? 1 : p.cols;
  contiguous[ndim - 1] = 1;
  for (int64_t d = ndim - 2; d >= 0; --d) {
    contiguous[d] = step;
    step *= call.x.sizes[d] > 1 ? call.x.sizes[d] : 1;
  }
  int64_t argmax_out[64];
  const int64_t* out_strides = contiguous;
  if (call.out) out_strides = call.out.strides;
  if (call.op == Op::kArgmax) {
    for (int64_t d = 0; d + 1 < ndim; ++d) argmax_out[d] = out_strides[d];
    argmax_out[ndim - 1] = 1;
    out_strides = argmax_out;
  }

  Rows* rows[4] = {&p.x, &p.out};
  const int64_t* strides[4] = {call.x.strides, out_strides};
  p.x.data = call.x.data;
  p.out.data = call.out ? call.out.data : nullptr;
  int count = 2;
  if (call.other) rows[count] = &p.other, strides[count++] = call.other.strides, p.other.data = call.other.data;
  if (call.op == Op::kResidualRmsNorm) {
    rows[count] = &p.second;
    strides[count++] = call.second ? call.second.strides : contiguous;
    p.second.data = call.second ? call.second.data : nullptr;
  }
  dandan::RowStrides merged[4];
  Problem& problem = plan.problem;
  problem.levels = dandan::make_row_space(call.x.sizes, ndim - 1, strides, count, &p.space, merged);
  for (int t = 0; t < count; ++t) rows[t]->strides = merged[t];

  const int per_vector = 16 / dtype_size(plan.dtype);
  problem.op = call.op;
  problem.arch = arch;
  problem.code_arch = code_arch;
  problem.sm_count = sm_count;
  problem.dtype = plan.dtype;
  problem.rows = p.space.rows;
  problem.cols = p.cols;
  problem.backend = static_cast<Backend>(call.backend);
  problem.profile = profile_row(call.op, plan.dtype, p.cols);
  bool aligned = problem.levels && p.space.levels <= 2 && p.space.rows < (int64_t{1} << 31) && p.cols % per_vector == 0 &&
                 p.cols / per_vector <= std::numeric_limits<int32_t>::max() / 128;  // chunks of a row fit the second dimension of a grid
  for (int t = 0; aligned && t < count; ++t) {
    if (call.op == Op::kArgmax && rows[t] == &p.out) {
      aligned = p.space.levels == 1 && p.out.strides.level[0] == (p.space.rows > 1 ? 1 : p.out.strides.level[0]);
    } else {
      aligned = aligned_operand(p, *rows[t], per_vector);
    }
  }
  problem.aligned = aligned;
  problem.affine = plain_affine(p.weight, plan.dtype, p.cols) && plain_affine(p.bias, plan.dtype, p.cols);
  plan.route = select(problem);
  return plan;
}

using Launcher = void (*)(DType, const Params&, const Launch&);

Launcher launcher(Op op, Backend kernel) {
  const bool rms = op == Op::kRmsNorm || op == Op::kResidualRmsNorm;
  switch (kernel) {
    case Backend::kRow:
      return rms ? launch_sm80_row_rms : op == Op::kLayerNorm ? launch_sm80_row_layer_norm : op == Op::kSoftmax ? launch_sm80_row_softmax : launch_sm80_row_argmax;
    case Backend::kCluster:
      return rms ? launch_sm90_cluster_rms : op == Op::kLayerNorm ? launch_sm90_cluster_layer_norm : op == Op::kSoftmax ? launch_sm90_cluster_softmax : launch_sm90_cluster_argmax;
    case Backend::kStream:
      return rms ? launch_sm80_stream_rms : op == Op::kLayerNorm ? launch_sm80_stream_layer_norm : op == Op::kSoftmax ? launch_sm80_stream_softmax : launch_sm80_stream_argmax;
    default: return launch_sm80_elementwise;
  }
}

void launch_plan(const Plan& plan, const host::DeviceFacts& facts, int32_t device_index) {
  Launch launch;
  launch.stream = static_cast<cudaStream_t>(host::current_cuda_stream(device_index));
  launch.dependent = facts.arch >= 90 && plan.problem.code_arch >= 90 && host::dependent_launch().load(std::memory_order_relaxed);
  launch.vectorized = plan.problem.aligned;
  launch.tile = plan.route.tile;
  launcher(plan.problem.op, plan.route.kernel)(plan.dtype, plan.params, launch);
}

// Profile rows are Python's to find; it is asked once, when a device is certain to be in use. Without rows the heuristics decide.
void load_profile_once() {
  static std::once_flag once;
  std::call_once(once, [] {
    StableIValue stack[1] = {};
    aoti_torch_call_dispatcher("dandan_norm::load_profile", "", stack);
  });
}

// The torch route: the reference operator that Python registers, through the dispatcher.
void call_reference(Call& call, StableIValue* results, Form form) {
  StableIValue stack[8] = {};
  host::Values values(stack);
  values.tensor(call.x.share());
  if (call.other) values.tensor(call.other.share());
  if (call.affine()) values.optional_tensor(call.weight ? call.weight.share() : nullptr);
  if (call.op == Op::kLayerNorm) values.optional_tensor(call.bias ? call.bias.share() : nullptr);
  if (call.affine()) values.number(call.eps);
  std::string name = std::string("dandan_norm::") + call.name() + "_reference";
  if (form == Form::kOut) {
    values.tensor(call.out.share());
    if (call.second) values.tensor(call.second.share());
    name += "_out";
  }
  host::check_shim(aoti_torch_call_dispatcher(name.c_str(), "", stack), "run the reference operator");
  if (form == Form::kAllocate) {
    results[0] = stack[0];
    if (call.op == Op::kResidualRmsNorm) results[1] = stack[1];
  }
}

void run(Op op, Form form, StableIValue* stack) {
  host::Arguments arguments(stack);
  Call call = read_call(op, form, arguments, nullptr);
  validate(call);
  const int32_t index = call.x.device_index;
  const bool empty = call.x.sizes[call.x.ndim - 1] == 0 || [&] {
    for (int64_t d = 0; d + 1 < call.x.ndim; ++d) {
      if (call.x.sizes[d] == 0) return true;
    }
    return false;
  }();
  const bool two = op == Op::kResidualRmsNorm;
  const auto allocate = [&] {
    const int64_t ndim = op == Op::kArgmax ? call.x.ndim - 1 : call.x.ndim;
    const int32_t dtype = op == Op::kArgmax ? aoti_torch_dtype_int64() : call.x.dtype;
    call.out = host::empty(ndim, call.x.sizes, dtype, call.x.device_type, index);
    if (two) call.second = host::empty(ndim, call.x.sizes, dtype, call.x.device_type, index);
  };
  const host::DeviceGuard guard(index);
  if (empty) {
    if (form == Form::kAllocate) allocate();
  } else {
    const host::DeviceFacts& facts = host::device_facts(index);
    load_profile_once();
    Plan plan = make_plan(call, facts.arch, host::code_architecture(facts.arch), facts.sm_count);
    if (!plan.route.error.empty()) host::backend_unavailable(plan.route.error);
    if (plan.route.kernel == Backend::kTorch) return call_reference(call, stack, form);
    if (form == Form::kAllocate) {
      allocate();
      plan.params.out.data = call.out.data;
      if (two) plan.params.second.data = call.second.data;
    }
    launch_plan(plan, facts, index);
  }
  if (form == Form::kAllocate) {
    host::Values results(stack);
    results.tensor(call.out.release());
    if (two) results.tensor(call.second.release());
  }
}

// The route of a call as JSON. `arch` 0 asks the device of x; another number stands for a device of that architecture, so that routes can be asked
// without a GPU.
void info(Op op, StableIValue* stack) {
  host::Arguments arguments(stack);
  int64_t arch = 0;
  Call call = read_call(op, Form::kInfo, arguments, &arch);
  validate(call);
  int sm_count = 132;
  if (arch == 0) {
    if (call.x.device_type != aoti_torch_device_type_cuda()) host::value_error(std::string(call.name()) + "_info: x is not on a CUDA device");
    const host::DeviceFacts& facts = host::device_facts(call.x.device_index);
    load_profile_once();
    arch = facts.arch;
    sm_count = facts.sm_count;
  }
  const Plan plan = make_plan(call, static_cast<int>(arch), host::code_architecture(static_cast<int>(arch)), sm_count);
  const Route& route = plan.route;
  if (!route.error.empty()) host::backend_unavailable(route.error);
  const bool torch = route.kernel == Backend::kTorch;
  std::string text = "{\"backend\": " + host::quoted(torch ? "torch" : "cuda") + ", \"kernel\": " + host::quoted(kBackendNames[static_cast<int>(route.kernel)]) +
                     ", \"reason\": " + host::quoted(route.reason) + ", \"fallback_reason\": " + (*route.fallback != '\0' ? host::quoted(route.fallback) : "null") +
                     ", \"profile\": " + host::json(route.profile) + ", \"aligned\": " + host::json(plan.problem.aligned) +
                     ", \"vectors\": " + std::to_string(route.tile.vectors) + ", \"threads\": " + std::to_string(route.tile.threads) +
                     ", \"rows\": " + std::to_string(route.tile.rows) + ", \"cluster\": " + std::to_string(route.tile.cluster) + "}";
  host::Values(stack).tensor(host::text_tensor(text).release());
}

// What this library is: kernels by number, architectures.
void describe(StableIValue* stack, uint64_t, uint64_t) {
  std::string text = "{\"plugin_api\": 1, \"backends\": [";
  for (int i = 0; i < kBackendCount; ++i) text += (i > 0 ? ", " : "") + host::quoted(kBackendNames[i]);
  text += "], \"sass\": " + host::quoted(DANDAN_SASS_ARCHS) + ", \"ptx\": " + host::quoted(DANDAN_PTX_ARCHS) + "}";
  host::Values(stack).tensor(host::text_tensor(text).release());
}

void boxed_set_profile(StableIValue* stack, uint64_t, uint64_t) { set_profile(host::tensor_text(host::Arguments(stack).tensor())); }

template <Op kOp, Form kForm>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  if constexpr (kForm == Form::kInfo) {
    info(kOp, stack);
  } else {
    run(kOp, kForm, stack);
  }
}

// torch's registration class stands in another namespace in 2.9 than later, hence a template.
template <Op kOp, typename Library>
void implement(Library& library, Form form) {
  const std::string name = kOpNames[static_cast<int>(kOp)];
  if (form == Form::kInfo) {
    library.impl((name + "_info").c_str(), &boxed<kOp, Form::kInfo>);
  } else {
    library.impl(name.c_str(), &boxed<kOp, Form::kAllocate>);
    library.impl((name + "_out").c_str(), &boxed<kOp, Form::kOut>);
  }
}

template <typename Library>
void implement_all(Library& library, Form form) {
  implement<Op::kRmsNorm>(library, form);
  implement<Op::kResidualRmsNorm>(library, form);
  implement<Op::kLayerNorm>(library, form);
  implement<Op::kSoftmax>(library, form);
  implement<Op::kSiluAndMul>(library, form);
  implement<Op::kArgmax>(library, form);
}

}  // namespace
}  // namespace dandan_norm

STABLE_TORCH_LIBRARY(dandan_norm, library) {
  library.def("rms_norm(Tensor x, Tensor? weight, float eps, int backend) -> Tensor");
  library.def("rms_norm_out(Tensor x, Tensor? weight, float eps, int backend, Tensor(a!) out) -> ()");
  library.def("rms_norm_info(Tensor x, Tensor? weight, float eps, int backend, Tensor? out, int arch) -> Tensor");
  library.def("residual_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, int backend) -> (Tensor, Tensor)");
  library.def("residual_rms_norm_out(Tensor x, Tensor residual, Tensor? weight, float eps, int backend, Tensor(a!) normalized, Tensor(b!) summed) -> ()");
  library.def("residual_rms_norm_info(Tensor x, Tensor residual, Tensor? weight, float eps, int backend, Tensor? normalized, Tensor? summed, int arch) -> Tensor");
  library.def("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, int backend) -> Tensor");
  library.def("layer_norm_out(Tensor x, Tensor? weight, Tensor? bias, float eps, int backend, Tensor(a!) out) -> ()");
  library.def("layer_norm_info(Tensor x, Tensor? weight, Tensor? bias, float eps, int backend, Tensor? out, int arch) -> Tensor");
  library.def("softmax(Tensor x, int backend) -> Tensor");
  library.def("softmax_out(Tensor x, int backend, Tensor(a!) out) -> ()");
  library.def("softmax_info(Tensor x, int backend, Tensor? out, int arch) -> Tensor");
  library.def("silu_and_mul(Tensor gate, Tensor up, int backend) -> Tensor");
  library.def("silu_and_mul_out(Tensor gate, Tensor up, int backend, Tensor(a!) out) -> ()");
  library.def("silu_and_mul_info(Tensor gate, Tensor up, int backend, Tensor? out, int arch) -> Tensor");
  library.def("argmax(Tensor x, int backend) -> Tensor");
  library.def("argmax_out(Tensor x, int backend, Tensor(a!) out) -> ()");
  library.def("argmax_info(Tensor x, int backend, Tensor? out, int arch) -> Tensor");
  library.def("describe() -> Tensor");
  library.def("set_profile(Tensor rows) -> ()");
  library.def("set_dependent_launch(int enabled) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(dandan_norm, CUDA, library) { dandan_norm::implement_all(library, dandan_norm::Form::kAllocate); }

STABLE_TORCH_LIBRARY_IMPL(dandan_norm, CompositeExplicitAutograd, library) {
  dandan_norm::implement_all(library, dandan_norm::Form::kInfo);
  library.impl("describe", &dandan_norm::describe);
  library.impl("set_profile", &dandan_norm::boxed_set_profile);
  library.impl("set_dependent_launch", &dandan::host::boxed_set_dependent_launch);
}
