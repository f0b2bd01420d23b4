"""NVFP4Config(lm_head=...): the output head quantized on request, tied embeddings untouched, its cost in the report."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fp4_inductor
from fp4_inductor import FP4Linear, NVFP4Config
from fp4_inductor.errors import CheckpointError, ConfigError, DTypeError
from fp4_inductor.modules import FP8Linear
from fp4_inductor.ops.linear_fp8 import quantize_weight

transformers = pytest.importorskip("transformers")
BF16 = torch.bfloat16
SIZES = dict(
    vocab_size=128, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, intermediate_size=96
)
KINDS = {"fp8": FP8Linear, "nvfp4": FP4Linear}


def model_of(tied: bool):
    torch.manual_seed(0)
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, tie_word_embeddings=tied)).eval().to(BF16)


def tokens():
    return torch.arange(24).reshape(2, 12)


def quantize(model, head, **fields):
    fields.setdefault("scale_search", "four_over_six")
    return fp4_inductor.quantize_model(model, NVFP4Config(lm_head=head, **fields), progress=False)


def head_row(model):
    return next(i for i in fp4_inductor.report(model).layers if i.name == "lm_head")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", KINDS)
@torch.no_grad()
def test_the_head_alone_changes(head, tied):
    model, dense = model_of(tied), model_of(tied)
    embedding = model.model.embed_tokens.weight
    quantize(model, head)
    plain = quantize(dense, "bf16")
    assert type(model.lm_head) is KINDS[head]
    assert type(plain.lm_head) is nn.Linear
    assert model.model.embed_tokens.weight is embedding
    assert torch.equal(embedding, plain.model.embed_tokens.weight)
    hidden = model.model(tokens()).last_hidden_state
    assert torch.equal(hidden, plain.model(tokens()).last_hidden_state)
    want = hidden.double() @ plain.lm_head.weight.double().T
    error = float((model(tokens()).logits - want).norm() / want.norm())
    assert error < {"fp8": 0.04, "nvfp4": 0.13}[head]
    assert head_row(model).relative_error == pytest.approx({"fp8": 0.0255, "nvfp4": 0.087}[head], abs=0.003)


@pytest.mark.parametrize("head", KINDS)
def test_a_tied_head_is_untied_and_the_report_says_what_that_costs(head):
    model = model_of(True)
    before = fp4_inductor.models.plan.model_bytes(model)
    quantize(model, head)
    layer = model.lm_head
    own = sum(b.numel() * b.element_size() for b in layer.buffers())
    report = fp4_inductor.report(model)
    body = sum(i.bytes_before - i.bytes_after for i in report.layers if i.name != "lm_head")
    padding = report.bytes_after - (before - body + own)
    assert 0 <= padding <= 16, "the head's copy is all that was added"
    row = head_row(model)
    assert row.bytes_before == 0
    assert any("untied from model.embed_tokens.weight" in note for note in row.notes)
    assert model.config.tie_word_embeddings is False
    model.tie_weights()
    assert model.lm_head is layer
    assert not any("untied" in note for note in head_row(quantize(model_of(False), head)).notes)


def test_calibration_gives_the_divergence_of_the_head():
    found = {}
    for head in KINDS:
        model = quantize(model_of(True), head, scale_search="activation", calibration=[{"input_ids": tokens()}] * 2)
        found[head] = head_row(model).kl
        assert f"KL {found[head]:.2e}" in str(fp4_inductor.report(model))
    assert 0 < found["fp8"] < found["nvfp4"] / 3
    assert head_row(quantize(model_of(True), "fp8")).kl is None


def test_the_users_list_wins_and_a_missing_head_is_said():
    model = fp4_inductor.quantize_model(model_of(True), NVFP4Config("four_over_six", lm_head="fp8"), ignore=["lm_head"], progress=False)
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.tie_word_embeddings is True
    assert any("no output head" in note for note in fp4_inductor.report(model).notes)
    assert any("no output head" in note for note in fp4_inductor.report(quantize(nn.Sequential(nn.Linear(32, 32)), "fp8")).notes)
    with pytest.raises(ConfigError, match="lm_head"):
        NVFP4Config(lm_head="int8")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", KINDS)
@torch.no_grad()
def test_save_and_load(head, tied, tmp_path):
    model = quantize(model_of(tied), head)
    want = model(tokens()).logits
    fp4_inductor.save(model, tmp_path)
    config = transformers.Qwen2Config.from_pretrained(tmp_path)
    for target in (model_of(tied), copy.deepcopy(model), lambda: transformers.Qwen2ForCausalLM(config)):
        loaded = fp4_inductor.load(target, tmp_path)
        assert type(loaded.lm_head) is KINDS[head]
        assert torch.equal(loaded(tokens()).logits, want)
        assert loaded.config.tie_word_embeddings is False
        assert head_row(loaded).relative_error == head_row(model).relative_error
    with pytest.raises(CheckpointError, match="lm_head"):
        fp4_inductor.load(nn.ModuleDict({"lm_head": nn.Linear(64, 100)}), tmp_path, strict=False)


def test_moves_casts_and_state_dict_of_an_fp8_layer():
    layer = FP8Linear.from_weight(torch.randn(24, 40), torch.randn(24))
    bits = layer.qdata.view(torch.uint8).clone()
    x = torch.randn(3, 40)
    y = layer(x)
    half = copy.deepcopy(layer).to(BF16)
    assert half.dtype == BF16 == half.bias.dtype
    assert torch.equal(half.qdata.view(torch.uint8), bits)
    assert half.scale.dtype == torch.float32
    assert torch.equal(half.float()(x), FP8Linear.from_weight(layer.dequantize(), half.bias)(x))
    fresh = FP8Linear(40, 24, bias=True, dtype=torch.float32)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x), y)
    with pytest.raises(DTypeError, match="qdata"):
        fresh.load_state_dict({**layer.state_dict(), "qdata": bits})
    with pytest.raises(DTypeError):
        layer.to(torch.float64)


def test_every_row_uses_the_whole_range_and_zeros_stay():
    w = torch.randn(8, 32) * torch.logspace(-8, 8, 8)[:, None]
    w[3] = 0
    codes, scale = quantize_weight(w)
    assert (codes.float().abs().amax(1)[torch.arange(8) != 3] == 448).all()
    assert not codes[3].float().any()
    back = codes.float() * scale[:, None]
    assert float(((back - w).norm(dim=1) / w.norm(dim=1).clamp_min(1e-30)).max()) < 0.05
