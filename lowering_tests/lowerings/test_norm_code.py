"""Generated CUDA code of linear layers with an RMSNorm in front of them. No GPU (fake_cuda.py); the kernel that takes a norm is that of norm_kernels.py."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

from fp4_inductor import FP4Linear, dispatch
from fp4_inductor.lowerings.journal import listen
from fp4_inductor.modules import SiblingWeight, pack_siblings
from fp4_inductor.ops import CONTRACTS
from fp4_inductor.passes import matches, missed, reset_matches
from lowering_tests import norm_kernels
from lowering_tests.fake_cuda import call_body, generated_code, triton_sources

BF16 = torch.bfloat16
K, HEADS, KV_HEADS, D, INNER, LENGTH, EPS = 1024, 8, 2, 128, 1536, 256, 1e-6
fp4 = torch.ops.fp4


def normalized(x, weight, offset=0.0):
    """As Llama writes it, and with an offset as Gemma does."""
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)
    return (x32 * (offset + weight.float())).to(x.dtype) if offset else weight * x32.to(x.dtype)


class DecoderLayer(nn.Module):
    """One token's pass through a layer of a Llama: its cache is read, not written."""

    def __init__(self, offset=0.0):
        super().__init__()
        options = dict(bias=False, dtype=BF16, device="cuda")
        for name in ("first", "second"):
            self.register_buffer(name, torch.ones(K, dtype=BF16, device="cuda"))
        for name in ("keys", "values"):
            self.register_buffer(name, torch.ones(1, KV_HEADS, LENGTH, D, dtype=BF16, device="cuda"))
        self.q, self.k, self.v = (FP4Linear(K, n * D, **options) for n in (HEADS, KV_HEADS, KV_HEADS))
        self.o, self.down = FP4Linear(HEADS * D, K, **options), FP4Linear(INNER, K, **options)
        self.gate, self.up = (FP4Linear(K, INNER, **options) for _ in range(2))
        self.offset = offset
        with mock.patch.object(SiblingWeight, "refresh", lambda self: setattr(self, "shared", False)):  # values of fake tensors cannot be compared
            pack_siblings([self.q, self.k, self.v])
            pack_siblings([self.gate, self.up])

    def forward(self, x):
        h = normalized(x, self.first, self.offset)
        q, k, v = (f(h).view(1, 1, -1, D).transpose(1, 2) for f in (self.q, self.k, self.v))
        attended = fp4.decode_attention(q * k.mean() + v.mean(), self.keys, self.values)
        x = x + self.o(attended.transpose(1, 2).reshape(1, 1, -1))
        h = normalized(x, self.second, self.offset)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def compiled(build, shape=(1, 1, K), serving=True, **options):
    """``(the wrapper's call, journal, matches, what was left apart, the whole code)``"""
    reset_matches()
    serves = norm_kernels.serving() if serving else mock.patch("builtins.id", id)
    with dispatch(thresholds={"chain": 0, "rms": 0}), listen() as entries, missed.listen() as left, serves:
        code = generated_code(build, [(shape, BF16)], csrc="", **options)[0]
    return call_body(code), entries, matches(), [m.reason for m in left if m.what == missed.APART], code


