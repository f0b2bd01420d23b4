"""A sum and its norm that are one operator, or one computation in float32, are taken apart where kernels of linear layers compute them, as in vLLM's graphs.

The operators here are stand-ins for vLLM's (lowering_tests/vllm runs those). Graphs on the CPU: the plan of a GPU is pretended (norm_kernels.py).
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from fp4_inductor.passes import operators
from fp4_inductor.passes.missed import APART, listen
from lowering_tests import norm_kernels

BF16, fp4 = torch.bfloat16, torch.ops.fp4
K, EPS = 64, 1e-6
_LIBRARY = torch.library.Library("fp4_of_a_test", "FRAGMENT")
_LIBRARY.define("norm(Tensor x, Tensor? weight, float eps, int? size=None) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define("add_norm(Tensor x, Tensor residual, Tensor? weight, float eps, int? size=None) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
of_a_test = torch.ops.fp4_of_a_test


def native(x, residual, weight, eps=EPS, size=None):
    """As vLLM's fused_add_rms_norm."""
    total = x.float() if residual is None else x.float() + residual.float()
    y = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
    return (y if weight is None else y.to(weight.dtype) * weight).to(x.dtype), total.to(x.dtype)


for _key in ("CPU", "Meta"):
    _LIBRARY.impl("norm", lambda x, weight, eps, size=None: native(x, None, weight, eps)[0], _key)
    _LIBRARY.impl("add_norm", native, _key)


def as_operator(x, residual, weight):
    return of_a_test.norm(x, weight, EPS) if residual is None else of_a_test.add_norm(x, residual, weight, EPS)


@pytest.fixture(autouse=True)
def _names():
    operators.add_norms("fp4_of_a_test::norm", "fp4_of_a_test::add_norm")
    yield
    operators.NORMS.discard("fp4_of_a_test::norm")
    del operators.ADD_NORMS["fp4_of_a_test::add_norm"]


def made(n, k):
    q, s, g = fp4.quantize(torch.randn(n, k).to(BF16) / k**0.5)
    return q, s, g


@pytest.fixture
def compared(compiled):
    """``compared(f, *args)``, compiled for the pretended GPU: fp4 operators, all others, why norms were left. Results are those of eager code."""

    def run(f, *args):
        with norm_kernels.on_a_cpu(), listen() as left:
            c = compiled(f, *args)
        want, got = (r if isinstance(r, tuple) else (r,) for r in (f(*args), c.result))
        for a, b in zip(got, want, strict=True):
            assert float((a.double() - b.double()).norm() / b.double().norm()) < 1e-2
        ops = re.findall(r"(?:= |auto_functionalized_v2\()(\w+\.\w+)\.\w+", c.graph)
        ours = [op.removeprefix("fp4.") for op in ops if op.startswith("fp4.")]
        return ours, [op for op in ops if not op.startswith("fp4.")], [m.reason for m in left if m.what == APART]

    return run


SPELLINGS = {"an operator": as_operator, "float32": native}


@pytest.mark.parametrize("name", SPELLINGS)
def test_the_piece_between_two_attentions(compared, name):
    """o + residual, norm + gate_up + GLU, down + residual, norm + q/k/v: one launch. The sum behind down is a result of the piece."""
    norm = SPELLINGS[name]

    def piece(attended, residual, first, second, *parts):
        o, gate_up, down, qkv = (parts[3 * i : 3 * i + 3] for i in range(4))
        x, residual = norm(fp4.linear(attended.view(-1, K), *o), residual, first)
        gate, up = fp4.linear(x, *gate_up).chunk(2, -1)
        x, residual = norm(fp4.linear(F.silu(gate) * up, *down), residual, second)
        return fp4.linear(x, *qkv), residual

    weights = [part for n, k in ((K, K), (256, K), (K, 128), (96, K)) for part in made(n, k)]
    x, residual, first, second = torch.randn(1, 4, K // 4).to(BF16), torch.randn(1, K).to(BF16), *(torch.randn(K).to(BF16) for _ in range(2))
    ours, others, left = compared(piece, x, residual, first, second, *weights)
    assert (ours, left) == (["linear_chain"], [])
    assert set(others) <= {"aten.reshape", "aten.full"}


def one_layer(norm, change=lambda x: x, then=lambda y, total: total):
    def f(x, residual, weight, *parts):
        y, total = norm(change(fp4.linear(x, *parts[:3])), residual, weight)
        return fp4.linear(y, *parts[3:]), then(y, total)

    return f


def with_a_size(x, residual, weight):
    return of_a_test.add_norm(x, residual, weight, EPS, K)


BY_INDUCTOR = "the kernel that makes its input computes it on the way"
# name -> what is compiled, rows, the operators that are left, and why
LEFT = {
    "an operator, M": (one_layer(as_operator), 2, ["fp4_of_a_test.add_norm"], ["M is 2: row takes one, up to M = 1"]),
    "float32, M": (one_layer(native), 2, None, ["M is 2: row takes one, up to M = 1"]),
    # As behind an all-reduce: vLLM joins that with its norm.
    "another producer": (one_layer(as_operator, change=torch.relu), 1, ["aten.relu", "fp4_of_a_test.add_norm"], [BY_INDUCTOR]),
    "another reader": (one_layer(as_operator, then=lambda y, total: y.cumsum(-1)), 1, None, ["aten.cumsum.default reads it, too"]),
    "a size": (one_layer(with_a_size), 1, ["fp4_of_a_test.add_norm"], []),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_stays_as_it_is(compared, name):
    f, rows, ops, reasons = LEFT[name]
    x, residual = (torch.randn(rows, K).to(BF16) for _ in range(2))
    ours, others, left = compared(f, x, residual, torch.randn(K).to(BF16), *made(K, K), *made(96, K))
    assert (len(ours), left) == (2, reasons) and not any("norm" in op for op in ours)
    if ops is not None:
        assert [o for o in others if o != "_operator.getitem"] == ops


def test_a_sum_that_is_read_in_float32(compared):
    """Rounding it would change what that reader gets."""

    def f(x, residual, weight, *parts):
        total = fp4.linear(x, *parts[:3]).float() + residual.float()
        y = (total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS)).to(BF16) * weight
        return fp4.linear(y, *parts[3:]), total.sum(-1)

    x, residual = (torch.randn(1, K).to(BF16) for _ in range(2))
    ours, _, left = compared(f, x, residual, torch.randn(K).to(BF16), *made(K, K), *made(96, K))
    assert (ours, left) == (["linear", "linear"], ["it reads float32, multiplies by bfloat16 and gives bfloat16: kernels take one dtype"])


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_alone(compared, offset):
    """Of the first layer of a piece; Gemma's weight is computed from the stored one."""

    def f(x, weight, *parts):
        return fp4.linear(of_a_test.norm(x, weight.float() + 1.0 if offset else weight, EPS), *parts)

    ours, others, left = compared(f, torch.randn(1, K).to(BF16), torch.randn(K).to(BF16), *made(96, K))
    assert (ours, others, left) == (["norm_linear"], [], [])
