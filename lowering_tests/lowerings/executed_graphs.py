"""Run by test_executed.py in a process of its own: compiled models for CUDA, generated, then run on a CPU (executed.py).

Prints one JSON object per graph: ``{"case", "error", "bound", "launched"}``. float16 nearly throughout: bfloat16 products are
wrong in Triton's interpreter. ``error``: distance of the generated code's outputs from those of the graph's operators on the CPU.
"""

from __future__ import annotations

import json
from unittest import mock

from lowering_tests import interpreter  # noqa: F401  (before anything imports Triton)

import torch  # isort: skip
import torch._dynamo as dynamo
import torch.nn.functional as F
from torch import nn

from fp4_inductor import FP4Linear, Sparse24Linear, dispatch
from fp4_inductor.formats import sparse24
from fp4_inductor.kernels import forms
from fp4_inductor.kernels.linear.mid import MidConfig
from fp4_inductor.kernels.linear_w4a4 import block_scaled
from fp4_inductor.modules import FP8Linear
from fp4_inductor.ops.linear_glu import ACTIVATIONS
from lowering_tests.executed import execute
from lowering_tests.lowerings.decoder_block import Block

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
K, N, KV, INNER = 96, 80, 32, 112


def check(case: str, build, *shapes, bound=2e-3, **options) -> None:
    done = execute(build, [s if isinstance(s[0], tuple) else (s, FP16) for s in shapes], **options)
    error = max(
        ((y.double() - w.double()).norm() / w.double().norm().clamp_min(1e-300)).item() if y.shape == w.shape else float("inf")
        for y, w in zip(done.outputs, done.wanted, strict=True)
    )
    launched = [name.removeprefix("triton_").split("_")[0] for name in done.launched]  # tem: a template; poi, per, red: torch's own
    print(json.dumps({"case": case, "error": error if error == error else 1e30, "bound": bound, "launched": launched}), flush=True)


def dynamic(x, *rest):
    dynamo.mark_dynamic(x, 0)


def layer(k=K, n=N, kind=FP4Linear, **options):
    return kind(k, n, device="cuda", **{"dtype": FP16, **options})


def around(f, **options):
    def build():
        linear = layer(**options)
        return lambda *inputs: f(linear, *inputs)

    return build


class Small(Block):
    K, N, KV, INNER = K, N, KV, INNER
    dtype = FP16


class GateUp(nn.Module):
    def __init__(self, act, bias):
        super().__init__()
        self.gate_up, self.act = layer(n=2 * INNER, bias=bias), act

    def forward(self, x, residual):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.act(gate) * up + residual


