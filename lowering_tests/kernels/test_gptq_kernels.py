"""GPTQ's loops over columns on a GPU, without one: their bits in Triton's interpreter, and what they compile to."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from fp4_inductor.formats import gptq as definition
from fp4_inductor.kernels.quantize import gptq, gpu
from fp4_inductor.kernels.quantize.triton_gptq import refine_panel, round_panel
from lowering_tests.kernels import aot
from lowering_tests.own_process import cases_of

ARGUMENTS = {
    round_panel: {"W": "*fp32", "U": "*fp32", "G": "*fp32", "KEEP": "*u8", "Q": "*fp32", "ERROR": "*fp32", "CODES": "*u8"},
    refine_panel: {"PULL": "*fp32", "Q": "*fp32", "CODES": "*u8", "H": "*fp32", "G": "*fp32", "KEEP": "*u8", "CHANGE": "*fp32"},
}
CONSTANTS = {
    round_panel: {"ROWS": gpu.ROUND_ROWS},
    refine_panel: {"ROWS": gpu.REFINE_ROWS, "PASSES": definition.PASSES},
}


def test_in_the_interpreter():
    cases = cases_of(Path(__file__).with_name("interpreted_gptq.py"))
    assert Counter(c["case"].split()[0] for c in cases) == {"dense": 10, "sparse": 1}


@pytest.mark.parametrize("kernel", ARGUMENTS, ids=["round", "refine"])
@pytest.mark.parametrize(("cc", "kept"), [(80, False), pytest.param(90, False, marks=pytest.mark.slow), (90, True), (120, True)])
def test_compiled(kernel, cc, kept):
    pointers = ARGUMENTS[kernel]
    signature = {**pointers, "N": "i32", "WIDTH": "i32", **({"GAIN": "fp32"} if kernel is refine_panel else {})}
    done = aot.compile_kernel(kernel, signature, {**CONSTANTS[kernel], "KEPT": kept}, cc, divisible=(*pointers, "WIDTH"), **gpu.OPTIONS)
    assert done.spills == 0
    assert done.registers <= 168, "six programs of two warps on a multiprocessor"
    assert "fma.rn.f32" not in done.ptx, "a product and a difference are rounded each by itself"
    assert "div.full.f32" not in done.ptx, "divided, not approximated"


def test_where_each_runs():
    class Weight:
        device = torch.device("cuda")

    assert gptq._panels(Weight()) is gpu.PANELS  # type: ignore[arg-type]
    assert gptq._panels(torch.empty(1, 16)).rounded is gptq._rounded
    assert gptq._panels(torch.empty(1, 16, device="meta")) is definition.TORCH
