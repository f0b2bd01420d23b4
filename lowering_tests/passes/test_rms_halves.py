"""An RMSNorm of 2 to 32 rows is divided among the linear layer in front of it and those behind it, where cuda_table serves all of them.

Graphs on the CPU: the plan of a GPU is pretended (norm_kernels.py), and the ops compute their steps one by one.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline

from fp4_inductor import compile_range, dispatch
from fp4_inductor.passes import rms_halves
from fp4_inductor.passes.missed import APART, listen
from lowering_tests import norm_kernels
from lowering_tests.passes.test_add_norm import SPELLINGS as OF_VLLM
from lowering_tests.passes.test_add_norm import _names  # noqa: F401
from lowering_tests.passes.test_norm import gemma, llama

BF16, fp4 = torch.bfloat16, torch.ops.fp4
K, INNER, N = 256, 512, 96


def made(n, k):
    return tuple(fp4.quantize(torch.randn(n, k).to(BF16) / k**0.5))


WEIGHTS = [part for n, k in ((K, K), (2 * INNER, K), (K, INNER), (N, K)) for part in made(n, k)]


def piece(norm):
    """o + residual, norm, gate_up and GLU, down + residual, norm, q/k/v: what stands between two attentions."""

    def f(attended, residual, first, second, *parts):
        o, gate_up, down, qkv = (parts[3 * i : 3 * i + 3] for i in range(4))
        x = residual + fp4.linear(attended, *o)
        gate, up = fp4.linear(norm(x, first), *gate_up).chunk(2, -1)
        x = x + fp4.linear(F.silu(gate) * up, *down)
        return fp4.linear(norm(x, second), *qkv), x

    return f


def arguments(m, dtype=BF16, lead=()):
    torch.manual_seed(0)
    return (*(torch.randn(*lead, m, K).to(dtype) for _ in range(2)), *((torch.randn(K) / 2 + 1).to(dtype) for _ in range(2)), *WEIGHTS)


@pytest.fixture
def divided(compiled):
    """``divided(f, *args)``, compiled for the pretended GPU: what was compiled, its fp4 ops, and why norms were left. Results are those of eager code."""

    def run(f, *args, off=(), **options):
        with norm_kernels.on_a_cpu(), dispatch(candidates=norm_kernels.switched_on(), thresholds={"chain": 0, **dict(off)}), listen() as left:
            c = compiled(f, *args, **options)
        want, got = (r if isinstance(r, tuple) else (r,) for r in (f(*args), c.result))
        for a, b in zip(got, want, strict=True):
            assert float((a.double() - b.double()).norm() / b.double().norm()) < 1e-2
        return c, re.findall(r"= fp4\.(\w+)\.default", c.graph), [m.reason for m in left if m.what == APART]

    return run


BOTH = ["linear_residual_squares", "rms_scaled_linear_glu", "linear_residual_squares", "rms_scaled_linear"]


@pytest.mark.parametrize(("norm", "offset"), [(llama, 0.0), (gemma, 1.0)], ids=["Llama", "Gemma"])
@pytest.mark.parametrize("m", [2, 32])
def test_the_piece_between_two_attentions(divided, norm, offset, m):
    c, ours, left = divided(piece(norm), *arguments(m))
    assert (ours, left) == (BOTH, [])
    assert c.matches == {"linear_glu": 1, "linear_residual_squares": 2, "rms_scaled_linear_glu": 1, "rms_scaled_linear": 1}
    assert "rsqrt" not in c.graph and "aten.add" not in c.graph
    assert re.findall(r"linear_residual_squares\.default\(.*, ([\d.]+), auto\)", c.graph) == [str(offset)] * 2


def test_the_graph(divided):
    c, _, _ = divided(piece(llama), *arguments(8))
    assert_expected_inline(
        c.graph,
        """\
