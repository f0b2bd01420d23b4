"""What of a model is left to training when it is quantized, what becomes of the rest of a layer, and gradients afterwards."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoKrConfig, LoraConfig, OFTConfig, PromptEncoderConfig, VeraConfig, get_peft_model
from torch import nn

import fp4_inductor
from fp4_inductor import errors
from fp4_inductor.integrations.peft import FP4LoraLinear
from fp4_inductor.models.plan import make_plan
from fp4_inductor.models.training import ADAPTER, TRAINABLE
from fp4_inductor.modules import FP4Linear, SiblingLinear
from lowering_tests.integrations.dense_twin import dequantized
from lowering_tests.models.conftest import build

IDS = torch.arange(24).reshape(2, 12) * 5 % 128


def quantize(model, **options):
    return fp4_inductor.quantize_model(model, progress=False, **options)


def reasons(model) -> dict[str, str]:
    return {s.name: s.reason for s in fp4_inductor.report(model).skipped}


def values(model, part: str) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if part in n}


@pytest.mark.parametrize("trainable", [True, False], ids=["training", "inference"])
def test_adapters_stay_and_the_weights_that_they_wrap_are_quantized(trainable):
    wrapped = get_peft_model(
        build("llama"), LoraConfig(target_modules="all-linear", init_lora_weights=False, modules_to_save=["lm_head"], inference_mode=not trainable)
    )
    before = values(wrapped, "lora_") | values(wrapped, "modules_to_save")
    quantize(wrapped)
    after = dict(wrapped.named_parameters())
    assert before and all(torch.equal(after[n], p) and after[n].requires_grad == trainable for n, p in before.items())
    assert {reasons(wrapped)[n] for n in before} == {ADAPTER}
    layers = [m for m in wrapped.modules() if isinstance(m, FP4Linear)]
    assert len(layers) == 14 and sum(isinstance(m, SiblingLinear) for m in layers) == 10  # the head is left alone, wrapped or not
    assert all(isinstance(m, FP4LoraLinear) for n, m in wrapped.named_modules() if n.endswith("_proj"))
    with torch.no_grad():
        assert torch.allclose(wrapped(IDS).logits, dequantized(wrapped)(IDS).logits, atol=1e-5)
    with pytest.raises(errors.UnsupportedOpError):
        wrapped.merge_and_unload()


@pytest.mark.parametrize("config", [IA3Config, VeraConfig, LoHaConfig, LoKrConfig])
def test_other_adapters_that_only_call_their_layer(config):
    options = {"feedforward_modules": ["down_proj"]} if config is IA3Config else {}
    wrapped = get_peft_model(build("llama"), config(target_modules=["k_proj", "down_proj"], **options))
    quantize(wrapped)
    assert sum(isinstance(m, FP4Linear) for m in wrapped.modules()) == 14
    assert all(p.requires_grad and n in reasons(wrapped) for n, p in wrapped.named_parameters() if "default" in n)
    with torch.no_grad():
        assert torch.allclose(wrapped(IDS).logits, dequantized(wrapped)(IDS).logits, atol=1e-5)
    with pytest.raises(errors.UnsupportedOpError):
        wrapped.merge_adapter()


@pytest.mark.parametrize(
    "config", [LoraConfig(use_dora=True, target_modules=["q_proj"]), OFTConfig(target_modules=["q_proj"], oft_block_size=16)], ids=["dora", "oft"]
)
def test_a_weight_that_an_adapter_computes_with_stays(config):
    wrapped = quantize(get_peft_model(build("llama"), config))
    said = reasons(wrapped)
    kept = [n for n in said if n.endswith("q_proj.base_layer.weight")]
    assert len(kept) == 2 and all("computes with this weight itself" in said[n] for n in kept)
    assert sum(isinstance(m, FP4Linear) for m in wrapped.modules()) == 12
    wrapped(input_ids=IDS, labels=IDS).loss.backward()


def test_merged_adapters_are_refused():
    wrapped = get_peft_model(build("llama"), LoraConfig(target_modules=["q_proj"]))
    wrapped.merge_adapter()
    with pytest.raises(errors.ConfigError, match=r"layers\.0-1\.self_attn\.q_proj[\s\S]*unmerge_adapter"):
        quantize(wrapped)
    assert not any(isinstance(m, FP4Linear) for m in wrapped.modules())


def test_an_encoder_of_prompts_stays():
    wrapped = get_peft_model(build("llama"), PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=64))
    wrapped.requires_grad_(False)
    before = values(wrapped, "prompt_encoder")
    quantize(wrapped)
    assert before.keys() == values(wrapped, "prompt_encoder").keys()
    assert sum(isinstance(m, FP4Linear) for m in wrapped.modules()) == 14


class _Adapter(nn.Module):
    """An adapter by hand, which no library knows."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(base.in_features, 16, bias=False), nn.Linear(16, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def test_a_trainable_weight_beside_frozen_ones_stays():
    model = build("llama").requires_grad_(False)
    for layer in model.model.layers:
        layer.mlp.down_proj = _Adapter(layer.mlp.down_proj)
    model.model.layers[1].self_attn.o_proj.requires_grad_(True)
    quantize(model)
    kept = {n for n, r in reasons(model).items() if r == TRAINABLE}
    assert kept == {f"model.layers.{i}.mlp.down_proj.{part}.weight" for i in (0, 1) for part in ("up", "down")} | {"model.layers.1.self_attn.o_proj.weight"}
    assert all(model.get_parameter(n).requires_grad for n in kept)
    assert sum(isinstance(m, FP4Linear) for m in model.modules()) == 13
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(model.get_parameter(n).grad is not None for n in kept)


