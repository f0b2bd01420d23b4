// torch.ops.fp4_csrc: the kernels of gemm/, sparse/ and moe/ as torch operators. The kernels' libraries know no torch and this one
// knows no CUDA: a resolver hands their functions over, per architecture, when they are first needed.
#include "../common/call.h"
#include "checks.h"

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

// libstdc++ asks glibc 2.32 and later whether there is one thread only. This definition answers "no", so that the binding runs with older ones.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}

namespace fp4 {

using Resolver = void*(const char* name, int arch, int scratch);

namespace {

std::mutex mutex;
std::map<std::pair<std::string, int64_t>, std::pair<void*, void*>> functions;
std::atomic<Resolver*> resolver = nullptr;

// A kernel's C functions. scratch: how many bytes of memory a call takes besides; null: none.
template <typename Params> struct Kernel {
  int (*run)(const Params*);
  int64_t (*scratch)(const Params*);
};

template <typename Params> Kernel<Params> kernel(const char* name, int64_t arch) {
  auto of = [](const std::pair<void*, void*>& found) { return Kernel<Params>{(int (*)(const Params*))found.first, (int64_t (*)(const Params*))found.second}; };
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = functions.find({name, arch});
    if (found != functions.end()) return of(found->second);
  }
  // Outside the lock: whoever answers may need a lock of its own (Python's), which another caller of ours holds.
  Resolver* resolve = resolver;
  void* answer = resolve ? resolve(name, (int)arch, false) : nullptr;
  STD_TORCH_CHECK(answer, "fp4_csrc::", name, " has no kernel for sm_", arch);
  void* scratch = resolve(name, (int)arch, true);
  const std::lock_guard<std::mutex> lock(mutex);
  return of(functions[{name, arch}] = {answer, scratch});
}

// Returns a cudaError_t. `like`: on whose device scratch memory is.
template <typename Params> int run(const Kernel<Params>& kernel, Params& p, const Tensor& like) {
  const int64_t bytes = kernel.scratch ? kernel.scratch(&p) : 0;
  if (bytes <= 0) return kernel.run(&p);
  const Tensor scratch = torch::stable::new_empty(like, {bytes}, ScalarType::Byte);
  p.scratch = scratch.data_ptr(), p.scratch_bytes = bytes;
  return kernel.run(&p);
}

// What activations are: of the result's dtype; E4M3 with a float32 scale a row, whose results are bfloat16; codes, which carry no dtype.
enum Activations { kPlain, kE4M3, kCodes };

// A linear operator.
struct Linear {
  const char* name;
  int64_t (*most_rows)(int64_t arch);  // as the Library of the kernel has it
  Activations activations = kPlain;
  int parts = 1;  // rows of the weight that make one column of the result
};

// Its tensors.
struct Operands {
  const Tensor &x, &codes, &scale, &global_scale;
  Maybe bias, x_scale = nullptr, row_scale = nullptr, meta = nullptr, mul = nullptr, residual = nullptr, norm_weight = nullptr;
};

// Of a call, M x N x K; its result is [m, columns].
struct Sizes {
  int64_t m, n, k, columns;
  ScalarType type;
};

// The kernels refuse more rows, too, with cudaErrorInvalidValue, which says neither how many they serve nor why there are so many.
void check_rows(const Linear& op, int64_t arch, const Tensor& x) {
  const int64_t most = op.most_rows(arch);
  STD_TORCH_CHECK(x.dim() != 2 || x.size(0) <= most, "fp4_csrc::", op.name, " serves at most M = ", most, " activation rows, got M = ", x.size(0),
                  ". A compiled graph that calls it was compiled for so few, and nothing checks its guards. Compile it for this M, or call torch.ops.fp4, "
                  "which serves every M.");
}

// Checks what the kernels take for granted, and fills in p.dtype where activations have one.
Sizes check(const Linear& op, int64_t arch, const Operands& t, LinearParams& p) {
  const char* name = op.name;
  const Tensor& x = t.x;
  check_rows(op, arch, x);
  require(t.global_scale.numel() > (p.second > 0) + (p.third > 0), name, "fewer global scales than siblings");
  const bool plain = op.activations == kPlain, codes = op.activations == kCodes;
  require(x.dim() == 2 && (!codes || t.codes.dim() == 2), name, codes ? "codes are [M, K/2] and [N, K/2]" : "activations are [M, K]");
  const int64_t m = x.size(0), n = t.codes.size(0), k = x.size(1) * (codes ? 2 : 1), columns = n / op.parts;
  if (plain) p.dtype = dtype_code(x, name);
  const ScalarType type = p.dtype ? ScalarType::Half : ScalarType::BFloat16;
  if (op.activations == kE4M3)
    require(x.scalar_type() == ScalarType::Float8_e4m3fn && t.x_scale->scalar_type() == ScalarType::Float, name,
            "activations are float8_e4m3fn, their scales float32");

  struct Part {
    Maybe tensor;
    int64_t rows, per_entry;  // [rows, K / per_entry]
  };
  for (const auto& [part, rows, per_entry] :
       {Part{t.x_scale, m, codes ? 16 : k}, {t.row_scale, m, k}, {&t.codes, n, t.meta ? 4 : 2}, {t.meta, n, 8}, {&t.scale, n, 16}})
    if (part) {
      require(part->get_device() == x.get_device(), name, "tensors on different devices");
      require(part->dim() == 2 && part->size(0) == rows && part->size(1) * per_entry == k, name,
              plain ? "a part of the weight does not fit N and K" : "a part does not fit M, N and K");
    }
  require(!t.bias || (t.bias->dim() == 1 && t.bias->size(0) == n && t.bias->scalar_type() == type), name,
          plain ? "the bias is [N] in the activations' dtype" : "the bias is [N] in the result's dtype");
  for (Maybe other : {t.mul, t.residual})
    require(!other || (other->dim() == 2 && other->size(0) == m && other->size(1) == columns && other->scalar_type() == type &&
                       other->get_device() == x.get_device()), name, "mul and residual are as the result");
  const Maybe norm = t.norm_weight;
  require(!norm || (norm->dim() == 1 && norm->size(0) == k && norm->scalar_type() == type && norm->get_device() == x.get_device()), name,
          "the norm's weight is [K] in the activations' dtype");
  require(n < INT32_MAX && k < INT32_MAX && m < INT32_MAX, name, "sizes below 2^31");
  return {m, n, k, columns, type};
}

// Fills in what a call reads and writes.
void fill(const Operands& t, const Sizes& of, const Tensor& y, void* stream, Dense& dense, LinearParams& p) {
  const Maybe norm = t.norm_weight;
  // The kernel must not begin while the one before it writes the weight, and that is a copy where the weight is not dense.
  p.early = p.early && is_dense(t.codes) && is_dense(t.scale) && (!t.meta || is_dense(*t.meta)) && (!norm || is_dense(*norm));
  p.x = dense(&t.x), p.x_scale = dense(t.x_scale), p.row_scale = dense(t.row_scale);
  p.codes = dense(&t.codes), p.meta = dense(t.meta), p.scale = dense(&t.scale), p.global_scale = t.global_scale.data_ptr();
  p.bias = dense(t.bias), p.mul = dense(t.mul), p.residual = dense(t.residual), p.y = y.data_ptr();
  if (norm) p.norm_weight = dense(norm);
  p.M = (int)of.m, p.N = (int)of.n, p.K = (int)of.k, p.stream = stream;
}

// y [M, N] of x [M, K] and a weight of N rows. p: numbers besides sizes.
template <typename Place> Tensor call(const Linear& op, int64_t arch, const Operands& t, LinearParams p) {
  const char* name = op.name;
  const Sizes of = check(op, arch, t, p);
  const Kernel<LinearParams> f = kernel<LinearParams>(name, arch);
  const Place place(t.x, name);
  Tensor y = torch::stable::new_empty(t.x, {of.m, of.columns}, of.type);
  if (of.m == 0 || of.columns == 0) return y;
  Dense dense;
  fill(t, of, y, place.stream, dense, p);
  const int status = run(f, p, t.x);
  STD_TORCH_CHECK(status == 0, "fp4_csrc::", name, " failed: cudaError ", status, " for M=", of.m, ", N=", of.n, ", K=", of.k);
  return y;
}

LinearParams numbers(std::initializer_list<int64_t> tile, int64_t second, int64_t third, int64_t act = 0, int64_t early = 0) {
  LinearParams p{};
  p.second = (int)second, p.third = (int)third, p.act = (int)act, p.early = (int)early;
  int i = 0;
  for (int64_t number : tile) p.tile[i++] = (int)number;
  return p;
}

// The operators' signatures, each that of the kernels OP. q, v: codes of a dense and of a sparse weight; e: metadata; s, g: block and global scales.
template <typename Place, const Linear& OP>
Tensor linear_small(const Tensor& x, const Tensor& q, const Tensor& s, const Tensor& g, const Optional& bias, int64_t arch, int64_t t0, int64_t t1, int64_t t2,
                    int64_t second, int64_t third, int64_t act, const Optional& mul, const Optional& residual) {
  return call<Place>(OP, arch, {.x = x, .codes = q, .scale = s, .global_scale = g, .bias = at(bias), .mul = at(mul), .residual = at(residual)},
                     numbers({t0, t1, t2}, second, third, act));
}

template <typename Place, const Linear& OP>
Tensor linear(const Tensor& x, const Tensor& q, const Tensor& s, const Tensor& g, const Optional& bias, int64_t arch, int64_t t0, int64_t t1, int64_t t2,
              int64_t t3, int64_t second, int64_t third, int64_t act, const Optional& mul, const Optional& residual, int64_t early) {
  return call<Place>(OP, arch, {.x = x, .codes = q, .scale = s, .global_scale = g, .bias = at(bias), .mul = at(mul), .residual = at(residual)},
                     numbers({t0, t1, t2, t3}, second, third, act, early));
}

template <typename Place, const Linear& OP>
Tensor linear_gemv(const Tensor& x, const Tensor& q, const Tensor& s, const Tensor& g, const Optional& bias, int64_t arch, int64_t t0, int64_t t1, int64_t t2,
                   int64_t t3, int64_t second, int64_t third, int64_t act, const Optional& mul, const Optional& residual, int64_t early,
                   const Optional& norm_weight, double eps, double norm_offset) {
  LinearParams p = numbers({t0, t1, t2, t3}, second, third, act, early);
  p.eps = (float)eps, p.norm_offset = (float)norm_offset;
  return call<Place>(
      OP, arch,
      {.x = x, .codes = q, .scale = s, .global_scale = g, .bias = at(bias), .mul = at(mul), .residual = at(residual), .norm_weight = at(norm_weight)}, p);
}

// Half of an RMSNorm, as common/epilogue.cuh has it: the results are y, z and the squares of y.
template <typename Place, const Linear& OP>
std::tuple<Tensor, Tensor, Tensor> linear_squares(const Tensor& x, const Tensor& q, const Tensor& s, const Tensor& g, const Optional& bias, int64_t arch,
                                                  int64_t t0, int64_t t1, int64_t t2, int64_t t3, int64_t second, int64_t third, int64_t act,
                                                  const Optional& mul, const Optional& residual, int64_t early, const Optional& norm_weight,
                                                  double norm_offset) {
  check_rows(OP, arch, x);
  require(x.dim() == 2 && q.dim() == 2 && q.size(0) % kSquared == 0, OP.name, "activations are [M, K], N is a multiple of 16");
  const int64_t m = x.size(0), n = q.size(0);
  const Maybe norm = at(norm_weight);
  require(norm && norm->dim() == 1 && norm->size(0) == n && norm->scalar_type() == x.scalar_type() && norm->get_device() == x.get_device(), OP.name,
          "the norm's weight is [N] in the activations' dtype");
  const Tensor z = torch::stable::new_empty(x, {m, n}), squares = torch::stable::new_empty(x, {m, n / kSquared}, ScalarType::Float);
  LinearParams p = numbers({t0, t1, t2, t3}, second, third, act, early);
  Dense dense;
  p.norm_weight = dense(norm), p.norm_offset = (float)norm_offset, p.z = z.data_ptr(), p.squares = squares.data_ptr();
  const Tensor y = call<Place>(OP, arch, {.x = x, .codes = q, .scale = s, .global_scale = g, .bias = at(bias), .mul = at(mul), .residual = at(residual)}, p);
  return {y, z, squares};
}

// The other half: x is such a z, squares are those of the y that it is of.
template <typename Place, const Linear& OP>
Tensor linear_rms(const Tensor& x, const Tensor& q, const Tensor& s, const Tensor& g, const Optional& bias, int64_t arch, int64_t t0, int64_t t1, int64_t t2,
                  int64_t t3, int64_t second, int64_t third, int64_t act, const Optional& mul, const Optional& residual, int64_t early, const Optional& squares,
                  double eps) {
  check_rows(OP, arch, x);
  const Maybe of = at(squares);
  require(x.dim() == 2 && of && of->dim() == 2 && of->size(0) == x.size(0) && of->size(1) * kSquared == x.size(1) && of->scalar_type() == ScalarType::Float &&
              of->get_device() == x.get_device(), OP.name, "squares are float32 [M, K / 16]");
  LinearParams p = numbers({t0, t1, t2, t3}, second, third, act, early);
  Dense dense;
  p.squares = (void*)dense(of), p.eps = (float)eps;
  return call<Place>(OP, arch, {.x = x, .codes = q, .scale = s, .global_scale = g, .bias = at(bias), .mul = at(mul), .residual = at(residual)}, p);
}

template <typename Place, const Linear& OP>
Tensor sparse_linear(const Tensor& x, const Tensor& v, const Tensor& e, const Tensor& s, const Tensor& g, const Optional& bias, int64_t arch, int64_t t0,
                     int64_t t1, int64_t t2, int64_t t3, int64_t second, int64_t third, int64_t early) {
  return call<Place>(OP, arch, {.x = x, .codes = v, .scale = s, .global_scale = g, .bias = at(bias), .meta = &e},
                     numbers({t0, t1, t2, t3}, second, third, 0, early));
}

template <typename Place, const Linear& OP>
Tensor sparse_linear_small(const Tensor& x, const Tensor& v, const Tensor& e, const Tensor& s, const Tensor& g, const Optional& bias, int64_t arch, int64_t t0,
                           int64_t t1, int64_t t2, int64_t t3, int64_t second, int64_t third) {
  return sparse_linear<Place, OP>(x, v, e, s, g, bias, arch, t0, t1, t2, t3, second, third, 0);
}

// Activations' k in the order of fp4.quantize_rows_fp8(lane_order=True).
template <typename Place, const Linear& OP>
Tensor linear_wide_fp8(const Tensor& x, const Tensor& xs, const Tensor& q, const Tensor& s, const Tensor& g, const Optional& bias, int64_t arch, int64_t t0,
                       int64_t t1, int64_t second, int64_t third, int64_t early) {
  return call<Place>(OP, arch, {.x = x, .codes = q, .scale = s, .global_scale = g, .bias = at(bias), .x_scale = &xs},
                     numbers({t0, t1}, second, third, 0, early));
}

template <typename Place, const Linear& OP>
Tensor sparse_linear_wide_fp8(const Tensor& x, const Tensor& xs, const Tensor& v, const Tensor& e, const Tensor& s, const Tensor& g, const Optional& bias,
                              int64_t arch, int64_t t0, int64_t t1, int64_t second, int64_t third, int64_t early) {
  return call<Place>(OP, arch, {.x = x, .codes = v, .scale = s, .global_scale = g, .bias = at(bias), .x_scale = &xs, .meta = &e},
                     numbers({t0, t1}, second, third, 0, early));
}

template <typename Place, const Linear& OP>
Tensor linear_w4a4(const Tensor& x, const Tensor& xs, const Tensor& row_scale, const Tensor& q, const Tensor& s, const Tensor& g, const Optional& bias,
                   int64_t arch, int64_t half) {
  LinearParams p{};
  p.dtype = half != 0;
  return call<Place>(OP, arch, {.x = x, .codes = q, .scale = s, .global_scale = g, .bias = at(bias), .x_scale = &xs, .row_scale = &row_scale}, p);
}

// Which products of a chain are those of experts, as ops/linear_chain.py has it.
struct Routed {
  int64_t gate_up = -1, top_k = 0, form = 0, rounded = 0;
  explicit Routed(const std::vector<int64_t>& routing) {
    if (routing.size() == 4) gate_up = routing[0], top_k = routing[1], form = routing[2], rounded = routing[3];
  }
  bool holds(size_t product) const { return gate_up >= 0 && ((int64_t)product == gate_up || (int64_t)product == gate_up + 1); }
};

// A product of experts in a chain, whose activations are [1, K]: checks what the kernel takes for granted; N and K are an expert's. parts, units: rows that make
// a column of the result, global scales of an expert.
Sizes check_experts(const char* name, const Operands& t, int64_t k, int parts, int64_t units, LinearParams& p) {
  p.dtype = dtype_code(t.x, name);
  const ScalarType type = p.dtype ? ScalarType::Half : ScalarType::BFloat16;
  require(t.codes.dim() == 3 && t.scale.dim() == 3, name, "the weights of experts have three dimensions");
  const int64_t e = t.codes.size(0), n = t.codes.size(1);
  require(t.codes.size(2) * 2 == k && t.scale.size(0) == e && t.scale.size(1) == n && t.scale.size(2) * 16 == k, name, "a part of the experts does not fit");
  require(t.global_scale.scalar_type() == ScalarType::Float && t.global_scale.numel() == units * e, name, "experts have one global scale each, gate and up two");
  require(!t.bias && p.second == 0 && p.third == 0, name, "experts of a chain have no bias and no siblings");
  for (Maybe part : {&t.codes, &t.scale, &t.global_scale, t.residual, t.norm_weight})
    require(!part || part->get_device() == t.x.get_device(), name, "tensors on different devices");
  require(!t.residual || (t.residual->dim() == 2 && t.residual->size(0) == 1 && t.residual->size(1) == n && t.residual->scalar_type() == type), name,
          "the residual is as the result");
  require(!t.norm_weight || (t.norm_weight->dim() == 1 && t.norm_weight->size(0) == k && t.norm_weight->scalar_type() == type), name,
          "the norm's weight is [K] in the activations' dtype");
  require(e < INT32_MAX && n < INT32_MAX && k < INT32_MAX, name, "sizes below 2^31");
  return {1, n, k, n / parts, type};
}

// The memory of the ranks of a group (_exchange.py), by the group's number.
struct Ranks {
  std::vector<void*> memory;
  int rank;
};
std::map<int64_t, Ranks>& groups() {
  static std::map<int64_t, Ranks> all;
  return all;
}

// The products of a chain: lists with an entry for each, starts with two (ops/linear_chain.py). Its results, four, of which those that are not there are empty.
template <typename Place, const Linear& OP>
std::tuple<Tensor, Tensor, Tensor, Tensor> linear_chain(const Tensor& x, const std::vector<Tensor>& q, const std::vector<Tensor>& s, const std::vector<Tensor>& g,
                                                        const std::vector<Optional>& bias, const std::vector<Optional>& norm_weight,
                                                        const std::vector<Optional>& residual, const std::vector<int64_t>& added, const std::vector<double>& eps,
                                                        const std::vector<double>& norm_offset, const std::vector<int64_t>& act, const std::vector<int64_t>& glu,
                                                        const std::vector<int64_t>& starts, const Tensor& arrivals, const Optional& router,
                                                        const std::vector<int64_t>& routing, const std::vector<int64_t>& summed, int64_t group, int64_t early,
                                                        int64_t arch) {
  const size_t count = q.size();
  require(count >= 1 && count <= 4 && starts.size() == 2 * count, OP.name, "one to four products");
  for (size_t size : {s.size(), g.size(), bias.size(), norm_weight.size(), residual.size(), added.size(), eps.size(), norm_offset.size(), act.size(), glu.size()})
    require(size == count, OP.name, "every list has an entry for each product");
  require(arrivals.scalar_type() == ScalarType::Int && arrivals.is_contiguous() && arrivals.get_device() == x.get_device(), OP.name,
          "arrivals are int32, contiguous, on the device of the activations");
  const Kernel<ChainParams> f = kernel<ChainParams>(OP.name, arch);
  const Place place(x, OP.name);
  const Routed routed(routing);
  ChainParams chain{};
  chain.arrivals = arrivals.data_ptr(), chain.arrivals_count = arrivals.numel(), chain.count = (int)count;
  if (!summed.empty()) {
    const auto found = groups().find(group);
    require(found != groups().end(), OP.name, "this process has no memory of the ranks that are summed: load the model before the graph is called");
    chain.ranks = (int)found->second.memory.size(), chain.rank = found->second.rank;
    std::copy(found->second.memory.begin(), found->second.memory.end(), chain.memory);
    for (int64_t i : summed) {
      require(i >= 0 && i < (int64_t)count, OP.name, "a product that is summed is one of the chain");
      chain.summed[i] = 1;
    }
  }
  std::vector<Tensor> y;
  Dense dense;
  bool all_early = true;
  for (size_t i = 0; i < count; ++i) {
    require(added[i] < (int64_t)i && (added[i] < 0 || added[i] != routed.gate_up), OP.name, "a product adds the result of an earlier one");
    const Optional sum = added[i] >= 0 ? Optional(y[added[i]]) : residual[i];
    const Operands t{.x = i ? y[i - 1] : x, .codes = q[i], .scale = s[i], .global_scale = g[i], .bias = at(bias[i]), .residual = at(sum), .norm_weight = at(norm_weight[i])};
    LinearParams& p = chain.products[i] = numbers({}, starts[2 * i], starts[2 * i + 1], act[i], early);
    p.eps = (float)eps[i], p.norm_offset = (float)norm_offset[i];
    const bool experts = routed.holds(i), gate_up = experts && (int64_t)i == routed.gate_up;
    require(!experts || t.x.dim() == 2, OP.name, "activations are [M, K]");
    const int64_t units = gate_up && t.global_scale.dim() == 2 ? 2 : 1;
    const Sizes of = experts ? check_experts(OP.name, t, t.x.size(1), glu[i] ? 2 : 1, units, p) : check(Linear{OP.name, OP.most_rows, kPlain, glu[i] ? 2 : 1}, arch, t, p);
    Tensor result = torch::stable::new_empty(x, {gate_up ? routed.top_k : of.m, of.columns}, of.type);
    if (gate_up) {
      require(router.has_value() && router->dim() == 2 && router->size(0) == t.codes.size(0) && router->size(1) == of.k && router->scalar_type() == of.type &&
                  router->get_device() == x.get_device() && x.size(0) == 1, OP.name, "the router is [experts, K] in the activations' dtype, which are one row");
      chain.router = dense(at(router)), chain.routed = (int)i, chain.experts = (int)t.codes.size(0);
      chain.top_k = (int)routed.top_k, chain.units = (int)units, chain.form = (int)routed.form, chain.rounded = (int)routed.rounded;
    }
    fill(t, of, result, place.stream, dense, p);
    chain.finish[i] = glu[i] ? 2 : act[i] || sum || experts ? 1 : 0;
    all_early = all_early && p.early;
    y.push_back(result);
  }
  chain.products[0].early = all_early;
  if (x.size(0)) {
    const int status = f.run(&chain);
    STD_TORCH_CHECK(status == 0, "fp4_csrc::", OP.name, " failed: cudaError ", status, " for ", count, " products, the first of N=", chain.products[0].N,
                    ", K=", chain.products[0].K);
  }
  if (routed.gate_up >= 0) y[routed.gate_up] = torch::stable::new_empty(x, {0});
  while (y.size() < 4) y.push_back(torch::stable::new_empty(x, {0}));
  return {y[0], y[1], y[2], y[3]};
}

// An MoE operator. units: global scales of an expert's first weight, 1, or 2 of gate and up.
struct Moe {
  const char* name;
  int units;
};

// The weight of one product of every expert.
struct Expert {
  const Tensor &codes, &scale, &global_scale;
  Maybe bias, meta = nullptr;
};

// y [T, N] of x [T, K], ids and weights [T, top_k]; up is a weight [E, 2 I, K], down [E, N, I], biases are [E, 2 I] and [E, N]. p: numbers besides sizes.
template <typename Place>
Tensor call(const Moe& op, int64_t arch, const Tensor& x, const Tensor& ids, const Tensor& weights, const Expert& up, const Expert& down, Maybe map,
            MoeParams p) {
  const char* name = op.name;
  const Kernel<MoeParams> f = kernel<MoeParams>(name, arch);
  require(x.dim() == 2 && ids.dim() == 2 && weights.dim() == 2 && up.codes.dim() == 3 && up.scale.dim() == 3 && down.codes.dim() == 3 && down.scale.dim() == 3,
          name, "tokens and their choices have two dimensions, weights three");
  const int64_t t = x.size(0), k = x.size(1), top_k = ids.size(1);
  const int64_t e = up.codes.size(0), n = down.codes.size(1), inner = down.codes.size(2) * (down.meta ? 4 : 2);
  require(ids.size(0) == t && weights.size(0) == t && weights.size(1) == top_k, name, "tokens and their choices do not belong together");
  for (const auto& [w, rows, columns] : {std::tuple<const Expert&, int64_t, int64_t>{up, 2 * inner, k}, {down, n, inner}}) {
    for (const auto& [part, per_entry] : {std::pair<Maybe, int64_t>{&w.codes, w.meta ? 4 : 2}, {&w.scale, 16}, {w.meta, 8}})
      require(!part || (part->dim() == 3 && part->size(0) == e && part->size(1) == rows && part->size(2) * per_entry == columns), name,
              "a part of the weights does not fit");
    require(!w.bias || (w.bias->dim() == 2 && w.bias->size(0) == e && w.bias->size(1) == rows && w.bias->scalar_type() == ScalarType::BFloat16), name,
            "biases are bfloat16, a row for each expert");
    require(w.global_scale.scalar_type() == ScalarType::Float, name, "global scales are float32");
    for (Maybe part : {&w.codes, &w.scale, &w.global_scale, w.bias, w.meta})
      require(!part || part->get_device() == x.get_device(), name, "tensors on different devices");
  }
  require(up.global_scale.numel() == op.units * e && down.global_scale.numel() == e, name,
          op.units == 2 ? "gate_up has two global scales for each expert, down one" : "there is a global scale for each expert");
  require(x.scalar_type() == ScalarType::BFloat16, name, "activations are bfloat16");
  auto wide = [&](const Tensor& v) {
    require(v.scalar_type() == ScalarType::Int || v.scalar_type() == ScalarType::Long, name, "ids are int32 or int64");
    return (int)(v.scalar_type() == ScalarType::Long);
  };
  p.weights_type = weights.scalar_type() == ScalarType::Float ? 2 : dtype_code(weights, name);
  p.ids_type = wide(ids), p.map_type = map ? wide(*map) : 0, p.map_size = map ? (int)map->numel() : 0;
  for (Maybe v : {&ids, &weights, map}) require(!v || v->get_device() == x.get_device(), name, "tensors on different devices");
  require(t * top_k < INT32_MAX && e < INT32_MAX && k < INT32_MAX && inner < INT32_MAX && n < INT32_MAX, name, "sizes below 2^31");

  const Place place(x, name);
  Tensor y = torch::stable::new_empty(x, {t, n});
  Dense dense;
  auto params = [&](const Expert& w) { return ExpertParams{dense(&w.codes), dense(w.meta), dense(&w.scale), dense(&w.global_scale), dense(w.bias)}; };
  p.x = dense(&x), p.ids = dense(&ids), p.weights = dense(&weights), p.map = dense(map), p.gate_up = params(up), p.down = params(down), p.y = y.data_ptr();
  p.tokens = (int)t, p.top_k = (int)top_k, p.E = (int)e, p.K = (int)k, p.I = (int)inner, p.N = (int)n, p.stream = place.stream;
  const int status = run(f, p, x);
  STD_TORCH_CHECK(status == 0, "fp4_csrc::", name, " failed: cudaError ", status, " for T=", t, ", K=", k, ", I=", inner, ", N=", n, ", E=", e, ", tile ",
                  p.tile[0]);
  return y;
}

MoeParams form(double alpha, double limit, int64_t more, int64_t interleaved, int64_t tokens = 0, int64_t gathers = 0) {
  MoeParams p{};
  p.alpha = (float)alpha, p.limit = (float)limit, p.more = (int)more, p.interleaved = (int)interleaved, p.tile[0] = (int)tokens, p.tile[1] = (int)gathers;
  return p;
}

template <typename Place, const Moe& OP>
Tensor moe_grouped_wide(const Tensor& x, const Tensor& ids, const Tensor& weights, const Tensor& q1, const Tensor& s1, const Tensor& g1, const Tensor& q2,
                        const Tensor& s2, const Tensor& g2, const Optional& bias, const Optional& down_bias, const Optional& map, double alpha, double limit,
                        int64_t more, int64_t interleaved, int64_t tokens, int64_t gathers, int64_t arch) {
  return call<Place>(OP, arch, x, ids, weights, {q1, s1, g1, at(bias)}, {q2, s2, g2, at(down_bias)}, at(map), form(alpha, limit, more, interleaved, tokens, gathers));
}

template <typename Place, const Moe& OP>
Tensor moe_decode_table(const Tensor& x, const Tensor& ids, const Tensor& weights, const Tensor& q1, const Tensor& s1, const Tensor& g1, const Tensor& q2,
                        const Tensor& s2, const Tensor& g2, const Optional& bias, const Optional& down_bias, const Optional& map, const Optional& meta1,
                        const Optional& meta2, double alpha, double limit, int64_t more, int64_t interleaved, int64_t arch) {
  return call<Place>(OP, arch, x, ids, weights, {q1, s1, g1, at(bias), at(meta1)}, {q2, s2, g2, at(down_bias), at(meta2)}, at(map),
                     form(alpha, limit, more, interleaved));
}

// Most rows of a call: of the kernels that split M; of a tile; where registers, and where shared memory decides (kLargeSharedMemory of device.cuh).
int64_t many(int64_t) { return 1 << 20; }
template <int ROWS> int64_t rows(int64_t) { return ROWS; }
int64_t small(int64_t arch) { return arch == 90 ? 32 : 16; }
int64_t sparse_small(int64_t arch) { return arch == 80 || arch == 87 || arch == 90 || (arch >= 100 && arch < 120) ? 32 : 16; }

// X(operator, signature, what describes it).
#define FP4_LINEAR(X)                                                      \
  X(linear_gemv, linear_gemv, rows<1>)                                     \
  X(linear_gemv_pointwise, linear_gemv, rows<1>)                           \
  X(linear_gemv_glu, linear_gemv, rows<1>, kPlain, 2)                      \
  X(linear_chain, linear_chain, rows<1>)                                   \
  X(linear_small, linear_small, small)                                     \
  X(linear_small_pointwise, linear_small, small)                           \
  X(linear_small_glu, linear_small, small, kPlain, 2)                      \
  X(linear_table, linear, rows<32>)                                        \
  X(linear_table_pointwise, linear, rows<32>)                              \
  X(linear_table_glu, linear, rows<32>, kPlain, 2)                         \
  X(linear_table_pointwise_squares, linear_squares, rows<32>)              \
  X(linear_table_rms, linear_rms, rows<32>)                                \
  X(linear_table_glu_rms, linear_rms, rows<32>, kPlain, 2)                 \
  X(linear_wide, linear, many)                                             \
  X(linear_wide_pointwise, linear, many)                                   \
  X(linear_wide_glu, linear, many, kPlain, 2)                              \
  X(linear_wide_fp8, linear_wide_fp8, many, kE4M3)                         \
  X(sparse_linear_small, sparse_linear_small, sparse_small)                \
  X(sparse_linear_small_scales, sparse_linear_small, sparse_small)         \
  X(sparse_linear_table, sparse_linear, rows<16>)                          \
  X(sparse_linear_table_scales, sparse_linear, rows<16>)                   \
  X(sparse_linear_wide, sparse_linear, many)                               \
  X(sparse_linear_wide_scales, sparse_linear, many)                        \
  X(sparse_linear_wide_fp8, sparse_linear_wide_fp8, many, kE4M3)           \
  X(linear_w4a4, linear_w4a4, many, kCodes)
#define FP4_MOE(X)                                    \
  X(moe_grouped_wide, moe_grouped_wide, 1)            \
  X(moe_grouped_wide_scales, moe_grouped_wide, 2)     \
  X(moe_grouped_wide_fp8, moe_grouped_wide, 1)        \
  X(moe_grouped_wide_fp8_scales, moe_grouped_wide, 2) \
  X(moe_decode_table, moe_decode_table, 1)            \
  X(moe_decode_table_scales, moe_decode_table, 2)

namespace operators {
#define FP4_DESCRIBE(name, signature, ...) constexpr Linear name{#name, __VA_ARGS__};
FP4_LINEAR(FP4_DESCRIBE)
#undef FP4_DESCRIBE
#define FP4_DESCRIBE(name, signature, ...) constexpr Moe name{#name, __VA_ARGS__};
FP4_MOE(FP4_DESCRIBE)
#undef FP4_DESCRIBE
}  // namespace operators

}  // namespace
}  // namespace fp4

