"""``inspect_checkpoint``: every format that is read, without a model; damage of every kind, never a crash. (More: lowering_tests/cli.)"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fp4_inductor
from fp4_inductor import NVFP4Tensor, Sparse24Config, errors, inspect_checkpoint
from fp4_inductor.checkpoint import identify, inspection
from fp4_inductor.checkpoint.gguf_file import open_gguf
from fp4_inductor.checkpoint.readers import format_of
from fp4_inductor.checkpoint.safetensors_file import Reader
from fp4_inductor.checkpoint.shards import open_shards
from lowering_tests.checkpoint.test_native_round_trip import Net
from lowering_tests.cli.commands import DENSE, poke
from lowering_tests.faults.mutations import mutate
from lowering_tests.foreign import COMPRESSED, MIXTRAL, MODELOPT, PLAIN, TORCHAO, write_gguf, write_gpt_oss, write_mixed, write_mxfp4_pack
from lowering_tests.models.conftest import build

MUTATIONS = int(os.environ.get("FP4_MUTATIONS", "300"))


@pytest.fixture(autouse=True)
def _no_model(monkeypatch):
    """Nothing here may build a model."""

    def refuse(*args, **kwargs):
        raise AssertionError("a model was built")

    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", refuse)


def counts(found) -> dict[str, int]:
    return {kind: sum(t.format == kind for t in found.quantized) for kind in {t.format for t in found.quantized}}


@pytest.mark.parametrize(
    ("folder", "format", "weights", "scales"),
    [(MODELOPT, "modelopt", 14, 14), (MIXTRAL, "modelopt", 32, 32), (COMPRESSED, "compressed-tensors", 14, 0), (TORCHAO, "torchao", 14, 0)],
)
def test_real_output_of_other_exporters(folder, format, weights, scales):
    found = inspect_checkpoint(folder)
    assert (found.format, counts(found), found.damage, found.read) == (format, {"nvfp4": weights}, [], True)
    assert sum(t.input_scale for t in found.quantized) == scales
    assert found.architecture in ("LlamaForCausalLM", "MixtralForCausalLM")
    up = next(t for t in found.quantized if t.name == "model.layers.0.mlp.up_proj.weight" or t.name.endswith("experts.0.w1.weight"))
    assert up.shape[1] == 64 and up.params == up.shape[0] * 64
    stored = sum(e.end - e.start for e in open_shards(folder).entries.values())
    assert sum(t.bytes for t in found.tensors) + scales * 4 == stored  # an input scale is a float32 beside its weight


def test_formats_without_a_file_at_hand(tmp_path):
    write_gpt_oss(build("gpt_oss", torch.bfloat16), tmp_path / "gpt-oss")
    write_mxfp4_pack(build("llama", torch.bfloat16), tmp_path / "pack")
    write_mixed(tmp_path / "mixed")
    experts = inspect_checkpoint(tmp_path / "gpt-oss")
    assert (experts.format, set(counts(experts))) == ("mxfp4", {"mxfp4"})
    assert all(len(t.shape) == 3 for t in experts.quantized)
    assert inspect_checkpoint(tmp_path / "pack").format == "compressed-tensors"
    mixed = inspect_checkpoint(tmp_path / "mixed")
    assert counts(mixed) == {"nvfp4": 8, "fp8": 4} and mixed.damage == []
    assert any("KV cache" in note for note in mixed.notes)


def test_an_mxfp4_weight_that_nvfp4_cannot_hold_is_noted(tmp_path):
    write_mxfp4_pack(build("llama", torch.bfloat16), tmp_path, span=18)
    found = inspect_checkpoint(tmp_path)
    assert found.damage == [] and sum("strict=False" in note for note in found.notes) == len(found.quantized)


def test_gguf(tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "m.gguf"
    write_gguf(build("llama", torch.bfloat16), path)
    found = inspect_checkpoint(path)
    assert (found.format, found.architecture, counts(found), found.damage) == ("gguf", "llama", {"nvfp4": 14}, [])
    assert {t.format for t in found.tensors} == {"nvfp4", "f32", "q8_0"} and any("Q8_0" in note for note in found.notes)
    raw = bytearray(path.read_bytes())
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_up.weight")
    raw[tensor.data_offset] = 0x7F
    path.write_bytes(raw)
    assert [e.what for e in inspect_checkpoint(path).damage] == ["blk.1.ffn_up.weight holds a block scale that is no number"]
    assert inspect_checkpoint(path, read=False).damage == []
    path.write_bytes(raw[:-100])
    assert "truncated" in inspect_checkpoint(path).damage[0].what
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(errors.CheckpointError, match="needs the gguf package"):  # which is no damage
        inspect_checkpoint(path)


class Experts(torch.nn.Module):
    """A native checkpoint with everything in it: a layer, a shared one, a tensor, sparse weights, a buffer."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.kept = torch.nn.Parameter(NVFP4Tensor.from_dense(torch.randn(32, 64, dtype=torch.bfloat16)), requires_grad=False)


