// Schemas, checks, selection and the filling of Params for torch.ops.dandan_attention. The only file that sees torch.
//
// Each operator, flash_attention and flash_attention_varlen, has a twin NAME_lse that returns the logarithms of the sums too, and each of the four has
// these forms: NAME allocates its results, NAME_out writes into tensors, NAME_info tells the route of a call without launching anything; NAME_reference
// and NAME_reference_out (registered in Python) are the torch route. Messages name twins without the ending. The schemas stand once more in
// dandan_attention/_ops.py for machines where this library cannot be loaded; a test holds both against each other.
#include <dandan/host/aten.h>
#include <dandan/host/binding.h>
#include <dandan/host/device.h>
#include <dandan/host/matrix.h>
#include <dandan/host/optional.h>
#include <dandan/host/selection.h>
#include <dandan/host/tensor.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "attention.h"
#include "routes.h"

namespace dandan_attention {
namespace {

namespace host = dandan::host;
using host::Tensor;

// ---------------------------------------------------------------- the arguments of a call

enum class Op { kDense, kDenseLse, kPacked, kPackedLse };
enum class Form { kAllocate, kOut, kInfo };

constexpr bool is_packed(Op op) { return op == Op::kPacked || op == Op::kPackedLse; }
constexpr bool has_lse(Op op) { return op == Op::kDenseLse || op == Op::kPackedLse; }
constexpr const char* op_name(bool packed) { return packed ? "flash_attention_varlen" : "flash_attention"; }

struct Call {
  Op op = Op::kDense;
  Tensor q, k, v, cu_seqlens_q, cu_seqlens_k;
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;
  bool causal = false, suffix = false;
  std::optional<double> softmax_scale;
  std::optional<int64_t> query_start, window_size;
  Tensor query_starts, seqused_k;
  double softcap = 0;
  int64_t backend = 0;
  Tensor out, lse;  // given by the caller or allocated

