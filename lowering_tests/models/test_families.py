"""quantize_model on the tiny families: what is replaced, what is skipped and why, what strict refuses, right numbers."""

from __future__ import annotations

import copy

import pytest
import torch

import fp4_inductor
from fp4_inductor import FP4Linear, NVFP4Config, errors
from fp4_inductor.models import families

IDS = torch.arange(24).reshape(2, 12) % 128
# Every one of these has a plain nn.Linear (or a router module) that must never become FP4.
ROUTERS = {
    "deepseek_v3": ".mlp.gate",
    "ernie4_5_moe": ".mlp.gate",
    "glm4_moe": ".mlp.gate",
    "glm4_moe_lite": ".mlp.gate",
    "gpt_oss": ".mlp.router",
    "granitemoehybrid": ".router",
    "hunyuan_moe": ".mlp.gate.wg",
    "lfm2_moe": ".feed_forward.gate",
    "llama4": ".feed_forward.router",
    "minimax_m2": ".mlp.gate",
    "mixtral": ".mlp.gate",
    "nemotron_h": ".mixer.gate",
    "olmoe": ".mlp.gate",
    "qwen3_5_moe": ".mlp.gate",
    "qwen3_moe": ".mlp.gate",
    "qwen3_next": ".mlp.gate",
}


def _logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits.double()


def _dequantized_twin(dense, quantized):
    """The dense model with the quantized weights written back: what the quantized one must compute."""
    twin = copy.deepcopy(dense)
    modules = dict(twin.named_modules())
    for name, layer in quantized.named_modules():
        if isinstance(layer, FP4Linear):
            weight = modules[name].weight.data
            w = layer.dequantize(weight.dtype)
            weight.copy_(w.t() if type(modules[name]).__name__ == "Conv1D" else w)
    return twin


def test_logits_are_those_of_the_dequantized_model(tiny, family):
    dense = tiny(family)
    model = fp4_inductor.quantize_model(copy.deepcopy(dense), strict=False, progress=False)
    want = _logits(_dequantized_twin(dense, model))
    got = _logits(model)
    assert (got - want).norm() / want.norm() < 2e-5
    # and the quantization did something
    assert (got - _logits(dense)).norm() / want.norm() > 1e-3


def test_every_parameter_is_accounted_for(tiny, family):
    dense = tiny(family)
    total = sum(p.numel() for p in dense.parameters())
    model = fp4_inductor.quantize_model(copy.deepcopy(dense), strict=False, progress=False)
    biases = sum(m.bias.numel() for m in model.modules() if isinstance(m, FP4Linear) and m.bias is not None)
    report = fp4_inductor.report(model)
    assert report.params + biases + sum(s.params for s in (*report.skipped, *report.uncovered)) == total
    assert all(s.reason for s in (*report.skipped, *report.uncovered))
    assert {i.name for i in report.layers} == {n for n, m in model.named_modules() if isinstance(m, FP4Linear)}


def test_dense_families_are_covered_completely(tiny, dense_family):
    report = fp4_inductor.report(fp4_inductor.quantize_model(tiny(dense_family), progress=False))
    assert report.coverage == 100.0
    assert not report.uncovered


def test_strict_refuses_missed_experts_and_changes_nothing(tiny, moe_family):
    model = tiny(moe_family)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(errors.CoverageError, match="experts") as caught:
        fp4_inductor.quantize_model(model, progress=False)
    assert "strict=False" in str(caught.value)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert not any(isinstance(m, FP4Linear) for m in model.modules())


def test_without_strict_the_coverage_says_what_is_missed(tiny, moe_family):
    model = tiny(moe_family)
    experts = {n: p.numel() for n, p in model.named_parameters() if p.dim() == 3 and "experts" in n}
    report = fp4_inductor.report(fp4_inductor.quantize_model(model, strict=False, progress=False))
    assert {s.name: s.params for s in report.uncovered} == experts
    assert not any("unknown family" in s.reason for s in report.uncovered)
    assert report.coverage == pytest.approx(100.0 * report.params / (report.params + sum(experts.values())))
    assert report.coverage < 90.0


