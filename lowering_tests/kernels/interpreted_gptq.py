"""Run by test_gptq_kernels.py in a process of its own: GPTQ's loops over columns in Triton's interpreter, on CPU tensors, against their definition.

Prints as ``interpreted.py``; an error is a number of bytes that differ.
"""

from __future__ import annotations

import contextlib
from unittest import mock

from lowering_tests.kernels import interpreted  # switches the interpreter on

import torch  # isort: skip

from fp4_inductor.formats import gptq, sparse24
from fp4_inductor.kernels.quantize import gpu
from lowering_tests.gptq_cases import hessian, weights


def differ(got, want) -> float:
    return float(sum((a.reshape(-1).view(torch.uint8) != b.reshape(-1).view(torch.uint8)).sum() for a, b in zip(got, want, strict=True)))


def check(case: str, w, h, g=None) -> None:
    interpreted.report(case, differ(gptq.quantize(w, h, g, gpu.PANELS), gptq.quantize(w, h, g)), 0.0)


def dense() -> None:
    n, k = 9, 48
    h, values = hessian(k), weights(n, k)
    for name, w in values.items():
        check(f"dense {name}", w, h)
    w = values["random"]
    check("dense bfloat16", w.bfloat16(), h)
    check("dense a given global scale", w, h, torch.tensor(1e-3))
    check("dense no input", w, torch.zeros(k, k))
    w[0], w[:, :16] = 0, 0
    check("dense zero row and blocks", w, h)
    check("dense two panels", torch.randn(5, 144), hessian(144))


def sparse() -> None:
    n, k = 5, 32
    h, w = hessian(k), torch.randn(n, k)
    w[0] = 0
    start = sparse24.quantize_sparse24(w, sparse24.magnitude_mask(w))
    interpreted.report("sparse", differ(gptq.quantize_sparse24(w, h, start, gpu.PANELS), gptq.quantize_sparse24(w, h, start)), 0.0)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with mock.patch.object(torch.cuda, "device", contextlib.nullcontext), mock.patch.object(gptq, "SWEEPS", 2):
        dense()
        sparse()
