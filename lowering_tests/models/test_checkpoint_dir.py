"""quantize_model(checkpoint_dir=...): an interrupted run goes on where it was and gives the same bits; what does not belong together is refused."""

from __future__ import annotations

import copy
import errno
import os
from pathlib import Path

import pytest
import torch

import fp4_inductor
from fp4_inductor import NVFP4Config, Sparse24Config, errors, quantize_model
from fp4_inductor.checkpoint import layer_folder
from fp4_inductor.models import gptq, prune, scale_choice, sparsify_experts
from fp4_inductor.modules import FP4Experts, FP4Linear

pytest.importorskip("transformers")
GPTQ = NVFP4Config("gptq")


@pytest.fixture(autouse=True)
def short_text(monkeypatch):
    monkeypatch.setattr(gptq, "SEQUENCES", 8)
    monkeypatch.setattr(gptq, "TOKENS", 32)
    for module in (gptq, prune, sparsify_experts):
        monkeypatch.setattr(module, "ENOUGH", 60)


def bits(model):
    return {name: t.reshape(-1).view(torch.uint8) for name, t in model.state_dict().items()}


def same(a, b) -> bool:
    first, second = bits(a), bits(b)
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def run(model, folder, config=GPTQ, **options):
    return quantize_model(copy.deepcopy(model), config, progress=False, checkpoint_dir=folder, **options)


def interrupted_after(monkeypatch, layers: int, model, folder, config=GPTQ) -> list:
    """A run that ends when it has kept ``layers`` layers; returns the names of the files that it wrote."""
    real = layer_folder.LayerFolder.write

    def write(self, key, tensors, words):
        if key == f"layer-{layers:05d}":
            raise KeyboardInterrupt
        real(self, key, tensors, words)

    with monkeypatch.context() as patch:
        patch.setattr(layer_folder.LayerFolder, "write", write)
        before = copy.deepcopy(model)
        with pytest.raises(KeyboardInterrupt):
            quantize_model(model, config, progress=False, checkpoint_dir=folder)
        assert same(model, before)
    return sorted(p.name for p in Path(folder).iterdir())


def notes(model) -> str:
    return "\n".join(fp4_inductor.report(model).notes)


def rows(model) -> list:
    return [(r.name, r.relative_error, r.output_error, r.notes) for r in fp4_inductor.report(model).layers]


@pytest.mark.parametrize("siblings", ["packed", "shared"])
def test_an_interrupted_run_goes_on_bit_for_bit(tiny, tmp_path, monkeypatch, siblings):
    model, config = tiny("llama", torch.bfloat16), NVFP4Config("gptq", siblings=siblings)
    whole = quantize_model(copy.deepcopy(model), config, progress=False)
    names = interrupted_after(monkeypatch, 5, model, tmp_path / "kept", config)
    assert names == [*(f"layer-{i:05d}.safetensors" for i in range(5)), "run.json", "text.safetensors"]
    rounded, written = [], []
    real, write = prune.gptq.quantize, gptq.self_calibration.write
    monkeypatch.setattr(prune.gptq, "quantize", lambda *args: (rounded.append(1), real(*args))[1])
    monkeypatch.setattr(gptq.self_calibration, "write", lambda *args, **kw: (written.append(1), write(*args, **kw))[1])
    again = run(model, tmp_path / "kept", config)
    assert same(again, whole) and rows(again) == rows(whole)
    assert (len(rounded), len(written)) == (9, 0)  # of 14 layers, and the text was there
    assert "5 of 14 layers were finished by an earlier run and come from checkpoint_dir=" in notes(again)
    assert "were finished" not in notes(whole)
    # A run that was complete is there as a whole.
    assert same(run(model, tmp_path / "kept", config), whole) and len(rounded) == 9


def test_experts_too(tiny, tmp_path, monkeypatch):
    model = tiny("qwen3_moe", torch.bfloat16)
    whole = quantize_model(copy.deepcopy(model), GPTQ, progress=False)
    count = sum(isinstance(m, (FP4Experts, FP4Linear)) for m in whole.modules())
    files = interrupted_after(monkeypatch, count - 1, model, tmp_path)  # items are numbered dense layers first, experts last
    assert f"layer-{count - 2:05d}.safetensors" in files  # experts of the first block
    again = run(model, tmp_path)
    assert same(again, whole) and rows(again) == rows(whole)
    assert f"{len(files) - 2} of {count} layers were finished" in notes(again)


