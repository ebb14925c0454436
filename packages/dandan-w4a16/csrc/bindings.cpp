// Schemas, checks, selection and the filling of Params for torch.ops.dandan_w4a16. The only file that sees torch.
//
// packed_linear takes the kernel-ordered weight: two flat tensors whose layout is w4a16.h's, codes of int32 and scales of the dtype that the kernels
// compute in, which is the dtype of x. w4a16_linear takes the canonical weight, which no kernel reads: it puts some of its rows in order at a time, in
// workspace that lives as long as the call, and multiplies by them. Both have the same forms: NAME allocates its result, NAME_out writes into a tensor,
// NAME_info tells the route of a call without launching anything. repack makes a kernel-ordered weight of a canonical one, unpack takes it back.
// packed_tile_out launches one configuration of one kernel and packed_candidates tells what the cost model says of all of them; both are for tests,
// measurements and calibration. The torch route of NAME is NAME_reference, which Python registers.
#include <dandan/host/aten.h>
#include <dandan/host/binding.h>
#include <dandan/host/device.h>
#include <dandan/host/matrix.h>
#include <dandan/host/selection.h>
#include <dandan/host/tensor.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "routes.h"
#include "w4a16.h"

namespace dandan_w4a16 {
namespace {

namespace host = dandan::host;
using host::Tensor;

// ---------------------------------------------------------------- the arguments of a call

enum class Op { kCanonical, kPacked };

struct Call {
  Op op = Op::kPacked;
  Tensor x;
  Tensor codes;          // qweight, or the codes of a kernel-ordered weight
  Tensor scales, zeros;  // zeros: of a canonical weight
  Tensor bias;
  int64_t n = 0, k = 0, group = 0;
  int64_t backend = 0;
  int64_t config = -1, split = 0;  // of packed_tile_out
  Tensor out;                      // given by the caller or allocated
  const char* name() const { return op == Op::kCanonical ? "w4a16_linear" : "packed_linear"; }
  int64_t m() const { return host::row_count(x); }
};

enum class Form { kAllocate, kOut, kInfo, kTile, kCandidates };

// Reads the stack in the order of the schemas at the end of this file.
Call read_call(Op op, Form form, host::Arguments& arguments, int64_t* arch) {
  Call call;
  call.op = op;
  call.x = arguments.tensor();
  call.codes = arguments.tensor();
  call.scales = arguments.tensor();
  if (op == Op::kCanonical) call.zeros = arguments.tensor();
  call.bias = arguments.optional_tensor();
  if (op == Op::kPacked) {
    call.n = arguments.integer();
    call.k = arguments.integer();
  }
  call.group = arguments.integer();
  if (form != Form::kCandidates) call.backend = arguments.integer();
  if (form == Form::kTile) {
    call.config = arguments.integer();
    call.split = arguments.integer();
  }
  if (form == Form::kOut || form == Form::kTile) call.out = arguments.tensor();
  if (form == Form::kInfo || form == Form::kCandidates) {
    call.out = arguments.optional_tensor();
    *arch = arguments.integer();
  }
  return call;
}

// ---------------------------------------------------------------- the rules

using Text = std::string;

bool is_half(int32_t dtype) {
  DType which;
  return host::is_half_dtype(dtype, &which);
}

bool is_float(int32_t dtype) { return is_half(dtype) || dtype == aoti_torch_dtype_float32(); }

int64_t element_size(const Tensor& t) {
  if (is_half(t.dtype)) return 2;
  return t.dtype == aoti_torch_dtype_uint8() ? 1 : 4;
}

// Names of arguments bring their verbs: "x is", "codes are".
void check_device(const char* op, const Text& argument, const Tensor& t, const Text& first, const Tensor& like) {
  if (t.on(like.device_type, like.device_index)) return;
  host::value_error(Text(op) + ": " + argument + " on " + host::device_text(t) + " but " + first + " on " + host::device_text(like));
}

void check_dtype(const char* op, const char* argument, const Tensor& t, bool right, const char* needed) {
  if (!right) host::type_error(Text(op) + ": " + argument + " dtype " + host::dtype_name(t.dtype) + "; " + needed);
}

void check_group(const char* op, int64_t group) {
  if (group == 32 || group == 64 || group == 128) return;
  host::value_error(Text(op) + ": group_size is " + std::to_string(group) + "; 32, 64 or 128 is needed");
}

constexpr const char* kInt32 = "int32 is needed";
constexpr const char* kRepackScales = "float16 or bfloat16, the dtype of the activations, is needed";
constexpr const char* kRepackZeros = "uint8 is needed";
constexpr const char* kHalves = "float16 and bfloat16 are supported";
constexpr const char* kFloats = "float16, bfloat16 and float32 are supported";

// The three tensors of a canonical weight; N and K are theirs. The last group of repack may be shorter, that of the format is not.
void check_canonical(const char* op, const Tensor& qweight, const Tensor& scales, const Tensor& zeros, int64_t group, bool whole_groups) {
  check_dtype(op, "qweight has", qweight, qweight.dtype == aoti_torch_dtype_int32(), kInt32);
  if (qweight.ndim != 2) host::value_error(Text(op) + ": qweight has shape " + host::shape_text(qweight) + "; [N, K/8] is needed");
  check_group(op, group);
  const int64_t n = qweight.sizes[0], k = qweight.sizes[1] * 8;
  if (whole_groups && k % group != 0) {
    host::value_error(Text(op) + ": K=" + std::to_string(k) + " of qweight is not a multiple of group_size=" + std::to_string(group));
  }
  const int64_t groups = ceil_div(k, group);
  for (const auto& [name, t] : {std::pair<const char*, const Tensor*>{"scales", &scales}, {"zeros", &zeros}}) {
    check_device(op, Text(name) + " are", *t, "qweight is", qweight);
    if (t == &scales) {
      check_dtype(op, "scales has", *t, is_float(t->dtype), kFloats);
    } else {
      const bool right = t->dtype == aoti_torch_dtype_uint8() || is_float(t->dtype);
      check_dtype(op, "zeros have", *t, right, "uint8, or float16, bfloat16 or float32 is needed");
    }
    if (t->ndim != 2 || t->sizes[0] != n || t->sizes[1] != groups) {
      host::value_error(Text(op) + ": " + name + " have shape " + host::shape_text(*t) + "; [" + std::to_string(n) + ", " + std::to_string(groups) +
                        "] is needed for N=" + std::to_string(n) + ", K=" + std::to_string(k) + ", group_size=" + std::to_string(group));
    }
  }
}

// The two tensors of a kernel-ordered weight of n by k.
void check_packed(const char* op, const Tensor& codes, const Tensor& scales, int64_t n, int64_t k, int64_t group) {
  check_group(op, group);
  for (const auto& [name, size] : {std::pair<const char*, int64_t>{"n", n}, {"k", k}}) {
    if (size < 0 || size > 0x7fffffff) host::value_error(Text(op) + ": " + name + " is " + std::to_string(size) + "; 0 to 2147483647 is needed");
  }
  if (k % 8 != 0) host::value_error(Text(op) + ": k is " + std::to_string(k) + "; a multiple of 8 is needed");
  check_dtype(op, "codes have", codes, codes.dtype == aoti_torch_dtype_int32(), kInt32);
  check_device(op, "scales are", scales, "codes are", codes);
  check_dtype(op, "scales have", scales, is_half(scales.dtype), kHalves);
  const int64_t needed[2] = {code_words(n, k), 2 * scale_words(n, k, static_cast<int>(group))};
  for (const auto& [name, t, size] : {std::tuple<const char*, const Tensor*, int64_t>{"codes", &codes, needed[0]}, {"scales", &scales, needed[1]}}) {
    if (t->ndim == 1 && t->sizes[0] == size) continue;
    host::value_error(Text(op) + ": " + name + " have shape " + host::shape_text(*t) + "; [" + std::to_string(size) + "] is needed for n=" +
                      std::to_string(n) + ", k=" + std::to_string(k) + ", group_size=" + std::to_string(group));
  }
}

void check_out(const Call& call) {
  const Text op = call.name();
  const Tensor& out = call.out;
  check_device(call.name(), "out is", out, "x is", call.x);
  if (out.dtype != call.x.dtype) {
    host::type_error(op + ": out has dtype " + host::dtype_name(out.dtype) + " but x has dtype " + host::dtype_name(call.x.dtype));
  }
  if (!host::has_result_shape(call.x, call.n, out)) {
    host::value_error(op + ": out has shape " + host::shape_text(out) + "; " + host::result_shape(call.x, call.n) + " is needed");
  }
  if (host::overlaps_itself(out)) host::value_error(op + ": elements of out share memory");
  const char* codes = call.op == Op::kCanonical ? "qweight" : "codes";
  if (out.device_type == aoti_torch_device_type_meta()) return;  // no memory to share
  for (const auto& [name, t] : {std::pair<const char*, const Tensor*>{"x", &call.x}, {codes, &call.codes}, {"scales", &call.scales}, {"zeros", &call.zeros},
                                {"bias", &call.bias}}) {
    if (*t && host::overlap(out, 2, *t, element_size(*t)) != host::Overlap::kNone) host::value_error(op + ": out overlaps " + name);
  }
}

void validate(Call& call) {
  const char* const op = call.name();
  const bool canonical = call.op == Op::kCanonical;
  const char* const weight = canonical ? "qweight" : "the weight";
  if (call.x.ndim < 1) host::value_error(Text(op) + ": x has 0 dimensions; at least 1 is needed");
  check_dtype(op, "x has", call.x, is_half(call.x.dtype), kHalves);
  check_device(op, canonical ? "qweight is" : "codes are", call.codes, "x is", call.x);
  if (canonical) {
    check_canonical(op, call.codes, call.scales, call.zeros, call.group, true);
    call.n = call.codes.sizes[0];
    call.k = call.codes.sizes[1] * 8;
  } else {
    check_packed(op, call.codes, call.scales, call.n, call.k, call.group);
  }
  if (const int64_t k = call.x.sizes[call.x.ndim - 1]; k != call.k) {
    host::value_error(Text(op) + ": x has K=" + std::to_string(k) + " but " + weight + " has K=" + std::to_string(call.k));
  }
  if (call.bias) {
    check_device(op, "bias is", call.bias, "x is", call.x);
    check_dtype(op, "bias has", call.bias, is_float(call.bias.dtype), kFloats);
    if (call.bias.ndim != 1 || call.bias.sizes[0] != call.n) {
      host::value_error(Text(op) + ": bias has shape " + host::shape_text(call.bias) + " but " + weight + " has N=" + std::to_string(call.n));
    }
  }
  if (call.backend < 0 || call.backend >= kBackendCount) {
    host::value_error(Text(op) + ": backend number " + std::to_string(call.backend) + " is unknown");
  }
  if (call.out) check_out(call);
}

// The configuration that packed_tile_out asks for.
Choice forced_choice(const Call& call) {
  if (call.config < 0 && call.split == 0) return {};
  const Backend kernel = static_cast<Backend>(call.backend);
  const ConfigTable table = configs_of(kernel);
  const Text start = Text("packed_linear: ");
  if (table.count == 0) host::value_error(start + "\"" + backend_name(kernel) + "\" has no configurations; name a kernel");
  if (call.config < 0 || call.config >= table.count) {
    host::value_error(start + "\"" + backend_name(kernel) + "\" has " + std::to_string(table.count) + " configurations, no number " +
                      std::to_string(call.config));
  }
  const Config& config = table.configs[call.config];
  if (!takes_split(config, call.split)) {
    host::value_error(start + "configuration \"" + config.name + "\" of \"" + backend_name(kernel) + "\" does not take " + std::to_string(call.split) +
                      " slices of K");
  }
  return {kernel, static_cast<int>(call.config), static_cast<int>(call.split)};
}

// ---------------------------------------------------------------- profile rows

constexpr const char* kProfileForm = "packed_linear;dtype;group_size=G,k=K,m=M,n=N;kernel or kernel.configuration.slices";

using ProfileKey = std::array<int64_t, 5>;

host::ProfileTable<ProfileKey, Choice>& profiles() {
  static host::ProfileTable<ProfileKey, Choice> table;
  return table;
}

Choice profile_row(const Problem& p) { return profiles().find({static_cast<int64_t>(p.dtype), p.group, p.m, p.n, p.k}); }

// "sm80_decode", or "sm80_decode.32x8.2": one of its configurations with so many slices of K. Kernel kAuto for anything else.
Choice parse_choice(const std::string& text) {
  const std::vector<std::string> parts = host::split_text(text, '.');
  Choice choice;
  for (int i = 1; i < kBackendCount; ++i) {
    if (parts[0] == kBackendNames[i] && i != static_cast<int>(Backend::kCuda)) choice.kernel = static_cast<Backend>(i);
  }
  if (parts.size() == 1) return choice;
  choice.config = config_number(choice.kernel, parts[1]);
  if (parts.size() != 3 || choice.config < 0) return {};
  const int64_t split = host::whole_number(parts[2]);
  if (!takes_split(configs_of(choice.kernel).configs[choice.config], split)) return {};
  choice.split = static_cast<int>(split);
  return choice;
}

void set_profile(const std::string& text) {
  std::map<ProfileKey, Choice> rows;
  for (const host::ProfileLine& line : host::parse_profile(text, kProfileForm)) {
    int dtype = -1;
    for (int i = 0; i < 2; ++i) dtype = line.dtype == dtype_name(static_cast<DType>(i)) ? i : dtype;
    const int64_t group = line.size("group_size"), m = line.size("m"), n = line.size("n"), k = line.size("k");
    const Choice choice = parse_choice(line.kernel);
    const bool sizes = std::min({m, n, k}) >= 0 && (group == 32 || group == 64 || group == 128) && line.sizes.size() == 4;
    if (line.op != "packed_linear" || dtype < 0 || !sizes || choice.kernel == Backend::kAuto) host::bad_profile_line(line.text, kProfileForm);
    rows[ProfileKey{dtype, group, m, n, k}] = choice;
  }
  profiles().replace(std::move(rows));
}

// ---------------------------------------------------------------- from a call to a launch

struct Plan {
  Problem problem;
  Params params;
  Route route;
  bool x_merges = false;  // leading dimensions have one stride, which is enough for torch
  bool copy_x = false, copy_bias = false, copy_out = false;
};

bool may_depend(const Problem& p) { return p.arch >= 90 && p.code_arch >= 90 && host::dependent_launch().load(std::memory_order_relaxed); }

// A flat tensor as kernels read it.
bool in_place(const Tensor& t) { return (t.sizes[0] <= 1 || t.strides[0] == 1) && reinterpret_cast<uintptr_t>(t.data) % 16 == 0; }

// Everything that the shapes, strides and addresses of a call decide, but for the route. `out` may be absent (a call that allocates): then it is
// contiguous. The weight of w4a16_linear gets its place in the workspace later, and is planned for as many rows as fit it.
Plan make_plan(const Call& call, int arch, int code_arch, int sm_count) {
  Plan plan;
  Params& p = plan.params;
  Problem& problem = plan.problem;
  p.m = call.m();
  p.n = call.n;
  p.k = call.k;
  p.group = static_cast<int>(call.group);
  const bool canonical = call.op == Op::kCanonical;
  if (!canonical) {
    p.codes = static_cast<const uint32_t*>(call.codes.data);
    p.scales = static_cast<const uint32_t*>(call.scales.data);
  }

  int64_t row_stride = 0;
  host::MatrixRows x;
  plan.x_merges = host::merge_rows(call.x, call.x.ndim - 1, &row_stride);
  if (plan.x_merges) x = host::matrix_rows(call.x.data, p.m, p.k, row_stride, call.x.strides[call.x.ndim - 1]);
  plan.copy_x = !x.in_place || !x.aligned;
  if (plan.copy_x) x = host::copied_rows(p.k);
  p.x = plan.copy_x ? nullptr : call.x.data;
  p.x_stride = x.stride;

  if (call.bias) {
    plan.copy_bias = call.bias.strides[0] != 1 && p.n > 1;
    p.bias = plan.copy_bias ? nullptr : call.bias.data;
  }

  p.out_stride = p.n;
  if (call.out) {
    host::MatrixRows out;
    if (host::merge_rows(call.out, call.out.ndim - 1, &row_stride)) {
      out = host::matrix_rows(call.out.data, p.m, p.n, row_stride, call.out.strides[call.out.ndim - 1]);
    }
    plan.copy_out = !out.in_place;
    if (out.in_place) p.out_stride = out.stride;
  }

  problem.arch = arch;
  problem.code_arch = code_arch;
  problem.own_code = host::has_own_code(arch, "90a");
  problem.sm_count = sm_count;
  host::is_half_dtype(call.x.dtype, &problem.dtype);
  problem.m = p.m;
  problem.n = canonical ? slab_rows(p.n, std::max<int64_t>(p.k, 1), p.group) : p.n;
  problem.k = p.k;
  problem.group = p.group;
  problem.canonical = canonical;
  problem.integer_zeros = !canonical || call.zeros.dtype == aoti_torch_dtype_uint8();
  problem.scales_fit = call.scales.dtype == call.x.dtype;
  problem.bias = static_cast<bool>(call.bias);
  problem.bias_fits = !call.bias || call.bias.dtype == call.x.dtype;
  problem.weight_in_place = canonical || (in_place(call.codes) && in_place(call.scales));
  problem.copied = (plan.copy_x ? p.m * p.k : 0) + (plan.copy_out ? p.m * p.n : 0);
  problem.copies = int{plan.copy_x} + int{plan.copy_bias} + int{plan.copy_out};
  problem.backend = static_cast<Backend>(call.backend);
  problem.forced = forced_choice(call);
  return plan;
}

Route remembered_select(const Problem& asked) {
  return host::remembered<Route>(asked, profiles().generation(), [](const Problem& forgotten) {
    Problem problem = forgotten;
    if (!problem.canonical) problem.profile = profile_row(problem);
    return select(problem);
  });
}

// Profile rows are Python's to find; it is asked once, when a device is certain to be in use. Without rows the estimates decide.
void load_profile_once() {
  static std::once_flag once;
  std::call_once(once, [] {
    StableIValue stack[1] = {};
    aoti_torch_call_dispatcher("dandan_w4a16::load_profile", "", stack);
  });
}

// The torch route: the reference operator that Python registers, through the dispatcher.
void call_reference(Call& call) {
  StableIValue stack[8] = {};
  host::Values values(stack);
  values.tensor(call.x.share()).tensor(call.codes.share()).tensor(call.scales.share());
  if (call.op == Op::kCanonical) values.tensor(call.zeros.share());
  values.optional_tensor(call.bias ? call.bias.share() : nullptr);
  if (call.op == Op::kPacked) values.integer(call.n).integer(call.k);
  values.integer(call.group);
  std::string name = std::string("dandan_w4a16::") + call.name() + "_reference";
  if (call.out) {
    values.tensor(call.out.share());
    name += "_out";
  }
  host::check_shim(aoti_torch_call_dispatcher(name.c_str(), "", stack), "run the reference operator");
  if (!call.out) call.out = host::Arguments(stack).tensor();
}

// ---------------------------------------------------------------- from one order of a weight to the other

Tensor contiguous(Tensor t) {
  int64_t step = 1;
  for (int64_t d = t.ndim - 1; d >= 0; --d) {
    if (t.sizes[d] > 1 && t.strides[d] != step) return host::copied(t, t.sizes[t.ndim - 1]);
    step *= t.sizes[d];
  }
  return t;
}

// The stream of a device that has code for both kernels.
cudaStream_t repack_stream(const char* op, int32_t device_index) {
  if (host::code_architecture(host::device_facts(device_index).arch) < 80) {
    host::backend_unavailable(Text(op) + ": this build has no code for the device's architecture");
  }
  return static_cast<cudaStream_t>(host::current_cuda_stream(device_index));
}

void repack(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* kName = "repack";
  host::Arguments arguments(stack);
  Tensor qweight = arguments.tensor(), scales = arguments.tensor(), zeros = arguments.tensor();
  const int64_t group = arguments.integer();
  check_canonical(kName, qweight, scales, zeros, group, false);
  // Anything else could not be taken back bit for bit, nor would the kernels make the same weights of it.
  check_dtype(kName, "scales have", scales, is_half(scales.dtype), kRepackScales);
  check_dtype(kName, "zeros have", zeros, zeros.dtype == aoti_torch_dtype_uint8(), kRepackZeros);
  Weight w;
  w.n = qweight.sizes[0];
  w.k = qweight.sizes[1] * 8;
  w.group = static_cast<int>(group);
  if (std::max(w.n, w.k) > 0x7fffffff) host::value_error(Text(kName) + ": qweight has shape " + host::shape_text(qweight) + "; N and K below 2^31 are needed");
  const host::DeviceGuard guard(qweight.device_index);
  const cudaStream_t stream = repack_stream(kName, qweight.device_index);
  const int64_t sizes[2] = {code_words(w.n, w.k), 2 * scale_words(w.n, w.k, w.group)};
  Tensor codes = host::empty(1, &sizes[0], qweight.dtype, qweight.device_type, qweight.device_index);
  Tensor words = host::empty(1, &sizes[1], scales.dtype, qweight.device_type, qweight.device_index);
  const Tensor from[3] = {contiguous(std::move(qweight)), contiguous(std::move(scales)), contiguous(std::move(zeros))};
  w.qweight = static_cast<int32_t*>(from[0].data);
  w.scales = from[1].data;
  w.zeros = static_cast<uint8_t*>(from[2].data);
  w.codes = static_cast<uint32_t*>(codes.data);
  w.scale_words = static_cast<uint32_t*>(words.data);
  DType dtype = DType::kHalf;
  host::is_half_dtype(from[1].dtype, &dtype);
  launch_sm80_repack(dtype, w, stream);
  // The kernels read a weight before the kernel in front of them has ended: it has to be there.
  host::check_cuda(cudaStreamSynchronize(stream), kName);
  host::Values(stack).tensor(codes.release()).tensor(words.release());
}

void unpack(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* kName = "unpack";
  host::Arguments arguments(stack);
  Tensor codes = arguments.tensor(), words = arguments.tensor();
  Weight w;
  w.n = arguments.integer();
  w.k = arguments.integer();
  const int64_t group = arguments.integer();
  check_packed(kName, codes, words, w.n, w.k, group);
  w.group = static_cast<int>(group);
  const host::DeviceGuard guard(codes.device_index);
  const cudaStream_t stream = repack_stream(kName, codes.device_index);
  const int64_t packed[2] = {w.n, w.k / 8}, grouped[2] = {w.n, ceil_div(w.k, group)};
  Tensor qweight = host::empty(2, packed, codes.dtype, codes.device_type, codes.device_index);
  Tensor scales = host::empty(2, grouped, words.dtype, codes.device_type, codes.device_index);
  Tensor zeros = host::empty(2, grouped, aoti_torch_dtype_uint8(), codes.device_type, codes.device_index);
  const Tensor from[2] = {contiguous(std::move(codes)), contiguous(std::move(words))};
  w.qweight = static_cast<int32_t*>(qweight.data);
  w.scales = scales.data;
  w.zeros = static_cast<uint8_t*>(zeros.data);
  w.codes = static_cast<uint32_t*>(from[0].data);
  w.scale_words = static_cast<uint32_t*>(from[1].data);
  DType dtype = DType::kHalf;
  host::is_half_dtype(from[1].dtype, &dtype);
  launch_sm80_unpack(dtype, w, stream);
  host::Values(stack).tensor(qweight.release()).tensor(scales.release()).tensor(zeros.release());
}

// ---------------------------------------------------------------- the call

// The kernel that the plan names, on a weight in its order; `like` is on the device.
void launch_kernel(const Plan& plan, const Params& p, Launch launch, const Tensor& like) {
  const DType dtype = plan.problem.dtype;
  switch (plan.route.kernel) {
    case Backend::kSm80Decode: return launch_sm80_decode(dtype, p, launch);
    case Backend::kSm90Decode: return launch_sm90_decode(dtype, p, launch);
    case Backend::kSm90aWgmma: return launch_sm90a_wgmma(dtype, p, launch);
    default: break;
  }
  Tensor workspace;
  if (const int64_t bytes = static_cast<int64_t>(mma_workspace_bytes(p.m, p.n, launch.tile.split))) {
    workspace = host::empty(1, &bytes, aoti_torch_dtype_uint8(), like.device_type, like.device_index);
    launch.workspace = workspace.data;
  }
  launch_sm80_mma(dtype, p, launch);
}

// The weight dequantised for this call, then torch's product with it.
void launch_dequantized(const Plan& plan, const Tensor& x, const Tensor& out, const Launch& launch) {
  const Params& p = plan.params;
  const int64_t sizes[2] = {p.n, p.k};
  const Tensor weight = host::empty(2, sizes, x.dtype, out.device_type, out.device_index);
  launch_sm80_dequantize(plan.problem.dtype, p, 0, p.n, weight.data, launch);
  const auto stride = [&](int64_t given, int64_t columns) { return p.m == 1 ? columns : given; };  // of a single row it means nothing
  host::matrix_product(host::matrix_view(out, p.m, p.n, stride(p.out_stride, p.n), 1), host::matrix_view(x, p.m, p.k, stride(p.x_stride, p.k), 1),
                       host::matrix_view(weight, p.k, p.n, 1, p.k), Tensor());
}

// The same on a canonical weight: some rows (of n) after the other are put in order, in the same workspace, and multiplied by.
void launch_on_canonical(const Call& call, const Plan& plan, Launch launch) {
  const Tensor from[3] = {contiguous(Tensor(call.codes.share())), contiguous(Tensor(call.scales.share())), contiguous(Tensor(call.zeros.share()))};
  const int64_t step = plan.problem.n, groups = call.k / call.group;
  const int64_t words = code_words(step, call.k), size = words + scale_words(step, call.k, plan.params.group);
  const Tensor workspace = host::empty(1, &size, call.codes.dtype, call.codes.device_type, call.codes.device_index);
  // A kernel that is launched as a dependent one reads its weight before the kernel in front of it, which writes that weight here, has ended.
  launch.dependent = false;
  Weight w;
  w.k = call.k;
  w.group = plan.params.group;
  w.codes = static_cast<uint32_t*>(workspace.data);
  w.scale_words = w.codes + words;
  for (int64_t first = 0; first < call.n; first += step) {
    w.n = std::min(step, call.n - first);
    w.qweight = static_cast<int32_t*>(from[0].data) + first * (call.k / 8);
    w.scales = static_cast<uint16_t*>(from[1].data) + first * groups;
    w.zeros = static_cast<uint8_t*>(from[2].data) + first * groups;
    launch_sm80_repack(plan.problem.dtype, w, launch.stream);
    Params p = plan.params;
    p.n = w.n;
    p.codes = w.codes;
    p.scales = w.scale_words;
    if (p.bias != nullptr) p.bias = static_cast<const uint16_t*>(p.bias) + first;
    p.out = static_cast<uint16_t*>(p.out) + first;
    launch_kernel(plan, p, launch, workspace);
  }
}

// Copies and workspace live until the kernel is enqueued; torch's allocator gives their memory to later work of the same stream alone.
void run_kernel(const Call& call, Plan* plan, const host::DeviceFacts& facts, const Tensor& out) {
  Tensor x, bias;
  Params& p = plan->params;
  if (plan->copy_x) x = host::copied(call.x, p.x_stride), p.x = x.data;
  if (plan->copy_bias) bias = host::copied(call.bias, p.n), p.bias = bias.data;
  p.out = out.data;
  Launch launch;
  launch.stream = static_cast<cudaStream_t>(host::current_cuda_stream(out.device_index));
  launch.sm_count = facts.sm_count;
  launch.dependent = may_depend(plan->problem);
  launch.tile = plan->route.tile;
  if (call.op == Op::kCanonical) {
    launch_on_canonical(call, *plan, launch);
  } else if (plan->route.kernel == Backend::kSm80Dequantize) {
    launch_dequantized(*plan, plan->copy_x ? x : call.x, out, launch);
  } else {
    launch_kernel(*plan, p, launch, out);
  }
}

void run(Op op, Form form, StableIValue* stack) {
  host::Arguments arguments(stack);
  Call call = read_call(op, form, arguments, nullptr);
  validate(call);
  const host::DeviceGuard guard(call.x.device_index);
  const bool given = static_cast<bool>(call.out);
  const auto finish = [&] {
    if (form == Form::kAllocate) host::Values(stack).tensor(call.out.release());
  };
  if (call.m() == 0 || call.n == 0 || call.k == 0) {
    if (!given) call.out = host::empty_result(call.x, call.n);
    if (call.m() != 0 && call.n != 0) host::fill_empty_sums(call.out, call.bias);
    return finish();
  }
  const host::DeviceFacts& facts = host::device_facts(call.x.device_index);
  load_profile_once();
  Plan plan = make_plan(call, facts.arch, host::code_architecture(facts.arch), facts.sm_count);
  plan.route = remembered_select(plan.problem);
  if (!plan.route.error.empty()) host::backend_unavailable(plan.route.error);
  if (plan.route.kernel == Backend::kTorch) {
    call_reference(call);
    return finish();
  }
  Tensor result;
  const bool temporary = !given || plan.copy_out;
  if (temporary) result = host::empty_result(call.x, call.n);
  run_kernel(call, &plan, facts, temporary ? result : call.out);
  if (temporary && given) host::copy_into(call.out, result);
  if (!given) call.out = std::move(result);
  finish();
}

// ---------------------------------------------------------------- what a call would do

// What is copied, the putting in order of a canonical weight included. The reference makes one dimension of leading ones itself, and its result is
// copied into `out`.
std::string copies(const Call& call, const Plan& plan, bool torch) {
  std::vector<const char*> list;
  if (torch ? !plan.x_merges : plan.copy_x) list.push_back("x");
  if (!torch && call.op == Op::kCanonical) list.insert(list.end(), {"qweight", "scales", "zeros"});
  if (!torch && plan.copy_bias) list.push_back("bias");
  if (torch ? static_cast<bool>(call.out) : plan.copy_out) list.push_back("out");
  return host::json(list);
}

// The plan of a call that is only asked about. `arch` 0 asks the device of x; another number stands for a device of that architecture, so that routes can
// be asked without a GPU.
Plan asked_plan(const Call& call, int64_t arch) {
  int sm_count = 132;
  if (arch == 0) {
    if (call.x.device_type != aoti_torch_device_type_cuda()) host::value_error(Text(call.name()) + "_info: x is not on a CUDA device");
    const host::DeviceFacts& facts = host::device_facts(call.x.device_index);
    load_profile_once();
    arch = facts.arch;
    sm_count = facts.sm_count;
  }
  Plan plan = make_plan(call, static_cast<int>(arch), host::code_architecture(static_cast<int>(arch)), sm_count);
  if (call.op == Op::kPacked) plan.problem.profile = profile_row(plan.problem);
  return plan;
}

std::string problem_text(const Params& p) {
  return "\"m\": " + std::to_string(p.m) + ", \"n\": " + std::to_string(p.n) + ", \"k\": " + std::to_string(p.k) + ", \"group_size\": " +
         std::to_string(p.group);
}

// The route of a call as JSON.
void info(Op op, StableIValue* stack) {
  host::Arguments arguments(stack);
  int64_t arch = 0;
  Call call = read_call(op, Form::kInfo, arguments, &arch);
  validate(call);
  Plan plan = asked_plan(call, arch);
  const bool nothing = plan.params.m == 0 || plan.params.n == 0 || plan.params.k == 0;
  if (nothing) {
    plan.route.reason = plan.params.k == 0 && plan.params.m != 0 && plan.params.n != 0 ? "K is 0: the sums are empty" : "out has no elements";
  } else {
    plan.route = select(plan.problem);
  }
  const Route& route = plan.route;
  if (!route.error.empty()) host::backend_unavailable(route.error);
  const bool torch = route.kernel == Backend::kTorch;
  const std::string config = torch ? "null" : host::quoted(configs_of(route.kernel).configs[route.tile.config].name);
  const std::string note = torch || op == Op::kPacked ? "" : "; the weight is not finalised and is put in the kernel's order for this call";
  const std::string text = "{\"backend\": " + host::quoted(torch ? "torch" : "cuda") + ", \"kernel\": " + host::quoted(backend_name(route.kernel)) +
                           ", \"reason\": " + host::quoted(route.reason + note) +
                           ", \"fallback_reason\": " + (*route.fallback != '\0' ? host::quoted(route.fallback) : "null") +
                           ", \"profile\": " + host::json(route.profile) + ", \"copies\": " + (nothing ? "[]" : copies(call, plan, torch)) +
                           ", \"config\": " + config + ", \"split\": " + std::to_string(route.tile.split) + ", \"us\": " + host::microseconds(route.us) +
                           ", " + problem_text(plan.params) + "}";
  host::Values(stack).tensor(host::text_tensor(text).release());
}

// What the cost model says of every candidate, as JSON, the cheapest first; kernels that cannot run with the reason.
void candidates(StableIValue* stack, uint64_t, uint64_t) {
  host::Arguments arguments(stack);
  int64_t arch = 0;
  Call call = read_call(Op::kPacked, Form::kCandidates, arguments, &arch);
  validate(call);
  const Plan plan = asked_plan(call, arch);
  std::vector<Candidate> found;
  std::string refused;
  if (plan.params.m != 0 && plan.params.n != 0 && plan.params.k != 0) {
    for (int i = kFirstKernel; i < kBackendCount; ++i) {
      const Backend kernel = static_cast<Backend>(i);
      for_each_candidate(kernel, plan.problem, [&](const Candidate& c) { found.push_back(c); });
      if (const char* why = obstacle(kernel, plan.problem)) {
        refused += (refused.empty() ? "" : ", ") + host::quoted(backend_name(kernel)) + ": " + host::quoted(why);
      }
    }
    std::stable_sort(found.begin(), found.end(), [](const Candidate& x, const Candidate& y) { return x.us < y.us; });
  }
  std::string text = "{\"candidates\": [";
  for (size_t i = 0; i < found.size(); ++i) {
    const Candidate& c = found[i];
    text += std::string(i > 0 ? ", " : "") + "{\"kernel\": " + host::quoted(backend_name(c.kernel)) +
            ", \"config\": " + host::quoted(configs_of(c.kernel).configs[c.config].name) + ", \"number\": " + std::to_string(c.config) +
            ", \"split\": " + std::to_string(c.split) + ", \"us\": " + host::microseconds(c.us) + "}";
  }
  text += "], \"obstacles\": {" + refused + "}, " + problem_text(plan.params) + "}";
  host::Values(stack).tensor(host::text_tensor(text).release());
}

// What this library is: kernels by number with their configurations, architectures.
void describe(StableIValue* stack, uint64_t, uint64_t) {
  std::string text = "{\"plugin_api\": 1, \"backends\": [", tables;
  for (int i = 0; i < kBackendCount; ++i) text += (i > 0 ? ", " : "") + host::quoted(kBackendNames[i]);
  for (int i = kFirstKernel; i < kBackendCount; ++i) {
    const ConfigTable table = configs_of(static_cast<Backend>(i));
    tables += (tables.empty() ? "" : ", ") + host::quoted(kBackendNames[i]) + ": [";
    for (int c = 0; c < table.count; ++c) {
      const Config& config = table.configs[c];
      tables += std::string(c > 0 ? ", " : "") + "{\"name\": " + host::quoted(config.name) + ", \"tile_m\": " + std::to_string(config.tile_m) +
                ", \"tile_n\": " + std::to_string(config.tile_n) + ", \"tile_k\": " + std::to_string(kBlock) +
                ", \"max_split\": " + std::to_string(max_split(config)) + ", \"splits\": [";
      for (int split = 1; split <= max_split(config); ++split) {
        if (takes_split(config, split)) tables += (tables.back() == '[' ? "" : ", ") + std::to_string(split);
      }
      tables += "]}";
    }
    tables += "]";
  }
  text += "], \"sass\": " + host::quoted(DANDAN_SASS_ARCHS) + ", \"ptx\": " + host::quoted(DANDAN_PTX_ARCHS) + ", \"configs\": {" + tables + "}}";
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

}  // namespace
}  // namespace dandan_w4a16

#define DANDAN_CANONICAL "Tensor x, Tensor qweight, Tensor scales, Tensor zeros, Tensor? bias, int group_size"
#define DANDAN_PACKED "Tensor x, Tensor codes, Tensor scales, Tensor? bias, int n, int k, int group_size"

STABLE_TORCH_LIBRARY(dandan_w4a16, library) {
  library.def("w4a16_linear(" DANDAN_CANONICAL ", int backend) -> Tensor");
  library.def("w4a16_linear_out(" DANDAN_CANONICAL ", int backend, Tensor(a!) out) -> ()");
  library.def("w4a16_linear_info(" DANDAN_CANONICAL ", int backend, Tensor? out, int arch) -> Tensor");
  library.def("packed_linear(" DANDAN_PACKED ", int backend) -> Tensor");
  library.def("packed_linear_out(" DANDAN_PACKED ", int backend, Tensor(a!) out) -> ()");
  library.def("packed_linear_info(" DANDAN_PACKED ", int backend, Tensor? out, int arch) -> Tensor");
  library.def("packed_tile_out(" DANDAN_PACKED ", int backend, int config, int split, Tensor(a!) out) -> ()");
  library.def("packed_candidates(" DANDAN_PACKED ", Tensor? out, int arch) -> Tensor");
  library.def("repack(Tensor qweight, Tensor scales, Tensor zeros, int group_size) -> (Tensor, Tensor)");
  library.def("unpack(Tensor codes, Tensor scales, int n, int k, int group_size) -> (Tensor, Tensor, Tensor)");
  library.def("describe() -> Tensor");
  library.def("set_profile(Tensor rows) -> ()");
  library.def("set_dependent_launch(int enabled) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(dandan_w4a16, CUDA, library) {
  using namespace dandan_w4a16;
  library.impl("w4a16_linear", &boxed<Op::kCanonical, Form::kAllocate>);
  library.impl("w4a16_linear_out", &boxed<Op::kCanonical, Form::kOut>);
  library.impl("packed_linear", &boxed<Op::kPacked, Form::kAllocate>);
  library.impl("packed_linear_out", &boxed<Op::kPacked, Form::kOut>);
  library.impl("packed_tile_out", &boxed<Op::kPacked, Form::kTile>);
  library.impl("repack", &repack);
  library.impl("unpack", &unpack);
}

STABLE_TORCH_LIBRARY_IMPL(dandan_w4a16, CompositeExplicitAutograd, library) {
  using namespace dandan_w4a16;
  library.impl("w4a16_linear_info", &boxed<Op::kCanonical, Form::kInfo>);
  library.impl("packed_linear_info", &boxed<Op::kPacked, Form::kInfo>);
  library.impl("packed_candidates", &candidates);
  library.impl("describe", &describe);
  library.impl("set_profile", &boxed_set_profile);
  library.impl("set_dependent_launch", &dandan::host::boxed_set_dependent_launch);
}
