"""Exports are what the other library would have written: byte-equal to its own file, and decoded by its own code."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import pytest
import torch

import fp4_inductor
from fp4_inductor import FP4Linear, errors
from fp4_inductor.formats.reciprocal import is_exact, reciprocal_scale
from fp4_inductor.modules import FP4Experts
from lowering_tests.foreign import COMPRESSED, MIXTRAL, MODELOPT, PLAIN, assert_same, bits, logits, raw, relative, reloaded

SHARED = replace(PLAIN, siblings="shared")


@pytest.mark.parametrize("path", [MODELOPT, MIXTRAL], ids=lambda p: p.name)
def test_modelopt_in_modelopt_out(path, tmp_path):
    """Every tensor under its name, with its shape, dtype and bytes; experts apart again."""
    fp4_inductor.export_pretrained(fp4_inductor.load_pretrained(path), tmp_path, "modelopt")
    want, got = raw(path), raw(tmp_path)
    assert want.keys() == got.keys()
    for name, t in want.items():
        assert (t.shape, t.dtype) == (got[name].shape, got[name].dtype), name
        assert torch.equal(bits(t), bits(got[name])), name
    old, new = (json.loads((p / "hf_quant_config.json").read_text())["quantization"] for p in (path, tmp_path))
    assert old == new
    old, new = (json.loads((p / "config.json").read_text())["quantization_config"] for p in (path, tmp_path))
    assert old["config_groups"] == new["config_groups"]
    assert (old["quant_algo"], old["quant_method"], sorted(old["ignore"])) == (new["quant_algo"], new["quant_method"], new["ignore"])


@pytest.mark.filterwarnings("ignore:export_pretrained")
@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_a_head_in_fp8_goes_out_in_high_precision_and_is_said_to(layout, tmp_path):
    """A reader that is not told takes it for one in FP4."""
    model = fp4_inductor.load_pretrained(MODELOPT)
    fp4_inductor.quantize_model(model, replace(PLAIN, lm_head="fp8"), progress=False)
    fp4_inductor.export_pretrained(model, tmp_path, layout)
    assert raw(tmp_path)["lm_head.weight"].dtype == torch.bfloat16
    assert "lm_head" in json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"]


def test_compressed_tensors_in_and_out(tmp_path):
    fp4_inductor.export_pretrained(fp4_inductor.load_pretrained(COMPRESSED), tmp_path, "compressed-tensors")
    want, got = raw(COMPRESSED), raw(tmp_path)
    assert want.keys() == got.keys()
    for name, t in want.items():
        assert (t.shape, t.dtype) == (got[name].shape, got[name].dtype), name
        if name.endswith("weight_global_scale"):
            torch.testing.assert_close(t, got[name], rtol=2.0**-22, atol=0)
        else:
            assert torch.equal(bits(t), bits(got[name])), name


@pytest.mark.filterwarnings("ignore:export_pretrained")
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "mixtral"])
def test_compressed_tensors_decodes_the_export_to_the_same_weights(tiny, tmp_path, family):
    """With its own code (compressed_tensors.compressors), bit for bit in bfloat16, wherever the global scale has an exact reciprocal."""
    compressors = pytest.importorskip("compressed_tensors.compressors.nvfp4")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    model = fp4_inductor.quantize_model(tiny(family, torch.bfloat16), SHARED, progress=False)
    fp4_inductor.export_pretrained(model, tmp_path, "compressed-tensors")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    [scheme] = quantization.QuantizationConfig.model_validate(config).config_groups.values()
    stored = raw(tmp_path)
    exact = total = 0
    for name, packed in ours(model, family).items():
        parts = {n: stored[f"{name}.{n}"] for n in ("weight_packed", "weight_scale", "weight_global_scale")}
        decoded = compressors.NVFP4PackedCompressor.decompress(parts, scheme)["weight"]
        want = packed.dequantize(torch.bfloat16)
        total += 1
        if is_exact(packed.global_scale, parts["weight_global_scale"]):
            assert torch.equal(decoded, want), name
            exact += 1
        assert bool(((decoded.float() - want.float()).abs() <= 2.0**-7 * want.float().abs()).all()), name
    assert total >= 14 if family != "gpt2" else total == 8
    assert exact >= 0.7 * total  # siblings share a scale: one without a partner counts two or three times


def test_compressed_tensors_has_no_reader_for_sparse_nvfp4():
    """Why 2:4 layers are refused: the name of the format is left, its compressor is not. If one comes back, so should an export."""
    base = pytest.importorskip("compressed_tensors.compressors.base")
    assert "nvfp4-pack-quantized" in base.BaseCompressor.registered_names()
    assert not {"sparse-24-bitmask", "sparse-bitmask", "marlin-24"} & set(base.BaseCompressor.registered_names())


def ours(model, family: str) -> dict:
    """NVFP4Tensors by the module names of the original checkpoint."""
    out = {name: m.weight for name, m in model.named_modules() if isinstance(m, FP4Linear)}
    for name, m in model.named_modules():
        if isinstance(m, FP4Experts):
            prefix = name.replace(".mlp.", ".block_sparse_moe.")
            for e in range(m.num_experts):
                gate_up, down = m.gate_up_proj[e], m.down_proj[e]
                half = gate_up.shape[0] // 2
                out |= {f"{prefix}.{e}.w1": gate_up[:half], f"{prefix}.{e}.w3": gate_up[half:], f"{prefix}.{e}.w2": down}
    return out


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe", "gpt_oss", "nemotron_h", "llama4"])
def test_what_was_quantized_here_comes_back_from_modelopts_layout(tiny, tmp_path, family):
    model = fp4_inductor.quantize_model(reloaded(tiny(family, torch.bfloat16), tmp_path / "dense"), SHARED, progress=False)
    tmp_path = tmp_path / "export"
    fp4_inductor.export_pretrained(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "W4A16_NVFP4"  # nobody measured activations
    assert "input_activations" not in config["config_groups"]["group_0"]
    assert "lm_head" in config["ignore"] or model.config.tie_word_embeddings
    assert_same(fp4_inductor.load_pretrained(tmp_path), model)


def test_sharded(tiny, tmp_path):
    model = fp4_inductor.quantize_model(tiny("mixtral", torch.bfloat16), SHARED, progress=False)
    fp4_inductor.export_pretrained(model, tmp_path, max_shard_size="30kB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert_same(fp4_inductor.load_pretrained(tmp_path), model)


def test_the_warning_says_where_a_reciprocal_is_not_exact(tmp_path):
    model = fp4_inductor.load_pretrained(MIXTRAL)
    with pytest.warns(UserWarning, match=r"1 of 32 weights \(model\.layers\.1\.block_sparse_moe\.experts\.2\.w2"):
        fp4_inductor.export_pretrained(model, tmp_path / "a", "compressed-tensors")
    assert relative(logits(fp4_inductor.load_pretrained(tmp_path / "a")), logits(model)) < 2.0**-7
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fp4_inductor.export_pretrained(model, tmp_path / "b", "modelopt")


def test_reciprocals():
    generator = torch.Generator().manual_seed(0)
    for g in torch.exp(torch.rand(300, generator=generator) * 20 - 4) * 2688:
        other = reciprocal_scale(g)
        assert is_exact(other, g)
        assert abs(float(other * g) - 1.0) < 2.0**-21
    exact = [is_exact(g, reciprocal_scale(g, dividing=False)) for g in (1 + torch.arange(128) / 128) * 2.0**-3 / 2688.0]
    assert sum(exact) == 126  # two of the scales that a bfloat16 maximum gives have no exact partner
    for bad in (0.0, float("inf"), float("nan")):
        reciprocal_scale(torch.tensor(bad))  # refused by whoever checks the result


def test_refusals(tiny, tmp_path):
    model = fp4_inductor.quantize_model(tiny("llama", torch.bfloat16), PLAIN, progress=False)
    with pytest.raises(errors.ConfigError, match="unknown export format"):
        fp4_inductor.export_pretrained(model, tmp_path, "awq")
    with pytest.raises(errors.ConfigError, match="takes a transformers model"):
        fp4_inductor.export_pretrained(torch.nn.Linear(32, 32), tmp_path)
    with pytest.raises(errors.CheckpointError, match="nothing to export"):
        fp4_inductor.export_pretrained(tiny("llama"), tmp_path)
    with pytest.raises(errors.CheckpointError, match="gate_up_proj"):
        fp4_inductor.export_pretrained(fp4_inductor.quantize_model(tiny("gpt_oss"), PLAIN, progress=False), tmp_path, "compressed-tensors")
    assert not list(tmp_path.iterdir())
    fp4_inductor.export_pretrained(model, tmp_path)
    with pytest.raises(errors.CheckpointError, match="holds weights already"):
        fp4_inductor.export_pretrained(model, tmp_path)