  bool packed() const { return is_packed(op); }
  const char* name() const { return op_name(packed()); }
  // Dimensions of q, k and v: [batch, heads, rows, head_dim], packed [rows, heads, head_dim].
  int heads_dim() const { return 1; }
  int rows_dim() const { return packed() ? 0 : 2; }
  int last_dim() const { return packed() ? 2 : 3; }
  int64_t batch() const { return packed() ? cu_seqlens_q.sizes[0] - 1 : q.sizes[0]; }
  int64_t rows_q() const { return q.sizes[rows_dim()]; }
  int64_t rows_k() const { return k.sizes[rows_dim()]; }
  int64_t num_heads_q() const { return q.sizes[heads_dim()]; }
  int64_t num_heads_kv() const { return k.sizes[heads_dim()]; }
  int64_t head_dim() const { return q.sizes[last_dim()]; }
};

// Reads the stack in the order of the schemas at the end of this file.
Call read_call(Op op, Form form, host::Arguments& arguments, int64_t* arch) {
  Call call;
  call.op = op;
  call.q = arguments.tensor();
  call.k = arguments.tensor();
  call.v = arguments.tensor();
  if (call.packed()) {
    call.cu_seqlens_q = arguments.tensor();
    call.cu_seqlens_k = arguments.tensor();
    call.max_seqlen_q = arguments.integer();
    call.max_seqlen_k = arguments.integer();
  }
  call.causal = host::flag(arguments);
  call.softmax_scale = host::optional_number(arguments);
  if (!call.packed()) call.query_start = host::optional_integer(arguments);
  call.query_starts = arguments.optional_tensor();
  if (call.packed()) call.suffix = host::flag(arguments);
  call.window_size = host::optional_integer(arguments);
  call.softcap = arguments.number();
  call.seqused_k = arguments.optional_tensor();
  call.backend = arguments.integer();
  if (form == Form::kOut) {
    call.out = arguments.tensor();
    if (has_lse(op)) call.lse = arguments.tensor();
  } else if (form == Form::kInfo) {
    call.out = arguments.optional_tensor();
    if (has_lse(op)) call.lse = arguments.optional_tensor();
    *arch = arguments.integer();
  }
  return call;
}

// ---------------------------------------------------------------- the rules; checks.py has the same

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", value);
  const std::string digits = text;
  return digits.find_first_of(".en") == std::string::npos ? digits + ".0" : digits;
}

[[noreturn]] void refuse_value(const Call& call, const std::string& text) { host::value_error(std::string(call.name()) + ": " + text); }
[[noreturn]] void refuse_type(const Call& call, const std::string& text) { host::type_error(std::string(call.name()) + ": " + text); }

std::string count_text(const char* name, int64_t count) { return std::string(name) + "=" + std::to_string(count); }

void check_device(const Call& call, const char* argument, const Tensor& t) {
  if (t.on(call.q.device_type, call.q.device_index)) return;
  refuse_value(call, std::string(argument) + " is on " + host::device_text(t) + " but q is on " + host::device_text(call.q));
}

void check_like_q(const Call& call, const char* argument, const Tensor& t) {
  check_device(call, argument, t);
  if (t.dtype == call.q.dtype) return;
  refuse_type(call, std::string(argument) + " has dtype " + host::dtype_name(t.dtype) + " but q has dtype " + host::dtype_name(call.q.dtype));
}

// An int32 vector on q's device, of `length` numbers unless that is negative.
void check_of_sequences(const Call& call, const char* argument, const Tensor& t, int64_t length, const std::string& why) {
  check_device(call, argument, t);
  static const int32_t int32 = aoti_torch_dtype_int32();
  if (t.dtype != int32) refuse_type(call, std::string(argument) + " has dtype " + host::dtype_name(t.dtype) + "; int32 is needed");
  if (t.ndim != 1) refuse_value(call, std::string(argument) + " has shape " + host::shape_text(t) + "; a vector is needed");
  if (length >= 0 && t.sizes[0] != length) {
    refuse_value(call, std::string(argument) + " has " + std::to_string(t.sizes[0]) + " numbers; " + std::to_string(length) + " are needed " + why);
  }
}

void check_heads(const Call& call) {
  check_like_q(call, "k", call.k);
  check_like_q(call, "v", call.v);
  const int last = call.last_dim();
  if (call.k.ndim != call.q.ndim) {
    refuse_value(call, "k has shape " + host::shape_text(call.k) + "; " + (call.packed() ? "[total_k, Hkv, D]" : "[B, Hkv, Sk, D]") + " is needed");
  }
  if (call.head_dim() < 1) refuse_value(call, "q has head_dim=0; at least 1 is needed");
  if (call.k.sizes[last] != call.head_dim()) {
    refuse_value(call, "k has " + count_text("head_dim", call.k.sizes[last]) + " but q has " + count_text("head_dim", call.head_dim()));
  }
  if (call.num_heads_kv() < 1) refuse_value(call, "k has num_heads_kv=0; at least 1 is needed");
  if (call.num_heads_q() % call.num_heads_kv() != 0) {
    refuse_value(call, "q has " + count_text("num_heads_q", call.num_heads_q()) + ", which is not a multiple of " +
                           count_text("num_heads_kv", call.num_heads_kv()) + " of k");
  }
  if (!host::same_shape(call.v, call.k)) {
    refuse_value(call, "v has shape " + host::shape_text(call.v) + " but k has shape " + host::shape_text(call.k));
  }
}

void check_options(const Call& call) {
  if (call.softmax_scale && !(std::isfinite(*call.softmax_scale) && *call.softmax_scale > 0)) {
    refuse_value(call, "softmax_scale is " + number_text(*call.softmax_scale) + "; a finite number above 0 is needed");
  }
  if (call.window_size && *call.window_size < 1) refuse_value(call, "window_size is " + std::to_string(*call.window_size) + "; 1 or more is needed");
  if (!(std::isfinite(call.softcap) && call.softcap >= 0)) {
    refuse_value(call, "softcap is " + number_text(call.softcap) + "; 0, for none, or a finite number above it is needed");
  }
}

void check_output(const Call& call, const char* argument, const Tensor& t, int64_t element_size, const std::vector<int64_t>& shape) {
  bool same = t.ndim == static_cast<int64_t>(shape.size());
  for (size_t d = 0; same && d < shape.size(); ++d) same = t.sizes[d] == shape[d];
  if (!same) {
    std::string needed = "[";
    for (size_t d = 0; d < shape.size(); ++d) needed += (d > 0 ? ", " : "") + std::to_string(shape[d]);
    refuse_value(call, std::string(argument) + " has shape " + host::shape_text(t) + "; " + needed + "] is needed");
  }
  if (host::overlaps_itself(t)) refuse_value(call, std::string("elements of ") + argument + " share memory");
  const std::pair<const char*, const Tensor*> inputs[] = {
      {"q", &call.q}, {"k", &call.k}, {"v", &call.v}, {"cu_seqlens_q", &call.cu_seqlens_q}, {"cu_seqlens_k", &call.cu_seqlens_k},
      {call.packed() ? "query_starts" : "query_start", &call.query_starts}, {"seqused_k", &call.seqused_k}, {"out", &call.out}};
  for (const auto& [name, input] : inputs) {
    if (!*input || input == &t) continue;
    const bool vector = input == &call.cu_seqlens_q || input == &call.cu_seqlens_k || input == &call.query_starts || input == &call.seqused_k;
    if (host::overlap(t, element_size, *input, vector ? 4 : 2) != host::Overlap::kNone) refuse_value(call, std::string(argument) + " overlaps " + name);
  }
}

bool contiguous(const Tensor& t) {
  int64_t step = 1;
  for (int64_t d = t.ndim - 1; d >= 0; --d) {
    if (t.sizes[d] == 0) return true;
    if (t.sizes[d] != 1 && t.strides[d] != step) return false;
    step *= t.sizes[d];
  }
  return true;
}

void check_outputs(const Call& call) {
  if (call.out) {
    check_like_q(call, "out", call.out);
    check_output(call, "out", call.out, 2, std::vector<int64_t>(call.q.sizes, call.q.sizes + call.q.ndim));
  }
  if (!call.lse) return;
  check_device(call, "lse", call.lse);
  if (call.lse.dtype != aoti_torch_dtype_float32()) {
    refuse_type(call, std::string("lse has dtype ") + host::dtype_name(call.lse.dtype) + "; float32 is needed");
  }
  std::vector<int64_t> shape = {call.num_heads_q(), call.rows_q()};
  if (!call.packed()) shape.insert(shape.begin(), call.batch());
  check_output(call, "lse", call.lse, 4, shape);
  if (!contiguous(call.lse)) refuse_value(call, "lse is not contiguous; a contiguous tensor is needed");
}

void validate(const Call& call) {
  DType dtype;
  if (!host::is_half_dtype(call.q.dtype, &dtype)) {
    refuse_type(call, std::string("q has dtype ") + host::dtype_name(call.q.dtype) + "; float16 and bfloat16 are supported");
  }
  if (call.q.ndim != call.last_dim() + 1) {
    refuse_value(call, "q has shape " + host::shape_text(call.q) + "; " + (call.packed() ? "[total_q, Hq, D]" : "[B, Hq, Sq, D]") + " is needed");
  }
  check_heads(call);
  std::string why;
  if (call.packed()) {
    check_of_sequences(call, "cu_seqlens_q", call.cu_seqlens_q, -1, "");
    if (call.cu_seqlens_q.sizes[0] < 1) refuse_value(call, "cu_seqlens_q has 0 numbers; at least 1 is needed, one more than sequences");
    check_of_sequences(call, "cu_seqlens_k", call.cu_seqlens_k, call.batch() + 1, "as in cu_seqlens_q");
    if (call.max_seqlen_q < 0) refuse_value(call, "max_seqlen_q is " + std::to_string(call.max_seqlen_q) + "; 0 or more is needed");
    if (call.max_seqlen_k < 0) refuse_value(call, "max_seqlen_k is " + std::to_string(call.max_seqlen_k) + "; 0 or more is needed");
    why = "for " + std::to_string(call.batch()) + " sequences";
  } else {
    if (call.k.sizes[0] != call.batch()) {
      refuse_value(call, "k has " + count_text("batch", call.k.sizes[0]) + " but q has " + count_text("batch", call.batch()));
    }
    why = "for " + count_text("batch", call.batch());
  }
  check_options(call);
  if (call.query_starts) {
    check_of_sequences(call, call.packed() ? "query_starts" : "query_start", call.query_starts, call.batch(), why);
    if (call.suffix) refuse_value(call, "query_starts is a tensor and \"suffix\" at once; one of them is needed");
  } else if (!call.packed() && !call.query_start && (call.causal || call.window_size) && call.rows_q() != call.rows_k()) {
    refuse_value(call, "query_start is None; with " + (call.causal ? "causal=True" : "window_size=" + std::to_string(*call.window_size)) +
                           " it is needed for " + count_text("seqlen_q", call.rows_q()) + " and " + count_text("seqlen_k", call.rows_k()) +
                           ": seqlen_k - seqlen_q for queries that end with the keys, 0 for queries that start with them");
  }
  if (call.seqused_k) check_of_sequences(call, "seqused_k", call.seqused_k, call.batch(), why);
  if (call.backend < 0 || call.backend >= kBackendCount) refuse_value(call, "backend number " + std::to_string(call.backend) + " is unknown");
  check_outputs(call);
}

// ---------------------------------------------------------------- profile rows

constexpr const char* kProfileForm =
    "flash_attention or flash_attention_varlen;dtype;batch=B,causal=0 or 1,head_dim=D,num_heads_kv=N,num_heads_q=N,seqlen_k=S,seqlen_q=S;kernel or "
    "kernel.configuration";
constexpr const char* kProfileSizes[] = {"batch", "causal", "head_dim", "num_heads_kv", "num_heads_q", "seqlen_k", "seqlen_q"};

using ProfileKey = std::array<int64_t, 9>;

host::ProfileTable<ProfileKey, Choice>& profiles() {
  static host::ProfileTable<ProfileKey, Choice> table;
  return table;
}

// "sm80_mma", or "sm80_mma.128x64w4s3": one of its configurations. Kernel kAuto for anything else.
Choice parse_choice(const std::string& text, int64_t head_dim) {
  const std::vector<std::string> parts = host::split_text(text, '.');
  Choice choice;
  for (int i = 1; i < kBackendCount; ++i) {
    if (parts[0] == kBackendNames[i] && i != static_cast<int>(Backend::kCuda)) choice.kernel = static_cast<Backend>(i);
  }
  if (parts.size() == 1) return choice;
  choice.config = config_number(choice.kernel, head_dim, parts[1]);
  return parts.size() == 2 && choice.config >= 0 ? choice : Choice{};
}

// A row is of calls without a window and without softcap.
void set_profile(const std::string& text) {
  std::map<ProfileKey, Choice> rows;
  for (const host::ProfileLine& line : host::parse_profile(text, kProfileForm)) {
    ProfileKey key = {-1, -1};
    for (int i = 0; i < 2; ++i) {
      if (line.op == op_name(i != 0)) key[0] = i;
      if (line.dtype == dtype_name(static_cast<DType>(i))) key[1] = i;
    }
    for (int i = 0; i < 7; ++i) key[2 + i] = line.size(kProfileSizes[i]);
    const Choice choice = parse_choice(line.kernel, line.size("head_dim"));
    if (line.sizes.size() != 7 || *std::min_element(key.begin(), key.end()) < 0 || key[3] > 1 || choice.kernel == Backend::kAuto) {
      host::bad_profile_line(line.text, kProfileForm);
    }
    rows[key] = choice;
  }
  profiles().replace(std::move(rows));
}

// Profile rows are Python's to find; it is asked once, when a device is certain to be in use.
void load_profile_once() {
  static std::once_flag once;
  std::call_once(once, [] {
    StableIValue stack[1] = {};
    aoti_torch_call_dispatcher("dandan_attention::load_profile", "", stack);
  });
}

// ---------------------------------------------------------------- from a call to a launch

struct Plan {
  Problem problem;
  Params params;
  Route route;
  bool copy_q = false, copy_k = false, copy_v = false, copy_out = false;
  bool copy_cu_seqlens_q = false, copy_cu_seqlens_k = false, copy_query_starts = false, copy_seqused_k = false;
};

bool step_needed(const Tensor& t, int d) { return t.sizes[d] > 1; }

// Strides by name; 0 where there is one place alone.
Strides strides_of(const Call& call, const Tensor& t) {
  const auto step = [&](int d) { return step_needed(t, d) ? t.strides[d] : 0; };
  Strides s;
  s.batch = call.packed() ? 0 : step(0);
  s.head = step(call.heads_dim());
  s.row = step(call.rows_dim());
  return s;
}

bool aligned(const Tensor& t, const Strides& s) { return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && (s.batch | s.head | s.row) % 8 == 0; }

bool whole_rows(const Call& call, const Tensor& t) { return t.strides[call.last_dim()] == 1 || !step_needed(t, call.last_dim()); }

// Whether `kernel` reads t where it lies: rows without gaps that start at multiples of 16 bytes (both copy 16 bytes at a time); wgmma's copy engine takes
// strides below 2^40 bytes and no rows that are one row again and again.
bool reads_in_place(const Call& call, Backend kernel, const Tensor& t) {
  const Strides s = strides_of(call, t);
  if (!whole_rows(call, t) || !aligned(t, s)) return false;
  if (kernel != Backend::kSm90aWgmma) return true;
  return std::max({s.batch, s.head, s.row}) < (int64_t{1} << 39) && (s.row != 0 || t.sizes[call.rows_dim()] <= 1);
}

// sm80_mma stores single elements where rows of out do not start at multiples of 16 bytes.
bool writes_in_place(const Call& call, Backend kernel, const Tensor& t) {
  return whole_rows(call, t) && (kernel == Backend::kSm80Mma || aligned(t, strides_of(call, t)));
}

// Whether results lie as [B, S, H, D]: where q does.
bool rows_outside(const Call& call) { return !call.packed() && call.q.strides[1] < call.q.strides[2]; }

Tensor empty_out(const Call& call) {
  const Tensor& q = call.q;
  if (!rows_outside(call)) return host::empty(q.ndim, q.sizes, q.dtype, q.device_type, q.device_index);
  const auto at_least_1 = [](int64_t n) { return n > 1 ? n : 1; };
  const int64_t head = at_least_1(q.sizes[3]), row = head * at_least_1(q.sizes[1]), batch = row * at_least_1(q.sizes[2]);
  const int64_t strides[4] = {batch, head, row, 1};
  AtenTensorHandle handle = nullptr;
  host::check_shim(aoti_torch_empty_strided(4, q.sizes, strides, q.dtype, q.device_type, q.device_index, &handle), "allocate a tensor");
  return Tensor(handle);
}

Tensor empty_lse(const Call& call) {
  const int64_t dense[3] = {call.batch(), call.num_heads_q(), call.rows_q()}, packed[2] = {call.num_heads_q(), call.rows_q()};
  return host::empty(call.packed() ? 2 : 3, call.packed() ? packed : dense, aoti_torch_dtype_float32(), call.q.device_type, call.q.device_index);
}

bool scattered(const Tensor& vector) { return vector && step_needed(vector, 0) && vector.strides[0] != 1; }

// Everything that the arguments of a call decide but for addresses of copies. `out` may be absent (a call that allocates): then it is aligned.
Plan make_plan(const Call& call, int arch, int code_arch) {
  Plan plan;
  Params& p = plan.params;
  Problem& problem = plan.problem;
  p.batch = call.batch();
  p.seqlen_q = call.packed() ? std::min(call.max_seqlen_q, call.rows_q()) : call.rows_q();
  p.seqlen_k = call.packed() ? std::min(call.max_seqlen_k, call.rows_k()) : call.rows_k();
  if (call.packed()) p.total_q = call.rows_q(), p.total_k = call.rows_k();
  p.num_heads_q = static_cast<int>(call.num_heads_q());
  p.num_heads_kv = static_cast<int>(call.num_heads_kv());
  p.head_dim = static_cast<int>(call.head_dim());
  p.softmax_scale = static_cast<float>(call.softmax_scale ? *call.softmax_scale : 1.0 / std::sqrt(static_cast<double>(call.head_dim())));
  p.softcap = static_cast<float>(call.softcap);
  p.causal = call.causal;
  p.window = call.window_size.value_or(0);
  p.query_start = call.query_start.value_or(0);
  p.suffix = call.suffix;

  problem.op = call.name();
  problem.arch = arch;
  problem.code_arch = code_arch;
  problem.own_code = host::has_own_code(arch, "90a");
  host::is_half_dtype(call.q.dtype, &problem.dtype);
  problem.batch = p.batch, problem.seqlen_q = p.seqlen_q, problem.seqlen_k = p.seqlen_k;
  problem.rows_q = call.rows_q(), problem.rows_k = call.rows_k();
  problem.num_heads_q = call.num_heads_q(), problem.num_heads_kv = call.num_heads_kv(), problem.head_dim = call.head_dim();
  problem.packed = call.packed();
  problem.masks = call.causal || call.window_size || p.softcap > 0.f;
  problem.aligned = reads_in_place(call, Backend::kSm80Mma, call.q) && reads_in_place(call, Backend::kSm80Mma, call.k) &&
                    reads_in_place(call, Backend::kSm80Mma, call.v);
  problem.backend = static_cast<Backend>(call.backend);
  if (!call.window_size && call.softcap == 0) {
    const int64_t max_q = call.packed() ? call.max_seqlen_q : p.seqlen_q, max_k = call.packed() ? call.max_seqlen_k : p.seqlen_k;
    problem.profile = profiles().find({call.packed(), static_cast<int64_t>(problem.dtype), p.batch, call.causal, problem.head_dim, problem.num_heads_kv,
                                       problem.num_heads_q, max_k, max_q});
  }
  plan.route = select(problem);

  const Backend kernel = plan.route.kernel;
  if (kernel == Backend::kTorch || !plan.route.error.empty()) return plan;
  plan.copy_q = !reads_in_place(call, kernel, call.q);
  plan.copy_k = !reads_in_place(call, kernel, call.k);
  plan.copy_v = !reads_in_place(call, kernel, call.v);
  plan.copy_out = call.out && !writes_in_place(call, kernel, call.out);
  plan.copy_cu_seqlens_q = scattered(call.cu_seqlens_q);
  plan.copy_cu_seqlens_k = scattered(call.cu_seqlens_k);
  plan.copy_query_starts = scattered(call.query_starts);
  plan.copy_seqused_k = scattered(call.seqused_k);
  return plan;
}

// `t`, or its copy, which `holder` keeps.
const Tensor& as_read(const Tensor& t, bool copy, Tensor* holder) {
  if (!copy) return t;
  *holder = host::copied(t, t.ndim == 1 ? 1 : t.sizes[t.ndim - 1]);
  return *holder;
}

// The kernel that the plan names. Copies live until it is enqueued; torch's allocator gives their memory to later work of the same stream alone.
void run_kernel(const Call& call, Plan* plan, const host::DeviceFacts& facts, const Tensor& out, const Tensor& lse) {
  Params& p = plan->params;
  Tensor held[7];
  const auto operand = [&](const Tensor& given, bool copy, Tensor* holder, const void** data, Strides* strides) {
    const Tensor& t = as_read(given, copy, holder);
    *data = t.data;
    *strides = strides_of(call, t);
  };
  operand(call.q, plan->copy_q, &held[0], &p.q, &p.q_strides);
  if (call.rows_k() > 0) {
    operand(call.k, plan->copy_k, &held[1], &p.k, &p.k_strides);
    operand(call.v, plan->copy_v, &held[2], &p.v, &p.v_strides);
  } else {  // no key is read, but an address has to be one
    p.k = p.v = p.q;
  }
  const auto vector = [&](const Tensor& t, bool copy, Tensor* holder) -> const int32_t* {
    return t ? static_cast<const int32_t*>(as_read(t, copy, holder).data) : nullptr;
  };
  p.cu_seqlens_q = vector(call.cu_seqlens_q, plan->copy_cu_seqlens_q, &held[3]);
  p.cu_seqlens_k = vector(call.cu_seqlens_k, plan->copy_cu_seqlens_k, &held[4]);
  p.query_starts = vector(call.query_starts, plan->copy_query_starts, &held[5]);
  p.seqused_k = vector(call.seqused_k, plan->copy_seqused_k, &held[6]);
  p.out = out.data;
  p.out_strides = strides_of(call, out);
  p.lse = lse ? static_cast<float*>(lse.data) : nullptr;
  Launch launch;
  launch.stream = static_cast<cudaStream_t>(host::current_cuda_stream(call.q.device_index));
  launch.sm_count = facts.sm_count;
  launch.dependent = plan->problem.arch >= 90 && plan->problem.code_arch >= 90 && host::dependent_launch().load(std::memory_order_relaxed);
  launch.config = plan->route.config;
  (plan->route.kernel == Backend::kSm90aWgmma ? launch_sm90a_wgmma : launch_sm80_mma)(plan->problem.dtype, p, launch);
}

// The torch route: the reference operator that Python registers, through the dispatcher.
void call_reference(const Call& call, StableIValue* results, Form form) {
  StableIValue stack[16] = {};
  host::Values values(stack);
  const auto optional = [&](const Tensor& t) { values.optional_tensor(t ? t.share() : nullptr); };
  values.tensor(call.q.share()).tensor(call.k.share()).tensor(call.v.share());
  if (call.packed()) values.tensor(call.cu_seqlens_q.share()).tensor(call.cu_seqlens_k.share()).integer(call.max_seqlen_q).integer(call.max_seqlen_k);
  values.integer(call.causal);
  host::put_optional_number(values, call.softmax_scale);
  if (!call.packed()) host::put_optional_integer(values, call.query_start);
  optional(call.query_starts);
  if (call.packed()) values.integer(call.suffix);
  host::put_optional_integer(values, call.window_size);
  values.number(call.softcap);
  optional(call.seqused_k);
  std::string name = std::string("dandan_attention::") + call.name() + (has_lse(call.op) ? "_lse" : "") + "_reference";
  if (form == Form::kOut) {
    values.tensor(call.out.share());
    if (has_lse(call.op)) values.tensor(call.lse.share());
    name += "_out";
  }
  host::check_shim(aoti_torch_call_dispatcher(name.c_str(), "", stack), "run the reference operator");
  if (form == Form::kAllocate) {
    results[0] = stack[0];
    if (has_lse(call.op)) results[1] = stack[1];
  }
}

bool nothing_to_do(const Call& call) { return call.batch() == 0 || call.num_heads_q() == 0 || call.rows_q() == 0; }

void run(Op op, Form form, StableIValue* stack) {
  host::Arguments arguments(stack);
  Call call = read_call(op, form, arguments, nullptr);
  validate(call);
  const int32_t index = call.q.device_index;
  const host::DeviceGuard guard(index);
  const bool given = form == Form::kOut;
  if (nothing_to_do(call)) {
    if (!given) call.out = empty_out(call);
    if (!given && has_lse(op)) call.lse = empty_lse(call);
  } else {
    const host::DeviceFacts& facts = host::device_facts(index);
    load_profile_once();
    Plan plan = make_plan(call, facts.arch, host::code_architecture(facts.arch));
    if (!plan.route.error.empty()) host::backend_unavailable(plan.route.error);
    if (plan.route.kernel == Backend::kTorch) return call_reference(call, stack, form);
    Tensor result;
    if (!given || plan.copy_out) result = empty_out(call);
    if (!given && has_lse(op)) call.lse = empty_lse(call);
    run_kernel(call, &plan, facts, result ? result : call.out, call.lse);
    if (plan.copy_out) host::copy_into(call.out, result);
    if (!given) call.out = std::move(result);
  }
  if (given) return;
  host::Values results(stack);
  results.tensor(call.out.release());
  if (has_lse(op)) results.tensor(call.lse.release());
}

// ---------------------------------------------------------------- what a call would do

std::vector<const char*> copies(const Call& call, const Plan& plan) {
  std::vector<const char*> list;
  const std::pair<bool, const char*> all[] = {{plan.copy_q, "q"}, {plan.copy_k, "k"}, {plan.copy_v, "v"}, {plan.copy_cu_seqlens_q, "cu_seqlens_q"},
                                              {plan.copy_cu_seqlens_k, "cu_seqlens_k"},
                                              {plan.copy_query_starts, call.packed() ? "query_starts" : "query_start"},
                                              {plan.copy_seqused_k, "seqused_k"}, {plan.copy_out, "out"}};
  for (const auto& [copy, name] : all) {
    if (copy) list.push_back(name);
  }
  return list;
}

std::string config_text(Backend kernel, int config) { return kernel == Backend::kTorch ? "null" : host::quoted(config_at(kernel, config).name); }

// The route of a call as JSON, and what else could run. `arch` 0 asks the device of q; another number stands for a device of that architecture, so that
// routes can be asked without a GPU.
void info(Op op, StableIValue* stack) {
  host::Arguments arguments(stack);
  int64_t arch = 0;
  const Call call = read_call(op, Form::kInfo, arguments, &arch);
  validate(call);
  if (arch == 0) {
    if (call.q.device_type != aoti_torch_device_type_cuda()) host::value_error(std::string(call.name()) + "_info: q is not on a CUDA device");
    arch = host::device_facts(call.q.device_index).arch;
    load_profile_once();
  }
  Plan plan = make_plan(call, static_cast<int>(arch), host::code_architecture(static_cast<int>(arch)));
  if (nothing_to_do(call)) {
    plan = Plan{};
    plan.route.reason = "out has no elements";
  }
  const Route& route = plan.route;
  if (!route.error.empty()) host::backend_unavailable(route.error);
  const bool torch = route.kernel == Backend::kTorch;
  std::string text = "{\"backend\": " + host::quoted(torch ? "torch" : "cuda") + ", \"kernel\": " + host::quoted(backend_name(route.kernel)) +
                     ", \"reason\": " + host::quoted(route.reason) +
                     ", \"fallback_reason\": " + (route.fallback.empty() ? "null" : host::quoted(route.fallback)) +
                     ", \"profile\": " + host::json(route.profile) + ", \"copies\": " + host::json(copies(call, plan)) +
                     ", \"config\": " + config_text(route.kernel, route.config) + ", \"candidates\": [";
  bool first = true;
  for (const Candidate& c : candidates(Backend::kAuto, plan.problem)) {
    text += std::string(first ? "" : ", ") + "{\"kernel\": " + host::quoted(backend_name(c.kernel)) + ", \"config\": " + config_text(c.kernel, c.config) +
            ", \"number\": " + std::to_string(c.config) + "}";
    first = false;
  }
  text += "], \"obstacles\": {";
  first = true;
  for (const Backend kernel : kOwnKernels) {
    const std::string why = obstacle(kernel, plan.problem);
    if (why.empty()) continue;
    text += (first ? "" : ", ") + host::quoted(backend_name(kernel)) + ": " + host::quoted(why);
    first = false;
  }
  host::Values(stack).tensor(host::text_tensor(text + "}}").release());
}

// What this library is: kernels by number with their configurations, architectures.
void describe(StableIValue* stack, uint64_t, uint64_t) {
  std::string text = "{\"plugin_api\": 1, \"backends\": [", tables;
  for (int i = 0; i < kBackendCount; ++i) text += (i > 0 ? ", " : "") + host::quoted(kBackendNames[i]);
  for (int i = kFirstKernel; i < kBackendCount; ++i) {
    const Backend kernel = static_cast<Backend>(i);
    tables += (tables.empty() ? "" : ", ") + host::quoted(kBackendNames[i]) + ": [";
    for (int c = 0; c < config_count(kernel); ++c) {
      const Config config = config_at(kernel, c);
      tables += std::string(c > 0 ? ", " : "") + "{\"name\": " + host::quoted(config.name) + ", \"head_dim\": " + std::to_string(config.head_dim) +
                ", \"tile_m\": " + std::to_string(config.tile_m) + ", \"tile_n\": " + std::to_string(config.tile_n) + "}";
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

// ---------------------------------------------------------------- schemas

// torch's registration class stands in another namespace in 2.9 than later, hence templates.
template <Op kOp, typename Library>
void define(Library& library) {
  const std::string name = std::string(op_name(is_packed(kOp))) + (has_lse(kOp) ? "_lse" : "");
  const std::string options = "SymInt? window_size, float softcap, Tensor? seqused_k, int backend";
  const std::string inputs =
      is_packed(kOp) ? "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, bool causal, "
                       "float? softmax_scale, Tensor? query_starts, bool suffix, " + options
                     : "Tensor q, Tensor k, Tensor v, bool causal, float? softmax_scale, SymInt? query_start, Tensor? query_starts, " + options;
  const bool lse = has_lse(kOp);
  library.def((name + "(" + inputs + ") -> " + (lse ? "(Tensor, Tensor)" : "Tensor")).c_str());
  library.def((name + "_out(" + inputs + ", Tensor(a!) out" + (lse ? ", Tensor(b!) lse" : "") + ") -> ()").c_str());
  library.def((name + "_info(" + inputs + ", Tensor? out" + (lse ? ", Tensor? lse" : "") + ", int arch) -> Tensor").c_str());
}

template <Op kOp, typename Library>
void implement(Library& library, Form form) {
  const std::string name = std::string(op_name(is_packed(kOp))) + (has_lse(kOp) ? "_lse" : "");
  if (form == Form::kInfo) {
    library.impl((name + "_info").c_str(), &boxed<kOp, Form::kInfo>);
  } else {
    library.impl(name.c_str(), &boxed<kOp, Form::kAllocate>);
    library.impl((name + "_out").c_str(), &boxed<kOp, Form::kOut>);
  }
}

template <typename Library>
void implement_all(Library& library, Form form) {
  implement<Op::kDense>(library, form);
  implement<Op::kDenseLse>(library, form);
  implement<Op::kPacked>(library, form);
  implement<Op::kPackedLse>(library, form);
}

}  // namespace
}  // namespace dandan_attention

STABLE_TORCH_LIBRARY(dandan_attention, library) {
  using dandan_attention::Op;
  dandan_attention::define<Op::kDense>(library);
  dandan_attention::define<Op::kDenseLse>(library);
  dandan_attention::define<Op::kPacked>(library);
  dandan_attention::define<Op::kPackedLse>(library);
  library.def("describe() -> Tensor");
  library.def("set_profile(Tensor rows) -> ()");
  library.def("set_dependent_launch(int enabled) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(dandan_attention, CUDA, library) { dandan_attention::implement_all(library, dandan_attention::Form::kAllocate); }

STABLE_TORCH_LIBRARY_IMPL(dandan_attention, CompositeExplicitAutograd, library) {
  dandan_attention::implement_all(library, dandan_attention::Form::kInfo);
  library.impl("describe", &dandan_attention::describe);
  library.impl("set_profile", &dandan_attention::boxed_set_profile);
  library.impl("set_dependent_launch", &dandan::host::boxed_set_dependent_launch);
}
