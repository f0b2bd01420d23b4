"""Models that were built from one config object: what happens to one of them is not written into the other."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import transformers

import fp4_inductor
from lowering_tests.foreign import PLAIN, logits
from lowering_tests.integrations.test_conversion_rules import qwen3_vl_moe

AUTO = transformers.AutoModelForCausalLM


@pytest.mark.parametrize("how", ["quantize_model", "load"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_dense_model_stays_dense(tiny, tmp_path, family, how):
    first = tiny(family, torch.bfloat16)
    config = first.config
    second = type(first)._from_config(config, dtype=torch.bfloat16).eval()
    before = config.to_dict() | {"attention": config._attn_implementation, "experts": config._experts_implementation}
    want = logits(second)
    if how == "load":
        fp4_inductor.save(fp4_inductor.quantize_model(copy.deepcopy(first), PLAIN, progress=False), tmp_path / "native")
        fp4_inductor.load(first, tmp_path / "native")
    else:
        fp4_inductor.quantize_model(first, PLAIN, progress=False)
    assert first.config._attn_implementation == "fp4_inductor"
    assert all(m.config is first.config for m in first.modules() if hasattr(m, "config"))
    assert second.config is config
    assert config.to_dict() | {"attention": config._attn_implementation, "experts": config._experts_implementation} == before
    assert torch.equal(logits(second), want)
    first.save_pretrained(tmp_path / "quantized")
    second.save_pretrained(tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    assert torch.equal(logits(AUTO.from_pretrained(tmp_path / "dense", dtype="auto")), want)
    assert torch.equal(logits(AUTO.from_pretrained(tmp_path / "quantized", dtype="auto")), logits(first))


def test_configs_within_configs(tmp_path):
    """Each part of the model has the part of the config that is its own."""
    first = qwen3_vl_moe()
    second = type(first)(first.config).to(torch.bfloat16).eval()
    fp4_inductor.quantize_model(first, PLAIN, progress=False)
    assert first.model.language_model.config is first.config.text_config is not second.config.text_config
    assert first.model.visual.config is first.config.vision_config is not second.config.vision_config
    assert second.model.language_model.config._attn_implementation == "sdpa"
    first.save_pretrained(tmp_path)
    assert torch.equal(logits(type(first).from_pretrained(tmp_path, dtype="auto")), logits(first))
