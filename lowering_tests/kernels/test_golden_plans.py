"""Which kernel serves which M, for every op and architecture over a grid of calls: golden_plans.txt.

A change of ``kernels/choose`` that is meant changes that file: ``python lowering_tests/kernels/test_golden_plans.py`` writes it, and the
difference says which calls got another kernel.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

from fp4_inductor.config import DispatchConfig
from fp4_inductor.errors import KernelError
from fp4_inductor.kernels.select import Call, plan

GOLDEN = Path(__file__).with_name("golden_plans.txt")
ARCHS = (0, 80, 89, 90, 100, 120, 121)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PREFILL = ("auto", "fp8", "bf16", "nvfp4")
N = (8, 100, 1024, 4096, 8192, 14336, 128256)
K = (16, 48, 64, 1088, 2880, 4096, 14336)
EXPERTS = ((2048, 768), (2048, 2048), (4096, 14336), (2880, 2880), (24, 4096), (100, 512))


def calls() -> Iterator[Call]:
    ops = ("linear", "linear_glu", "linear_epilogue", "linear_chain", "linear_fp8", "linear_w4a4", "sparse_linear")
    for op, arch, dtype, n, k, prefill, csrc in itertools.product(ops, ARCHS, DTYPES, N, K, PREFILL, ("", "no nvcc")):
        yield Call(op, arch, dtype, n, k, prefill, csrc)
    for op, arch, n, k, csrc in itertools.product(("linear_residual_squares", "rms_scaled_linear", "rms_scaled_linear_glu"), ARCHS, N, K, ("", "no nvcc")):
        yield Call(op, arch, torch.bfloat16, n, k, csrc=csrc)
    for op, arch, dtype, (n, k), prefill, csrc, experts, form in itertools.product(
        ("moe", "sparse_moe"), ARCHS, DTYPES, EXPERTS, PREFILL, ("", "no nvcc"), (1, 8, 128), ((), ("no gate",))
    ):
        yield Call(op, arch, dtype, n, k, prefill, csrc, experts, form=form)
    for arch, dtype, k in itertools.product(ARCHS, DTYPES, (60, 64, 128, 256)):
        yield Call("decode_attention", arch, dtype, 32, k)
        yield Call("cached_attention", arch, dtype, 32, k)
    for arch, dtype, experts, k, csrc in itertools.product(ARCHS, DTYPES, (8, 128, 512), (40, 2048, 16384), ("", "no nvcc")):
        yield Call("router", arch, dtype, experts, k, csrc=csrc)
    for dtype, scales in itertools.product(DTYPES, (1, 2)):
        yield Call("linear_w4a4", 121, dtype, 4096, 4096, triton=(3, 6), scales=scales)
    for op, arch, n, k, csrc in itertools.product(("linear", "linear_glu", "linear_epilogue"), ARCHS, N, K, ("", "no nvcc")):
        yield Call(op, arch, torch.bfloat16, n, k, csrc=csrc, eager=True)


def text() -> str:
    """For each op and architecture, then for eager calls: a hash of all its plans in order, and each distinct plan with the number of calls that have it."""
    found: dict[str, list[str]] = defaultdict(list)
    for call in calls():
        try:
            spans = plan(call, DispatchConfig()).rows
        except KernelError:
            spans = ()
        found[f"{call.op} {call.arch}{' eager' if call.eager else ''}"].append(", ".join(f"{span.max_m or 'all'} {span.kernel}" for span in spans) or "none")
    lines = []
    for calls_of, plans in found.items():
        lines.append(f"{calls_of}: {hashlib.sha256('|'.join(plans).encode()).hexdigest()[:16]}")
        lines += [f"    {count:5d} x {spans}" for spans, count in sorted(Counter(plans).items())]
    return "\n".join(lines) + "\n"


def test_no_call_gets_another_kernel_unnoticed():
    assert text() == GOLDEN.read_text()


if __name__ == "__main__":
    GOLDEN.write_text(text())
