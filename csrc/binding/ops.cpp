// torch.ops.fp4_csrc: the kernels of gemm/, sparse/ and moe/ as torch operators. The kernels' libraries know no torch and this one
// knows no CUDA: a resolver hands their functions over, per architecture, when they are first needed.
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

using Resolver = void*(const char* name, int arch);

namespace {

// A dense kernel, its tile described by numbers of the types given, before them whether it begins early, if it can.
template <typename... Tile>
using Linear = int(const void* x, const void* q, const void* s, const void* g, const void* bias, const void* mul, const void* residual, void* y, int M, int N,
                   int K, int dtype, int second, int third, int act, Tile... tile, void* stream);
// The sparse ones likewise.
template <typename... Tile>
using SparseLinear = int(const void* x, const void* values, const void* meta, const void* s, const void* g, const void* bias, void* y, int M, int N, int K,
                         int dtype, int second, int third, Tile... tile, void* stream);
using LinearWideFP8 = int(const void* x8, const void* x_scale, const void* q, const void* s, const void* g, const void* bias, void* y, int M, int N, int K,
                          int dtype, int second, int third, int early, int tokens, int splits, void* scratch, void* stream);
using SparseLinearWideFP8 = int(const void* x8, const void* x_scale, const void* values, const void* meta, const void* s, const void* g, const void* bias, void* y,
                                int M, int N, int K, int dtype, int second, int third, int early, int tokens, int splits, void* scratch, void* stream);
using LinearW4A4 = int(const void* x, const void* x_scale, const void* row_scale, const void* q, const void* s, const void* g, const void* bias, void* y,
                       int M, int N, int K, int dtype, void* stream);
using MoeGroupedWide = int(const void* x, const void* ids, const void* weights, const void* q1, const void* s1, const void* g1, const void* q2, const void* s2,
                           const void* g2, const void* bias, const void* down_bias, const void* map, void* y, int tokens, int top_k, int E, int K, int I, int N,
                           int ids_type, int weights_type, int map_type, int map_size, float alpha, float limit, int more, int interleaved, int tile,
                           int64_t workspace_bytes, void* workspace, void* stream);
using MoeDecodeTable = int(const void* x, const void* ids, const void* weights, const void* q1, const void* s1, const void* g1, const void* q2, const void* s2,
                           const void* g2, const void* bias, const void* down_bias, const void* map, const void* meta1, const void* meta2, void* y, int tokens, int top_k,
                           int E, int K, int I, int N, int ids_type, int weights_type, int map_type, int map_size, float alpha, float limit, int more, int interleaved,
                           int sets, int sets_a_warp, int k_groups, int down_sets, int down_sets_a_warp, int down_k_groups, int down_splits, int64_t workspace_bytes,
                           void* workspace, void* stream);

std::mutex mutex;
std::map<std::pair<std::string, int64_t>, void*> functions;
std::atomic<Resolver*> resolver = nullptr;

template <typename F> F* function(const char* name, int64_t arch) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = functions.find({name, arch});
    if (found != functions.end()) return (F*)found->second;
  }
  // Outside the lock: whoever answers may need a lock of its own (Python's), which another caller of ours holds.
  Resolver* resolve = resolver;
  void* answer = resolve ? resolve(name, (int)arch) : nullptr;
  STD_TORCH_CHECK(answer, "fp4_csrc::", name, " has no kernel for sm_", arch);
  const std::lock_guard<std::mutex> lock(mutex);
  return (F*)(functions[{name, arch}] = answer);
}

const void* pointer(const std::optional<Tensor>& t) { return t ? t->data_ptr() : nullptr; }