def test_native_folders_without_a_model_class(tmp_path):
    """No config.json: the package that made the model is not needed to look into its folder."""
    model = Experts().bfloat16().eval()
    fp4_inductor.quantize_model(model.net, PLAIN, progress=False)
    fp4_inductor.save(model, tmp_path, max_shard_size=4000)
    found = inspect_checkpoint(tmp_path)
    assert (found.format, found.architecture, found.damage) == ("native", "", [])
    assert ("kept", "nvfp4", (32, 64)) in [(t.name, t.format, t.shape) for t in found.quantized]
    layers = {name for name, m in model.named_modules() if isinstance(m, fp4_inductor.FP4Linear)}
    assert {t.name.removesuffix(".weight") for t in found.quantized} == {*layers, "kept"} and len(found.files) > 1
    stored = {name: e for name, e in inspection.open_checkpoint(tmp_path).entries.items() if name not in inspection.mf.read(tmp_path).aliases}
    assert sum(t.bytes for t in found.tensors) == sum(e.end - e.start for e in stored.values())


def test_a_sparse_native_folder(tmp_path):
    w = torch.randn(64, 64, dtype=torch.bfloat16)
    w.view(-1, 4)[:, :2] = 0
    layer = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    layer.weight.data = w
    model = torch.nn.Sequential(layer)
    fp4_inductor.save(fp4_inductor.quantize_model(model, Sparse24Config(), progress=False), tmp_path)
    found = inspect_checkpoint(tmp_path)
    assert counts(found) == {"sparse24_nvfp4": 1} and found.bits_per_weight == pytest.approx(3.5, abs=0.02)


