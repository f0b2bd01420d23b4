"""ModelOpt MIXED_PRECISION: NVFP4 and FP8 layers as they are stored, the others in high precision, a quantized KV cache noted.

The checkpoint is written by ``foreign.write_mixed`` from the exporter's source: no real one was at hand.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import fp4_inductor
from fp4_inductor import FP4Linear, errors
from fp4_inductor.modules import FP8Linear
from lowering_tests.foreign import MIXTRAL, MODELOPT, assert_same, bits, logits, raw, relative, write_mixed

BF16 = 2.0**-7


@pytest.fixture
def path(tmp_path):
    return tmp_path / "mixed"


def test_bits_modules_and_notes(path):
    algorithms = write_mixed(path)
    stored, model = raw(path), fp4_inductor.load_pretrained(path)
    modules = {name: m for name, m in model.named_modules() if isinstance(m, FP4Linear)}
    assert modules.keys() == algorithms.keys()
    for name, kind in algorithms.items():
        layer = modules[name]
        assert isinstance(layer, FP8Linear) == (kind == "FP8"), name
        assert torch.equal(bits(layer.qdata), bits(stored[f"{name}.weight"]))
        assert layer.input_scale == stored[f"{name}.input_scale"]
        if kind == "FP8":
            assert torch.equal(layer.scale, stored[f"{name}.weight_scale"].expand(64))
        else:
            assert torch.equal(bits(layer.scale), bits(stored[f"{name}.weight_scale"]))
            assert layer.global_scale == stored[f"{name}.weight_scale_2"]
    for i in range(2):
        assert torch.equal(model.model.layers[i].self_attn.q_proj.weight, stored[f"model.layers.{i}.self_attn.q_proj.weight"])
    report = fp4_inductor.report(model)
    assert sum(layer.format == "fp8" for layer in report.layers) == 4
    assert "KV cache: the cache stays in high precision here: 4 tensors ignored" in report.text(1000)
    skipped = {s.name for s in (*report.uncovered, *report.skipped)}
    assert {f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)} <= skipped


def test_logits_are_those_of_the_dequantized_model(path):
    import transformers

    write_mixed(path)
    model = fp4_inductor.load_pretrained(path)
    config = transformers.AutoConfig.from_pretrained(path)
    del config.quantization_config
    dense = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    state = {n: t for n, t in model.state_dict().items() if n in dense.state_dict()}
    state |= {f"{n}.weight": m.dequantize() for n, m in model.named_modules() if isinstance(m, FP4Linear)}
    dense.load_state_dict(state)
    assert relative(logits(model), logits(dense)) < BF16


def test_through_transformers_and_natively(path, tmp_path):
    from transformers import AutoModelForCausalLM

    write_mixed(path)
    model = fp4_inductor.load_pretrained(path)
    assert_same(AutoModelForCausalLM.from_pretrained(path, dtype="auto"), model)
    fp4_inductor.save(model, tmp_path / "native")
    config = model.config
    again = fp4_inductor.load(lambda: AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), tmp_path / "native")
    assert_same(again, model)


def test_export_gives_the_checkpoint_back(path, tmp_path):
    """Every tensor but the cache's scales, byte for byte; compressed-tensors has no such layer, and says so."""
    write_mixed(path)
    model = fp4_inductor.load_pretrained(path)
    fp4_inductor.export_pretrained(model, tmp_path / "out", "modelopt")
    want, got = {n: t for n, t in raw(path).items() if not n.endswith((".k_scale", ".v_scale"))}, raw(tmp_path / "out")
    assert want.keys() == got.keys()
    for name, t in want.items():
        assert (t.dtype, t.shape) == (got[name].dtype, got[name].shape), name
        assert torch.equal(bits(t), bits(got[name])), name
    stored, written = (json.loads((p / "config.json").read_text())["quantization_config"] for p in (path, tmp_path / "out"))
    assert written["quantized_layers"] == stored["quantized_layers"]
    assert written["config_groups"] == stored["config_groups"]
    assert_same(fp4_inductor.load_pretrained(tmp_path / "out"), model)
    with pytest.warns(UserWarning, match=r"FP8 layers go out in high precision.*o_proj"):
        fp4_inductor.export_pretrained(model, tmp_path / "ct", "compressed-tensors")