// x [M, K] with a weight of N rows; checks what the kernels take for granted about x, bias and the weight's parts.
template <typename Place, typename Run>
Tensor call(const char* op, const Tensor& x, const std::optional<Tensor>& bias, int64_t n, int64_t columns,
            std::initializer_list<std::pair<Tensor, int64_t>> parts, Run run) {
  require(x.dim() == 2, op, "activations are [M, K]");
  const int64_t m = x.size(0), k = x.size(1);
  for (const auto& [part, per_byte] : parts) {
    require(part.get_device() == x.get_device(), op, "tensors on different devices");
    require(part.dim() == 2 && part.size(0) == n && part.size(1) * per_byte == k, op, "a part of the weight does not fit N and K");
  }
  require(!bias || (bias->dim() == 1 && bias->size(0) == n && bias->scalar_type() == x.scalar_type()), op, "the bias is [N] in the activations' dtype");
  require(n < INT32_MAX && k < INT32_MAX && m < INT32_MAX, op, "sizes below 2^31");
  const int dtype = dtype_code(x, op);
  const Place place(x, op);
  Tensor y = torch::stable::new_empty(x, {m, columns});
  if (m == 0 || columns == 0) return y;
  const Tensor rows = dense(x);
  const std::optional<Tensor> b = bias ? std::optional<Tensor>(dense(*bias)) : std::nullopt;
  const int status = run(rows.data_ptr(), pointer(b), y.data_ptr(), (int)m, (int)n, (int)k, dtype, place.stream);
  STD_TORCH_CHECK(status == 0, "fp4_csrc::", op, " failed: cudaError ", status, " for M=", m, ", N=", n, ", K=", k);
  return y;
}

// The kernels refuse more rows, too, with cudaErrorInvalidValue, which says neither how many they serve nor why there are so many.
void require_rows(const char* op, const Tensor& x, int64_t most) {
  STD_TORCH_CHECK(x.dim() != 2 || x.size(0) <= most, "fp4_csrc::", op, " serves at most M = ", most, " activation rows, got M = ", x.size(0),
                  ". A compiled graph that calls it was compiled for so few, and nothing checks its guards. Compile it for this M, or call torch.ops.fp4, "
                  "which serves every M.");
}

// What a library is compiled for: FP4_FINISH of common/epilogue.cuh.
enum Variant { kPlain, kPointwise, kGlu };
struct Names {
  const char* of[3];
};
constexpr Names kSmall{{"linear_small", "linear_small_pointwise", "linear_small_glu"}}, kTable{{"linear_table", "linear_table_pointwise", "linear_table_glu"}},
    kWide{{"linear_wide", "linear_wide_pointwise", "linear_wide_glu"}};

using Optional = std::optional<Tensor>;
// Most rows of a call, as most_rows() of csrc.py has them: of the kernels that split M, and where shared memory decides (kLargeSharedMemory of device.cuh).
constexpr int64_t kManyRows = 1 << 20;
constexpr bool large_shared_memory(int64_t arch) { return arch == 80 || arch == 87 || arch == 90 || (arch >= 100 && arch < 120); }

template <typename Place, Variant VARIANT, typename... Tile>
Tensor linear(const Names& names, int64_t most, const Tensor& x, const Tensor& qdata, const Tensor& scale, const Tensor& global_scale, const Optional& bias,
              int64_t arch, int64_t second, int64_t third, int64_t act, const Optional& mul, const Optional& residual, Tile... tile) {
  const char* op = names.of[VARIANT];
  require_rows(op, x, most);
  auto* f = function<Linear<Tile...>>(op, arch);
  require(global_scale.numel() > (second > 0) + (third > 0), op, "fewer global scales than siblings");
  const Tensor q = dense(qdata), s = dense(scale);
  const int64_t n = q.size(0), columns = VARIANT == kGlu ? n / 2 : n;
  for (const Optional& t : {mul, residual})
    require(!t || (t->dim() == 2 && t->size(0) == x.size(0) && t->size(1) == columns && t->scalar_type() == x.scalar_type() &&
                   t->get_device() == x.get_device()), op, "mul and residual are as the result");
  const Optional a = mul ? Optional(dense(*mul)) : std::nullopt, b = residual ? Optional(dense(*residual)) : std::nullopt;
  return call<Place>(op, x, bias, n, columns, {{q, 2}, {s, 16}}, [&](auto* xp, auto* bp, auto* yp, int m, int n, int k, int dtype, void* stream) {
    return f(xp, q.data_ptr(), s.data_ptr(), global_scale.data_ptr(), bp, pointer(a), pointer(b), yp, m, n, k, dtype, (int)second, (int)third, (int)act,
             tile..., stream);
  });
}

