"""Experts with biases, and gpt-oss' activation: the method of a layer, given what vLLM's loader writes, against vLLM's own activation in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fp4_inductor.formats import nvfp4
from fp4_inductor.integrations.vllm import gpt_oss as own
from fp4_inductor.integrations.vllm.experts import FP4MoEMethod
from fp4_inductor.integrations.vllm.linear import COMPRESSED, MODELOPT
from fp4_inductor.integrations.vllm.settings import Settings
from lowering_tests.vllm.test_refusals import parallel

E, H, INNER, TOKENS, TOP = 4, 64, 32, 9, 2


def gpt_oss(h: torch.Tensor) -> torch.Tensor:
    """Gates and ups take turns."""
    from vllm.model_executor.layers.activation import SwigluOAIAndMul

    return SwigluOAIAndMul.forward_native(SimpleNamespace(alpha=1.702, limit=7.0), h)


def silu(h: torch.Tensor) -> torch.Tensor:
    gate, up = h.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def filled(names, activation: str, rank: int = 0):
    """A layer as it is after loading, its method, and its dense weights and biases in float64."""
    moe = SimpleNamespace(
        activation=activation, has_bias=True, is_act_and_mul=True, tp_size=2, tp_rank=rank, intermediate_size=2 * INNER, moe_parallel_config=parallel()
    )
    method, layer = FP4MoEMethod(moe, names, "model.layers.0.mlp.experts", Settings(), dummy=False), torch.nn.Module()
    layer.expert_map, layer.apply_router_weight_on_input = None, False
    method.create_weights(layer, E, H, INNER, torch.float32, weight_loader=None)
    dense = {}
    for w in ("w13", "w2"):
        codes, scale, g = (getattr(layer, f"{w}_{name}").data for name in names.tensors[:3])
        codes.random_(0, 256)
        scale.copy_((torch.rand(scale.shape) + 0.5).to(scale.dtype))
        g.copy_((torch.rand(E, *[1] * (g.dim() - 1)) + 0.5) * 0.2)  # gate and up share one: they take turns in gpt-oss
        factor = g.flatten(1)[:, 0] if g.dim() > 1 else g.clone()
        dense[w] = torch.stack([nvfp4.dequantize(codes[e], scale[e], factor[e], torch.float32) for e in range(E)]).double()
        if names.divides:
            g.copy_(1 / g)
        bias = getattr(layer, f"{w}_bias").data
        dense[f"{w}_bias"] = bias.normal_().double()
    method.process_weights_after_loading(layer)
    return method, layer, dense


@pytest.mark.parametrize("names", [MODELOPT, COMPRESSED], ids=["modelopt", "compressed-tensors"])
@pytest.mark.parametrize(("name", "act"), [("swigluoai", gpt_oss), ("silu", silu)], ids=["gpt-oss", "silu"])
def test_biases_and_activations(name, act, names):
    torch.manual_seed(0)
    method, layer, dense = filled(names, name)
    x, ids = torch.randn(TOKENS, H), torch.stack([torch.randperm(E)[:TOP] for _ in range(TOKENS)]).int()
    weights = torch.rand(TOKENS, TOP)
    want = torch.zeros(TOKENS, H, dtype=torch.float64)
    for t in range(TOKENS):
        for e, weight in zip(ids[t].tolist(), weights[t].double(), strict=True):
            h = act(x[t].double() @ dense["w13"][e].T + dense["w13_bias"][e])
            want[t] += weight * (h @ dense["w2"][e].T + dense["w2_bias"][e])
    got = method.apply(layer, x, weights, ids)
    assert ((got - want).norm() / want.norm()).item() < 1e-5


@pytest.mark.parametrize("experts", [None, [-1, 0, -1, 1], [1, -1, 0, -1]], ids=["tensor", "expert", "another order"])
def test_the_share_of_a_rank_of_gpt_oss(experts):
    """The second of two ranks: the second half of each expert, or the experts of ``expert_map`` in the order of their local ids."""
    layer = SimpleNamespace(expert_map=None if experts is None else torch.tensor(experts, dtype=torch.int32))
    load = own.share_of(layer, 0 if experts else 1)
    local = E if experts is None else 2
    rows, columns = (2 * INNER, H // 2) if experts else (INNER, H // 2)
    whole, g = torch.randint(256, (E, 2 * INNER, H // 2), dtype=torch.uint8), torch.rand(E)
    param, scales = torch.zeros(local, rows, columns, dtype=torch.uint8), torch.zeros(local, 2)
    load(param, whole)
    load(scales, g)
    mine = range(E) if experts is None else sorted((e for e in range(E) if experts[e] >= 0), key=lambda e: experts[e])
    for here, e in enumerate(mine):
        assert torch.equal(param[here], whole[e] if experts else whole[e, INNER:])
        assert scales[here].tolist() == [g[e].item()] * 2
    if experts is None:  # the down projection is divided by columns
        down, half = torch.randint(256, (E, H, INNER), dtype=torch.uint8), torch.zeros(E, H, INNER // 2, dtype=torch.uint8)
        load(half, down)
        assert torch.equal(half, down[..., INNER // 2 :])


def test_the_bias_of_down_is_added_by_one_rank():
    torch.manual_seed(0)
    _, first, _ = filled(MODELOPT, "swigluoai")
    _, second, _ = filled(MODELOPT, "swigluoai", rank=1)
    assert bool(first.w2_bias.any()) and not bool(second.w2_bias.any())
    assert bool(second.w13_bias.any())
