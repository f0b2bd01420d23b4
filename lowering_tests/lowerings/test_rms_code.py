"""Generated CUDA code of 2 to 32 rows whose RMSNorms are halves of the products around them. No GPU (fake_cuda.py)."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp4_inductor import FP4Linear, compile_range, dispatch
from fp4_inductor.lowerings.journal import listen
from fp4_inductor.modules import pack_siblings
from fp4_inductor.passes import matches, missed, reset_matches
from lowering_tests import norm_kernels
from lowering_tests.fake_cuda import call_body, generated_code, held, triton_sources
from lowering_tests.lowerings.test_norm_code import launched, normalized

BF16 = torch.bfloat16
K, INNER, EPS = 1024, 1536, 1e-6
fp4 = torch.ops.fp4


class Layer(nn.Module):
    """A decoder layer with a pointwise stand-in for attention, which is a kernel of Inductor's."""

    def __init__(self, offset=0.0):
        super().__init__()
        options = dict(bias=False, dtype=BF16, device="cuda")
        for name in ("first", "second"):
            self.register_buffer(name, torch.ones(K, dtype=BF16, device="cuda"))
        self.q, self.k, self.v, self.o = (FP4Linear(K, K, **options) for _ in range(4))
        self.gate, self.up, self.down = FP4Linear(K, INNER, **options), FP4Linear(K, INNER, **options), FP4Linear(INNER, K, **options)
        self.offset = offset
        for siblings in ([self.q, self.k, self.v], [self.gate, self.up]):
            pack_siblings(siblings)

    def forward(self, x):
        h = normalized(x, self.first, self.offset)
        x = x + self.o(torch.tanh(self.q(h) * self.k(h)) + self.v(h))
        h = normalized(x, self.second, self.offset)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


@pytest.fixture(autouse=True)
def _shared_scales(monkeypatch):
    from fp4_inductor.modules import SiblingWeight

    monkeypatch.setattr(SiblingWeight, "refresh", lambda self: setattr(self, "shared", False))  # values of fake tensors cannot be compared


def compiled(build, shapes=((8, K),), csrc="", **options):
    """``(the wrapper's call, journal, matches, what was left apart, the whole code)``"""
    reset_matches()
    with dispatch(candidates=norm_kernels.switched_on()), listen() as entries, missed.listen() as left:
        code = generated_code(build, [(shape, BF16) for shape in shapes], csrc=csrc, **options)[0]
    return call_body(code), entries, matches(), [m.reason for m in left if m.what == missed.APART], code


def test_layers():
    """Four launches a layer and the stand-in: the norms between two products are none. The first one's input is that of the graph."""
    body, entries, counted, left, code = compiled(lambda: nn.Sequential(Layer(), Layer()), ((4, 1, K),))
    assert [re.sub(r"triton_\w+", "triton", name) for name in launched(body)] == [
        "triton", "linear_table", "triton", "linear_table_pointwise_squares", "linear_table_glu_rms", "linear_table_pointwise_squares",
        "linear_table_rms", "triton", "linear_table_pointwise_squares", "linear_table_glu_rms", "linear_table_pointwise",
    ]  # fmt: skip
    names = ("linear_residual_squares", "rms_scaled_linear_glu", "rms_scaled_linear_siblings")
    assert [counted[name] for name in names] == [3, 2, 1] and len(left) == 1
    assert sum("libdevice.rsqrt" in source for source in triton_sources(code).values()) == 1
    notes = {e.decision.row.kernel: e.note for e in entries}
    early = "begins while the kernel before it runs"
    assert notes["cuda_table_squares"] == f"in the kernel: + residual, and the squares of its RMSNorm; {early}"
    assert notes["cuda_table_glu_rms"] == f"one call for siblings: gate, up; silu(gate) * up; it scales its sums by the RMSNorm of its input; {early}"
    assert notes["cuda_table_rms"] == f"one call for siblings: q, k, v; it scales its sums by the RMSNorm of its input; {early}"
    assert [e.module for e in entries if e.decision.row.kernel == "cuda_table_squares"] == ["0.o", "0.down", "1.o"]


