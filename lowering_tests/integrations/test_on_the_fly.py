"""Quantizing while transformers loads: the same bits as quantizing afterwards; registration, casts, generate."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import fp4_inductor
from fp4_inductor import FP4InductorConfig, FP4Linear, errors
from lowering_tests.foreign import MODELOPT, PLAIN, assert_same, logits


def saved(model, directory):
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "mixtral", "gpt_oss", "nemotron_h"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_same_bits_as_quantizing_afterwards(tiny, tmp_path, family, dtype):
    from transformers import AutoModelForCausalLM

    path = saved(tiny(family, torch.bfloat16), tmp_path)
    while_loading = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, quantization_config=FP4InductorConfig())
    afterwards = fp4_inductor.quantize_model(AutoModelForCausalLM.from_pretrained(path, dtype=dtype), PLAIN, progress=False)
    assert_same(while_loading, afterwards)
    assert torch.equal(logits(while_loading), logits(afterwards))
    errors_of = [{row.name: row.relative_error for row in fp4_inductor.report(m).layers} for m in (while_loading, afterwards)]
    assert errors_of[0] == errors_of[1]
    assert None not in errors_of[0].values()


def test_ignore_and_options(tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    path = saved(tiny("llama", torch.bfloat16), tmp_path)
    config = FP4InductorConfig(scale_search="amax", prefill="bf16", ignore=["mlp.down_proj"])
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", quantization_config=config)
    layer = model.model.layers[0].mlp
    assert type(layer.down_proj) is torch.nn.Linear
    assert layer.up_proj.prefill == "bf16"
    want = FP4Linear.from_weight(tiny("llama", torch.bfloat16).model.layers[0].mlp.up_proj.weight, scale_search="amax")
    assert torch.equal(layer.up_proj.qdata, want.qdata)


def test_a_weight_that_cannot_be_quantized_is_named(tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    model = tiny("llama", torch.bfloat16)
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    path = saved(model, tmp_path)
    with pytest.raises(errors.NonFiniteError, match=r"layers\.1\.mlp\.up_proj\.weight.*ignore"):
        AutoModelForCausalLM.from_pretrained(path, dtype="auto", quantization_config=FP4InductorConfig())
    AutoModelForCausalLM.from_pretrained(path, dtype="auto", quantization_config=FP4InductorConfig(ignore=["layers.1.mlp.up_proj"]))


@pytest.mark.parametrize("options", [{"scale_search": "activation"}, {"scale_search": "auto"}, {"scale_search": "best"}, {"prefill": "int8"}, {"unknown": 1}])
def test_bad_options(options):
    with pytest.raises(errors.ConfigError):
        FP4InductorConfig(**options)


def test_a_model_quantized_in_memory_saves_what_from_pretrained_reads(tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    model = fp4_inductor.quantize_model(tiny("mixtral", torch.bfloat16), PLAIN, progress=False)
    model.save_pretrained(tmp_path / "a")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype="auto")
    assert_same(again, model)
    fp4_inductor.save(again, tmp_path / "b")
    assert_same(fp4_inductor.load(tiny("mixtral", torch.bfloat16), tmp_path / "b"), model)
    assert again.half().dtype == torch.float16


def test_generate_with_a_static_cache(tiny):
    """Through Inductor. Greedy tokens are those of the eager model; the decode step is one graph."""
    from transformers import CompileConfig

    model = fp4_inductor.load_pretrained(MODELOPT)
    ids = torch.arange(5, 13)[None]
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    config = CompileConfig(fullgraph=True, dynamic=False)
    config._compile_all_devices = True
    eager = model.generate(ids, **options, cache_implementation="static", disable_compile=True)
    compiled = model.generate(ids, **options, cache_implementation="static", compile_config=config)
    assert torch.equal(eager[:, :9], compiled[:, :9])  # random weights: a tie may fall either way once two tokens differ
    assert compiled.shape == eager.shape


ORDERS = {
    "before": "import fp4_inductor; from transformers import AutoModelForCausalLM",
    "by its module": "from transformers import AutoModelForCausalLM; from fp4_inductor.integrations import pretrained",
    "by what it imports": "from fp4_inductor.decoding import ranks; from transformers import AutoModelForCausalLM",
}


@pytest.mark.parametrize("order", ["before", "by what it imports", pytest.param("by its module", marks=pytest.mark.slow)])
def test_registration_whichever_is_imported_first(order):
    code = f"{ORDERS[order]}\nmodel = AutoModelForCausalLM.from_pretrained({str(MODELOPT)!r}, dtype='auto')\n"
    code += "print(type(model.model.layers[0].mlp.up_proj).__name__)"
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code], capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith(("FP4Linear", "SiblingLinear"))


def test_a_small_share_stays_unless_strict(tmp_path):
    from transformers import SiglipVisionConfig, SiglipVisionModel

    config = SiglipVisionConfig(hidden_size=64, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=16)
    path = saved(SiglipVisionModel(config), tmp_path)
    report = fp4_inductor.report(SiglipVisionModel.from_pretrained(path, quantization_config=FP4InductorConfig()))
    assert {s.reason for s in report.uncovered} == {"nn.MultiheadAttention reads this weight itself"}
    assert 95 <= report.coverage < 100
    with pytest.raises(errors.CoverageError, match="none with strict=True"):
        SiglipVisionModel.from_pretrained(path, quantization_config=FP4InductorConfig(strict=True))
    assert "strict" not in FP4InductorConfig().to_dict()
