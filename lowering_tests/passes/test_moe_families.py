"""Transformers' MoE blocks on NVFP4Tensor Parameters: no family's experts are missed, and both doors give the same bits."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fp4_inductor import NVFP4Tensor, Sparse24NVFP4Tensor
from fp4_inductor.integrations.transformers import use_experts_backend
from fp4_inductor.passes.missed import listen

pytest.importorskip("transformers")

_SPEC = importlib.util.spec_from_file_location("tiny_models", Path(__file__).resolve().parents[1] / "models" / "conftest.py")
tiny_models = sys.modules.setdefault("tiny_models", importlib.util.module_from_spec(_SPEC))
_SPEC.loader.exec_module(tiny_models)

INTERFACE = sorted(set(tiny_models.MOE) - {"llama4"})  # outside the experts interface
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def pruned(w):
    return Sparse24NVFP4Tensor.from_dense(w, "magnitude")


def quantized_block(family, implementation="batched_mm", dtype=torch.bfloat16, from_dense=NVFP4Tensor.from_dense):
    """The family's MoE block with packed experts in place of dense ones, and inputs it was called with."""
    model = tiny_models.build(family, dtype).requires_grad_(False)
    experts = [m for m in model.modules() if any(p.dim() == 3 and n.endswith("proj") for n, p in m.named_parameters(recurse=False))]
    for module in experts:
        for name, p in list(module.named_parameters(recurse=False)):
            if p.dim() == 3 and name.endswith("proj"):
                turned = getattr(module, "is_transposed", False)
                w = from_dense(p.mT.contiguous()).mT if turned else from_dense(p)
                setattr(module, name, nn.Parameter(w, requires_grad=False))
            elif "bias" in name:
                p.copy_(torch.randn_like(p))
    if family in INTERFACE:
        model.set_experts_implementation(implementation)
    block = next(m for m in model.modules() if experts[-1] in m.children())
    seen = []
    hook = block.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        model(torch.randint(3, 128, (2, 5)), use_cache=False)
    hook.remove()
    args, kwargs = seen[-1]
    return model, block, args, kwargs


def hidden(result):
    return result[0] if isinstance(result, tuple) else result


def relative_error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


SPARSE = [(family, pruned) for family in ("gpt_oss", "mixtral", "nemotron_h")]


@pytest.mark.parametrize(("family", "from_dense"), [*((family, NVFP4Tensor.from_dense) for family in INTERFACE), *SPARSE])
def test_no_family_is_missed_and_both_doors_agree(compiled, family, from_dense):
    """Pattern and experts backend call the same op with the same arguments: equal bits."""
    model, block, args, kwargs = quantized_block(family, from_dense=from_dense)
    with torch.no_grad():
        eager = hidden(block(*args, **kwargs))
    results = []
    for implementation in ("batched_mm", "grouped_mm"):
        model.set_experts_implementation(implementation)
        with listen() as missed:
            c = compiled(lambda *a: hidden(block(*a, **kwargs)), *args)
        assert c.matches == {f"moe_{implementation}": 1}
        assert not missed and "fp4.dequantize" not in c.graph and c.graph.count("fp4.moe.") == 1
        assert relative_error(c.result, eager) <= TOLERANCE[torch.bfloat16]
        results.append(c.result)
    assert use_experts_backend(model)
    c = compiled(lambda *a: hidden(block(*a, **kwargs)), *args)
    assert c.matches == {} and c.graph.count("fp4.moe.") == 1
    assert all(torch.equal(c.result, r) for r in results)


def test_llama4_is_not_silently_dense(compiled):
    """Its experts lie [E, K, N], which NVFP4 cannot contract over."""
    _, block, args, kwargs = quantized_block("llama4")
    with listen() as missed:
        c = compiled(lambda *a: hidden(block(*a, **kwargs)), *args)
    assert c.matches == {}
    assert {m.shape for m in missed} == {"[4, 64, 64]", "[4, 32, 64]"}
    assert all("not contracted over its last dimension" in m.reason for m in missed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "nemotron_h"])
def test_other_dtypes(compiled, family, dtype):
    """Transformers' own operator replaces torch's grouped product for these."""
    _, block, args, kwargs = quantized_block(family, "grouped_mm", dtype)
    c = compiled(lambda *a: hidden(block(*a, **kwargs)), *args)
    assert c.matches == {"moe_grouped_mm": 1}
    with torch.no_grad():
        assert relative_error(c.result, hidden(block(*args, **kwargs))) <= TOLERANCE[dtype]


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_every_size_is_symbolic(compiled, implementation):
    """``dynamic=True``: products of batch and sequence, and gpt-oss' alpha and limit as graph inputs."""
    _, block, args, kwargs = quantized_block("gpt_oss", implementation)
    c = compiled(lambda *a: hidden(block(*a, **kwargs)), *args, dynamic=True)
    assert c.matches == {f"moe_{implementation}": 1}
    with torch.no_grad():
        assert relative_error(c.result, hidden(block(*args, **kwargs))) <= TOLERANCE[torch.bfloat16]