def test_the_calls():
    body, *_ = compiled(lambda: nn.Sequential(Layer(1.0), Layer(1.0)))
    calls = dict(re.findall(r"fp4_csrc\.(linear_table\w*)\.default\(.*?, 90, (.*?)\)\n", body))
    tile = "0, 0, 0, 0"
    assert re.fullmatch(rf"{tile}, 0, 0, 0, None, b\d+, 1, in\d+, 1.0", calls["linear_table_pointwise_squares"])
    assert re.fullmatch(rf"{tile}, {INNER}, 0, 1, None, None, 1, b\d+, 1e-06", calls["linear_table_glu_rms"])
    assert re.fullmatch(rf"{tile}, {K}, {2 * K}, 0, None, None, 1, b\d+, 1e-06", calls["linear_table_rms"])


def test_a_range_of_rows():
    """One graph, which says which M it is for."""
    with compile_range(2, 32):
        body, _, counted, left, code = compiled(lambda: nn.Sequential(Layer(), Layer()), ((5, K),), mark=lambda x: torch._dynamo.mark_dynamic(x, 0))
    assert counted["linear_residual_squares"] == 3 and len(left) == 1 and "linear_table_glu_rms" in body
    assert {condition for condition, _ in held(code)} == {"s0 < 2 or s0 > 32"}


def test_a_guard_of_the_pass():
    """Which proves M to every lowering, and is called a guard all the same."""
    _, entries, counted, _, _ = compiled(lambda: nn.Sequential(Layer(), Layer()), ((8, K),), mark=lambda x: torch._dynamo.mark_dynamic(x, 0))
    assert counted["linear_residual_squares"] == 3 and {e.decision.how for e in entries} == {"guard"}


class Halves(nn.Module):
    """The ops by themselves, which no pass has written."""

    def __init__(self):
        super().__init__()
        self.o, self.gate_up, self.q = (FP4Linear(K, n, bias=False, dtype=BF16, device="cuda") for n in (K, 2 * INNER, K))
        self.register_buffer("w", torch.ones(K, dtype=BF16, device="cuda"))

    def forward(self, x):
        y, z, squares = fp4.linear_residual_squares(x, *self.o.parts(), None, x, self.w, 0.0)
        glu = fp4.rms_scaled_linear_glu(z, squares, EPS, *self.gate_up.parts())
        q, s, g = self.q.parts()
        return y, glu, fp4.rms_scaled_linear(z, squares, EPS, q, s, g), *fp4.rms_scaled_linear_siblings(z, squares, EPS, q, s, g, None, [0, 16, 32, K])


@pytest.mark.parametrize(("m", "options"), [(1, {}), (0, {}), (64, {"mark": lambda x: torch._dynamo.mark_dynamic(x, 0)})], ids=["one", "none", "dynamic"])
def test_rows_that_no_kernel_takes(m, options):
    """The products by their own kernels, plain operations around them."""
    body, entries, *_ = compiled(Halves, ((m, K),), **options)
    assert not re.search(r"linear_table_\w*(squares|rms)|fp4\.(rms|linear_residual)", body)
    assert m == 0 or len(entries) == 4


def test_without_nvcc():
    """Neither the pass nor a lowering takes a library that is not there."""
    for build in (Layer, Halves):
        body, entries, counted, *_ = compiled(build, csrc="nvcc is not installed")
        assert "linear_residual_squares" not in counted and "fp4_csrc" not in body and not any(e.decision.row.csrc for e in entries)


def test_at_run_time():
    with dispatch(unproven="runtime"):
        body, entries, *_ = compiled(Halves, ((8, K),), mark=lambda x: torch._dynamo.mark_dynamic(x, 0))
    assert {e.decision.how for e in entries} == {"runtime"} and "fp4_csrc" not in body


def test_a_guard():
    """Written by hand, M is guarded as for every other op."""
    _, entries, *_ = compiled(Halves, ((8, K),), mark=lambda x: torch._dynamo.mark_dynamic(x, 0))
    assert sorted(e.decision.row.kernel for e in entries) == ["cuda_table_glu_rms", "cuda_table_rms", "cuda_table_rms", "cuda_table_squares"]
    assert {e.decision.how for e in entries} == {"guard"}
