"""Kernels that are off by default, or were until they were timed, on a GPU: numbers, tails, replays, what the emulator cannot see (the real memory model)."""

from __future__ import annotations

import functools

import pytest
import torch

from fp4_inductor import FP4Linear, dispatch, explain
from fp4_inductor.config import dispatch_config
from fp4_inductor.formats import nvfp4
from fp4_inductor.kernels import csrc, host, registry, run, select
from fp4_inductor.kernels.forms import Epilogue, Norm, Options
from fp4_inductor.ops import linear_glu, quantize_rows_fp8
from fp4_inductor.ops.dequantize_fp8 import WEIGHT_FACTOR, scaled_product
from lowering_tests.gpu.helpers import BF16, DEVICE, FP8_BOUND, FP16, bound_of, error, exact, plan_of, weight
from lowering_tests.kernels import sparse24 as sparse
from lowering_tests.kernels.emulator import fp8_tiles, tiles_of

pytestmark = pytest.mark.gpu
fp4 = torch.ops.fp4


def product(op, kernel, x, weight, bias, tile=None):
    """By one kernel, whoever serves the call otherwise."""
    return run.by_form(registry.named(op)[kernel].form, x, weight, bias, tile=tile)


def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0) or csrc.why_not("linear_wide", 90):
        pytest.skip("the rows of candidates name sm_90 with nvcc")


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_table(dtype):
    hopper()
    tiles = [
        None,
        *(csrc.tile("linear_table", *t) for t in ((1, 1, 1), (2, 2, 8), (2, 1, 8), (3, 1, 5), (4, 2, 8), (7, 1, 2), (8, 2, 4), (14, 2, 2), (16, 2, 1))),
    ]
    shared = [csrc.tile("linear_table", *t, 4) for t in ((2, 2, 8), (2, 2, 16), (8, 2, 4))]
    for n, k in ((512, 1024), (4096, 4096), (8200, 2048), (33, 256), (4096, 14336)):
        w, bias = weight(n, k), torch.randn(n, device=DEVICE).to(dtype)
        for m in (1, 3, 8, 9, 16, 17, 24, 25, 32):
            x = torch.randn(m, k, device=DEVICE).to(dtype)
            fitting = [t for t in tiles if t is None or m <= 24 or t.sets // t.sets_a_warp * t.k_groups < 16]
            for tile in [*fitting, *(shared if m <= 16 and k % 1024 == 0 else ())]:
                first = product("linear", "cuda_table", x, w, bias, tile)
                assert error(first, exact(x, *w, bias)) <= bound_of(x, w[0], fused=True), (m, n, k, tile)
                assert all(torch.equal(product("linear", "cuda_table", x, w, bias, tile), first) for _ in range(20)), (m, n, k, tile)
            if m <= 16 or (m <= 24 and n != 8200):  # as its row of the table says
                assert torch.equal(product("linear", "cuda_table", x[:1], w, bias), product("linear", "cuda_table", x, w, bias)[:1]), (m, n, k)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_wide(dtype):
    hopper()
    source = "gemm/linear_wide.cu"
    mapped = [csrc.tile("linear_wide", *t, 1, 0) for t in tiles_of(source, "STREAMED")] + [csrc.tile("linear_wide", *t, -1) for t in tiles_of(source, "SHARED")]
    for n, k in ((512, 1024), (4096, 4096), (8200, 2048), (33, 2112), (130, 64)):
        split = [csrc.tile("linear_wide", *t, s) for t in tiles_of(source, "ANY_K" if k % 256 else "TILE") for s in (1, 2, 4) if s <= -(-k // 256)]
        tiles = [None, *split, *(mapped if k % 256 == 0 else ())]
        w, bias = weight(n, k), torch.randn(n, device=DEVICE).to(dtype)
        for m in (1, 64, 130, 300):
            x = torch.randn(m, k, device=DEVICE).to(dtype)
            for tile in tiles:
                first = product("linear", "cuda_wide", x, w, bias, tile)
                assert error(first, exact(x, *w, bias)) <= bound_of(x, w[0], fused=True), (m, n, k, tile)
                assert all(torch.equal(product("linear", "cuda_wide", x, w, bias, tile), first) for _ in range(20)), (m, n, k, tile)


def test_wide_fp8():
    """Against float64 of the same E4M3 codes, where only sums and one rounding differ, and against the transient weight's path."""
    hopper()
    tiles = [None, *(csrc.tile("linear_wide_fp8", *t) for t in fp8_tiles())]
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    for n, k in ((512, 1024), (4096, 4096), (8208, 2048), (5120, 8192), (33, 256), (1000, 1280)):
        (q, s, g), bias = weight(n, k), torch.randn(n, device=DEVICE).to(BF16)
        w8 = fp4.dequantize_fp8(q, s)
        for m in (1, 129, 192, 193, 256, 300, 512, 777, 1024, 2047, 2048):
            x8, x_scale = fp4.quantize_rows_fp8(torch.randn(m, k, device=DEVICE).to(BF16))
            given = quantize_rows_fp8.in_lane_order(x8), x_scale
            want = (x8.double() * x_scale.double()) @ (w8.double() * (g.double() / WEIGHT_FACTOR)).T + bias.double()
            if n % 16 == 0:
                transient = error(scaled_product(x8, x_scale, w8, g, BF16, bias), want)
            for tile in tiles:
                if tile and tile.splits > 1 and (k // 256 < tile.splits or -(-m // tile.tokens) * -(-n // 256) * tile.splits > sms // 2):
                    continue
                sizes = tile or ()
                first = csrc.call("linear_wide_fp8", given, (q, s), g, bias, 90, Options(sizes))
                assert error(first, want) <= (max(1.2 * transient, 2.5e-3) if n % 16 == 0 else 6e-3), (m, n, k, tile)
                assert all(torch.equal(csrc.call("linear_wide_fp8", given, (q, s), g, bias, 90, Options(sizes)), first) for _ in range(20)), (m, n, k, tile)


def test_wide_fp8_has_the_transient_weights_codes():
    """Each token picks one k: a column of the result is the E4M3 weight."""
    hopper()
    n, k = 1016, 2048
    q = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=DEVICE)
    s = (torch.arange(n * k // 16, device=DEVICE) % 127).to(torch.uint8).view(n, -1)[:, torch.randperm(k // 16)].contiguous().view(nvfp4.SCALE_DTYPE)
    one = quantize_rows_fp8.in_lane_order(torch.eye(k, device=DEVICE)).to(torch.float8_e4m3fn), torch.ones(k, 1, device=DEVICE)
    y = csrc.call("linear_wide_fp8", one, (q, s), torch.full((), WEIGHT_FACTOR, device=DEVICE), None, 90)
    assert torch.equal(y.float(), fp4.dequantize_fp8(q, s).float().T)


def test_wide_fp8_siblings_eager_and_compiled():
    hopper()
    n, k, starts = 6144, 4096, (4096, 5120)
    q, s, _ = weight(n, k)
    g = torch.tensor([0.3, 2.9, 0.01], device=DEVICE) / k**0.5
    for m in (130, 256, 600, 2048):
        x = torch.randn(m, k, device=DEVICE).to(BF16)
        assert plan_of(x, q).pick(m).kernel == "cuda_wide_fp8"
        y = torch.ops.fp4_csrc.linear_wide_fp8(*fp4.quantize_rows_fp8(x, True), q, s, g, None, 90, 0, 0, *starts)
        compiled = torch.compile(lambda x, q, s, g: fp4.linear_siblings(x, q, s, g, None, [0, 4096, 4096, 5120, 5120, n]), fullgraph=True)(x, q, s, g)
        for i, (a, b) in enumerate(zip((0, *starts), (*starts, n), strict=True)):
            want = exact(x, q[a:b], s[a:b], g[i])
            assert error(y[:, a:b], want) <= FP8_BOUND and error(fp4.linear(x, q[a:b], s[a:b], g[i]), want) <= FP8_BOUND
            assert torch.equal(compiled[i], y[:, a:b])


def test_candidates_serve_when_switched_on():
    hopper()
    with dispatch(candidates=("triton_gemv_glu",)):
        for n, k in ((512, 1024), (130, 1040)):
            w, x = weight(n, k), torch.randn(1, k, device=DEVICE).to(BF16)
            assert host.row_for("linear_glu", x, 1, n, k).kernel == "triton_gemv_glu"
            y = fp4.linear_glu(x, *w)
            gate, up = exact(x, *w).split(n // 2, 1)
            assert error(y, torch.nn.functional.silu(gate) * up) <= bound_of(x, w[0], fused=True), (n, k)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                z = fp4.linear_glu(x, *w)
            for _ in range(100):
                z.fill_(float("nan"))
                graph.replay()
            assert torch.equal(z, y)


def rms_norm(x, own, eps, offset=0.0):
    x = x.float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (offset + own.float())).to(own.dtype)


GEMV_TILES = [(), (4, 16, 1, 1), (2, 8, 8, 4), (4, 12, 3, 2), (4, 4, 1, 2 + 16 * 4)]
LARGE_GEMV_TILES = [(4, 16, 4, 2), (4, 16, 2, 3), (2, 16, 4, 5 + 16), (4, 8, 2, 6)]  # of which a block takes more than 99 KB of shared memory


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_gemv(dtype):
    """Every tile that fits, alone, with a residual, with gates and ups; with a norm ahead; each call twenty times the same."""
    arch = host.arch(torch.device(DEVICE))
    for n, k in ((512, 1024), (6144, 4096), (4096, 12288), (8202, 2048), (34, 64), (130, 1088)):
        (q, s, g), bias, own = weight(n, k), torch.randn(n, device=DEVICE).to(dtype), torch.randn(k, device=DEVICE).to(dtype)
        x, residual = (torch.randn(1, size, device=DEVICE).to(dtype) for size in (k, n))
        for norm in (None, Norm(own, 1e-6, 1.0)):
            z = exact(x if norm is None else rms_norm(x, *norm), q, s, g, bias)
            gate, up = z.split(n // 2, 1)
            finishes = {
                "": (Epilogue(), z),
                "_pointwise": (Epilogue(residual=residual), z + residual.double()),
                "_glu": (Epilogue(act="silu"), torch.nn.functional.silu(gate) * up),
            }
            for finish, (then, want) in finishes.items():
                for tile in [*GEMV_TILES, *(LARGE_GEMV_TILES if arch in (80, 87, 90) or 100 <= arch < 120 else ())]:
                    call = functools.partial(csrc.call, f"linear_gemv{finish}", x, (q, s), g, bias, arch)
                    first = call(Options(tile, then, norm=norm))
                    assert error(first, want) <= bound_of(x, q, fused=True), (n, k, finish, tile, norm is None)
                    assert all(torch.equal(call(Options(tile, then, i % 2 == 1, norm)), first) for i in range(20)), (n, k, finish, tile)


def test_gemv_of_several_global_scales():
    (q, s, _), g, x = weight(6144, 4096), torch.tensor([0.3, 2.9, 0.01], device=DEVICE) / 64, torch.randn(1, 4096, device=DEVICE).to(BF16)
    y = csrc.call("linear_gemv", x, (q, s), g, None, host.arch(torch.device(DEVICE)), Options(then=Epilogue((4096, 5120))))
    for i, (a, b) in enumerate(((0, 4096), (4096, 5120), (5120, 6144))):
        assert error(y[:, a:b], exact(x, q[a:b], s[a:b], g[i])) <= bound_of(x, q, fused=True)


@pytest.mark.parametrize("norm", [False, True])
def test_gemv_early(norm):
    """A chain of layers, each call the input of the next, replayed: what began too early would read what the replay before left."""
    arch, n = host.arch(torch.device(DEVICE)), 4096
    layers = [(weight(n, n), weight(2 * 12288, n), weight(n, 12288)) for _ in range(3)]
    own = Norm(torch.randn(n, device=DEVICE).to(BF16), 1e-6) if norm else None
    x = torch.randn(1, n, device=DEVICE).to(BF16)

    def chain(early):
        h = x
        for o, gate_up, down in layers:
            y = csrc.call("linear_gemv", h, o[:2], o[2], None, arch, Options(early=early, norm=own))
            h = csrc.call("linear_gemv_pointwise", y, o[:2], o[2], None, arch, Options(then=Epilogue(residual=h), early=early))
            y = csrc.call("linear_gemv_glu", h, gate_up[:2], gate_up[2], None, arch, Options(then=Epilogue(act="silu"), early=early, norm=own))
            h = csrc.call("linear_gemv_pointwise", y, down[:2], down[2], None, arch, Options(then=Epilogue(residual=h), early=early))
            h = h * 0.5  # a kernel that is none of ours between two of them
        return h

    chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(True)
    for _ in range(100):
        x.copy_(torch.randn(1, n, device=DEVICE))
        graph.replay()
        assert torch.equal(got, chain(False))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_early(dtype):
    """A chain of calls, each the input of the next, in one graph: what began too early would read the activations of the replay before."""
    hopper()
    n = 4096
    dense = [weight(n, n) for _ in range(6)]
    kept = [(*(t.to(DEVICE) for t in sparse.weight(n, n)[:2]), s, g) for _, s, g in dense]
    for m, name in (
        (1, "linear_table"),
        (8, "linear_table"),
        (16, "linear_table"),
        (24, "linear_table"),
        (32, "linear_table"),
        (40, "linear_wide"),
        (64, "linear_wide"),
        (128, "linear_wide"),
        *((m, "sparse_linear_table") for m in (1, 8, 16)),
        *((m, "sparse_linear_wide") for m in (24, 64, 200)),
    ):
        x = torch.randn(m, n, device=DEVICE).to(dtype)

        def chain(early, x=x, name=name):
            y = x
            for *parts, g in kept if name.startswith("sparse") else dense:
                y = csrc.call(name, y, parts, g, None, 90, Options(early=early)) * 1.0
                y = csrc.call(name, y, parts, g, None, 90, Options(early=early))
            return y

        chain(True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = chain(True)
        for _ in range(50):
            x.copy_(torch.randn(m, n, device=DEVICE))
            graph.replay()
            assert torch.equal(got, chain(False)), m


@pytest.mark.parametrize("m", [1, 2, 16, 40, 128, 300, 2048])
def test_early_in_a_compiled_graph(m):
    """Layers of one graph behind each other, replayed, bit for bit what they are when nothing begins early."""
    hopper()
    n = 4096
    layers = torch.nn.Sequential(*(FP4Linear.from_weight(torch.randn(n, n, device=DEVICE).to(BF16) / 64) for _ in range(4)))

    def model(x):
        for layer in layers:
            x = torch.tanh(layer(x.relu()) + x)  # no reduction: Inductor may choose another order for it when it compiles again
        return x

    x = torch.randn(m, n, device=DEVICE, dtype=BF16)
    results = {}
    for early in ("never", "proven"):
        torch.compiler.reset()
        with dispatch(early=early), torch.no_grad():
            compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
            torch.manual_seed(0)
            results[early] = [compiled(torch.randn_like(x)).clone() for _ in range(20)]
    differing = [(a != b).sum().item() for a, b in zip(*results.values(), strict=True)]
    assert not any(differing), differing


def test_one_row_in_a_compiled_graph():
    """cuda_gemv serves M = 1 and begins early, alone and with what stands behind it; replayed with new activations against float64."""
    hopper()
    k, n = 4096, 8192
    gate, up, down = (FP4Linear.from_weight(torch.randn(a, b, device=DEVICE).to(BF16) / b**0.5) for a, b in ((n, k), (n, k), (k, n)))
    weights = [layer.dequantize(torch.float32).double().t() for layer in (gate, up, down)]

    def model(x):
        h = x.relu()
        return down(torch.nn.functional.silu(gate(h)) * up(h)) + x

    x = torch.randn(1, k, device=DEVICE, dtype=BF16)
    called = [(row.op, row.kernel, "begins while" in row.note) for row in explain(torch.compile(model, fullgraph=True), x).rows]
    assert called == [("fp4.linear", "cuda_gemv", True), *[("fp4.linear_epilogue", "cuda_gemv_pointwise", True)] * 2]  # up; gate * up; down + x
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        for _ in range(20):
            x = torch.randn_like(x)
            h = x.relu().double()
            expected = (torch.nn.functional.silu(h @ weights[0]) * (h @ weights[1])) @ weights[2] + x.double()
            assert error(compiled(x), expected) < 1e-2


@pytest.mark.parametrize(("k", "n"), [(8192, 28672), (8192, 8192), (4096, 4096)])
def test_wide_at_full_speed(k, n):
    """Weights from memory, rings always full: where a stage that was given back before it was read is overwritten, a few codes in a thousand calls."""
    hopper()
    weights = [weight(n, k) for _ in range(1 + (256 << 20) // (n * k * 9 // 16))]
    for m in (24, 32, 64, 128):
        x = torch.randn(m, k, device=DEVICE).to(BF16)
        out = [torch.empty(m, n, dtype=BF16, device=DEVICE) for _ in weights]

        def call(x=x, out=out):
            for (q, s, g), y in zip(weights, out, strict=True):
                y.copy_(csrc.call("linear_wide", x, (q, s), g, None, 90))

        call()
        first = [y.clone() for y in out]
        for y, w in zip(first[:2], weights, strict=False):
            assert error(y, exact(x, *w)) <= bound_of(x, w[0], fused=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        for _ in range(20):
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(out, first, strict=True)), m


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_siblings_and_epilogues(dtype):
    """Two and three global scales, a hundred times apart; activation, product and residual; act(gate) * up."""
    hopper()
    for n, k in ((512, 1024), (66, 2112), (8192, 4096)):
        q, s, g = weight(n, k)
        a, b = n // 4, n // 2
        scales = torch.stack((g, g * 100, g / 100))
        for size, rows in (("small", (1, 8, 9, 32)), ("table", (1, 8, 9, 16) if k % 256 == 0 else ()), ("wide", (33, 64, 130, 300))):
            for m in rows:
                x, bias = torch.randn(m, k, device=DEVICE).to(dtype), torch.randn(n, device=DEVICE).to(dtype)
                y = csrc.call(f"linear_{size}", x, (q, s), scales, bias, 90, Options(then=Epilogue((a, b))))
                for first, last, i in ((0, a, 0), (a, b, 1), (b, n, 2)):
                    want = exact(x, q[first:last], s[first:last], scales[i], bias[first:last])
                    assert error(y[:, first:last], want) <= bound_of(x, q, fused=True), (size, m, n, k, i)
                z = exact(x, q, s, g, bias)
                mul, residual = (torch.randn(m, n, device=DEVICE).to(dtype) for _ in range(2))
                for act, f in (("", lambda t: t), *linear_glu.ACTIVATIONS.items()):
                    then = Epilogue((), act, mul, residual)
                    y = csrc.call(f"linear_{size}_pointwise", x, (q, s), g, bias, 90, Options(then=then))
                    assert error(y, f(z) * mul.double() + residual.double()) <= bound_of(x, q, fused=True), (size, m, n, k, act)
                    if act:
                        y = csrc.call(f"linear_{size}_glu", x, (q, s), g, bias, 90, Options(then=Epilogue((), act)))
                        assert error(y, f(z[:, : n // 2]) * z[:, n // 2 :]) <= bound_of(x, q, fused=True), (size, m, n, k, act)
                        again = csrc.call(f"linear_{size}_glu", x, (q, s), g, bias, 90, Options(then=Epilogue((), act)))
                        assert torch.equal(again, y)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_sparse_table(dtype):
    hopper()
    tiles = [
        None,
        *(
            csrc.tile("sparse_linear_table", *t)
            for t in ((1, 1, 1, 2), (2, 2, 8, 2), (1, 1, 8, 2), (3, 1, 5, 2), (4, 4, 8, 2), (4, 2, 4, 4), (7, 1, 2, 2), (2, 1, 8, 4), (4, 4, 8, 4))
        ),
    ]
    for n, k in ((512, 1024), (4096, 4096), (129, 2560), (16, 256), (4099, 14336)):
        w = sparse.weight(n, k)
        reference = sparse.dense(*w).to(DEVICE)
        parts, bias = [t.to(DEVICE) for t in w], torch.randn(n, device=DEVICE).to(dtype)
        call = select.describe("sparse_linear", torch.device(DEVICE, 0), dtype, n, k)
        for m in (1, 3, 8, 9, 16):
            assert m == 1 or select.plan(call, dispatch_config()).pick(m).kernel == "cuda_sparse_table"
            x = torch.randn(m, k, device=DEVICE).to(dtype)
            want = x.double() @ reference.T + bias.double()
            for tile in tiles:
                if tile and (16 * tile.sets > n or k % (128 * tile.substeps)):
                    continue
                first = product("sparse_linear", "cuda_sparse_table", x, parts, bias, tile)
                assert ((first.double() - want).norm() / want.norm()).item() <= sparse.BOUND[dtype] * 2, (m, n, k, tile)
                assert all(torch.equal(product("sparse_linear", "cuda_sparse_table", x, parts, bias, tile), first) for _ in range(20)), (m, n, k, tile)
            assert torch.equal(
                product("sparse_linear", "cuda_sparse_table", x[:1], parts, bias), product("sparse_linear", "cuda_sparse_table", x, parts, bias)[:1]
            ), "one order of summation for 1 to 16 rows"
            if m > 1:
                assert torch.equal(fp4.sparse_linear(x, *parts, bias), product("sparse_linear", "cuda_sparse_table", x, parts, bias))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_sparse(dtype):
    arch = host.arch(torch.device(DEVICE, 0))
    if csrc.why_not("sparse_linear_small", arch):
        pytest.skip("needs nvcc")
    tiles = [None, *(csrc.tile("sparse_linear_small", *t, s) for t in ((2, 8, 2), (2, 16, 2), (4, 8, 3)) if arch == 90 for s in (1, 2, 4, 8))]
    for n, k in ((512, 1024), (4096, 4096), (33, 2112), (130, 64), (70, 1056)):
        w = sparse.weight(n, k)
        reference = sparse.dense(*w).to(DEVICE)
        parts = [t.to(DEVICE) for t in w]
        for m in (1, 3, 8, 9, 16):
            x = torch.randn(m, k, device=DEVICE).to(dtype)
            want = x.double() @ reference.T
            for tile in tiles if m <= 8 else tiles[:1]:
                first = product("sparse_linear", "cuda_sparse_small", x, parts, None, tile)
                assert ((first.double() - want).norm() / want.norm()).item() <= sparse.BOUND[dtype] * 2, (m, n, k, tile)
                assert all(torch.equal(product("sparse_linear", "cuda_sparse_small", x, parts, None, tile), first) for _ in range(20)), (m, n, k, tile)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_sparse_wide(dtype):
    hopper()
    own = [csrc.tile("sparse_linear_wide", *t, s) for t in tiles_of("sparse/sparse_linear_wide.cu") for s in (1, 2, 4, 0)]
    for n, k in ((512, 1024), (4096, 4096), (8200, 2048), (33, 1280)):
        w = sparse.weight(n, k)
        reference = sparse.dense(*w).to(DEVICE)
        parts, bias = [t.to(DEVICE) for t in w], torch.randn(n, device=DEVICE).to(dtype)
        for m in (1, 17, 64, 130):
            x = torch.randn(m, k, device=DEVICE).to(dtype)
            want = x.double() @ reference.T + bias.double()
            for tile in (None, *own):
                first = product("sparse_linear", "cuda_sparse_wide", x, parts, bias, tile)
                assert ((first.double() - want).norm() / want.norm()).item() <= sparse.BOUND[dtype], (m, n, k, tile)
                assert all(torch.equal(product("sparse_linear", "cuda_sparse_wide", x, parts, bias, tile), first) for _ in range(20)), (m, n, k, tile)


def test_sparse_wide_fp8():
    """Against float64 of the same E4M3 codes, where only sums and one rounding differ."""
    hopper()
    tiles = [None, *(csrc.tile("linear_wide_fp8", *t) for t in fp8_tiles())]
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    for n, k in ((512, 1024), (4096, 4096), (8208, 2048), (33, 256), (1000, 1280)):
        *parts, g = (t.to(DEVICE) for t in sparse.weight(n, k))
        w8, bias = fp4.sparse_dequantize_fp8(*parts), torch.randn(n, device=DEVICE).to(BF16)
        for m in (1, 129, 193, 300, 777, 1024, 2047):
            x = fp4.quantize_rows_fp8(torch.randn(m, k, device=DEVICE).to(BF16))
            want = (x[0].double() * x[1].double()) @ (w8.double() * (g.double() / WEIGHT_FACTOR)).T + bias.double()
            for tile in tiles:
                if tile and tile.splits > 1 and (k // 256 < tile.splits or -(-m // tile.tokens) * -(-n // 256) * tile.splits > sms // 2):
                    continue
                sizes = tile or ()
                first = csrc.call("sparse_linear_wide_fp8", x, parts, g, bias, 90, Options(sizes))
                assert error(first, want) <= 2.5e-3, (m, n, k, tile)
                assert all(torch.equal(csrc.call("sparse_linear_wide_fp8", x, parts, g, bias, 90, Options(sizes)), first) for _ in range(20)), (m, n, k, tile)


def test_sparse_wide_fp8_has_the_transient_weights_codes():
    """Each token picks one k: a column of the result is the E4M3 weight."""
    hopper()
    n, k = 1016, 2048
    values, meta, _, _ = (t.to(DEVICE) for t in sparse.weight(n, k))
    s = (torch.arange(n * k // 16, device=DEVICE) % 127).to(torch.uint8).view(n, -1)[:, torch.randperm(k // 16)].contiguous().view(nvfp4.SCALE_DTYPE)
    one = torch.eye(k, device=DEVICE).to(torch.float8_e4m3fn), torch.ones(k, 1, device=DEVICE)
    y = csrc.call("sparse_linear_wide_fp8", one, (values, meta, s), torch.full((), WEIGHT_FACTOR, device=DEVICE), None, 90)
    assert torch.equal(y.float(), fp4.sparse_dequantize_fp8(values, meta, s).float().T)


def test_sparse_wide_is_what_serves():
    """Eager, and in a replayed graph in which another kernel writes the activations right before it."""
    hopper()
    w = sparse.weight(4096, 2048)
    reference, parts = sparse.dense(*w).to(DEVICE), [t.to(DEVICE) for t in w]
    x = torch.randn(48, 2048, device=DEVICE).to(BF16)
    assert select.plan(select.describe("sparse_linear", 90, BF16, 4096, 2048), dispatch_config()).pick(48).kernel == "cuda_sparse_wide"
    graph, source = torch.cuda.CUDAGraph(), torch.empty_like(x)
    fp4.sparse_linear(x, *parts)
    with torch.cuda.graph(graph):
        y = fp4.sparse_linear(source * 2, *parts)
    for _ in range(3):
        source.copy_(torch.randn_like(source))
        graph.replay()
        want = (source * 2).double() @ reference.T
        assert ((y.double() - want).norm() / want.norm()).item() <= sparse.BOUND[BF16]
