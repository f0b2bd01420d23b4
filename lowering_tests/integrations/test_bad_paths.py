"""What load_pretrained is given: paths that lead nowhere, leftovers, variants, subfolders, folders of ``save``, no network."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time

import pytest
import torch
import transformers

import fp4_inductor
from fp4_inductor import errors
from fp4_inductor.integrations.pretrained import place
from lowering_tests.foreign import MIXTRAL, MODELOPT, PLAIN, assert_same, logits, raw

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(MODELOPT, tmp_path / "a")
    return tmp_path / "a"


@pytest.fixture
def saved(tiny, tmp_path):
    """``(the model, a folder that fp4_inductor.save wrote)``."""
    model = fp4_inductor.quantize_model(tiny("mixtral", torch.bfloat16), PLAIN, progress=False)
    fp4_inductor.save(model, tmp_path / "native")
    return model, tmp_path / "native"


@pytest.mark.parametrize("leftover", ["shards are gone", "damaged", "names itself"])
def test_a_single_file_beside_a_leftover_index(folder, leftover):
    file = "model.safetensors" if leftover == "names itself" else "model-00001-of-00001.safetensors"
    index = {"weight_map": dict.fromkeys(raw(folder), file)}
    (folder / INDEX).write_text("{" if leftover == "damaged" else json.dumps(index))
    assert torch.equal(logits(fp4_inductor.load_pretrained(folder)), logits(fp4_inductor.load_pretrained(MODELOPT)))


def test_two_whole_checkpoints_in_one_folder(folder):
    shutil.copy(MIXTRAL / "model.safetensors", folder / "model-00001-of-00001.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "model-00001-of-00001.safetensors"}}))
    with pytest.raises(errors.CheckpointError, match="two checkpoints"):
        fp4_inductor.load_pretrained(folder)


@pytest.mark.parametrize("sharded", [False, True], ids=["single", "shards"])
def test_variant(folder, tmp_path, sharded):
    """Beside other weights of the same model, whose index must not be read for it."""
    want = logits(fp4_inductor.load_pretrained(MODELOPT))
    if sharded:
        model = fp4_inductor.load_pretrained(MODELOPT)
        fp4_inductor.export_pretrained(model, tmp_path / "b", max_shard_size="60kB")
        body = json.loads((tmp_path / "b" / INDEX).read_text())
        names = {file: file.replace("model-", "model.nv-") for file in set(body["weight_map"].values())}
        for old, new in names.items():
            (tmp_path / "b" / old).rename(tmp_path / "b" / new)
        body["weight_map"] = {name: names[file] for name, file in body["weight_map"].items()}
        (tmp_path / "b" / "model.safetensors.index.nv.json").write_text(json.dumps(body))
        body["weight_map"] = dict.fromkeys(body["weight_map"], "model-00001-of-00001.safetensors")
        (tmp_path / "b" / INDEX).write_text(json.dumps(body))
        folder = tmp_path / "b"
    else:
        (folder / "model.safetensors").rename(folder / "model.nv.safetensors")
        with pytest.raises(errors.CheckpointError, match=r"model\.nv\.safetensors: pass variant="):
            fp4_inductor.load_pretrained(folder)
    assert torch.equal(logits(fp4_inductor.load_pretrained(folder, variant="nv")), want)


def test_subfolder(folder):
    assert torch.equal(logits(fp4_inductor.load_pretrained(folder.parent, subfolder="a")), logits(fp4_inductor.load_pretrained(MODELOPT)))
    with pytest.raises(errors.CheckpointError, match="no such subfolder"):
        fp4_inductor.load_pretrained(folder.parent, subfolder="b")


def test_a_native_folder_as_a_model_class(saved):
    """A class of a model has no ``from_config``, which the auto classes have."""
    model, folder = saved
    loaded = fp4_inductor.load_pretrained(folder, model_class=type(model))
    assert type(loaded) is type(model)
    assert_same(loaded, model)


def test_a_native_folder_of_a_model_that_is_not_transformers(tmp_path):
    fp4_inductor.save(fp4_inductor.quantize_model(torch.nn.Sequential(torch.nn.Linear(32, 32)), progress=False), tmp_path)
    with pytest.raises(errors.CheckpointError, match=r"does not say which model.*fp4_inductor\.load\(lambda"):
        fp4_inductor.load_pretrained(tmp_path)


@pytest.mark.parametrize("how", ["load_pretrained", "from_pretrained"])
def test_an_index_that_leads_outside(folder, how):
    """Through transformers too, which joins the folder and whatever the index says."""
    (folder / "model.safetensors").rename(folder.parent / "x.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(raw_of(folder.parent / "x.safetensors"), "../x.safetensors")}))
    load = fp4_inductor.load_pretrained if how == "load_pretrained" else transformers.AutoModelForCausalLM.from_pretrained
    with pytest.raises(errors.CheckpointError, match="outside"):
        load(folder)


def raw_of(path):
    from safetensors.torch import load_file

    return load_file(path)


def test_paths_with_dots_are_fine(folder, monkeypatch):
    monkeypatch.chdir(folder)
    want = logits(fp4_inductor.load_pretrained(MODELOPT))
    for path in (".", "../a", f"../a/../{folder.name}"):
        assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto")), want)


def test_a_folder_of_save_is_read(saved):
    model, path = saved
    again = fp4_inductor.load_pretrained(path)
    assert_same(again, model)
    assert torch.equal(logits(again), logits(model))
    assert fp4_inductor.report(again).coverage == fp4_inductor.report(model).coverage
    assert fp4_inductor.load_pretrained(path, dtype="float16").dtype == torch.float16
    with pytest.raises(errors.ConfigError, match=r"\['tp_plan'\]"):
        fp4_inductor.load_pretrained(path, tp_plan="auto")


def test_folders_that_are_no_checkpoint(saved, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(errors.CheckpointError, match=r"config\.json cannot be read.*Name the directory"):
        fp4_inductor.load_pretrained(tmp_path / "empty")
    with pytest.raises(errors.CheckpointError, match=r"fp4_inductor\.json cannot be read.*Name a directory that fp4_inductor\.save\(\) wrote"):
        fp4_inductor.load(saved[0], tmp_path / "empty")
    with pytest.raises(errors.CheckpointError, match=r"did not write this folder.*load_pretrained"):
        fp4_inductor.load(saved[0], MODELOPT)


@pytest.mark.parametrize("kind", ["pipe", "folder", "link to nowhere", "link to itself"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "fp4_inductor.json", "fp4_inductor.safetensors"])
def test_a_file_that_is_none(folder, saved, name, kind):
    """A pipe would be waited for, for ever: the alarm ends that."""
    path = folder if "model" in name or "config" in name else saved[1]
    (path / name).unlink()
    if kind == "pipe":
        os.mkfifo(path / name)
    elif kind == "folder":
        (path / name).mkdir()
    else:
        (path / name).symlink_to(name if "itself" in kind else "nowhere")

    def stop(*_):
        raise TimeoutError("waits for the pipe")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    try:
        with pytest.raises(errors.CheckpointError):
            fp4_inductor.load_pretrained(path)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "a/b/c", "nowhere.gguf", "~/nowhere", "C:\\models"])
def test_a_path_that_does_not_exist_is_answered_as_a_path(path):
    with pytest.raises(errors.CheckpointError, match="there is no such file or folder"):
        fp4_inductor.load_pretrained(path)


@pytest.mark.parametrize("value", [None, "", 3, b"x"], ids=repr)
def test_no_path_at_all(saved, value):
    model, _ = saved
    for call in (
        lambda: fp4_inductor.load_pretrained(value),
        lambda: fp4_inductor.export_pretrained(model, value),
        lambda: fp4_inductor.save(model, value),
        lambda: fp4_inductor.load(model, value),
    ):
        with pytest.raises(errors.ConfigError, match="is no path"):
            call()


@pytest.fixture
def no_network(monkeypatch):
    """A hub that does not answer, as behind a firewall that drops packets."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("https_proxy", "http_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(place, "_PATIENCE", 0.1)

    def silence(*args, **kwargs):
        time.sleep(0.5)
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", silence)


