"""Architectures whose conversion rules look at the model's parameters, and experts that their dense checkpoints keep stacked."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn
from transformers import conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter

import fp4_inductor
from fp4_inductor.errors import CheckpointError
from fp4_inductor.integrations.pretrained import export
from fp4_inductor.modules import FP4Experts
from lowering_tests.foreign import PLAIN, assert_same, logits, raw
from lowering_tests.integrations.test_export_fused import SHARED


def qwen3_vl_moe(**text) -> nn.Module:
    torch.manual_seed(0)
    fields = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        "pad_token_id": 0,
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 4,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    }
    config = transformers.Qwen3VLMoeConfig(text_config=fields | text, vision_config=vision)
    return transformers.Qwen3VLMoeForConditionalGeneration._from_config(config, dtype=torch.bfloat16).eval()


# moe_intermediate_size 64: gate_up_proj [E, 128, 64]; 32: [E, 64, 64], whose shape says nothing about its layout; 24: padded.
@pytest.mark.parametrize("inner", [64, 32, 24])
def test_what_save_pretrained_wrote_is_read(tmp_path, inner):
    model = fp4_inductor.quantize_model(qwen3_vl_moe(moe_intermediate_size=inner), PLAIN, progress=False)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype="auto")
    assert sum(isinstance(m, FP4Experts) for m in again.modules()) == 2
    assert_same(again, model)
    assert torch.equal(logits(again), logits(model))
    assert_same(fp4_inductor.load_pretrained(tmp_path, model_class=type(model)), model)


@pytest.mark.filterwarnings("ignore:export_pretrained")
@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("inner", [64, 32])
def test_stacked_experts_are_exported_one_by_one(tmp_path, layout, inner):
    """Under the names of ModelOpt and llm-compressor, which vLLM reads; no layout says what a packed stack [E, N, K] is."""
    model = fp4_inductor.quantize_model(qwen3_vl_moe(moe_intermediate_size=inner), SHARED, progress=False)
    fp4_inductor.export_pretrained(model, tmp_path, layout)
    suffix = "weight" if layout == "modelopt" else "weight_packed"
    experts = {name for name in raw(tmp_path) if ".experts." in name and name.endswith(f".{suffix}")}
    assert experts == {f"model.language_model.layers.{i}.mlp.experts.{e}.{p}_proj.{suffix}" for i in range(2) for e in range(4) for p in ("gate", "up", "down")}
    again = fp4_inductor.load_pretrained(tmp_path, model_class=type(model))
    if layout == "modelopt":
        assert_same(again, model)
        assert torch.equal(logits(type(model).from_pretrained(tmp_path, dtype="auto")), logits(model))
    else:
        assert float((logits(again) - logits(model)).norm() / logits(model).norm()) < 0.01


def test_no_other_architecture_of_this_version_looks_at_parameters():
    """A rule whose source may be the name of the model's own tensor is safe only if it compares dimensions; one such architecture is known and tested."""
    looking = {
        model_type
        for model_type, rules in conversion_mapping._build_checkpoint_conversion_mapping().items()
        for rule in rules
        if isinstance(rule, WeightConverter)
        and (set(rule.source_patterns) & set(rule.target_patterns) or any(isinstance(op, Transpose) and op.check_dims for op in rule.operations))
    }
    assert looking <= {"qwen3_vl_moe"}


def test_rules_that_cannot_be_undone_end_in_a_typed_error(tiny, tmp_path, monkeypatch):
    model = fp4_inductor.quantize_model(tiny("llama", torch.bfloat16), SHARED, progress=False)

    def breaks(model, state):
        raise AttributeError("`down_proj` is not an nn.Parameter")

    def unpacks(model, state):
        return {name: t.dequantize() if hasattr(t, "dequantize") and "down_proj" in name else t for name, t in state.items()}

    for rules, match in ((breaks, "AttributeError: `down_proj`"), (unpacks, r"16384 weights left FP4")):
        monkeypatch.setattr(export, "revert_weight_conversion", rules)
        with pytest.raises(CheckpointError, match=match):
            fp4_inductor.export_pretrained(model, tmp_path / "out")
        assert not (tmp_path / "out").exists()
