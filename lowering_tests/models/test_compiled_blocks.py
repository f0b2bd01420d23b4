"""Blocks that are compiled while a model trains: they compute what they computed, of each class one function, and afterwards nothing is left."""

from __future__ import annotations

import copy

import pytest
import torch

from fp4_inductor import NVFP4Config, quantize_model
from fp4_inductor._torch.compiling import Compiled
from fp4_inductor.decoding import attention
from fp4_inductor.models.compiled_blocks import compiled_blocks

pytest.importorskip("transformers")
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

IDS = torch.randint(128, (2, 12), generator=torch.Generator().manual_seed(1))


def names(model) -> list[str]:
    return [f"model.layers.{i}" for i in range(len(model.model.layers))]


def loss_and_gradients(model) -> tuple[torch.Tensor, list[torch.Tensor]]:
    loss = model(input_ids=IDS, use_cache=False).logits.square().mean()
    return loss.detach(), list(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad]))


def test_they_compute_what_they_computed_and_are_as_they_were(tiny):
    model = tiny("qwen3", torch.float32)
    wanted = loss_and_gradients(model)
    before = [dict(vars(m)) for m in model.model.layers]
    with compiled_blocks((model,), names(model)) as why_not:
        loss, gradients = loss_and_gradients(model)
        functions = {m.forward.func for m in model.model.layers}
        assert len(functions) == 1 and isinstance(functions.pop(), Compiled)
        assert why_not() == ""
    torch.testing.assert_close(loss, wanted[0])
    torch.testing.assert_close(gradients, wanted[1], rtol=1e-4, atol=1e-6)
    assert [dict(vars(m)) for m in model.model.layers] == before


def test_a_marked_layer_is_compiled_and_marked_again(tiny):
    model = quantize_model(tiny("llama", torch.float32), NVFP4Config("mse", calibration=None), progress=False, strict=False)
    layer = model.model.layers[0]
    from fp4_inductor.decoding.regions import _forward_of

    layer.forward = mark = _forward_of(type(layer)).__get__(layer)
    with compiled_blocks((model,), names(model)[:1]) as why_not:
        assert isinstance(layer.forward.func, Compiled) and layer.forward.func.plain is type(layer).forward and why_not() == ""
    assert layer.forward is mark


def test_what_cannot_be_compiled_is_said_and_runs(tiny, monkeypatch):
    model = tiny("llama", torch.float32)
    other = copy.deepcopy(model)
    wanted = model(input_ids=IDS, use_cache=False).logits
    plain = type(model.model.layers[0]).forward

    def breaks(self, *args, **kwargs):
        torch._dynamo.graph_break()
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(type(model.model.layers[0]), "forward", breaks)
    other.model.layers[0].forward = lambda *args, **kwargs: plain(other.model.layers[0], *args, **kwargs)
    with compiled_blocks((model, other), [*names(model)[:1], "model.none"]) as why_not:
        assert torch.equal(model(input_ids=IDS, use_cache=False).logits, wanted)
        said = why_not()
    assert "LlamaDecoderLayer.forward is not compiled" in said or "breaks is not compiled" in said
    assert "their forward is wrapped" in said and "there is no model.none" in said


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gpt2"])
def test_a_capture_makes_the_masks_that_a_step_makes(tiny, kind, monkeypatch):
    model = tiny(kind, torch.float32)
    attention.use_attention_backend(model)
    assert model.config._attn_implementation == attention.NAME
    seen: list[torch.Tensor | None] = []

    def forward(module, query, key, value, attention_mask, **kwargs):
        seen.append(attention_mask)
        return attention.attention_forward(module, query, key, value, attention_mask, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, attention.NAME, forward)
    wanted = model(input_ids=IDS, use_cache=False).logits
    outside, _ = [*seen], seen.clear()
    with attention.whole(IDS) as mask:
        assert torch.equal(model(input_ids=IDS, attention_mask=mask, use_cache=False).logits, wanted)
        monkeypatch.setattr("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: True)
        assert torch.equal(model(input_ids=IDS, attention_mask=mask, use_cache=False).logits, wanted)
    found, again = seen[: len(outside)], seen[len(outside) :]
    assert [m is None for m in found] == [m is None for m in again] == [m is None for m in outside]
    seen.clear()
    model(input_ids=IDS, use_cache=False)
    assert all(m is not None for m in seen), "without it"
