"""torchao's and compressed-tensors' own decoding is recognised, proven, and rewritten; what only looks like it is not."""

from __future__ import annotations

import warnings

import idioms
import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

from fp4_inductor.formats import nvfp4

N, K, M = 96, 128, 5
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def relative_error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


class Model(nn.Module):
    """Some library's linear layer: parts as buffers, a decode function, F.linear."""

    def __init__(self, decode, *, n=N, k=K, dtype=torch.bfloat16, swizzle=False, divides=False, g=True, bias=False, shape=()):
        super().__init__()
        q, s, scale = nvfp4.quantize(torch.randn(n, k) / k**0.5)
        self.register_buffer("q", q)
        self.register_buffer("s", idioms.swizzle(s) if swizzle else s)
        self.register_buffer("g", (1 / scale if divides else scale).reshape(shape) if g else None)
        self.register_buffer("bias", torch.randn(n, dtype=dtype) if bias else None)
        self.decode, self.dtype = decode, dtype

    def forward(self, x):
        return F.linear(x, self.decode(self.q, self.s, self.g, self.dtype), self.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_torchao(compiled, dtype, bias):
    model, x = Model(idioms.torchao, dtype=dtype, bias=bias), torch.randn(M, K).to(dtype)
    c = compiled(model, x)
    assert c.matches == {"idiom_addmm" if bias else "idiom_mm": 1}
    assert relative_error(c.result, model(x)) <= TOLERANCE[dtype]
    if bias:
        assert_expected_inline(
            c.graph,
            """\
v0 = fp4.linear.default(in4, in0, in1, in2, in3)
return v0""",
        )


def test_torchao_without_global_scale(compiled):
    model, x = Model(idioms.torchao, g=False), torch.randn(M, K).bfloat16()
    model.s = (model.s.float() / 64).to(torch.float8_e4m3fn)
    c = compiled(model, x)
    assert c.matches == {"idiom_mm": 1}
    assert relative_error(c.result, model(x)) <= TOLERANCE[torch.bfloat16]
    assert_expected_inline(
        c.graph,
        """\
v0 = aten.full.default([], 1.0, dtype=torch.float32, pin_memory=False)
v1 = fp4.linear.default(in2, in0, in1, v0, None)
return v1""",
    )


@pytest.mark.parametrize(("n", "k"), [(96, 128), (128, 64), (256, 192), (130, 80)])
def test_torchao_swizzled_scales(compiled, n, k):
    """The scales come out of the library's own un-swizzling; the codes go to the kernel as they are."""
    model = Model(lambda *a: idioms.torchao(*a, swizzled=True), n=n, k=k, swizzle=True)
    x = torch.randn(M, k).bfloat16()
    c = compiled(model, x)
    assert c.matches == {"idiom_mm": 1}
    assert relative_error(c.result, model(x)) <= TOLERANCE[torch.bfloat16]
    assert "bitwise" not in c.graph


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), ()])
def test_compressed_tensors(compiled, dtype, shape):
    """The stored global scale divides: off by 3.5e4 if it were taken to multiply."""
    model = Model(idioms.compressed_tensors, divides=True, dtype=dtype, shape=shape)
    x = torch.randn(M, K).to(dtype)
    c = compiled(model, x)
    assert c.matches == {"idiom_mm": 1}
    assert relative_error(c.result, model(x)) <= TOLERANCE[dtype]
    assert c.graph.count("aten.reciprocal.default") == 1
    assert "bitwise" not in c.graph


def test_multiplying_and_dividing_are_told_apart(compiled):
    model = Model(lambda *a: idioms.compressed_tensors(*a, multiply=True), shape=(1,))
    x = torch.randn(M, K).bfloat16()
    c = compiled(model, x)
    assert c.matches == {"idiom_mm": 1}
    assert "reciprocal" not in c.graph
    assert relative_error(c.result, model(x)) <= TOLERANCE[torch.bfloat16]


def test_a_computed_global_scale(compiled):
    """Whatever makes the scalar stays in the graph; the weight is cut below it."""
    model, x = Model(lambda q, s, g, d: idioms.torchao(q, s, g * g * 64.0, d)), torch.randn(M, K).bfloat16()
    c = compiled(model, x)
    assert c.matches == {"idiom_mm": 1}
    assert c.graph.count("aten.mul.Tensor") == 2
    assert relative_error(c.result, model(x)) <= TOLERANCE[torch.bfloat16]