@pytest.mark.parametrize("how", ["hf_quant_config alone", "quantized_layers only there", "nested twice", "lower case"])
def test_where_the_layers_are_named(path, tmp_path, how):
    """config.json names them since modelopt 0.43; vLLM#35047 shows a file that nests them twice."""
    write_mixed(path)
    want = fp4_inductor.load_pretrained(path)
    file = path / "config.json"
    config = json.loads(file.read_text())
    quantization = config["quantization_config"]
    if how == "hf_quant_config alone":
        del config["quantization_config"]
    elif how == "quantized_layers only there":
        del quantization["quantized_layers"], quantization["config_groups"]
    elif how == "nested twice":
        quantization["quantized_layers"] = {"quantized_layers": quantization["quantized_layers"]}
    else:
        for layer in quantization["quantized_layers"].values():
            layer["quant_algo"] = layer["quant_algo"].lower()
    file.write_text(json.dumps(config))
    assert_same(fp4_inductor.load_pretrained(path), want)


def test_one_scale_per_row(path):
    """FP8_PER_CHANNEL_PER_TOKEN: weight_scale [N]."""
    from safetensors.torch import save_file

    write_mixed(path)
    state = raw(path)
    name = "model.layers.0.mlp.down_proj"
    state[f"{name}.weight_scale"] = torch.rand(64) + 0.5
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(fp4_inductor.load_pretrained(path).get_submodule(name).scale, state[f"{name}.weight_scale"])


def test_a_cache_that_is_asked_for_without_scales(tmp_path):
    shutil.copytree(MODELOPT, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = fp4_inductor.report(fp4_inductor.load_pretrained(tmp_path)).text(1000)
    assert "asks for a KV cache in 8-bit float: the cache stays in high precision here" in text


def edit(path, change):
    from safetensors.torch import save_file

    state = raw(path)
    change(state)
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})


NAME = "model.layers.1.self_attn.o_proj"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda s: s.pop(f"{NAME}.weight_scale"), rf"{NAME}\.weight_scale is missing"),
        (lambda s: s.update({f"{NAME}.weight_scale": torch.ones(7)}), rf"{NAME}\.weight_scale has the wrong shape"),
        (lambda s: s.update({f"{NAME}.weight_scale": torch.tensor(-1.0)}), "finite and positive"),
        (lambda s: s[f"{NAME}.weight"].view(torch.uint8)[3].fill_(0x7F), rf"{NAME}\.weight holds NaN"),
        (lambda s: s.update({f"{NAME}.weight": s[f"{NAME}.weight"][:32].clone()}), rf"{NAME}\.weight: shape \(32, 64\)"),
        (lambda s: s.update({f"{NAME}.input_scale": torch.ones(3)}), rf"{NAME}\.input_scale has the wrong shape"),
    ],
)
def test_bad_fp8_layers(path, change, match):
    write_mixed(path)
    edit(path, change)
    with pytest.raises(errors.CheckpointError, match=match):
        fp4_inductor.load_pretrained(path)


def test_experts_in_fp8_are_refused_by_name(tmp_path):
    shutil.copytree(MIXTRAL, tmp_path, dirs_exist_ok=True)
    layers = {}

    def change(state):
        for name in [n.removesuffix(".weight_scale_2") for n in state if n.endswith(".weight_scale_2")]:
            layers[name] = {"quant_algo": "NVFP4"}
            if ".experts." in name and ".layers.1." in name:
                weight = torch.ops.fp4.dequantize(*(state.pop(f"{name}.{p}") for p in ("weight", "weight_scale", "weight_scale_2")), torch.float32)
                state[f"{name}.weight"], state[f"{name}.weight_scale"] = weight.to(torch.float8_e4m3fn), torch.tensor(1.0)
                layers[name] = {"quant_algo": "FP8"}

    edit(tmp_path, change)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"].update(quant_algo="MIXED_PRECISION", quantized_layers=layers)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(errors.CheckpointError, match=r"layers\.1\.mlp\.experts\.\{gate_up_proj,down_proj\}: FP8 in the checkpoint, which only linear layers"):
        fp4_inductor.load_pretrained(tmp_path)