template <typename Place, Variant VARIANT>
Tensor linear_small(const Tensor& x, const Tensor& qdata, const Tensor& scale, const Tensor& global_scale, const Optional& bias, int64_t arch, int64_t rows_16,
                    int64_t warps, int64_t stages, int64_t second, int64_t third, int64_t act, const Optional& mul, const Optional& residual) {
  return linear<Place, VARIANT>(kSmall, arch == 90 ? 32 : 16, x, qdata, scale, global_scale, bias, arch, second, third, act, mul, residual, (int)rows_16,
                                (int)warps, (int)stages);
}

// A kernel must not begin while the one before it writes the weight, and that is a copy where the weight is not dense.
template <typename... Part> int begins(int64_t early, const Part&... parts) { return early && (is_dense(parts) && ...); }

template <typename Place, Variant VARIANT>
Tensor linear_table(const Tensor& x, const Tensor& qdata, const Tensor& scale, const Tensor& global_scale, const Optional& bias, int64_t arch, int64_t sets,
                    int64_t sets_a_warp, int64_t k_groups, int64_t substeps, int64_t second, int64_t third, int64_t act, const Optional& mul,
                    const Optional& residual, int64_t early) {
  return linear<Place, VARIANT>(kTable, VARIANT == kPlain ? 24 : 16, x, qdata, scale, global_scale, bias, arch, second, third, act, mul, residual,
                                begins(early, qdata, scale), (int)sets, (int)sets_a_warp, (int)k_groups, (int)substeps);
}

// As scratch_bytes() of csrc.py: float32 sums of 132 blocks of 128 rows, and a flag each.
constexpr int64_t shared_sums(int64_t tokens) { return 132 * 4 * 128 * tokens + 1024; }

template <typename Place, Variant VARIANT>
Tensor linear_wide(const Tensor& x, const Tensor& qdata, const Tensor& scale, const Tensor& global_scale, const Optional& bias, int64_t arch, int64_t rows,
                   int64_t tokens, int64_t k_groups, int64_t splits, int64_t second, int64_t third, int64_t act, const Optional& mul, const Optional& residual,
                   int64_t early) {
  const Tensor scratch = torch::stable::new_empty(x, {shared_sums(128) / 2});
  return linear<Place, VARIANT>(kWide, kManyRows, x, qdata, scale, global_scale, bias, arch, second, third, act, mul, residual, begins(early, qdata, scale),
                                (int)rows, (int)tokens, (int)k_groups, (int)splits, scratch.data_ptr());
}

template <typename Place, typename... Tile>
Tensor sparse_linear(const char* op, int64_t most, const Tensor& x, const Tensor& values, const Tensor& meta, const Tensor& scale, const Tensor& global_scale,
                     const Optional& bias, int64_t arch, int64_t second, int64_t third, Tile... tile) {
  require_rows(op, x, most);
  auto* f = function<SparseLinear<Tile...>>(op, arch);
  require(global_scale.numel() > (second > 0) + (third > 0), op, "fewer global scales than siblings");
  const Tensor v = dense(values), e = dense(meta), s = dense(scale);
  return call<Place>(op, x, bias, v.size(0), v.size(0), {{v, 4}, {e, 8}, {s, 16}}, [&](auto* xp, auto* bp, auto* yp, int m, int n, int k, int dtype, void* stream) {
    return f(xp, v.data_ptr(), e.data_ptr(), s.data_ptr(), global_scale.data_ptr(), bp, yp, m, n, k, dtype, (int)second, (int)third, tile..., stream);
  });
}