// resolve: who is asked, once, for fp4_<name> of the kernel library for a compute capability (times ten), and for fp4_<name>_scratch; it answers null if there
// is none.
extern "C" __attribute__((visibility("default"))) void fp4_csrc_bind(fp4::Resolver* resolve, void* current_stream) {
  fp4::resolver = resolve;
  fp4::current_stream = (fp4::CurrentStream*)current_stream;
}

// The memory of each of the ranks of group `number`, 8 at most, as this one, number `rank`, reaches it.
extern "C" __attribute__((visibility("default"))) void fp4_csrc_join(int64_t number, void* const* memory, int ranks, int rank) {
  fp4::groups()[number] = {std::vector<void*>(memory, memory + ranks), rank};
}

// The operators are defined where they are described to the compiler too (fp4_inductor/kernels/csrc.py).
#define FP4_ON_DEVICE(name, signature, ...) m.impl(#name, TORCH_BOX((&fp4::signature<fp4::OnDevice, fp4::operators::name>)));
STABLE_TORCH_LIBRARY_IMPL(fp4_csrc, CUDA, m) { FP4_LINEAR(FP4_ON_DEVICE) FP4_MOE(FP4_ON_DEVICE) }
#ifdef FP4_EMULATED
#define FP4_ON_HOST(name, signature, ...) m.impl(#name, TORCH_BOX((&fp4::signature<fp4::OnHost, fp4::operators::name>)));
STABLE_TORCH_LIBRARY_IMPL(fp4_csrc, CPU, m) { FP4_LINEAR(FP4_ON_HOST) FP4_MOE(FP4_ON_HOST) }
#endif