def test_many_layers_many_uses(compiled):
    first, second = Model(idioms.torchao, n=K), Model(idioms.torchao, n=K, bias=True)
    x = torch.randn(2, M, K).bfloat16()

    def run(x):
        return second(first(x).relu()) + first(x * 2)

    c = compiled(run, x)
    assert c.matches == {"idiom_mm": 2, "idiom_addmm": 1}
    assert relative_error(c.result, run(x)) <= 2 * TOLERANCE[torch.bfloat16]


def test_dynamic_rows(compiled):
    x = torch.randn(M, K).bfloat16()
    torch._dynamo.mark_dynamic(x, 0)
    assert compiled(Model(idioms.torchao, bias=True), x).matches == {"idiom_addmm": 1}


@pytest.mark.parametrize("n", [96, 151936])
def test_more_rows_than_samples(n):
    """A vocabulary-sized weight: every row is still visited."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.post_grad import pass_patterns, view_to_reshape
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    from fp4_inductor import passes

    with FakeTensorMode():
        inputs = [torch.empty(n, K // 2, dtype=torch.uint8), torch.empty(n, K // 16, dtype=torch.float8_e4m3fn), torch.empty(1)]
        fn = torch.func.functionalize(lambda x, q, s, g: F.linear(x, idioms.torchao(q, s, g, torch.bfloat16)))
        module = make_fx(fn, select_decomp_table(), tracing_mode="fake")(torch.empty(M, K, dtype=torch.bfloat16), *inputs)
    view_to_reshape(module)
    passes.reset_matches()
    pass_patterns[0].apply(module.graph)
    module.graph.lint()
    assert passes.matches() == {"idiom_mm": 1}


@pytest.mark.gpu
@pytest.mark.parametrize("decode", ["torchao", "compressed_tensors"])
def test_on_cuda(compiled, decode):
    """The table lies on the CPU and is moved in the graph, as the library does."""
    model = Model(getattr(idioms, decode), divides=decode == "compressed_tensors", bias=True).cuda()
    x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
    c = compiled(model, x, generate=True)
    assert c.matches == {"idiom_addmm": 1}
    assert relative_error(c.result, model(x)) <= TOLERANCE[torch.bfloat16]


def test_generated_code(compiled):
    """All the way through Inductor, once for each library."""
    for decode, divides in ((idioms.torchao, False), (idioms.compressed_tensors, True)):
        model, x = Model(decode, divides=divides, bias=True), torch.randn(M, K).bfloat16()
        c = compiled(model, x, generate=True)
        assert c.matches == {"idiom_addmm": 1}
        assert relative_error(c.result, model(x)) <= TOLERANCE[torch.bfloat16]


def mxfp4_scales(packed, scale, g, dtype):
    """E8M0 scales: powers of two from the exponent bits."""
    s = (scale.view(torch.uint8).to(torch.int32) << 23).view(torch.float32)
    blocks = idioms.torchao_values(idioms.torchao_codes(packed)).view(N, -1, 16)
    return (blocks * (s * g).view(N, -1, 1)).view(N, K).to(dtype)


def with_(**changes):
    return lambda *a: idioms.torchao(*a, **changes)


NOT_NVFP4 = {
    "nibbles swapped": (with_(codes=idioms.swapped_nibbles), {}),
    "low nibbles of the row first": (with_(codes=idioms.halves_of_a_row), {}),
    "low nibbles of the group first": (with_(codes=idioms.halves_of_a_group), {}),
    "one row from elsewhere": (with_(codes=idioms.rows_shifted_by_one), {}),
    "another exponent bias": (with_(bias=2), {}),
    "E8M0 scales": (mxfp4_scales, {}),
    "another table": (lambda *a: idioms.compressed_tensors(*a, table=idioms.OTHER_TABLE), {"divides": True}),
    "a table computed from an input": (lambda q, s, g, d: idioms.compressed_tensors(q, s, g, d, table=torch.arange(8.0) * g), {}),
    "an offset": (lambda *a: idioms.torchao(*a) + 0.25, {}),
    "a twice as large weight": (lambda *a: idioms.torchao(*a) * 2, {}),
    "scales rounded on the way": (lambda q, s, g, d: idioms.torchao(q, (s.float() * 0.3).to(s.dtype), g, d), {}),
    "clamped": (lambda *a: idioms.torchao(*a).clamp(-0.1, 0.1), {}),
    "one column zeroed": (lambda *a: torch.cat([idioms.torchao(*a)[:, :-1], torch.zeros(N, 1, dtype=torch.bfloat16)], 1), {}),
}


@pytest.mark.parametrize("case", NOT_NVFP4)
def test_left_alone(compiled, case):
    decode, options = NOT_NVFP4[case]
    model, x = Model(decode, **options), torch.randn(M, K).bfloat16()
    c = compiled(model, x)
    assert c.matches == {}
    assert relative_error(c.result, model(x)) <= TOLERANCE[torch.bfloat16]


def test_a_table_in_a_buffer(compiled):
    """Nothing says what an input holds when the graph runs, so nothing is proven, whatever it holds now."""
    model, x = Model(lambda *a: idioms.compressed_tensors(*a, table=model.table), divides=True), torch.randn(M, K).bfloat16()
    model.register_buffer("table", idioms.TABLE.clone())
    c = compiled(model, x)
    assert c.matches == {}
    assert relative_error(c.result, model(x)) <= TOLERANCE[torch.bfloat16]


@pytest.mark.skipif(not hasattr(torch._inductor.config, "pre_grad_pass_timing"), reason="torch < 2.13 has no such option")
def test_a_table_that_the_cache_key_would_not_see(compiled):
    """Passes after the cache look-up would let another table hit this graph's entry."""
    model, x = Model(idioms.compressed_tensors, divides=True), torch.randn(M, K).bfloat16()
    assert compiled(model, x, config={"pre_grad_pass_timing": "late"}).matches == {}
    assert compiled(model, x, config={"pre_grad_pass_timing": "early"}).matches == {"idiom_mm": 1}