// The kernels that take one global scale, and those of the libraries that take several.
template <typename Place, bool SEVERAL>
Tensor sparse_linear_small(const Tensor& x, const Tensor& values, const Tensor& meta, const Tensor& scale, const Tensor& global_scale, const Optional& bias,
                           int64_t arch, int64_t rows_16, int64_t warps, int64_t stages, int64_t splits, int64_t second, int64_t third) {
  return sparse_linear<Place>(SEVERAL ? "sparse_linear_small_scales" : "sparse_linear_small", large_shared_memory(arch) ? 32 : 16, x, values, meta, scale,
                              global_scale, bias, arch, second, third, (int)rows_16,
                              (int)warps, (int)stages, (int)splits);
}

template <typename Place, bool SEVERAL>
Tensor sparse_linear_table(const Tensor& x, const Tensor& values, const Tensor& meta, const Tensor& scale, const Tensor& global_scale, const Optional& bias,
                           int64_t arch, int64_t sets, int64_t sets_a_warp, int64_t k_groups, int64_t substeps, int64_t second, int64_t third, int64_t early) {
  return sparse_linear<Place>(SEVERAL ? "sparse_linear_table_scales" : "sparse_linear_table", 16, x, values, meta, scale, global_scale, bias, arch, second,
                              third, begins(early, values, meta, scale), (int)sets, (int)sets_a_warp, (int)k_groups, (int)substeps);
}

template <typename Place, bool SEVERAL>
Tensor sparse_linear_wide(const Tensor& x, const Tensor& values, const Tensor& meta, const Tensor& scale, const Tensor& global_scale, const Optional& bias,
                          int64_t arch, int64_t rows, int64_t tokens, int64_t k_groups, int64_t splits, int64_t second, int64_t third, int64_t early) {
  return sparse_linear<Place>(SEVERAL ? "sparse_linear_wide_scales" : "sparse_linear_wide", kManyRows, x, values, meta, scale, global_scale, bias, arch,
                              second, third, begins(early, values, meta, scale), (int)rows, (int)tokens, (int)k_groups, (int)splits);
}

// Activations of several parts: [M, K / (elements per entry)] each, then those of the weight, [N, ...]. Checks them and the bias, which is as the result.
struct Part {
  Tensor tensor;
  int64_t rows, per_entry;
};
void check_parts(const char* op, const Tensor& x, int64_t n, int64_t k, std::initializer_list<Part> parts, const Optional& bias, ScalarType type) {
  for (const auto& [part, rows, per_entry] : parts) {
    require(part.get_device() == x.get_device(), op, "tensors on different devices");
    require(part.dim() == 2 && part.size(0) == rows && part.size(1) * per_entry == k, op, "a part does not fit M, N and K");
  }
  require(!bias || (bias->dim() == 1 && bias->size(0) == n && bias->scalar_type() == type), op, "the bias is [N] in the result's dtype");
  require(n < INT32_MAX && k < INT32_MAX && x.size(0) < INT32_MAX, op, "sizes below 2^31");
}