v0 = fp4.linear_residual_squares.default(in0, in1, in2, in3, None, in4, in5, 0.0, auto)
v1 = <built-in function getitem>(v0, 0)
v2 = <built-in function getitem>(v0, 1)
v3 = <built-in function getitem>(v0, 2)
v4 = fp4.rms_scaled_linear_glu.default(v2, v3, 1e-05, in6, in7, in8, None, silu, auto)
v5 = fp4.linear_residual_squares.default(v4, in9, in10, in11, None, v1, in12, 0.0, auto)
v6 = <built-in function getitem>(v5, 0)
v7 = <built-in function getitem>(v5, 1)
v8 = <built-in function getitem>(v5, 2)
v9 = fp4.rms_scaled_linear.default(v7, v8, 1e-05, in13, in14, in15)
return v9, v6""",
    )


@pytest.mark.parametrize("name", OF_VLLM)
def test_as_vllm_spells_it(divided, name):
    """A sum and its norm that are one operator, or one computation in float32; a graph for 2 to 32 rows, whose sizes nothing guards."""
    norm = OF_VLLM[name]

    def f(attended, residual, first, second, *parts):
        o, gate_up, down, qkv = (parts[3 * i : 3 * i + 3] for i in range(4))
        x, residual = norm(fp4.linear(attended, *o), residual, first)
        gate, up = fp4.linear(x, *gate_up).chunk(2, -1)
        x, residual = norm(fp4.linear(F.silu(gate) * up, *down), residual, second)
        return fp4.linear(x, *qkv), residual

    args = arguments(5)
    for x in args[:2]:
        torch._dynamo.mark_dynamic(x, 0)
    with compile_range(2, 32):
        c, ours, left = divided(f, *args)
    assert (ours, left) == (BOTH, [])
    assert "add_norm" not in c.graph


def test_siblings_and_a_batch_of_sequences(divided):
    """Three layers that read one norm, rows [batch, 1, K]."""
    q, k = made(N, K), made(16, K)

    def f(x, residual, w, *_):
        total = fp4.linear(x, *WEIGHTS[:3]) + residual
        y = llama(total, w)
        return fp4.linear(y, *q), fp4.linear(y, *k), total

    args = [t[:, None] if t.dim() == 2 and i < 2 else t for i, t in enumerate(arguments(4)[:3])]
    _, ours, left = divided(f, *args)
    assert (ours, left) == (["linear_residual_squares", "rms_scaled_linear", "rms_scaled_linear"], [])


@pytest.mark.parametrize(("low", "high", "folds"), [(2, 32, True), (2, 16, True), (5, 33, False), (1, 32, False), (33, 64, False)], ids=lambda v: str(v))
def test_a_range(divided, low, high, folds):
    args = arguments(max(low, 5) if low < 33 else 40)
    for x in args[:2]:
        torch._dynamo.mark_dynamic(x, 0)
    with compile_range(low, high):
        _, ours, left = divided(piece(llama), *args)
    assert (ours == BOTH) is folds
    assert left == ([] if folds else ["M is dynamic: row_glu takes one, up to M = 1", "M is dynamic: row takes one, up to M = 1"])


def test_a_guard(divided):
    """Without a promise: the example lies in the range of the kernels, as the lowering of every linear layer guards it."""
    args = arguments(8)
    for x in args[:2]:
        torch._dynamo.mark_dynamic(x, 0)
    assert divided(piece(llama), *args)[1] == BOTH
    with dispatch(unproven="runtime"):
        assert divided(piece(llama), *args)[1] != BOTH
    args = arguments(8)
    for x in args[:2]:
        torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
    assert divided(piece(llama), *args)[1] != BOTH, "a promised range is not narrowed"


@pytest.mark.parametrize("m", [1, 33])
def test_other_rows(divided, m):
    _, ours, left = divided(piece(llama), *arguments(m))
    assert not set(ours) & set(BOTH)
    assert left == ([] if m == 1 else [f"M is 33: {kernel} takes one, up to M = 1" for kernel in ("row_glu", "row")])


@pytest.mark.parametrize("off", ["rms", "small"])
def test_switched_off(divided, off):
    """The kernels of both halves, or cuda_table, whose place they take."""
    _, ours, left = divided(piece(llama), *arguments(8), off={off: 0})
    assert not set(ours) & set(BOTH) and left == [f"M is 8: {kernel} takes one, up to M = 1" for kernel in ("row_glu", "row")]


def of_a_sum(change=lambda y: y, then=lambda y, total: total, norm=llama, k=K):
    def f(x, residual, w, *parts):
        total = change(fp4.linear(x, *parts[:3])) + residual
        y = norm(total, w)
        return fp4.linear(y, *parts[3:]), then(y, total)

    return f


# What is compiled, the norm's width, dtype, and why its norm stays.
LEFT = {
    "another reader": (of_a_sum(then=lambda y, total: y.cumsum(-1)), K, BF16, "aten.cumsum.default reads it, too"),
    "an activation in front of the sum": (of_a_sum(change=torch.relu), K, BF16, rms_halves.NO_LAYER),
    "another producer": (lambda x, residual, w, *parts: fp4.linear(llama(x * 2 + residual, w), *parts[3:]), K, BF16, rms_halves.NO_LAYER),
    "a product that something else reads": (of_a_sum(change=lambda y: y + y.mean(-1, keepdim=True)), K, BF16, rms_halves.NO_LAYER),
    "rows in another order": (of_a_sum(norm=lambda x, w: llama(x.view(2, 2, K).transpose(0, 1), w)), K, BF16, rms_halves.NO_LAYER),
    "float16": (of_a_sum(), K, torch.float16, rms_halves.OVERFLOWS),
    "no weight": (of_a_sum(norm=lambda x, w: F.rms_norm(x, (K,), None, 1e-5)), K, BF16, "it has no weight"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_stays_as_it_is(divided, name):
    f, k, dtype, reason = LEFT[name]
    x, residual = (torch.randn(4, k).to(dtype) for _ in range(2))
    _, ours, left = divided(f, x, residual, torch.randn(k).to(dtype), *made(k, k), *made(N, k))
    assert not set(ours) & set(BOTH)
    assert len(left) == 1 and reason in left[0]


def test_a_layer_in_front_whose_k_no_such_kernel_takes(divided):
    x, residual, w = torch.randn(4, 64).to(BF16), torch.randn(4, K).to(BF16), torch.randn(K).to(BF16)
    _, ours, left = divided(of_a_sum(), x, residual, w, *made(K, 64), *made(N, K))
    assert (ours, left) == (["linear", "linear"], [f"K = 64 is not a multiple of 256: the layer in front of it, N = {K}, K = 64"])
