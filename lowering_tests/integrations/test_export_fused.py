"""Servers fuse q/k/v, gate/up and the like under one global scale: an export means the same to them as to its own reader."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace

import pytest
import torch
import transformers

import fp4_inductor
from fp4_inductor.checkpoint.writers.fused import fused_families, share_scales
from fp4_inductor.errors import CheckpointError
from fp4_inductor.modules import FP4Linear
from fp4_inductor.tensors import NVFP4Tensor
from lowering_tests.foreign import PLAIN, bits, logits, raw, relative, write

SHARED = replace(PLAIN, siblings="shared")
# What vLLM 0.32 merges (packed_modules_mapping of Llama, DeepSeek, Qwen3.5), written down apart from the package's own list.
MERGED = [
    r"^(.*\.)(q_proj|k_proj|v_proj)\.(.*)$",
    r"^(.*\.)(gate_proj|up_proj)\.(.*)$",
    r"^(.*\.)(q_a_proj|kv_a_proj_with_mqa)\.(.*)$",
    r"^(.*\.)(in_proj_qkv|in_proj_z)\.(.*)$",
    r"^(.*\.)(in_proj_b|in_proj_a)\.(.*)$",
]
GATE = re.compile(r"^(.*\.experts\.\d+\.)(w1|gate_proj)\.(.*)$")
UP = {"w1": "w3", "gate_proj": "up_proj"}
GLOBAL = ("weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale")


def as_vllm_loads(tensors: dict) -> dict:
    """The tensors as vLLM's loaders use them: ``max()`` over a merged family's global scales; of routed experts the gate's for both."""
    out = dict(tensors)
    scales = [name for name in tensors if name.endswith(GLOBAL)]
    for pattern in MERGED:
        families: dict = {}
        for name in scales:
            if ".experts." not in name and (match := re.match(pattern, name)):
                families.setdefault((match[1], match[3]), []).append(name)
        for names in families.values():
            out |= dict.fromkeys(names, torch.stack([tensors[n].float() for n in names]).amax(0))
    for name in scales:
        if match := GATE.match(name):
            out[f"{match[1]}{UP[match[2]]}.{match[3]}"] = tensors[name]
    return out


def with_spread(model):
    """Make siblings' weights differ in range, as those of trained models do."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("k_proj.weight", "up_proj.weight", "q_a_proj.weight", "in_proj_z.weight", "in_proj_a.weight")):
                p.mul_(0.37)
    return model


@pytest.mark.filterwarnings("ignore:export_pretrained")
@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3", "qwen3_5_moe"])
def test_a_server_that_takes_one_scale_a_family_computes_the_exported_model(tiny, tmp_path, family, layout):
    model = fp4_inductor.quantize_model(with_spread(tiny(family, torch.bfloat16)), PLAIN, progress=False)
    report = fp4_inductor.export_pretrained(model, tmp_path / "export", layout)
    assert report.rescaled and 0 < max(report.rescaled.values()) < 0.08
    stored = raw(tmp_path / "export")
    served = as_vllm_loads(stored)
    assert [n for n in stored if not torch.equal(bits(stored[n]), bits(served[n].to(stored[n].dtype)))] == []
    config = fp4_inductor.checkpoint.shards.read_json(tmp_path / "export" / "config.json")
    loaded = fp4_inductor.load_pretrained(tmp_path / "export")
    assert torch.equal(logits(fp4_inductor.load_pretrained(write(tmp_path / "served", served, config))), logits(loaded))
    assert relative(logits(loaded), logits(model)) < 0.15
    # Each weight changed by what the report says of it.
    for name, layer in model.named_modules():
        if isinstance(layer, FP4Linear) and f"{name}.weight" in report.rescaled:
            old, new = layer.dequantize(torch.float32), loaded.get_submodule(name).dequantize(torch.float32)
            assert float((new - old).norm() / old.norm()) == pytest.approx(report.rescaled[f"{name}.weight"], rel=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_scales_that_are_shared_already_keep_every_bit(tiny, tmp_path, family):
    model = fp4_inductor.quantize_model(tiny(family, torch.bfloat16), SHARED, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = fp4_inductor.export_pretrained(model, tmp_path)
    assert report.rescaled == {} and report.notes == ()
    assert torch.equal(logits(fp4_inductor.load_pretrained(tmp_path)), logits(model))


def test_the_loss_is_said(tiny, tmp_path):
    model = fp4_inductor.quantize_model(tiny("llama", torch.bfloat16), PLAIN, progress=False)
    with pytest.warns(UserWarning, match=r"of 14 weights were quantized again under the global scale .* by up to \d\.\d\d%"):
        report = fp4_inductor.export_pretrained(model, tmp_path)
    assert "siblings=" in str(report)


def test_a_family_that_is_quantized_in_part_is_said(tiny, tmp_path):
    model = fp4_inductor.quantize_model(tiny("llama", torch.bfloat16), SHARED, ignore=["model.layers.1.self_attn.k_proj"], progress=False)
    with pytest.warns(UserWarning, match=r"1 families of layers .* in FP4 in part only \(model\.layers\.1\.self_attn\.\{q_proj,k_proj,v_proj\}"):
        report = fp4_inductor.export_pretrained(model, tmp_path)
    assert len(report.notes) == 1


def test_after_save_pretrained_too(tmp_path):
    """Saving leaves the name of a dtype in the config, and this architecture's constructor computes with it."""
    config = transformers.ApertusConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, pad_token_id=0
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model = fp4_inductor.quantize_model(model, SHARED, progress=False)
    model.save_pretrained(tmp_path / "a")
    fp4_inductor.export_pretrained(model, tmp_path / "b")
    assert torch.equal(logits(fp4_inductor.load_pretrained(tmp_path / "b")), logits(model))