def legal_meta(fake):
    """Random 2:4 metadata for the bytes that are one eighth of K."""
    if fake.dtype != torch.uint8 or fake.shape[-1] != K // 8:
        return None
    return sparse24.pack_meta(torch.tensor(sparse24.NIBBLES, dtype=torch.uint8)[torch.randint(0, 6, (fake.shape[0], K // 4))])


def dense_cases() -> None:
    shapes = ((1, N, K), (1, 33, 48), (2, N, 16), (4, 7, 1040), (3, N, K), (40, N, K), (17, 33, 48), (70, 130, 272))
    for i, (m, n, k) in enumerate(shapes):
        check(f"dense M{m} N{n} K{k}", around(lambda f, x: f(x), n=n, k=k, bias=i % 2 == 0), (m, k))
    check("dense bf16 M1", around(lambda f, x: f(x), dtype=BF16, bias=True), ((1, K), BF16), bound=2e-2)
    check("dense [2, 3, K]", around(lambda f, x: f(x), bias=True), (2, 3, K))
    check("dense [K]", around(lambda f, x: f(x)), (K,))
    for m in (3, 40):
        check(f"dynamic M{m}", around(lambda f, x: torch.relu(f(x)), bias=True), (m, K), mark=dynamic)
        check(f"dynamic [M{m}, 2, K]", around(lambda f, x: f(x)), (m, 2, K), mark=dynamic)
    check("transposed input", around(lambda f, x: f(x.t())), (K, 5))
    check("a slice", around(lambda f, x: f(x.narrow(1, 3, K))), (6, K + 8))
    check("large bf16 M2100", around(lambda f, x: f(x), prefill="bf16", bias=True), (2100, K))


def epilogue_cases() -> None:
    for m in (1, 4, 40):
        check(f"silu * up M{m}", around(lambda f, x, up: F.silu(f(x)) * up), (m, K), (m, N))
        check(f"residual M{m}", around(lambda f, x, r: f(x) + r, bias=True), (m, K), (m, N))
    check("relu M1", around(lambda f, x: torch.relu(f(x)), bias=True), (1, K))
    check("norm before and behind M3", around(lambda f, x: F.rms_norm(f(F.rms_norm(x, (K,))), (N,))), (3, K))
    check("float32 sum M40", around(lambda f, x: f(x).float().sum(-1)), (40, K))


def sibling_cases() -> None:
    for m, shared in ((1, False), (1, True), (2, False), (4, False), (40, False), (40, True)):
        check(f"siblings M{m} shared {shared}", lambda shared=shared: Small(shared=shared), (m, K))
    check("siblings dynamic M3", Small, (3, K), mark=dynamic)


def glu_cases() -> None:
    with dispatch(candidates=("triton_gemv_glu",)):
        for i, name in enumerate(sorted(set(ACTIVATIONS) - {"gelu_tanh"})):  # tanh is inline assembly on CUDA
            check(f"glu {name}", lambda name=name, i=i: GateUp(ACTIVATIONS[name], i != 1), (1, K), (1, INNER))
        check("glu of siblings", Small, (1, K))


def sparse_cases() -> None:
    for m, bias in ((1, True), (3, False), (40, True)):
        check(f"sparse M{m}", around(lambda f, x: torch.relu(f(x)), kind=Sparse24Linear, bias=bias), (m, K), values=legal_meta)
    check("sparse dynamic M5", around(lambda f, x: f(x), kind=Sparse24Linear), (5, K), mark=dynamic, values=legal_meta)


class Merged(nn.Module):
    """One weight of three layers with a global scale each."""

    def __init__(self, rows, sparse=False):
        super().__init__()
        linear = layer(kind=Sparse24Linear if sparse else FP4Linear)
        self.op, self.rows = torch.ops.fp4.sparse_linear if sparse else torch.ops.fp4.linear, rows
        for i, t in enumerate(linear.weight.parts()[:-1]):
            self.register_buffer(f"part{i}", t)
        self.register_buffer("scales", torch.empty(len(rows), device="cuda"))

    def forward(self, x):
        return torch.relu(self.op(x, *self.buffers(), None, "auto", self.rows))


def scales_cases() -> None:
    for m, rows, sparse in ((1, [0, 32, 48], False), (3, [0, 7], False), (40, [0, 79], False), (1, [0, 33, 34], True), (40, [0, 16, 79], True)):
        check(f"scales M{m} {rows} sparse {sparse}", lambda rows=rows, sparse=sparse: Merged(rows, sparse), (m, K), values=legal_meta)


def head_cases() -> None:
    check("fp8 head M1", lambda: FP8Linear(K, 130, dtype=FP16, device="cuda"), (1, K))


def w4a4_cases() -> None:
    """The product decoded by hand (see kernels/interpreted_w4a4.py); rounding, loads, tails, epilogues and siblings are those of the real one."""
    options = dict(prefill="nvfp4", k=80, n=33)
    with dispatch(thresholds={"gemv": 1, "mid": 2, "cpu": 2}):  # few rows: the interpreter takes a maximum element by element
        check("w4a4 M18", around(lambda f, x: torch.relu(f(x)), bias=True, **options), (18, 80), cc=(12, 0))
        check("w4a4 [2, 3, K] behind a norm", around(lambda f, x: f(F.rms_norm(x, (80,))), **options), (2, 3, 80), cc=(10, 0))
        check("w4a4 dynamic M5", around(lambda f, x: f(x), **options), (5, 80), mark=dynamic, cc=(12, 0))
        # silu * up is rounded by one kernel less than on the CPU: a bit there may move a code in front of down
        check("w4a4 siblings", lambda: Small("nvfp4"), (5, K), cc=(12, 0), bound=4e-2)
        check("w4a4 by hand", lambda: Small("nvfp4"), (5, K), bound=4e-2)  # no FP4 tensor cores


def main() -> None:
    torch.manual_seed(0)
    real = block_scaled.FORM.constants
    mock.patch.object(block_scaled.FORM, "constants", lambda *a: {**real(*a), "NATIVE": False}).start()
    mock.patch.object(block_scaled.FORM, "tile", return_value=MidConfig(16, 32, 64, 4, 2)).start()
    mock.patch.object(forms, "ASM", False).start()
    for cases in (dense_cases, epilogue_cases, sibling_cases, glu_cases, sparse_cases, scales_cases, head_cases, w4a4_cases):
        cases()


if __name__ == "__main__":
    main()