// Activations as codes, which carry no dtype: half says whether bias and result are float16 or bfloat16.
template <typename Place>
Tensor linear_w4a4(const Tensor& x_qdata, const Tensor& x_scale, const Tensor& row_scale, const Tensor& qdata, const Tensor& scale, const Tensor& global_scale,
                   const Optional& bias, int64_t arch, int64_t half) {
  constexpr const char* op = "linear_w4a4";
  require_rows(op, x_qdata, kManyRows);
  auto* f = function<LinearW4A4>(op, arch);
  require(x_qdata.dim() == 2 && qdata.dim() == 2, op, "codes are [M, K/2] and [N, K/2]");
  const int64_t m = x_qdata.size(0), n = qdata.size(0), k = x_qdata.size(1) * 2;
  const auto type = half ? ScalarType::Half : ScalarType::BFloat16;
  check_parts(op, x_qdata, n, k, {{x_scale, m, 16}, {row_scale, m, k}, {qdata, n, 2}, {scale, n, 16}}, bias, type);
  const Place place(x_qdata, op);
  Tensor y = torch::stable::new_empty(x_qdata, {m, n}, type);
  if (m == 0 || n == 0) return y;
  const Tensor x = dense(x_qdata), xs = dense(x_scale), rows = dense(row_scale), q = dense(qdata), s = dense(scale);
  const Optional b = bias ? Optional(dense(*bias)) : std::nullopt;
  const int status = f(x.data_ptr(), xs.data_ptr(), rows.data_ptr(), q.data_ptr(), s.data_ptr(), global_scale.data_ptr(), pointer(b), y.data_ptr(), (int)m,
                       (int)n, (int)k, (int)(half != 0), place.stream);
  STD_TORCH_CHECK(status == 0, "fp4_csrc::", op, " failed: cudaError ", status, " for M=", m, ", N=", n, ", K=", k);
  return y;
}

// x [T, K], ids and weights [T, top_k]; weights [E, 2 I, K] and [E, N, I] by their parts, of which those that are 2:4-sparse have metadata, biases [E, 2 I] and
// [E, N]. units: global scales of an expert's first weight, 1, or 2 of gate and up. tile: 0 for the kernel's own choice. workspace: bytes that the caller counted. run: calls the kernel with what it takes before y, metadata, y and the sizes, and what is last.
template <typename Place, typename Run>
Tensor moe_layer(const char* op, const Tensor& x, const Tensor& ids, const Tensor& weights, const Tensor& q1, const Tensor& s1, const Tensor& g1, const Tensor& q2, const Tensor& s2,
                 const Tensor& g2, const Optional& bias, const Optional& down_bias, const Optional& map, const Optional& meta1, const Optional& meta2,
                 int64_t units, int64_t tile, const Tensor& workspace, Run run) {
  require(x.dim() == 2 && ids.dim() == 2 && weights.dim() == 2 && q1.dim() == 3 && s1.dim() == 3 && q2.dim() == 3 && s2.dim() == 3, op, "tokens and their choices have two dimensions, weights three");
  const int64_t each1 = meta1 ? 4 : 2, each2 = meta2 ? 4 : 2;  // k for a byte of codes
  const int64_t t = x.size(0), k = x.size(1), e = q1.size(0), n = q2.size(1), inner = q2.size(2) * each2, top_k = ids.size(1);
  require(ids.size(0) == t && weights.size(0) == t && weights.size(1) == top_k, op, "tokens and their choices do not belong together");
  for (const auto& [part, rows, per_byte, columns] : {std::tuple<Optional, int64_t, int64_t, int64_t>{q1, 2 * inner, each1, k}, {s1, 2 * inner, 16, k}, {meta1, 2 * inner, 8, k},
                                                      {q2, n, each2, inner}, {s2, n, 16, inner}, {meta2, n, 8, inner}})
    require(!part || (part->dim() == 3 && part->size(0) == e && part->size(1) == rows && part->size(2) * per_byte == columns), op, "a part of the weights does not fit");
  require(g1.numel() == units * e && g2.numel() == e, op, units == 2 ? "gate_up has two global scales for each expert, down one" : "there is a global scale for each expert");
  for (const auto& [b, rows] : {std::pair<Optional, int64_t>{bias, 2 * inner}, {down_bias, n}})
    require(!b || (b->dim() == 2 && b->size(0) == e && b->size(1) == rows && b->scalar_type() == ScalarType::BFloat16), op, "biases are bfloat16, a row for each expert");
  require(x.scalar_type() == ScalarType::BFloat16, op, "activations are bfloat16");
  require(g1.scalar_type() == ScalarType::Float && g2.scalar_type() == ScalarType::Float, op, "global scales are float32");
  auto wide = [&](const Tensor& v) {
    require(v.scalar_type() == ScalarType::Int || v.scalar_type() == ScalarType::Long, op, "ids are int32 or int64");
    return (int)(v.scalar_type() == ScalarType::Long);
  };
  const int weights_type = weights.scalar_type() == ScalarType::Float ? 2 : dtype_code(weights, op), ids_type = wide(ids), map_type = map ? wide(*map) : 0;
  for (const Optional& v : {Optional(ids), Optional(weights), Optional(q1), Optional(s1), Optional(g1), Optional(q2), Optional(s2), Optional(g2), bias, down_bias, map, meta1, meta2,
                            Optional(workspace)})
    require(!v || v->get_device() == x.get_device(), op, "tensors on different devices");
  require(t * top_k < INT32_MAX && e < INT32_MAX && k < INT32_MAX && inner < INT32_MAX && n < INT32_MAX, op, "sizes below 2^31");
  const Place place(x, op);
  Tensor y = torch::stable::new_empty(x, {t, n});
  const Tensor a = dense(x), i = dense(ids), w = dense(weights), cq1 = dense(q1), cs1 = dense(s1), cg1 = dense(g1), cq2 = dense(q2), cs2 = dense(s2), cg2 = dense(g2);
  auto given = [](const Optional& v) { return v ? Optional(dense(*v)) : std::nullopt; };
  const Optional b1 = given(bias), b2 = given(down_bias), m = given(map), e1 = given(meta1), e2 = given(meta2);
  const auto head = std::make_tuple(a.data_ptr(), i.data_ptr(), w.data_ptr(), cq1.data_ptr(), cs1.data_ptr(), cg1.data_ptr(), cq2.data_ptr(), cs2.data_ptr(), cg2.data_ptr(),
                                    pointer(b1), pointer(b2), pointer(m));
  const auto metas = std::make_tuple(pointer(e1), pointer(e2));
  const auto sizes = std::make_tuple(y.data_ptr(), (int)t, (int)top_k, (int)e, (int)k, (int)inner, (int)n, ids_type, weights_type, map_type, map ? (int)map->numel() : 0);
  const int status = run(head, metas, sizes, std::make_tuple((int64_t)workspace.numel(), workspace.data_ptr(), place.stream));
  STD_TORCH_CHECK(status == 0, "fp4_csrc::", op, " failed: cudaError ", status, " for T=", t, ", K=", k, ", I=", inner, ", N=", n, ", E=", e, ", tile ", tile);
  return y;
}

