"""Generated CUDA code of one product with several global scales: one launch and nothing put together, or the operator. No GPU (fake_cuda.py)."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp4_inductor import dispatch
from fp4_inductor.formats import nvfp4
from fp4_inductor.kernels import registry, select
from fp4_inductor.lowerings import linear as lowering
from fp4_inductor.lowerings import linear_epilogue
from fp4_inductor.lowerings.journal import listen
from fp4_inductor.passes import matches, reset_matches
from lowering_tests.fake_cuda import call_body, generated_code, triton_ptx, triton_sources

BF16, FP16 = torch.bfloat16, torch.float16
fp4 = torch.ops.fp4
N, K = 1024, 512
QKV = [0, 512, 768]
FOUR = [0, 256, 512, 768]


class Merged(nn.Module):
    """A weight of several layers, as a server's loader has it."""

    def __init__(self, rows=QKV, sparse=False, then=lambda y, r: y):
        super().__init__()
        self.op, self.rows, self.then = fp4.sparse_linear if sparse else fp4.linear, rows, then
        sizes = (N, K // 4), (N, K // 8), (N, K // nvfp4.GROUP)
        codes = [torch.empty(*s, dtype=torch.uint8, device="cuda") for s in sizes[:2]] if sparse else [torch.empty(N, K // 2, dtype=torch.uint8, device="cuda")]
        for i, t in enumerate((*codes, torch.empty(*sizes[2], dtype=nvfp4.SCALE_DTYPE, device="cuda"), torch.empty(len(rows), device="cuda"))):
            self.register_buffer(f"part{i}", t)

    def forward(self, x, residual):
        return self.then(self.op(x, *self.buffers(), None, "auto", self.rows), residual)


def compiled(m, dtype=BF16, csrc=None, width=N, **model):
    """``(the wrapper's call, the code, what the journal says)``."""
    reset_matches()
    with listen() as entries:
        code = generated_code(lambda: Merged(**model), [((m, K), dtype), ((m, width), dtype)], **({} if csrc is None else {"csrc": csrc}))[0]
    return call_body(code), code, entries


def launches(body):
    return re.findall(r"(triton_(?:poi|tem|per|red)\w+\.run|fp4_csrc\.\w+\.default|torch\.ops\.fp4\.\w+\.default|extern_kernels\.\w+)\(", body)


@pytest.mark.parametrize(("m", "sparse"), [(1, False), (40, False), (1, True), (40, True)])
def test_a_triton_kernel_takes_them_all(m, sparse):
    body, code, entries = compiled(m, sparse=sparse)
    assert [(e.n, e.note) for e in entries] == [(N, "3 global scales")]
    assert len(launches(body)) == 1 and launches(body)[0].startswith("triton_tem")
    (source,) = triton_sources(code).values()
    assert re.findall(r"B[12] : tl.constexpr = (\d+)", source) == ["512", "768"]
    assert len(triton_ptx(code)) == 1


@pytest.mark.parametrize(
    ("m", "sparse", "kernel"),
    [
        (8, False, "linear_table"), (48, False, "linear_wide"), (1024, False, "linear_wide_fp8"),
        (8, True, "sparse_linear_table_scales"), (48, True, "sparse_linear_wide_scales"), (1024, True, "sparse_linear_wide_fp8"),
    ],
)  # fmt: skip
def test_a_cuda_kernel_takes_them_all(m, sparse, kernel):
    body, _, entries = compiled(m, csrc="", sparse=sparse)
    assert [e.note.partition(";")[0] for e in entries] == ["3 global scales"]
    (arguments,) = re.findall(rf"fp4_csrc\.{kernel}\.default\((.*?)\)\n", body)
    assert ", 512, 768" in arguments
    assert not re.search(r"\bcat\b|poi_fused_cat", body)


def test_one_scale_is_the_library_that_takes_one():
    """An old call and one whose rows are one layer's: the same code as without ``rows``."""
    for sparse in (False, True):
        body, _, entries = compiled(8, csrc="", sparse=sparse, rows=[0])
        (arguments,) = re.findall(r"fp4_csrc\.(?:sparse_)?linear_table\.default\((.*?)\)\n", body)
        assert arguments.count("512, 768") == 0 and "scales" not in body
        assert "global scales" not in entries[0].note


@pytest.mark.parametrize("sparse", [False, True])
def test_many_rows_have_one_product(sparse):
    """FP8: the scales of rows go with the product; float16: into the transient weight."""
    body, _, _ = compiled(9000, sparse=sparse)
    assert launches(body).count("extern_kernels._scaled_mm") == 1
    assert len([name for name in launches(body) if "dequantize" in name]) == 1
    body, _, _ = compiled(3000, FP16, sparse=sparse)
    assert [name for name in launches(body) if name.startswith("extern_kernels.")] == ["extern_kernels.mm"]
    assert len([name for name in launches(body) if "dequantize" in name]) == 1


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("m", [1, 8, 9000])
def test_more_scales_than_a_kernel_takes_are_left_to_the_operator(m, sparse):
    body, _, entries = compiled(m, csrc="", rows=FOUR, sparse=sparse)
    assert [e.note for e in entries] == ["4 global scales: 2 calls, whose results are put together"]
    assert launches(body) == [f"torch.ops.fp4.{'sparse_' * sparse}linear.default"]
    assert "[0, 256, 512, 768])" in body


def test_a_number_of_rows_that_is_not_known_is_left_to_the_operator():
    for sparse in (False, True):
        with dispatch(unproven="runtime"), listen() as entries:
            code = generated_code(
                lambda sparse=sparse: Merged(sparse=sparse), [((40, K), BF16), ((40, N), BF16)], mark=lambda x, r: torch._dynamo.mark_dynamic(x, 0)
            )[0]
        assert launches(call_body(code)) == [f"torch.ops.fp4.{'sparse_' * sparse}linear.default"]
        assert "[0, 512, 768])" in call_body(code)
        assert {e.note for e in entries} == {"3 global scales"}


def test_a_kernel_for_one_scale_is_called_for_each(monkeypatch):
    rows = tuple(replace(kernel, one_scale=True) if kernel.name == "cuda_table" else kernel for kernel in registry.kernels())
    monkeypatch.setattr(lowering, "plan", lambda call, config: select.plan(call, config, rows))
    body, _, entries = compiled(8, csrc="")
    assert [e.note for e in entries] == ["3 global scales: a call each, put together"]
    assert launches(body) == ["torch.ops.fp4.linear.default"]


def test_gate_and_up_are_one_kernel_with_their_product():
    def glu(y, residual):
        gate, up = y.chunk(2, -1)
        return F.silu(gate) * up

    body, _, entries = compiled(8, csrc="", rows=[0, N // 2], then=glu)
    assert matches() == {"linear_glu": 1}
    assert [(e.op, e.decision.row.kernel) for e in entries] == [("fp4.linear_glu", "cuda_table_glu")]
    assert launches(body) == ["fp4_csrc.linear_table_glu.default"]
    assert re.findall(r"linear_table_glu\.default\(.*?, 90(.*?)\)", body) == [f", 0, 0, 0, 0, {N // 2}, 0, 1"]
    compiled(8, csrc="", rows=QKV, then=glu)  # other members than the halves
    assert matches() == {}


def test_what_follows_is_in_the_kernel():
    body, _, entries = compiled(8, csrc="", then=lambda y, r: y + r)
    assert matches() == {"linear_epilogue": 1}
    assert [e.note.partition("; not begun early")[0] for e in entries] == ["3 global scales; in the kernel: + residual"]
    (arguments,) = re.findall(r"linear_table_pointwise\.default\(.*?, 90(.*?)\)\n", body)
    assert ", 512, 768, " in arguments
    body, _, entries = compiled(8, csrc="", rows=FOUR, then=lambda y, r: y + r)
    assert matches() == {} and launches(body)[0] == "torch.ops.fp4.linear.default"


def test_an_epilogue_of_more_scales_than_a_kernel_takes(monkeypatch):
    """Written by hand: the lowering takes it apart."""
    monkeypatch.setattr(linear_epilogue, "MANY_ROWS", 1 << 30)

    class Written(Merged):
        def forward(self, x, residual):
            return fp4.linear_epilogue(x, *self.buffers(), None, "silu", None, residual, "auto", self.rows)

    code = generated_code(lambda: Written(FOUR), [((8, K), BF16), ((8, N), BF16)], csrc="")[0]
    names = launches(call_body(code))
    assert names[0] == "torch.ops.fp4.linear.default" and len(names) == 2 and names[1].startswith("triton_poi")