@pytest.mark.parametrize(
    ("value", "damaged"),
    [([float("nan"), 0.0], True), ([float("inf"), 1.0], True), ([-float("inf"), 1.0], True), ([-float("inf"), 0.0], False), ([65504.0, 1.0], False)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_that_are_not_finite(tmp_path, value, damaged, dtype):
    """Inf is damage, but for a mask of zeros and minus infinity."""
    save_file({"w": torch.tensor(value).to(dtype)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert bool(inspect_checkpoint(tmp_path).damage) == damaged


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_byte_of_the_8_bit_floats(dtype):
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    expected = int((~torch.isfinite(every.float())).sum())
    with pytest.raises(errors.CheckpointError, match="NaN or Inf") as caught:
        inspection.check_finite("t", every)
    assert caught.value.value == f"{expected} of 256 values"


def test_what_is_no_checkpoint_raises(tmp_path):
    for path, match in ((tmp_path / "none", "no such file or folder"), (tmp_path, "no safetensors weights")):
        with pytest.raises(errors.CheckpointError, match=match):
            inspect_checkpoint(path)
    with pytest.raises(errors.ConfigError):
        inspect_checkpoint(None)


def test_hf_quant_config_alone_names_modelopt(tmp_path):
    """ModelOpt before 0.29 wrote no quantization_config into config.json."""
    shutil.copytree(MODELOPT, tmp_path / "old")
    config = json.loads((tmp_path / "old" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    assert counts(inspect_checkpoint(tmp_path / "old")) == {"nvfp4": 14}
    (tmp_path / "old" / "hf_quant_config.json").unlink()
    found = inspect_checkpoint(tmp_path / "old")
    assert found.format == "dense" and "config.json does not say what they are" in found.notes[0]


def test_the_report_is_readable(tmp_path):
    shutil.copytree(MODELOPT, tmp_path / "m")
    poke(tmp_path / "m", "model.layers.1.mlp.up_proj.weight_scale", b"\xff")
    text = str(inspect_checkpoint(tmp_path / "m"))
    assert "  DAMAGED: 1 problem\n    model.layers.1.mlp.up_proj.weight has a NaN or negative block scale\n      found 0xff; expected 0x00 .. 0x7e" in text
    lines = str(inspect_checkpoint(DENSE)).splitlines()
    assert max(map(len, lines[1:])) <= 80
    names = [line.split()[-1] for line in inspect_checkpoint(DENSE).table(every=True).splitlines() if "layers." in line]
    assert names == sorted(names, key=lambda n: (int(n.split(".")[2]), n))


@pytest.mark.parametrize("kind", ["modelopt", "compressed", "torchao", "native"])
def test_mutated_folders(tmp_path, kind):
    """Never a crash; damage is listed if and only if the part of a loader that needs no model refuses the folder."""
    good = tmp_path / "good"
    if kind == "native":
        fp4_inductor.save(fp4_inductor.quantize_model(Net().bfloat16(), PLAIN, progress=False), good)
    else:
        shutil.copytree({"modelopt": MODELOPT, "compressed": COMPRESSED, "torchao": TORCHAO}[kind], good)
    rng, seen = random.Random(kind), {True: 0, False: 0}
    for i in range(MUTATIONS // 4):
        work = Path(shutil.copytree(good, tmp_path / str(i)))
        changed = mutate(rng, work)
        try:
            problems = inspect_checkpoint(work).damage
        except errors.FP4Error as error:
            problems = [error]
        assert all(None not in (e.value, e.limit, e.remedy) for e in problems), changed
        ok = not problems
        assert ok == loads(work), changed
        seen[ok] += 1
        shutil.rmtree(work)
    assert seen[False] > MUTATIONS // 20, seen


def test_mutated_gguf(tmp_path):
    pytest.importorskip("gguf")
    write_gguf(build("llama", torch.bfloat16), tmp_path / "m.gguf")
    good, rng, found = (tmp_path / "m.gguf").read_bytes(), random.Random("gguf"), 0
    end = min(t.start for t in open_gguf(tmp_path / "m.gguf").tensors.values())
    for _ in range(MUTATIONS // 4):
        (tmp_path / "m.gguf").write_bytes(good)
        mutate(rng, tmp_path, end)
        if (tmp_path / "m.gguf").read_bytes()[:4] == b"GGUF":
            found += bool(inspect_checkpoint(tmp_path / "m.gguf").damage)
        else:
            with pytest.raises(errors.CheckpointError, match="no checkpoint"):
                inspect_checkpoint(tmp_path / "m.gguf")
            found += 1
    assert found > MUTATIONS // 20


def loads(folder: Path) -> bool:
    """Does everything that is read without a model get through its checks?"""
    try:
        if (folder / "fp4_inductor.json").exists():
            fp4_inductor.load(lambda: Net().bfloat16(), folder)
            return True
        shards, what = open_shards(folder), identify.identify(folder)
        weights = format_of(what.source).find(shards, what.source).weights if what.quantized else {}
        with Reader() as reader:
            for weight in weights.values():
                weight.read(reader, torch.float32)
                weight.read_input_scale(reader)
            for entry in shards.entries.values():
                t = reader.read(entry)
                if t.is_floating_point() and t.dtype.itemsize > 1 and not bool(torch.isfinite(t).all()):
                    return False
        return bool(weights) or not what.quantized
    except errors.FP4Error:
        return False