def test_auto_goes_on_and_says_if_it_takes_something_else(tiny, tmp_path, monkeypatch):
    model = tiny("llama", torch.bfloat16)
    monkeypatch.setattr(scale_choice, "SECONDS", 60.0)
    interrupted_after(monkeypatch, 3, model, tmp_path / "kept", NVFP4Config())
    assert "3 of 14 layers" in notes(run(model, tmp_path / "kept"))  # what "auto" makes is what "gptq" makes
    monkeypatch.setattr(scale_choice, "SECONDS", 0.0)
    assert 'is for "gptq": nothing of it is in the result' in notes(run(model, tmp_path / "other", NVFP4Config()))
    assert not (tmp_path / "other").exists()


def refused(model, folder, match: str, config=GPTQ, kind=errors.CheckpointError, **options) -> None:
    before = copy.deepcopy(model)
    with pytest.raises(kind, match=match) as caught:
        quantize_model(model, config, progress=False, checkpoint_dir=folder, **options)
    assert caught.value.value is not None and caught.value.limit is not None and caught.value.remedy is not None
    assert same(model, before)


def test_another_run_is_refused(tiny, tmp_path, monkeypatch):
    model = tiny("llama", torch.bfloat16)
    interrupted_after(monkeypatch, 2, model, tmp_path)
    kept = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    other = copy.deepcopy(model)
    other.model.layers[1].mlp.up_proj.weight.data[3, 4] *= 2
    refused(other, tmp_path, "of other weights;")
    ids = [torch.randint(128, (2, 40))]
    refused(model, tmp_path, "of other calibration;", NVFP4Config("gptq", calibration=ids))
    refused(model, tmp_path, "of other options .there siblings=packed.*; now siblings=shared", NVFP4Config("gptq", siblings="shared"))
    refused(model, tmp_path, "of other layers;", ignore=["o_proj"])
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == kept
    with layer_folder.LayerFolder(tmp_path) as held:
        held._take_lock()
        refused(model, tmp_path, "is used by another run")
    run(model, tmp_path)


def test_calibration_is_compared_by_its_values(tiny, tmp_path):
    model, ids = tiny("llama", torch.bfloat16), torch.randint(128, (2, 40))
    whole = run(model, tmp_path, NVFP4Config("gptq", calibration=[{"input_ids": ids, "use_cache": False}, (ids[:1],)]))
    assert same(run(model, tmp_path, NVFP4Config("gptq", calibration=iter([{"input_ids": ids.clone(), "use_cache": False}, (ids[:1],)]))), whole)
    refused(model, tmp_path, "of other calibration;", NVFP4Config("gptq", calibration=[{"input_ids": ids.flip(0), "use_cache": False}, (ids[:1],)]))
    what = NVFP4Config("gptq", calibration=[{"input_ids": ids, "past_key_values": object()}])
    refused(model, tmp_path / "new", "whether calibration is the same", what, errors.ConfigError)


def test_damage_is_refused(tiny, tmp_path, monkeypatch):
    model = tiny("llama", torch.bfloat16)
    interrupted_after(monkeypatch, 2, model, tmp_path)
    path = tmp_path / "layer-00001.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused(model, tmp_path, "was altered since it was saved")
    path.write_bytes(whole[:-7])
    refused(model, tmp_path, "layer-00001.safetensors")
    for other in ("layer-00000", "text"):
        path.write_bytes((tmp_path / f"{other}.safetensors").read_bytes())
        refused(model, tmp_path, "layer-00001.safetensors does not belong to this run")
    (tmp_path / "notes.txt").touch()
    refused(model, tmp_path, "holds something else.*notes.txt")


def test_no_space_keeps_what_is_there(tiny, tmp_path, monkeypatch):
    model = tiny("llama", torch.bfloat16)
    whole = quantize_model(copy.deepcopy(model), GPTQ, progress=False)
    real, calls = layer_folder.save_file, []

    def full(tensors, name, metadata):
        calls.append(1)
        if len(calls) == 5:
            Path(name).write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(tensors, name, metadata=metadata)

    with monkeypatch.context() as patch:
        patch.setattr(layer_folder, "save_file", full)
        refused(model, tmp_path, "No space left on device")
    (tmp_path / ".killed.tmp").write_bytes(b"half")  # what a killed process leaves
    again = run(model, tmp_path)
    assert same(again, whole) and "3 of 14 layers" in notes(again)
    assert not list(tmp_path.glob(".*"))
    (tmp_path / "file").touch()
    refused(model, tmp_path / "file" / "below", "Not a directory")


def test_other_uses_are_refused(tiny, tmp_path):
    model = tiny("llama", torch.bfloat16)
    refused(model, tmp_path, "would not be used", NVFP4Config("mse"), errors.ConfigError)
    refused(model, tmp_path, "would not be used; got Sparse24Config", Sparse24Config("existing"), errors.ConfigError)
    refused(model, 3, "checkpoint_dir is no path", kind=errors.ConfigError)