template <typename Place, bool FP8, bool SEVERAL>
Tensor moe_grouped_wide(const Tensor& x, const Tensor& ids, const Tensor& weights, const Tensor& q1, const Tensor& s1, const Tensor& g1, const Tensor& q2,
                        const Tensor& s2, const Tensor& g2, const Optional& bias, const Optional& down_bias, const Optional& map, double alpha, double limit,
                        int64_t more, int64_t interleaved, int64_t tile, const Tensor& workspace, int64_t arch) {
  constexpr const char* op = FP8 ? SEVERAL ? "moe_grouped_wide_fp8_scales" : "moe_grouped_wide_fp8" : SEVERAL ? "moe_grouped_wide_scales" : "moe_grouped_wide";
  auto* f = function<MoeGroupedWide>(op, arch);
  const auto form = std::make_tuple((float)alpha, (float)limit, (int)more, (int)interleaved, (int)tile);
  return moe_layer<Place>(op, x, ids, weights, q1, s1, g1, q2, s2, g2, bias, down_bias, map, std::nullopt, std::nullopt, SEVERAL ? 2 : 1, tile,
                          workspace,
                          [&](auto head, auto, auto sizes, auto rest) { return std::apply(f, std::tuple_cat(head, sizes, form, rest)); });
}

template <typename Place, bool SEVERAL>
Tensor moe_decode_table(const Tensor& x, const Tensor& ids, const Tensor& weights, const Tensor& q1, const Tensor& s1, const Tensor& g1, const Tensor& q2, const Tensor& s2,
                        const Tensor& g2, const Optional& bias, const Optional& down_bias, const Optional& map, const Optional& meta1, const Optional& meta2, double alpha,
                        double limit, int64_t more, int64_t interleaved, const Tensor& workspace, int64_t arch) {
  constexpr const char* op = SEVERAL ? "moe_decode_table_scales" : "moe_decode_table";
  auto* f = function<MoeDecodeTable>(op, arch);
  const auto form = std::make_tuple((float)alpha, (float)limit, (int)more, (int)interleaved);
  const std::tuple<int, int, int, int, int, int, int> own_tiles{};
  return moe_layer<Place>(op, x, ids, weights, q1, s1, g1, q2, s2, g2, bias, down_bias, map, meta1, meta2, SEVERAL ? 2 : 1, 0, workspace,
                          [&](auto head, auto metas, auto sizes, auto rest) { return std::apply(f, std::tuple_cat(head, metas, sizes, form, own_tiles, rest)); });
}

