"""Write which kernel serves which M into fp4_inductor/kernels/README.md: ``make readme``. lowering_tests/test_docs.py compares.

The choice is asked, not read: for layers of real models on each architecture, and for each kernel where it runs, with what status and why.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from fp4_inductor.config import DispatchConfig
from fp4_inductor.kernels import registry
from fp4_inductor.kernels.kernel import Kernel, On
from fp4_inductor.kernels.select import Call, plan

README = Path(__file__).resolve().parent.parent / "fp4_inductor" / "kernels" / "README.md"
BEGIN, END = "<!-- choice of kernels: begin (make readme) -->", "<!-- choice of kernels: end -->"
NAMES = {"sparse_moe": "`fp4.moe` with 2:4-sparse experts"}
ARCHS = (90, 80, 89, 100)
# N, K of layers, by op; of experts the layer's width and the hidden size, with E.
QKV, OUT, GATE_UP, DOWN = (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)
SHAPES: dict[str, tuple[tuple[str, int, int, int], ...]] = {
    "linear": (
        ("Llama 3 8B: q, k, v", *QKV, 1), ("o", *OUT, 1), ("gate, up", *GATE_UP, 1), ("down", *DOWN, 1), ("gpt-oss: q, k, v", 5120, 2880, 1),
        ("70B: gate, up", 57344, 8192, 1), ("70B: o", 8192, 8192, 1),
    ),
    "linear_glu": (("Llama 3 8B", *GATE_UP, 1), ("Qwen3 0.6B", 6144, 1024, 1)),
    "linear_epilogue": (("Llama 3 8B: o", *OUT, 1), ("Qwen3 0.6B: o", 1024, 2048, 1)),
    "linear_chain": (("Llama 3 8B: o", *OUT, 1), ("gate, up", *GATE_UP, 1)),
    "linear_residual_squares": (("Llama 3 8B: o", *OUT, 1), ("down", *DOWN, 1)),
    "rms_scaled_linear": (("Llama 3 8B: q, k, v", *QKV, 1),),
    "rms_scaled_linear_glu": (("Llama 3 8B: gate, up", *GATE_UP, 1),),
    "linear_fp8": (("a head", 128256, 4096, 1),),
    "linear_w4a4": (("Llama 3 8B: down", *DOWN, 1),),
    "sparse_linear": (("Llama 3 8B: q, k, v", *QKV, 1), ("gate, up", *GATE_UP, 1), ("Qwen3 0.6B: o", 1024, 2048, 1)),
    "moe": (("Qwen3 30B-A3B", 2048, 2048, 128), ("Mixtral 8x7B", 4096, 4096, 8), ("gpt-oss-20b", 2880, 2880, 32)),
    "sparse_moe": (("Qwen3 30B-A3B", 2048, 2048, 128), ("Mixtral 8x7B", 4096, 4096, 8)),
    "decode_attention": (("32 heads of 128", 32, 128, 1),),
    "cached_attention": (("32 heads of 128", 32, 128, 1),),
    "paged_attention": (("32 heads of 128", 32, 128, 1),),
    "router": (("Qwen3 30B-A3B", 128, 2048, 1), ("gpt-oss-20b", 32, 2880, 1)),
}  # fmt: skip


def sm(on: On) -> str:
    gpus = f"sm_{max(on.first, 80)} - {on.last}" if on.first < on.last else f"sm_{on.last}"
    return "CPU" if on.last == 0 else f"CPU, {gpus}" if on.first == 0 else gpus


def served(call: Call) -> str:
    """The choice for ``call``: each kernel with the largest M that it serves."""
    return ", ".join(f"{span.kernel} to {span.max_m:,}" if span.max_m else span.kernel for span in plan(call, DispatchConfig()).rows)


def choices(op: str) -> Iterator[str]:
    yield "| GPU | layers (N, K) | bfloat16, `prefill` auto: kernel to the largest M |"
    yield "|---|---|---|"
    for arch in ARCHS:
        alike: dict[str, list[str]] = {}  # layers that are served alike are one line
        for name, n, k, experts in SHAPES[op]:
            alike.setdefault(served(Call(op, arch, torch.bfloat16, n, k, experts=experts)), []).append(f"{name} ({n:,}, {k:,})")
        for choice, layers in alike.items():
            yield f"| sm_{arch} | {'; '.join(layers)} | {choice} |"


def kernels(op: str) -> Iterator[str]:
    yield "| kernel | needs | on | status | why |"
    yield "|---|---|---|---|---|"
    for kernel in registry.kernels(op):
        for on in kernel.on:
            yield f"| {kernel.name} | {needs(kernel)} | {sm(on)} | {on.status} | {on.why} |"


def needs(kernel: Kernel) -> str:
    """What a call has to be."""
    dtypes = " or ".join(str(d).removeprefix("torch.") for d in kernel.dtypes)
    what = [
        "any dtype" if len(kernel.dtypes) == 3 else dtypes if len(kernel.dtypes) == 1 else "",
        f"`prefill` {' or '.join(kernel.prefill)}" if len(kernel.prefill) < 3 else "",
        f"K % {kernel.k_multiple} = 0" if kernel.k_multiple > 16 else "",
        f"K = {', '.join(map(str, kernel.only_k))}" if kernel.only_k else "",
        f"N % {kernel.n_multiple} = 0" if kernel.n_multiple > 1 else "",
        f"N >= {kernel.least_n}" if kernel.least_n > 1 else "",
        "plain" if kernel.plain else "",
        "nvcc" if kernel.csrc else "",
    ]
    return ", ".join(filter(None, what))


def block() -> str:
    parts = []
    for op in SHAPES:
        parts.append("\n".join((f"### {NAMES.get(op, f'`fp4.{op}`')}", "", *choices(op), "", *kernels(op))))
    return "\n".join((BEGIN, "\n\n".join(parts), END))


def main() -> None:
    text = README.read_text()
    README.write_text(f"{text.split(BEGIN)[0]}{block()}{text.split(END)[1]}")


if __name__ == "__main__":
    main()