def test_group_of_32(compiled):
    model = Model(with_(group=32))
    model.s = model.s[:, ::2].contiguous()
    x = torch.randn(M, K).bfloat16()
    assert compiled(model, x).matches == {}


def test_packed_along_n(compiled):
    """A square weight whose bytes hold two rows instead of two columns."""
    model = Model(lambda q, s, g, d: idioms.torchao(q, s, g, d).t(), n=K)
    x = torch.randn(M, K).bfloat16()
    assert compiled(model, x).matches == {}
    assert relative_error(compiled(model, x).result, model(x)) <= TOLERANCE[torch.bfloat16]


def test_a_table_that_changes_is_seen(compiled):
    """The table is a constant of the graph under a guard: writing to it recompiles, and another table is not NVFP4."""
    from fp4_inductor import passes

    model = Model(lambda *a: idioms.compressed_tensors(*a, table=idioms.CHANGED_TABLE), divides=True)
    x = torch.randn(M, K).bfloat16()
    passes.reset_matches()
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        f = torch.compile(model, fullgraph=True)
        assert relative_error(f(x), model(x)) <= TOLERANCE[torch.bfloat16]
        assert passes.matches() == {"idiom_mm": 1}
        before = idioms.CHANGED_TABLE.clone()
        try:
            idioms.CHANGED_TABLE[7] = 5.0
            assert relative_error(f(x), model(x)) <= TOLERANCE[torch.bfloat16]
            assert passes.matches() == {"idiom_mm": 1}
        finally:
            idioms.CHANGED_TABLE.copy_(before)


def test_real_torchao(compiled):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ao = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    for swizzled in (False, True):
        layer = nn.Linear(K, N, dtype=torch.bfloat16)
        w = layer.weight.detach()
        scale = ao.per_tensor_amax_to_scale(w.abs().max())
        layer.weight = nn.Parameter(ao.NVFP4Tensor.to_nvfp4(w, per_tensor_scale=scale, is_swizzled_scales=swizzled), requires_grad=False)
        x = torch.randn(M, K).bfloat16()
        c = compiled(layer, x)
        assert c.matches == {"idiom_addmm": 1}
        with torch.no_grad():
            assert relative_error(c.result, layer(x)) <= TOLERANCE[torch.bfloat16]


def test_real_compressed_tensors(compiled):
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    args = quantization.QuantizationArgs(num_bits=4, type="float", group_size=16, strategy="tensor_group", symmetric=True)

    def decode(q, s, g, dtype):
        unpacked = helpers.unpack_fp4_from_uint8(q, N, K, dtype)
        return dequantize(x_q=unpacked, scale=s.to(dtype), args=args, global_scale=g, dtype=dtype)

    model, x = Model(decode, divides=True, shape=(1,)), torch.randn(M, K).bfloat16()
    c = compiled(model, x)
    assert c.matches == {"idiom_mm": 1}
    assert relative_error(c.result, model(x)) <= TOLERANCE[torch.bfloat16]