def test_trainable_experts_beside_frozen_weights_stay():
    model = build("mixtral").requires_grad_(False)
    model.model.layers[1].mlp.experts.requires_grad_(True)
    quantize(model)
    assert {n for n, r in reasons(model).items() if r == TRAINABLE} == {f"model.layers.1.mlp.experts.{p}" for p in ("gate_up_proj", "down_proj")}


@pytest.mark.parametrize("flag", [True, False])
def test_a_model_that_nobody_chose_parts_of_is_quantized_whole(flag):
    model = build("llama").requires_grad_(flag)
    model.model.embed_tokens.requires_grad_(not flag)  # frozen position tables are common: they are no choice of what is trained
    quantize(model)
    assert sum(isinstance(m, FP4Linear) for m in model.modules()) == 14
    assert TRAINABLE not in reasons(model).values()


def _vit_mae():
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    return ViTMAEForPreTraining(ViTMAEConfig(**sizes, decoder_hidden_size=64, decoder_num_hidden_layers=1, decoder_num_attention_heads=2))


def test_a_frozen_position_table_is_no_choice():
    model = _vit_mae()
    assert [n for n, p in model.named_parameters() if p.dim() == 3 and not p.requires_grad]
    assert fp4_inductor.report(quantize(model)).coverage == 100.0
    assert TRAINABLE not in reasons(model).values()


class _InProject(nn.Module):
    """A user's module around a model."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.backbone, self.head = model, nn.Linear(64, 64)


@pytest.mark.parametrize("name", ["blt", "idefics"])
@pytest.mark.parametrize("wrap", [lambda m: m, _InProject], ids=["alone", "inside"])
def test_what_a_constructor_freezes_is_no_choice(name, wrap):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from lowering_tests.models import model_types

    cls = next(model_types._classes(name, CONFIG_MAPPING[name]))
    model = model_types._built(cls, CONFIG_MAPPING[name], {})
    flags = [p.requires_grad for n, p in model.named_parameters() if n.endswith("proj.weight")]
    assert len(set(flags)) == 2  # the constructor froze some
    model = wrap(model)
    before = torch.random.get_rng_state()
    plan = make_plan(model)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not [s for s in plan.skipped if s.reason == TRAINABLE]
    assert len(plan.targets) > len(flags) / 2
    some = next(m for m in model.modules() if isinstance(m, nn.Linear) and m.weight.requires_grad)
    some.requires_grad_(False)  # from here on somebody chose
    assert [s for s in make_plan(model).skipped if s.reason == TRAINABLE]


def test_a_trained_bias_stays_the_parameter_that_it_is():
    model = build("qwen2").requires_grad_(False)
    biases = {n: p.requires_grad_(True) for n, p in model.named_parameters() if n.endswith("q_proj.bias")}
    quantize(model)
    after = dict(model.named_parameters())
    assert len(biases) == 2 and all(after[n] is p and p.requires_grad for n, p in biases.items())
    assert all(type(layer.self_attn.q_proj) is FP4Linear for layer in model.model.layers)
    twin = dequantized(model)
    for m in (model, twin):
        m(input_ids=IDS, labels=IDS).loss.backward()
    for n, p in biases.items():
        assert torch.allclose(p.grad, twin.get_parameter(n).grad, atol=1e-6) and p.grad.abs().sum() > 0
    again = fp4_inductor.quantize_model(build("qwen2"), progress=False)
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)
    model.half()
    assert biases["model.layers.0.self_attn.q_proj.bias"].dtype == torch.float16
    copy.deepcopy(model)(IDS)


def test_what_was_set_on_a_layer_is_kept_or_named():
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32))
    model[0].lr_scale, model[0].note, model[1].scale = 0.5, {"a": 1}, 2.0
    quantize(model)
    assert model[0].lr_scale == 0.5 and model[0].note == {"a": 1} and isinstance(model[1].scale, torch.Tensor)
    notes = {row.name: " ".join(row.notes) for row in fp4_inductor.report(model).layers}
    assert "attributes not kept: scale" in notes["1"] and "attributes" not in notes["0"]


def test_quantized_inside_inference_mode_it_can_still_be_trained(tmp_path):
    model = build("qwen2")
    with torch.inference_mode():
        quantize(model)
        fp4_inductor.save(model, tmp_path)
        loaded = fp4_inductor.load(build("qwen2"), tmp_path)
        model.save_pretrained(tmp_path / "transformers")
        read = fp4_inductor.load_pretrained(tmp_path / "transformers")
    for m in (model, loaded, read):
        assert not any(t.is_inference() for t in (*m.buffers(), *m.parameters()))
        wrapped = get_peft_model(m, LoraConfig(target_modules=["q_proj", "down_proj"]))
        wrapped(input_ids=IDS, labels=IDS).loss.backward()
        assert any(p.grad is not None for p in wrapped.parameters())