def launched(body: str) -> list[str]:
    """The kernels of a wrapper in order."""
    return [a or b for a, b in re.findall(r"(?:(triton_\w+?)_\d+\.run|torch\.ops\.(?:fp4|fp4_csrc)\.(\w+)\.default)\(", body)]


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_decoder_layer(offset):
    """Five kernels, and the stand-in for rotary embedding. Before, there were two norms more."""
    body, entries, counted, left, _ = compiled(lambda: DecoderLayer(offset))
    names = [name for name in launched(body) if not name.startswith("triton_")]
    assert names == ["of_a_test", "decode_attention", "of_a_test_pointwise", "of_a_test_glu", "of_a_test_pointwise"]
    assert counted == {"siblings": 2, "linear_glu": 1, "norm_linear_siblings": 1, "norm_linear_glu": 1, "linear_epilogue": 2}
    assert left == []
    calls = re.findall(r"fp4_csrc\.of_a_test(\w*)\.default\(.*?, 90, (.*?)\)\n", body)
    tile, norm = "0, 0", rf"in\d+, 1e-06, {offset}"
    for (name, arguments), (finish, then) in zip(
        calls,
        [
            ("", rf"{tile}, 1024, 1280, 0, None, None, 0, {norm}"),  # the first kernel of the graph, which does not know what ran before
            ("_pointwise", rf"{tile}, 0, 0, 0, None, reinterpret_tensor\(in\d+, .*?\), 1"),
            ("_glu", rf"{tile}, 1536, 0, 1, None, None, 1, {norm}"),
            ("_pointwise", rf"{tile}, 0, 0, 0, None, b\d+, 1"),
        ],
        strict=True,
    ):
        assert name == finish and re.fullmatch(then, arguments), (name, arguments)
    notes = {e.op: e.note for e in entries if e.op != "fp4.decode_attention"}
    assert "one call for siblings: q, k, v; the RMSNorm of its input is in the kernel; not begun early" in notes["fp4.linear"]
    assert "silu(gate) * up; the RMSNorm of its input is in the kernel; begins while" in notes["fp4.linear_glu"]
    assert notes["fp4.linear_epilogue"] == "in the kernel: + residual; begins while the kernel before it runs"


def test_layers_in_a_row():
    """Every layer but the first uses programmatic dependent launch, and nothing of Inductor's stands between two of them."""
    body, entries, counted, _, code = compiled(lambda: nn.Sequential(DecoderLayer(), DecoderLayer()))
    linear = [e for e in entries if e.op != "fp4.decode_attention"]
    assert [e.note.endswith("begins while the kernel before it runs") for e in linear] == [False] + [True] * 7
    assert counted["norm_linear_siblings"] == counted["norm_linear_glu"] == 2 and counted["linear_epilogue"] == 4
    assert not any("rsqrt" in source for source in triton_sources(code).values())
    names = launched(body)
    second = names.index("of_a_test", 1)
    assert names[second - 1] == "of_a_test_pointwise"


def test_more_rows_have_kernels_of_their_own_for_norms():
    _, _, counted, left, code = compiled(lambda: Two(), shape=(8, K))
    assert left == ["M is 8: row takes one, up to M = 1"]
    assert "norm_linear" not in counted
    assert any("rsqrt" in source for source in triton_sources(code).values())


class Two(nn.Module):
    """A norm and a layer behind it; ``op``: by the op itself, which no pass has written."""

    def __init__(self, op=False, computed=False):
        super().__init__()
        self.linear = FP4Linear(K, K, bias=False, dtype=BF16, device="cuda")
        self.register_buffer("w", torch.ones(K, dtype=BF16, device="cuda"))
        self.op, self.computed = op, computed

    def forward(self, x):
        w = self.w + self.w.abs() if self.computed else self.w
        if self.op:
            return fp4.norm_linear(x, w, EPS, 0.0, *self.linear.parts())
        return self.linear(normalized(x, w))


@pytest.mark.parametrize(("m", "options"), [(8, {}), (64, {}), (512, {}), (64, {"mark": lambda x: torch._dynamo.mark_dynamic(x, 0)})])
def test_where_no_kernel_takes_the_norm_the_op_costs_what_the_norm_and_the_layer_cost(m, options):
    own, entries, *_ = compiled(lambda: Two(op=True), shape=(m, K), **options)
    apart, before, *_ = compiled(lambda: Two(), shape=(m, K), **options)
    assert len(launched(own)) == len(launched(apart))
    assert [(e.op, e.decision.row.kernel) for e in entries] == [(e.op, e.decision.row.kernel) for e in before]
    assert "RMSNorm" not in entries[0].note and "fp4.norm_linear" not in own