def test_routers_and_heads_stay(tiny, moe_family):
    model = fp4_inductor.quantize_model(tiny(moe_family), strict=False, progress=False)
    quantized = {n for n, m in model.named_modules() if isinstance(m, FP4Linear)}
    assert not any(n.endswith(ROUTERS[moe_family]) for n in quantized)
    skipped = {s.name: s.reason for s in fp4_inductor.report(model).skipped}
    routers = [r for n, r in skipped.items() if n.removesuffix(".weight").endswith(ROUTERS[moe_family])]
    assert routers
    assert all(r.startswith("router") for r in routers)
    assert "lm_head" not in quantized
    assert skipped["lm_head.weight"].startswith(("output head", "tied to"))


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("qwen3_next", ["linear_attn.in_proj_ba", "mlp.shared_expert_gate", "linear_attn.conv1d"]),
        ("qwen3_5_moe", ["in_proj_a", "in_proj_b"]),
        ("lfm2_moe", ["conv.conv"]),
    ],
)
def test_sensitive_layers_of_linear_attention_stay(tiny, name, layers):
    report = fp4_inductor.report(fp4_inductor.quantize_model(tiny(name), strict=False, progress=False))
    for layer in layers:
        assert any(s.name.endswith(f"{layer}.weight") for s in report.skipped), layer
        assert not any(i.name.endswith(layer) for i in report.layers), layer


def test_conv1d_is_exactly_the_transposed_linear(tiny):
    dense = tiny("gpt2", torch.bfloat16)
    model = fp4_inductor.quantize_model(copy.deepcopy(dense), fp4_inductor.NVFP4Config("four_over_six"), progress=False)
    for name, old in dense.named_modules():
        if type(old).__name__ != "Conv1D":
            continue
        new = model.get_submodule(name)
        want = FP4Linear.from_weight(old.weight.detach().t().contiguous(), old.bias.detach(), scale_search="four_over_six")
        assert isinstance(new, FP4Linear), name
        assert torch.equal(new.scale.view(torch.uint8), want.scale.view(torch.uint8))
        for part in ("qdata", "global_scale", "bias"):
            assert torch.equal(getattr(new, part), getattr(want, part)), f"{name}.{part}"
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma3", "gpt2", "ernie4_5_moe", "lfm2_moe"])
def test_tied_embeddings_stay_tied_and_untouched(tiny, name):
    model = tiny(name)
    embedding = model.get_input_embeddings().weight
    bits = embedding.detach().clone()
    fp4_inductor.quantize_model(model, strict=False, progress=False)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight is embedding
    assert torch.equal(embedding, bits)
    skipped = {s.name: s.reason for s in fp4_inductor.report(model).skipped}
    assert skipped["lm_head.weight"].startswith("tied to")


def test_activation_search_on_a_tiny_model(tiny, dense_family):
    model = tiny(dense_family)
    config = NVFP4Config("activation", calibration=[{"input_ids": IDS}])
    report = fp4_inductor.report(fp4_inductor.quantize_model(model, config, progress=False))
    assert report.coverage == 100.0
    assert _logits(model).isfinite().all()


def test_an_expert_parameter_of_an_unknown_family_is_not_overlooked():
    class Strange(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = torch.nn.Linear(32, 32)
            self.bank = torch.nn.Parameter(torch.randn(4, 32, 64))

    with pytest.raises(errors.CoverageError, match=r"bank.*unknown family"):
        fp4_inductor.quantize_model(Strange(), progress=False)


@pytest.mark.parametrize("shape", [(1, 64, 64), (4, 8, 64), (4, 64, 3)])
def test_what_only_looks_like_experts_is_left_alone(shape):
    """Position embeddings [1, T, D] and small banks are no expert weights."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    model.register_parameter("pos", torch.nn.Parameter(torch.zeros(shape)))
    assert fp4_inductor.report(fp4_inductor.quantize_model(model, progress=False)).coverage == 100.0


def test_families_are_found_by_file():
    names = [f.name for f in families()]
    assert len(names) == len(set(names))
    assert {"decoder", "gpt2", "gpt_oss", "llama4", "multimodal", "nemotron_h", "state_space"} <= set(names)
