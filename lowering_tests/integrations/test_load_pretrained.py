"""Every format into our tensors: codes and scales bit for bit, logits those of the dequantized model, through either door."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import fp4_inductor
from fp4_inductor import FP4Linear, errors
from fp4_inductor.checkpoint.readers import FORMATS, torchao
from fp4_inductor.modules import FP4Experts
from fp4_inductor.ops.activation import Activation
from lowering_tests.foreign import (
    COMPRESSED,
    MIXTRAL,
    MODELOPT,
    TORCHAO,
    assert_same,
    bits,
    dequantized,
    logits,
    raw,
    relative,
    write_gguf,
    write_gpt_oss,
    write_mxfp4_pack,
)
from lowering_tests.passes import idioms

BF16 = 2.0**-7  # relative: two roundings of a bfloat16 product


def linears(model) -> dict[str, FP4Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, FP4Linear)}


def load(path, **options):
    return fp4_inductor.load_pretrained(path, **options)


@pytest.mark.parametrize("path", [MODELOPT, COMPRESSED, TORCHAO, MIXTRAL], ids=lambda p: p.name)
def test_logits_are_those_of_the_dequantized_model(path):
    model = load(path)
    assert relative(logits(model), logits(dequantized(model, model.config))) < BF16
    report = fp4_inductor.report(model)
    assert report.coverage == 100.0
    assert model.dtype == torch.bfloat16
    assert not model.training


def test_modelopt_bits():
    stored, model = raw(MODELOPT), load(MODELOPT)
    assert len(linears(model)) == 14
    for name, layer in linears(model).items():
        assert torch.equal(layer.qdata, stored[f"{name}.weight"])
        assert torch.equal(bits(layer.scale), bits(stored[f"{name}.weight_scale"]))
        assert torch.equal(layer.global_scale, stored[f"{name}.weight_scale_2"])
        assert torch.equal(layer.input_scale, stored[f"{name}.input_scale"])


def test_compressed_tensors_bits_and_the_reciprocal():
    stored, model = raw(COMPRESSED), load(COMPRESSED)
    assert len(linears(model)) == 14
    for name, layer in linears(model).items():
        assert torch.equal(layer.qdata, stored[f"{name}.weight_packed"])
        assert torch.equal(bits(layer.scale), bits(stored[f"{name}.weight_scale"]))
        # What compressed-tensors itself computes: scale / global_scale in float32, times the code, rounded to bfloat16.
        scale = stored[f"{name}.weight_scale"].float() / stored[f"{name}.weight_global_scale"]
        want = torch.ops.fp4.dequantize(layer.qdata, torch.ones_like(scale).to(torch.float8_e4m3fn), torch.ones(()), torch.float32).unflatten(-1, (-1, 16))
        assert torch.equal(layer.dequantize(), (want * scale.unsqueeze(-1)).flatten(-2).bfloat16())


def test_torchao_bits():
    """The order of the tiles by its definition: offset (r % 32) * 16 + (r // 32) * 4 + c within tiles of 128 rows and 4 columns."""
    stored, model = raw(TORCHAO), load(TORCHAO)
    assert len(linears(model)) == 14
    for name, layer in linears(model).items():
        assert torch.equal(layer.qdata, stored[f"{name}._weight_qdata"])
        assert torch.equal(layer.global_scale, stored[f"{name}._weight_per_tensor_scale"])
        flat, (rows, cols) = bits(stored[f"{name}._weight_scale"]), layer.scale.shape
        r, c = torch.arange(rows)[:, None], torch.arange(cols)[None]
        tile = (r // 128) * (-(-cols // 4)) + c // 4
        assert torch.equal(layer.scale.view(torch.uint8), flat[tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4])


@pytest.mark.parametrize("shape", [(1, 1), (32, 4), (128, 4), (130, 5), (300, 12)])
def test_unswizzle(shape):
    scale = torch.randint(0, 255, shape, dtype=torch.uint8)
    assert torch.equal(torchao.unswizzle(idioms.swizzle(scale), *shape), scale)


def test_mixtral_experts_bits():
    stored, model = raw(MIXTRAL), load(MIXTRAL)
    for i, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        assert isinstance(experts, FP4Experts)
        for e in range(4):
            prefix = f"model.layers.{i}.block_sparse_moe.experts.{e}"
            for part, names in ((experts.gate_up_proj, ("w1", "w3")), (experts.down_proj, ("w2",))):
                assert torch.equal(part.qdata[e], torch.cat([stored[f"{prefix}.{n}.weight"] for n in names]))
                assert torch.equal(bits(part.scale[e]), torch.cat([bits(stored[f"{prefix}.{n}.weight_scale"]) for n in names]))
                assert all(part.global_scale[e] == stored[f"{prefix}.{n}.weight_scale_2"] for n in names)
                assert part.input_scale[e] == max(stored[f"{prefix}.{n}.input_scale"] for n in names)


def test_gpt_oss(tiny, tmp_path):
    model = tiny("gpt_oss", torch.bfloat16)
    dense = write_gpt_oss(model, tmp_path)
    loaded = load(tmp_path)
    for i in range(2):
        experts = loaded.model.layers[i].mlp.experts
        # transformers builds the model under its own default dtype, in which a clamp at 7 was once not recognised
        assert experts.activation == Activation("swiglu_oai", 1.702, 7.0, True)
        for part in ("gate_up_proj", "down_proj"):
            w = getattr(experts, part)
            assert torch.equal(w.dequantize(torch.float32).mT, dense[f"model.layers.{i}.mlp.experts.{part}"])
            assert torch.equal(w.bias, raw(tmp_path)[f"model.layers.{i}.mlp.experts.{part}_bias"])
    assert relative(logits(loaded), logits(dequantized(loaded, loaded.config))) < BF16


def test_mxfp4_pack_quantized(tiny, tmp_path):
    dense = write_mxfp4_pack(tiny("llama", torch.bfloat16), tmp_path)
    loaded = load(tmp_path)
    assert len(linears(loaded)) == len(dense) == 14
    for name, layer in linears(loaded).items():
        assert torch.equal(layer.dequantize(torch.float32), dense[f"{name}.weight"])


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_mxfp4_whose_exponents_span_too_much(tiny, tmp_path, family):
    """18 octaves: no global scale holds them. Refused by name, or kept dense and said so; never rounded."""
    dense = (write_mxfp4_pack if family == "llama" else write_gpt_oss)(tiny(family, torch.bfloat16), tmp_path, span=18)
    with pytest.raises(errors.CoverageError, match=r"proj.*cannot be NVFP4.*strict=False"):
        load(tmp_path)
    loaded = load(tmp_path, strict=False)
    assert not linears(loaded)
    state = loaded.state_dict()
    for name, want in dense.items():
        assert torch.equal(state[name], want.bfloat16()), name
    assert sum("stays in high precision" in note for note in fp4_inductor.report(loaded).notes) == len(dense)
    assert logits(loaded).isfinite().all()


def test_gguf(tiny, tmp_path):
    pytest.importorskip("gguf")
    model = tiny("llama", torch.bfloat16)
    dense = write_gguf(model, tmp_path / "m.gguf")
    loaded = load(tmp_path / "m.gguf")
    assert len(linears(loaded)) == 14
    for name, layer in linears(loaded).items():
        assert torch.equal(layer.dequantize(torch.float32), dense[f"{name}.weight"]), name
    model.load_state_dict({n: t.bfloat16() for n, t in dense.items()})
    assert relative(logits(loaded), logits(model)) < BF16


def test_a_damaged_gguf(tiny, tmp_path):
    pytest.importorskip("gguf")
    write_gguf(tiny("llama", torch.bfloat16), tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    for i, damaged in enumerate((b"", b"GGUF", data[:100], data[: len(data) // 2], data[:-40], b"XXXX" + data[4:])):
        path = tmp_path / f"{i}.gguf"
        path.write_bytes(damaged)
        with pytest.raises(errors.CheckpointError):
            load(path)


# --- through transformers --------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("path", [MODELOPT, COMPRESSED, MIXTRAL], ids=lambda p: p.name)
def test_straight_to_a_gpu(path, tmp_path):
    """The same bits as through the host, and the same refusals."""
    on_cpu, model = load(path), load(path, device="cuda")
    for name, held in model.state_dict().items():
        assert held.is_cuda, name
        assert torch.equal(bits(held).cpu(), bits(on_cpu.state_dict()[name])), name
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    file = next(tmp_path.glob("*.safetensors"))
    stored = load_file(file)
    name = next(n for n, t in stored.items() if t.dtype == torch.float8_e4m3fn)
    stored[name].view(torch.uint8).view(-1)[3] = 0x7F
    save_file(stored, file, metadata={"format": "pt"})
    with pytest.raises(errors.CheckpointError, match="NaN or negative block scale"):
        load(tmp_path, device="cuda")


@pytest.mark.parametrize("path", [MODELOPT, MIXTRAL], ids=lambda p: p.name)
def test_from_pretrained_knows_modelopt(path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert_same(model, load(path))
    assert model.hf_quantizer.is_compileable
    assert model.hf_quantizer.is_serializable()


@pytest.mark.parametrize("path", [MODELOPT, COMPRESSED, TORCHAO, MIXTRAL], ids=lambda p: p.name)
def test_save_pretrained_round_trip(path, tmp_path):
    from transformers import AutoModelForCausalLM

    model = load(path)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert_same(model, again)
    assert_same(model, load(tmp_path))
    assert torch.equal(logits(model), logits(again))


def test_sharded_and_index(tmp_path):
    model = load(MIXTRAL)
    model.save_pretrained(tmp_path, max_shard_size="20kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert_same(model, load(tmp_path))


def test_hf_quant_config_alone(tmp_path):
    """ModelOpt wrote only hf_quant_config.json before version 0.3x; config.json knows nothing there."""
    shutil.copytree(MODELOPT, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_same(load(tmp_path), load(MODELOPT))


@pytest.mark.filterwarnings("ignore:export_pretrained")
def test_llm_compressor_calls_mixtrals_experts_otherwise(tmp_path):
    """gate_proj, up_proj, down_proj where transformers expects w1, w3, w2."""
    model = load(MIXTRAL)
    fp4_inductor.export_pretrained(model, tmp_path / "a", "compressed-tensors")
    names = {".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}
    state = load_file(tmp_path / "a" / "model.safetensors")
    renamed = {}
    for name, t in state.items():
        for old, new in names.items():
            name = name.replace(old, new) if ".experts." in name else name
        renamed[name] = t
    assert renamed.keys() != state.keys()
    save_file(renamed, tmp_path / "a" / "model.safetensors", metadata={"format": "pt"})
    loaded = load(tmp_path / "a")
    for a, b in zip(loaded.model.layers, model.model.layers, strict=True):
        for part in ("gate_up_proj", "down_proj"):
            left, right = getattr(a.mlp.experts, part), getattr(b.mlp.experts, part)
            assert torch.equal(left.qdata, right.qdata)
            assert torch.equal(bits(left.scale), bits(right.scale))
            torch.testing.assert_close(left.global_scale, right.global_scale, rtol=2.0**-22, atol=0)


def test_dtype_device_and_options():
    model = load(MODELOPT, dtype=torch.float32, device="cpu", prefill="bf16")
    assert model.dtype == torch.float32
    layer = model.model.layers[0].mlp.up_proj
    assert layer.dtype == torch.float32
    assert layer.prefill == "bf16"
    with pytest.raises(errors.DeviceError):
        load(MODELOPT, device="meta")
    with pytest.raises(errors.ConfigError, match="runs no code"):
        load(MODELOPT, trust_remote_code=True)
    with pytest.raises(errors.ConfigError, match="say the same"):
        load(MODELOPT, device="cpu", device_map="cpu")


def test_gate_and_up_under_different_global_scales(tmp_path):
    """One matrix has one global scale: refused by name, or kept dense with the right values."""
    shutil.copytree(MIXTRAL, tmp_path, dirs_exist_ok=True)
    state = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.2.w3"
    state[f"{name}.weight_scale_2"] = state[f"{name}.weight_scale_2"] * 1.5
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(errors.CoverageError, match=r"layers\.1\.mlp\.experts\.gate_up_proj cannot be NVFP4"):
        load(tmp_path)
    model, original = load(tmp_path, strict=False), load(MIXTRAL)
    assert isinstance(model.model.layers[0].mlp.experts, FP4Experts)
    dense, packed = model.model.layers[1].mlp.experts, original.model.layers[1].mlp.experts
    assert torch.equal(dense.gate_up_proj[1], packed.gate_up_proj.dequantize()[1])
    assert torch.equal(dense.gate_up_proj[2, :96], packed.gate_up_proj.dequantize()[2, :96])
    want = packed.gate_up_proj[2].dequantize(torch.float32)[96:] * 1.5
    assert relative(dense.gate_up_proj[2, 96:].double(), want.double()) < 2.0**-8
    assert torch.equal(dense.down_proj, packed.down_proj.dequantize())
    assert logits(model).isfinite().all()


def test_every_format_has_a_test_here():
    assert set(FORMATS) == {"modelopt", "compressed-tensors", "mxfp4", "torchao", "gguf", "fp4_inductor"}