// Activations in E4M3 with a float32 scale per token; bias and result in bfloat16.
template <typename Place, typename Run>
Tensor call_fp8(const char* op, const Tensor& x8, const Tensor& x_scale, int64_t n, std::initializer_list<Part> weight, const Optional& bias, Run run) {
  require(x8.dim() == 2, op, "activations are [M, K]");
  require(x8.scalar_type() == ScalarType::Float8_e4m3fn && x_scale.scalar_type() == ScalarType::Float, op, "activations are float8_e4m3fn, their scales float32");
  const int64_t m = x8.size(0), k = x8.size(1);
  check_parts(op, x8, n, k, {{x_scale, m, k}}, bias, ScalarType::BFloat16);
  check_parts(op, x8, n, k, weight, bias, ScalarType::BFloat16);
  const Place place(x8, op);
  Tensor y = torch::stable::new_empty(x8, {m, n}, ScalarType::BFloat16);
  if (m == 0 || n == 0) return y;
  const Tensor scratch = torch::stable::new_empty(x8, {shared_sums(256)});
  const Tensor x = dense(x8), xs = dense(x_scale);
  const Optional b = bias ? Optional(dense(*bias)) : std::nullopt;
  const int status = run(x.data_ptr(), xs.data_ptr(), pointer(b), y.data_ptr(), (int)m, (int)n, (int)k, scratch.data_ptr(), place.stream);
  STD_TORCH_CHECK(status == 0, "fp4_csrc::", op, " failed: cudaError ", status, " for M=", m, ", N=", n, ", K=", k);
  return y;
}

// Activations' k in the order of fp4.quantize_rows_fp8(lane_order=True).
template <typename Place>
Tensor linear_wide_fp8(const Tensor& x8, const Tensor& x_scale, const Tensor& qdata, const Tensor& scale, const Tensor& global_scale, const Optional& bias,
                       int64_t arch, int64_t tokens, int64_t splits, int64_t second, int64_t third, int64_t early) {
  constexpr const char* op = "linear_wide_fp8";
  require_rows(op, x8, kManyRows);
  auto* f = function<LinearWideFP8>(op, arch);
  require(global_scale.numel() > (second > 0) + (third > 0), op, "fewer global scales than siblings");
  const Tensor q = dense(qdata), s = dense(scale);
  const int64_t n = q.size(0);
  return call_fp8<Place>(op, x8, x_scale, n, {{q, n, 2}, {s, n, 16}}, bias, [&](auto* xp, auto* xsp, auto* bp, auto* yp, int m, int n, int k, void* scratch, void* stream) {
    return f(xp, xsp, q.data_ptr(), s.data_ptr(), global_scale.data_ptr(), bp, yp, m, n, k, 0, (int)second, (int)third, begins(early, qdata, scale), (int)tokens,
             (int)splits, scratch, stream);
  });
}

