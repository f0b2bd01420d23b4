"""Products of one row that read each other's results, between two attentions over a KVCache, become one fp4.linear_chain.

Graphs on the CPU: the plan of a GPU is pretended (norm_kernels.py), and the op computes its products one by one.
"""

from __future__ import annotations

import re

import pytest
import torch

import fp4_inductor
from fp4_inductor import KVCache, dispatch
from fp4_inductor.passes.missed import UNCHAINED, listen
from lowering_tests import norm_kernels
from lowering_tests.models.conftest import build

BF16 = torch.bfloat16
KERNEL = "cuda_gemv_chain"
ON = dict(candidates=(KERNEL,))


def decode_step(family):
    """``step(ids, cache)`` of a quantized model, and what makes its cache."""
    model = fp4_inductor.quantize_model(build(family, BF16), progress=False)
    return lambda ids, cache: model(input_ids=ids, past_key_values=cache).logits, lambda: KVCache(model, 32, 1)


@pytest.fixture
def chained(compiled):
    """``chained(step, *args, **dispatch)``: compiled for the pretended GPU; what was compiled, and why products were left apart."""

    def run(step, *args, **options):
        with norm_kernels.on_a_cpu(), dispatch(**ON | options), listen() as left:
            c = compiled(step, *args)
        return c, [m.reason for m in left if m.what == UNCHAINED]

    return run


def called(graph: str) -> list[str]:
    """The fp4 ops of a graph in order."""
    return re.findall(r"= fp4\.(\w+)\.default", graph)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_decode_step(chained, family):
    step, cache = decode_step(family)
    ids = torch.tensor([[5]])
    with torch.no_grad():
        want = step(ids, cache())
    c, left = chained(step, ids, cache())
    print(c.graph, c.matches, left)
    assert float((c.result.double() - want.double()).norm() / want.double().norm()) < 2e-2
    assert 0