def test_at_run_time():
    with dispatch(unproven="runtime"):
        body, [entry], *_ = compiled(lambda: Two(op=True), shape=(64, K), mark=lambda x: torch._dynamo.mark_dynamic(x, 0))
    assert entry.decision.how == "runtime"
    assert [name.partition("_fused")[0] for name in launched(body)] == ["triton_per", "linear"]


def test_a_norm_weight_that_the_graph_computes():
    """It is read with the weight, perhaps before the kernel before it has ended."""
    _, [entry], *_ = compiled(lambda: Two(op=True, computed=True), shape=(1, K))
    assert entry.note.endswith("not begun early: its weight is computed by the graph")


def test_siblings_one_by_one_share_one_norm():
    """Four global scales are more than a kernel takes."""

    def build():
        q, s = torch.ones(64, K // 2, dtype=torch.uint8, device="cuda"), torch.ones(64, K // 16, device="cuda").to(torch.float8_e4m3fn)
        g = torch.ones(4, device="cuda")
        w = torch.ones(K, dtype=BF16, device="cuda")
        return lambda x: fp4.norm_linear_siblings(x, w, EPS, 0.0, q, s, g, None, [0, 16, 16, 32, 32, 48, 48, 64])

    body, entries, *_ = compiled(build, shape=(1, K))
    assert len(entries) == 4
    assert len([name for name in launched(body) if name.startswith("triton_per")]) == 1


def test_the_code_of_a_layer_behind_a_norm():
    assert_expected_inline(
        compiled(lambda: Two(), shape=(1, K))[0],
        """\
    b0 = torch.ops.fp4_csrc.of_a_test.default(in0, in1, in2, in3, None, 90, 0, 0, 0, 0, 0, None, None, 0, in4, 1e-06, 0.0)
return (b0, )""",
    )


def test_an_activation_behind_the_layer():
    class Activated(Two):
        def forward(self, x):
            return F.silu(super().forward(x))

    body, [entry], counted, *_ = compiled(Activated, shape=(1, K))
    assert launched(body) == ["of_a_test_pointwise"] and counted == {"norm_linear": 1, "norm_linear_epilogue": 1}
    assert entry.note.startswith("the RMSNorm of its input is in the kernel; in the kernel: silu")
    for m in (8, 64):  # the op where its kernel takes no norm, against a graph that has none
        calls = [compiled(lambda op=op: Epilogue(op), shape=(m, K)) for op in (True, False)]
        assert len(launched(calls[0][0])) == len(launched(calls[1][0])) == 2
        assert [e.decision.row.kernel for e in calls[0][1]] == [e.decision.row.kernel for e in calls[1][1]]


class Epilogue(Two):
    def forward(self, x):
        if self.op:
            return fp4.norm_linear_epilogue(x, self.w, EPS, 0.0, *self.linear.parts(), None, "silu")
        return F.silu(self.linear(normalized(x, self.w)))


@pytest.mark.parametrize("name", ["norm_linear", "norm_linear_siblings", "norm_linear_glu", "norm_linear_epilogue"])
def test_compiled_on_a_cpu(name):
    """No kernel there takes a norm: the lowering's steps against the reference."""
    contract = CONTRACTS[name]
    for description, args in [case for case in contract.inputs(torch.device("cpu")) if case[1][4].numel()][::5]:
        torch._dynamo.reset()
        with torch.no_grad():
            got = torch.compile(lambda *a: contract.op(*a), fullgraph=True)(*args)
        want = contract.reference(*args)
        for a, b in zip(*([r] if isinstance(r, torch.Tensor) else r for r in (got, want)), strict=True):
            assert a.dtype == b.dtype
            if b.numel():
                error = float((a.double() - b.double()).norm() / b.double().norm())
                assert error <= contract.tolerance[b.dtype], description