template <typename Place>
Tensor sparse_linear_wide_fp8(const Tensor& x8, const Tensor& x_scale, const Tensor& values, const Tensor& meta, const Tensor& scale, const Tensor& global_scale,
                              const Optional& bias, int64_t arch, int64_t tokens, int64_t splits, int64_t second, int64_t third, int64_t early) {
  constexpr const char* op = "sparse_linear_wide_fp8";
  require_rows(op, x8, kManyRows);
  auto* f = function<SparseLinearWideFP8>(op, arch);
  require(global_scale.numel() > (second > 0) + (third > 0), op, "fewer global scales than siblings");
  const Tensor v = dense(values), e = dense(meta), s = dense(scale);
  const int64_t n = v.size(0);
  return call_fp8<Place>(op, x8, x_scale, n, {{v, n, 4}, {e, n, 8}, {s, n, 16}}, bias, [&](auto* xp, auto* xsp, auto* bp, auto* yp, int m, int n, int k, void* scratch, void* stream) {
    return f(xp, xsp, v.data_ptr(), e.data_ptr(), s.data_ptr(), global_scale.data_ptr(), bp, yp, m, n, k, 0, (int)second, (int)third,
             begins(early, values, meta, scale), (int)tokens, (int)splits, scratch, stream);
  });
}

}  // namespace
}  // namespace fp4

// resolve: who is asked, once, for fp4_<name> of the kernel library for a compute capability (times ten); it answers null if there is none.
extern "C" __attribute__((visibility("default"))) void fp4_csrc_bind(fp4::Resolver* resolve, void* current_stream) {
  fp4::resolver = resolve;
  fp4::current_stream = (fp4::CurrentStream*)current_stream;
}

// The operators are defined where they are described to the compiler too (fp4_inductor/kernels/csrc.py).
#define FP4_DENSE(name, Place)                                                        \
  m.impl(#name, TORCH_BOX((&fp4::name<Place, fp4::kPlain>)));                         \
  m.impl(#name "_pointwise", TORCH_BOX((&fp4::name<Place, fp4::kPointwise>)));        \
  m.impl(#name "_glu", TORCH_BOX((&fp4::name<Place, fp4::kGlu>)));
#define FP4_BOTH(name, Place)                                                         \
  m.impl(#name, TORCH_BOX((&fp4::name<Place, false>)));                               \
  m.impl(#name "_scales", TORCH_BOX((&fp4::name<Place, true>)));
#define FP4_IMPLEMENT(key, Place)                                               \
  STABLE_TORCH_LIBRARY_IMPL(fp4_csrc, key, m) {                                 \
    FP4_DENSE(linear_small, Place)                                              \
    FP4_DENSE(linear_table, Place)                                              \
    FP4_DENSE(linear_wide, Place)                                               \
    m.impl("linear_wide_fp8", TORCH_BOX(&fp4::linear_wide_fp8<Place>));         \
    FP4_BOTH(sparse_linear_small, Place)                                        \
    FP4_BOTH(sparse_linear_table, Place)                                        \
    FP4_BOTH(sparse_linear_wide, Place)                                         \
    m.impl("sparse_linear_wide_fp8", TORCH_BOX(&fp4::sparse_linear_wide_fp8<Place>)); \
    m.impl("linear_w4a4", TORCH_BOX(&fp4::linear_w4a4<Place>));                 \
    m.impl("moe_grouped_wide", TORCH_BOX((&fp4::moe_grouped_wide<Place, false, false>)));          \
    m.impl("moe_grouped_wide_scales", TORCH_BOX((&fp4::moe_grouped_wide<Place, false, true>)));    \
    m.impl("moe_grouped_wide_fp8", TORCH_BOX((&fp4::moe_grouped_wide<Place, true, false>)));       \
    m.impl("moe_grouped_wide_fp8_scales", TORCH_BOX((&fp4::moe_grouped_wide<Place, true, true>))); \
    FP4_BOTH(moe_decode_table, Place)                                                              \
  }
FP4_IMPLEMENT(CUDA, fp4::OnDevice)
#ifdef FP4_EMULATED
FP4_IMPLEMENT(CPU, fp4::OnHost)
#endif
