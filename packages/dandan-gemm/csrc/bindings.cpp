// Schemas, checks, selection and the filling of Params for torch.ops.dandan_gemm. The only file that sees torch.
//
// The operator has these forms: gemm allocates its result, gemm_out writes into a tensor, gemm_info tells the route of a call without launching anything,
// gemm_reference and gemm_reference_out (registered in Python) are plain PyTorch. gemm_tile_out launches one configuration of one kernel and
// gemm_candidates tells what the cost model says of all of them; both are for tests, measurements and calibration. The schemas of the first three stand
// once more in dandan_gemm/_ops.py for machines where this library cannot be loaded; a test holds both against each other.
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
#include <vector>

#include "gemm.h"
#include "routes.h"

namespace dandan_gemm {
namespace {

namespace host = dandan::host;
using host::Tensor;

// ---------------------------------------------------------------- the arguments of a call

struct Call {
  Tensor a, b, bias;
  bool weight_transposed = false;
  bool static_weight = false;
  int64_t backend = 0;
  int64_t config = -1, split = 0;  // of gemm_tile_out
  Tensor out;                      // given by the caller or allocated
  int64_t k() const { return a.sizes[a.ndim - 1]; }
  int64_t n() const { return b.sizes[weight_transposed ? 0 : 1]; }
  int64_t m() const { return host::row_count(a); }
};

enum class Form { kAllocate, kOut, kInfo, kTile, kCandidates };

// A bool fills the first byte of its place.
bool read_flag(host::Arguments& arguments) { return (arguments.integer() & 0xff) != 0; }

// Reads the stack in the order of the schemas at the end of this file.
Call read_call(Form form, host::Arguments& arguments, int64_t* arch) {
  Call call;
  call.a = arguments.tensor();
  call.b = arguments.tensor();
  call.bias = arguments.optional_tensor();
  call.weight_transposed = read_flag(arguments);
  call.static_weight = read_flag(arguments);
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

void check_like_a(const Call& call, const char* argument, const Tensor& t) {
  if (!t.on(call.a.device_type, call.a.device_index)) {
    host::value_error(std::string("gemm: ") + argument + " is on " + host::device_text(t) + " but a is on " + host::device_text(call.a));
  }
  if (t.dtype == call.a.dtype) return;
  host::type_error(std::string("gemm: ") + argument + " has dtype " + host::dtype_name(t.dtype) + " but a has dtype " + host::dtype_name(call.a.dtype));
}

void check_out(const Call& call) {
  check_like_a(call, "out", call.out);
  if (!host::has_result_shape(call.a, call.n(), call.out)) {
    host::value_error("gemm: out has shape " + host::shape_text(call.out) + "; " + host::result_shape(call.a, call.n()) + " is needed");
  }
  if (host::overlaps_itself(call.out)) host::value_error("gemm: elements of out share memory");
  for (const auto& [name, t] : {std::pair<const char*, const Tensor*>{"a", &call.a}, {"b", &call.b}, {"bias", &call.bias}}) {
    if (*t && host::overlap(call.out, kElementSize, *t, kElementSize) != host::Overlap::kNone) host::value_error(std::string("gemm: out overlaps ") + name);
  }
}

void validate(const Call& call) {
  if (call.a.ndim < 1) host::value_error("gemm: a has 0 dimensions; at least 1 is needed");
  DType dtype;
  if (!host::is_half_dtype(call.a.dtype, &dtype)) {
    host::type_error(std::string("gemm: a has dtype ") + host::dtype_name(call.a.dtype) + "; float16 and bfloat16 are supported");
  }
  check_like_a(call, "b", call.b);
  if (call.b.ndim != 2) {
    host::value_error("gemm: b has shape " + host::shape_text(call.b) + "; " + (call.weight_transposed ? "[N, K]" : "[K, N]") + " is needed");
  }
  const int64_t k = call.b.sizes[call.weight_transposed ? 1 : 0];
  if (k != call.k()) {
    std::string text = "gemm: b has K=" + std::to_string(k) + " but a has K=" + std::to_string(call.k());
    if (call.n() == call.k()) text += std::string("; with weight_transposed=") + (call.weight_transposed ? "False" : "True") + " it would fit";
    host::value_error(text);
  }
  if (call.bias) {
    check_like_a(call, "bias", call.bias);
    if (call.bias.ndim != 1 || call.bias.sizes[0] != call.n()) {
      host::value_error("gemm: bias has shape " + host::shape_text(call.bias) + " but b has N=" + std::to_string(call.n()));
    }
  }
  if (call.backend < 0 || call.backend >= kBackendCount) {
    host::value_error("gemm: backend number " + std::to_string(call.backend) + " is unknown");
  }
  if (call.out) check_out(call);
}

// The configuration that gemm_tile_out asks for.
Choice forced_choice(const Call& call) {
  if (call.config < 0 && call.split == 0) return {};
  const Backend kernel = static_cast<Backend>(call.backend);
  const ConfigTable table = configs_of(kernel);
  if (table.count == 0) host::value_error(std::string("gemm: \"") + backend_name(kernel) + "\" has no configurations; name a kernel");
  if (call.config < 0 || call.config >= table.count) {
    host::value_error(std::string("gemm: \"") + backend_name(kernel) + "\" has " + std::to_string(table.count) + " configurations, no number " +
                      std::to_string(call.config));
  }
  const Config& config = table.configs[call.config];
  if (!takes_split(config, call.split)) {
    host::value_error(std::string("gemm: configuration \"") + config.name + "\" of \"" + backend_name(kernel) + "\" does not take " +
                      std::to_string(call.split) + " slices of K");
  }
  return {kernel, static_cast<int>(call.config), static_cast<int>(call.split)};
}

// ---------------------------------------------------------------- profile rows

constexpr const char* kProfileForm = "gemm;dtype;k=K,m=M,n=N or that with ,weight_transposed=0 or 1;kernel or kernel.configuration.slices";

using ProfileKey = std::array<int64_t, 5>;

host::ProfileTable<ProfileKey, Choice>& profiles() {
  static host::ProfileTable<ProfileKey, Choice> table;
  return table;
}

Choice profile_row(const Problem& p) { return profiles().find({static_cast<int64_t>(p.dtype), p.weight_transposed ? 1 : 0, p.m, p.n, p.k}); }

// "skinny", or "skinny.8x128.1": one of its configurations with so many slices of K. Kernel kAuto for anything else.
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

// A row is of one layout of b as a kernel reads it, whatever the caller called it; without a word on it, of rows along N.
void set_profile(const std::string& text) {
  std::map<ProfileKey, Choice> rows;
  for (const host::ProfileLine& line : host::parse_profile(text, kProfileForm)) {
    int dtype = -1;
    for (int i = 0; i < 2; ++i) dtype = line.dtype == dtype_name(static_cast<DType>(i)) ? i : dtype;
    const int64_t named = line.size("weight_transposed"), transposed = line.sizes.size() == 3 ? 1 : named;
    const int64_t m = line.size("m"), n = line.size("n"), k = line.size("k");
    const Choice choice = parse_choice(line.kernel);
    const bool sizes = std::min({m, n, k, transposed}) >= 0 && transposed <= 1 && line.sizes.size() == (named < 0 ? 3 : 4);
    if (line.op != "gemm" || dtype < 0 || !sizes || choice.kernel == Backend::kAuto) host::bad_profile_line(line.text, kProfileForm);
    rows[ProfileKey{dtype, transposed, m, n, k}] = choice;
  }
  profiles().replace(std::move(rows));
}

// ---------------------------------------------------------------- from a call to a launch

struct Plan {
  Problem problem;
  Params params;
  Route route;
  bool a_merges = false, out_merges = true;  // leading dimensions have one stride, which is enough for torch
  int64_t a_row_stride = 0, out_row_stride = 0;
  bool copy_a = false, copy_b = false, copy_bias = false, copy_out = false;
  bool static_weight = false;  // the kernel may read b before work enqueued earlier has ended
};

bool may_depend(const Problem& p) { return p.arch >= 90 && p.code_arch >= 90 && host::dependent_launch().load(std::memory_order_relaxed); }

// b as it lies in memory: in the layout of the caller, or in the other one where only that has contiguous rows or rows that start at vectors.
void place_b(const Call& call, Plan* plan) {
  const Tensor& b = call.b;
  const auto rows_in = [&](bool transposed) {
    const int r = transposed == call.weight_transposed ? 0 : 1;  // the dimension whose steps are from row to row
    return host::matrix_rows(b.data, b.sizes[r], b.sizes[1 - r], b.strides[r], b.strides[1 - r]);
  };
  const host::MatrixRows given = rows_in(call.weight_transposed), other = rows_in(!call.weight_transposed);
  const bool flip = other.in_place && (!given.in_place || (other.aligned && !given.aligned));
  const host::MatrixRows chosen = flip ? other : given.in_place ? given : host::copied_rows(b.sizes[1]);
  plan->copy_b = !chosen.in_place;
  plan->params.b = chosen.in_place ? b.data : nullptr;
  plan->params.b_stride = chosen.stride;
  plan->params.weight_transposed = call.weight_transposed != flip;
  plan->problem.b_aligned = chosen.aligned;
}

// Everything that the shapes, strides and addresses of a call decide, but for the route. `out` may be absent (a call that allocates): then it is contiguous.
Plan make_plan(const Call& call, int arch, int code_arch, int sm_count) {
  Plan plan;
  Params& p = plan.params;
  Problem& problem = plan.problem;
  p.m = call.m();
  p.n = call.n();
  p.k = call.k();

  plan.a_merges = host::merge_rows(call.a, call.a.ndim - 1, &plan.a_row_stride);
  host::MatrixRows a;
  if (plan.a_merges) a = host::matrix_rows(call.a.data, p.m, p.k, plan.a_row_stride, call.a.strides[call.a.ndim - 1]);
  if (!a.in_place) {
    plan.copy_a = true;
    a = host::copied_rows(p.k);
  }
  p.a = plan.copy_a ? nullptr : call.a.data;
  p.a_stride = a.stride;
  place_b(call, &plan);

  if (call.bias) {
    plan.copy_bias = call.bias.strides[0] != 1 && p.n > 1;
    p.bias = plan.copy_bias ? nullptr : call.bias.data;
  }

  host::MatrixRows out = host::matrix_rows(nullptr, p.m, p.n, p.n, 1);
  if (call.out) {
    plan.out_merges = host::merge_rows(call.out, call.out.ndim - 1, &plan.out_row_stride);
    host::MatrixRows given;
    if (plan.out_merges) given = host::matrix_rows(call.out.data, p.m, p.n, plan.out_row_stride, call.out.strides[call.out.ndim - 1]);
    plan.copy_out = !given.in_place;
    if (given.in_place) out = given;
    p.out = given.in_place ? call.out.data : nullptr;
  }
  p.out_stride = out.stride;

  problem.arch = arch;
  problem.code_arch = code_arch;
  problem.own_code = host::has_own_code(arch, "90a");
  problem.sm_count = sm_count;
  host::is_half_dtype(call.a.dtype, &problem.dtype);
  problem.m = p.m;
  problem.n = p.n;
  problem.k = p.k;
  problem.weight_transposed = p.weight_transposed;
  problem.a_aligned = a.aligned;
  problem.out_aligned = out.aligned;
  plan.static_weight = call.static_weight && !plan.copy_b;  // a copy is enqueued just before the kernel
  problem.copied = (plan.copy_a ? p.m * p.k : 0) + (plan.copy_b ? p.n * p.k : 0) + (plan.copy_out ? p.m * p.n : 0);
  problem.copies = int{plan.copy_a} + int{plan.copy_b} + int{plan.copy_bias} + int{plan.copy_out};
  problem.backend = static_cast<Backend>(call.backend);
  problem.forced = forced_choice(call);
  return plan;
}

Route remembered_select(const Problem& asked) {
  return host::remembered<Route>(asked, profiles().generation(), [](const Problem& forgotten) {
    Problem problem = forgotten;
    problem.profile = profile_row(problem);
    return select(problem);
  });
}

using Launcher = void (*)(DType, const Params&, const Launch&);

Launcher launcher(Backend kernel) {
  switch (kernel) {
    case Backend::kSm80Mma: return launch_sm80_mma;
    case Backend::kSm90TmaMma: return launch_sm90_tma_mma;
    case Backend::kSm90aWgmma: return launch_sm90a_wgmma;
    default: return launch_skinny;
  }
}

void launch_plan(const Plan& plan, const host::DeviceFacts& facts, const Tensor& like) {
  Tensor workspace;
  Launch launch;
  if (const size_t bytes = workspace_bytes(plan.route.kernel, plan.route.tile, plan.problem)) {
    const int64_t size = static_cast<int64_t>(bytes);
    workspace = host::empty(1, &size, aoti_torch_dtype_uint8(), like.device_type, like.device_index);
    launch.workspace = workspace.data;
  }
  launch.stream = static_cast<cudaStream_t>(host::current_cuda_stream(like.device_index));
  launch.sm_count = facts.sm_count;
  launch.dependent = may_depend(plan.problem);
  launch.static_weight = plan.static_weight && launch.dependent;
  launch.tile = plan.route.tile;
  launcher(plan.route.kernel)(plan.problem.dtype, plan.params, launch);
}

// Profile rows are Python's to find; it is asked once, when a device is certain to be in use. Without rows the estimates decide.
void load_profile_once() {
  static std::once_flag once;
  std::call_once(once, [] {
    StableIValue stack[1] = {};
    aoti_torch_call_dispatcher("dandan_gemm::load_profile", "", stack);
  });
}

// The torch route: what torch.mm and torch.addmm launch, on the memory of the caller.
void run_torch(const Call& call, const Plan& plan, const Tensor& out, int64_t out_row_stride) {
  const int64_t m = plan.params.m, n = plan.params.n, k = plan.params.k, last = call.a.ndim - 1;
  Tensor copy;
  if (!plan.a_merges) copy = host::copied(call.a, k);
  const Tensor& a = copy ? copy : call.a;
  const int64_t a_step = a.strides[last];
  const Tensor rows = host::matrix_view(a, m, k, m == 1 ? std::max<int64_t>(k * a_step, 1) : copy ? k : plan.a_row_stride, a_step);
  const int kd = call.weight_transposed ? 1 : 0;
  const Tensor weight = host::matrix_view(call.b, k, n, call.b.strides[kd], call.b.strides[1 - kd]);
  const int64_t out_step = out.strides[last];
  host::matrix_product(host::matrix_view(out, m, n, m == 1 ? std::max<int64_t>(n * out_step, 1) : out_row_stride, out_step), rows, weight, call.bias);
}

// The kernel that the plan names. Copies live until it is enqueued; torch's allocator gives their memory to later work of the same stream alone.
void run_kernel(const Call& call, Plan* plan, const host::DeviceFacts& facts, const Tensor& out) {
  Tensor a, b, bias;
  Params& p = plan->params;
  if (plan->copy_a) a = host::copied(call.a, p.a_stride), p.a = a.data;
  if (plan->copy_b) b = host::copied(call.b, p.b_stride), p.b = b.data;
  if (plan->copy_bias) bias = host::copied(call.bias, p.n), p.bias = bias.data;
  p.out = out.data;
  launch_plan(*plan, facts, out);
}

void run(Form form, StableIValue* stack) {
  host::Arguments arguments(stack);
  Call call = read_call(form, arguments, nullptr);
  validate(call);
  const int32_t index = call.a.device_index;
  const host::DeviceGuard guard(index);
  const bool given = static_cast<bool>(call.out);
  if (call.m() == 0 || call.n() == 0 || call.k() == 0) {
    if (!given) call.out = host::empty_result(call.a, call.n());
    if (call.m() != 0 && call.n() != 0) host::fill_empty_sums(call.out, call.bias);
  } else {
    const host::DeviceFacts& facts = host::device_facts(index);
    load_profile_once();
    Plan plan = make_plan(call, facts.arch, host::code_architecture(facts.arch), facts.sm_count);
    plan.route = remembered_select(plan.problem);
    if (!plan.route.error.empty()) host::backend_unavailable(plan.route.error);
    const bool torch = plan.route.kernel == Backend::kTorch;
    const bool temporary = !given || (torch ? !plan.out_merges : plan.copy_out);
    Tensor result;
    if (temporary) result = host::empty_result(call.a, call.n());
    const Tensor& out = temporary ? result : call.out;
    if (torch) {
      run_torch(call, plan, out, temporary ? call.n() : plan.out_row_stride);
    } else {
      run_kernel(call, &plan, facts, out);
    }
    if (temporary && given) host::copy_into(call.out, result);
    if (!given) call.out = std::move(result);
  }
  if (form == Form::kAllocate) host::Values(stack).tensor(call.out.release());
}

// ---------------------------------------------------------------- what a call would do

std::string copies(const Plan& plan, bool torch) {
  std::vector<const char*> list;
  if (torch ? !plan.a_merges : plan.copy_a) list.push_back("a");
  if (!torch && plan.copy_b) list.push_back("b");
  if (!torch && plan.copy_bias) list.push_back("bias");
  if (torch ? !plan.out_merges : plan.copy_out) list.push_back("out");
  return host::json(list);
}

// The plan of a call that is only asked about. `arch` 0 asks the device of a; another number stands for a device of that architecture, so that routes can
// be asked without a GPU.
Plan asked_plan(const Call& call, int64_t arch) {
  int sm_count = 132;
  if (arch == 0) {
    if (call.a.device_type != aoti_torch_device_type_cuda()) host::value_error("gemm_info: a is not on a CUDA device");
    const host::DeviceFacts& facts = host::device_facts(call.a.device_index);
    load_profile_once();
    arch = facts.arch;
    sm_count = facts.sm_count;
  }
  Plan plan = make_plan(call, static_cast<int>(arch), host::code_architecture(static_cast<int>(arch)), sm_count);
  plan.problem.profile = profile_row(plan.problem);
  return plan;
}

std::string problem_text(const Problem& p) {
  return "\"m\": " + std::to_string(p.m) + ", \"n\": " + std::to_string(p.n) + ", \"k\": " + std::to_string(p.k) +
         ", \"weight_transposed\": " + host::json(p.weight_transposed) + ", \"a_aligned\": " + host::json(p.a_aligned) +
         ", \"b_aligned\": " + host::json(p.b_aligned) + ", \"out_aligned\": " + host::json(p.out_aligned);
}

// The route of a call as JSON.
void info(StableIValue* stack) {
  host::Arguments arguments(stack);
  int64_t arch = 0;
  Call call = read_call(Form::kInfo, arguments, &arch);
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
  const std::string text = "{\"backend\": " + host::quoted(torch ? "torch" : "cuda") + ", \"kernel\": " + host::quoted(backend_name(route.kernel)) +
                           ", \"reason\": " + host::quoted(route.reason) +
                           ", \"fallback_reason\": " + (*route.fallback != '\0' ? host::quoted(route.fallback) : "null") +
                           ", \"profile\": " + host::json(route.profile) + ", \"copies\": " + (nothing ? "[]" : copies(plan, torch)) +
                           ", \"config\": " + config + ", \"split\": " + std::to_string(route.tile.split) + ", \"us\": " + host::microseconds(route.us) +
                           ", \"workspace\": " + std::to_string(torch ? 0 : workspace_bytes(route.kernel, route.tile, plan.problem)) + ", " +
                           problem_text(plan.problem) + "}";
  host::Values(stack).tensor(host::text_tensor(text).release());
}

// What the cost model says of every candidate, as JSON, the cheapest first; kernels that cannot run with the reason.
void candidates(StableIValue* stack) {
  host::Arguments arguments(stack);
  int64_t arch = 0;
  const Call call = read_call(Form::kCandidates, arguments, &arch);
  validate(call);
  const Plan plan = asked_plan(call, arch);
  std::vector<Candidate> found;
  std::string refused;
  if (plan.params.m != 0 && plan.params.n != 0 && plan.params.k != 0) {
    found.push_back({Backend::kTorch, 0, 1, torch_us(plan.problem)});
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
    const std::string config = c.kernel == Backend::kTorch ? "null" : host::quoted(configs_of(c.kernel).configs[c.config].name);
    text += std::string(i > 0 ? ", " : "") + "{\"kernel\": " + host::quoted(backend_name(c.kernel)) + ", \"config\": " + config +
            ", \"number\": " + std::to_string(c.config) + ", \"split\": " + std::to_string(c.split) + ", \"us\": " + host::microseconds(c.us) + "}";
  }
  text += "], \"obstacles\": {" + refused + "}, " + problem_text(plan.problem) + "}";
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
                ", \"tile_n\": " + std::to_string(config.tile_n) + ", \"tile_k\": " + std::to_string(config.tile_k) +
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

void boxed_gemm(StableIValue* stack, uint64_t, uint64_t) { run(Form::kAllocate, stack); }
void boxed_gemm_out(StableIValue* stack, uint64_t, uint64_t) { run(Form::kOut, stack); }
void boxed_gemm_tile_out(StableIValue* stack, uint64_t, uint64_t) { run(Form::kTile, stack); }
void boxed_gemm_info(StableIValue* stack, uint64_t, uint64_t) { info(stack); }
void boxed_gemm_candidates(StableIValue* stack, uint64_t, uint64_t) { candidates(stack); }
void boxed_set_profile(StableIValue* stack, uint64_t, uint64_t) { set_profile(host::tensor_text(host::Arguments(stack).tensor())); }

}  // namespace
}  // namespace dandan_gemm

STABLE_TORCH_LIBRARY(dandan_gemm, library) {
  library.def("gemm(Tensor a, Tensor b, Tensor? bias, bool weight_transposed, bool static_weight, int backend) -> Tensor");
  library.def("gemm_out(Tensor a, Tensor b, Tensor? bias, bool weight_transposed, bool static_weight, int backend, Tensor(a!) out) -> ()");
  library.def("gemm_info(Tensor a, Tensor b, Tensor? bias, bool weight_transposed, bool static_weight, int backend, Tensor? out, int arch) -> Tensor");
  library.def(
      "gemm_tile_out(Tensor a, Tensor b, Tensor? bias, bool weight_transposed, bool static_weight, int backend, int config, int split, Tensor(a!) out) -> "
      "()");
  library.def("gemm_candidates(Tensor a, Tensor b, Tensor? bias, bool weight_transposed, bool static_weight, Tensor? out, int arch) -> Tensor");
  library.def("describe() -> Tensor");
  library.def("set_profile(Tensor rows) -> ()");
  library.def("set_dependent_launch(int enabled) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(dandan_gemm, CUDA, library) {
  library.impl("gemm", &dandan_gemm::boxed_gemm);
  library.impl("gemm_out", &dandan_gemm::boxed_gemm_out);
  library.impl("gemm_tile_out", &dandan_gemm::boxed_gemm_tile_out);
}

STABLE_TORCH_LIBRARY_IMPL(dandan_gemm, CompositeExplicitAutograd, library) {
  library.impl("gemm_info", &dandan_gemm::boxed_gemm_info);
  library.impl("gemm_candidates", &dandan_gemm::boxed_gemm_candidates);
  library.impl("describe", &dandan_gemm::describe);
  library.impl("set_profile", &dandan_gemm::boxed_set_profile);
  library.impl("set_dependent_launch", &dandan::host::boxed_set_dependent_launch);
}