def test_input_scales_and_weights_of_zeros():
    """The measured range of every member is covered; the global scale 1 of a weight without values does not flush the others."""
    torch.manual_seed(0)
    weights = {f"a.{n}.weight": NVFP4Tensor.from_dense(torch.randn(32, 64) * s) for n, s in (("q_proj", 1.0), ("k_proj", 0.25), ("v_proj", 0.0))}
    before = {name: t.dequantize(torch.float32) for name, t in weights.items()}
    inputs = {name: torch.tensor(float(i + 1)) for i, name in enumerate(weights)}
    changed = share_scales(weights, inputs)
    assert {float(t.global_scale) for t in weights.values()} == {float(weights["a.q_proj.weight"].global_scale)}
    assert {float(s) for s in inputs.values()} == {3.0}
    assert not torch.equal(before["a.k_proj.weight"], 0 * before["a.k_proj.weight"])
    assert relative(weights["a.k_proj.weight"].dequantize(torch.float32), before["a.k_proj.weight"]) == pytest.approx(changed["a.k_proj.weight"])
    assert changed["a.k_proj.weight"] < 0.1
    assert changed["a.v_proj.weight"] == 0.0


def test_a_scale_that_differs_by_a_power_of_two_costs_nothing():
    w = torch.randn(32, 64)
    big, small = NVFP4Tensor.from_dense(w), NVFP4Tensor.from_dense(w)
    small = small.with_parts((small.qdata, small.scale, small.global_scale / 8))
    weights = {"a.gate_proj.weight": big, "a.up_proj.weight": small}
    assert max(share_scales(weights, {}).values()) < 1e-6


def test_families():
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "q_a_proj", "kv_a_proj_with_mqa", "w1", "w3"]
    found = list(fused_families({f"m.{n}.weight": (32, 64) for n in names} | {"m.w2.weight": (64, 32), "n.v_proj.weight": (32, 64)}))
    assert sorted(map(sorted, found)) == sorted(
        sorted(f"m.{n}.weight" for n in family)
        for family in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"), ("w1", "w3"))
    )
    assert list(fused_families({"m.k_proj.weight": (32, 64), "m.v_proj.weight": (32, 48)})) == []  # they cannot read one input


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["no space", "Ctrl-C"])
def test_nothing_half_written_is_left(tiny, tmp_path, monkeypatch, error):
    model = fp4_inductor.quantize_model(tiny("llama", torch.bfloat16), SHARED, progress=False)
    from fp4_inductor.integrations.pretrained import export

    real, calls = export.save_file, []

    def full(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(export, "save_file", full)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else CheckpointError):
        fp4_inductor.export_pretrained(model, tmp_path / "a" / "b", max_shard_size="30kB")
    assert list(tmp_path.iterdir()) == []