def test_a_hub_that_cannot_be_reached_is_said_at_once(no_network, tmp_path):
    start = time.monotonic()
    with pytest.raises(errors.CheckpointError, match="no folder here, and not in the cache.*cannot be reached"):
        fp4_inductor.load_pretrained("nobody/nothing", cache_dir=tmp_path)
    assert time.monotonic() - start < 2


def test_what_is_in_the_cache_of_the_hub_is_read_without_a_network(no_network, tmp_path):
    snapshot = tmp_path / "models--nobody--nothing" / "snapshots" / "0123456789012345678901234567890123456789"
    shutil.copytree(MODELOPT, snapshot)
    (tmp_path / "models--nobody--nothing" / "refs").mkdir()
    (tmp_path / "models--nobody--nothing" / "refs" / "main").write_text(snapshot.name)
    start = time.monotonic()
    again = fp4_inductor.load_pretrained("nobody/nothing", cache_dir=tmp_path)
    assert time.monotonic() - start < 5, "nobody tries again and again"
    assert torch.equal(logits(again), logits(fp4_inductor.load_pretrained(MODELOPT)))


def test_offline_by_choice(tmp_path):
    with pytest.raises(errors.CheckpointError, match="local_files_only is set"):
        fp4_inductor.load_pretrained("nobody/nothing", cache_dir=tmp_path, local_files_only=True)
