"""The commands on bad input: a message, an exit status, nothing half-written, no traceback."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowering_tests.cli.commands import ASSETS, DENSE, NOVEL, Commands, environment, inside, poke
from lowering_tests.foreign import COMPRESSED, MODELOPT, TORCHAO

FAST = ("--scale-search", "amax", "-q")
UP = "model.layers.0.mlp.up_proj"
NAN = b"\x7f"  # as a block scale
# format -> (folder, tensor, what to write into it, what inspect says)
DAMAGE = {
    "native": (None, f"{UP}.qdata", b"\xa5\x5a", f"{UP}.qdata was altered since it was saved"),
    "transformers": (None, f"{UP}.scale", NAN, f"{UP}.weight has a NaN or negative block scale"),
    "modelopt": (MODELOPT, f"{UP}.weight_scale_2", b"\0\0\0\0", f"{UP}.weight has a global scale that is not finite and positive"),
    "modelopt input": (MODELOPT, f"{UP}.input_scale", b"\0\0\xc0\xff", f"{UP}.input_scale must be finite and positive"),
    "compressed-tensors": (COMPRESSED, f"{UP}.weight_scale", b"\x80", f"{UP}.weight has a NaN or negative block scale"),
    "torchao": (TORCHAO, f"{UP}._weight_scale", NAN, f"{UP}.weight has a NaN or negative block scale"),
    "dense": (Path(DENSE), "model.norm.weight", b"\xc0\x7f", "model.norm.weight holds NaN or Inf"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_and_named(fp4, written, tmp_path, kind):
    source, tensor, value, what = DAMAGE[kind]
    folder = Path(shutil.copytree(source or written(kind), tmp_path / "copy"))
    poke(folder, tensor, value, "fp4_inductor.safetensors" if kind == "native" else "model.safetensors")
    done = fp4("inspect", folder).must(1)
    assert "DAMAGED: 1 problem\n" in done.out and what in " ".join(done.out.split())
    assert fp4("inspect", folder, "--headers").must().status == 0  # no value is read
    found = fp4("inspect", folder, "--json").must(1).json
    assert len(found["damage"]) == 1 and what in found["damage"][0]["what"]
    if kind not in ("dense", "modelopt input"):
        assert "fp4-inductor inspect lists them" in fp4("verify", folder).must(1).out


def test_every_damaged_place_is_listed(fp4, tmp_path):
    folder = Path(shutil.copytree(MODELOPT, tmp_path / "copy"))
    for i in range(2):
        for name in ("up_proj", "gate_proj"):
            poke(folder, f"model.layers.{i}.mlp.{name}.weight_scale", b"\xff")
    found = fp4("inspect", folder, "--json").must(1).json
    assert sorted(d["what"].split()[0] for d in found["damage"]) == [f"model.layers.{i}.mlp.{n}_proj.weight" for i in range(2) for n in ("gate", "up")]


@pytest.mark.parametrize("kind", ["native", "transformers"])
@pytest.mark.parametrize("how", ["truncated", "missing", "config"])
def test_damaged_files_are_named(fp4, written, tmp_path, kind, how):
    folder = Path(shutil.copytree(written(kind), tmp_path / "copy"))
    name = "fp4_inductor.safetensors" if kind == "native" else "model.safetensors"
    if how == "truncated":
        os.truncate(folder / name, 1_000_000)
    elif how == "missing":
        (folder / name).unlink()
    else:
        name = "config.json"
        (folder / name).write_text('{"architectures": [')
    if (kind, how) == ("transformers", "missing"):
        assert "no safetensors weights" in fp4("inspect", folder).must(2).err  # no checkpoint is there
        return
    done = fp4("inspect", folder).must(1)
    assert "DAMAGED" in done.out and name in done.out.split("DAMAGED")[1]


def test_a_checkpoint_that_does_not_load_fails_the_check(fp4, tmp_path):
    """Every byte is right, and config.json is of another model."""
    folder = Path(shutil.copytree(MODELOPT, tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    done = fp4("verify", folder).must(1)
    assert "it does not load" in done.out and "model.layers.1.mlp.{" in done.out and "up_proj" in done.out


MISTAKES = {
    "no such folder": (("inspect", "{tmp}/none"), "there is no such file or folder"),
    "an empty folder": (("inspect", "{tmp}/empty"), "no safetensors weights"),
    "a file": (("inspect", NOVEL), "this file is no checkpoint"),
    "text called GGUF": (("inspect", "{tmp}/text.gguf"), "this file is no checkpoint"),
    "an unknown quantization": (("inspect", "{tmp}/gptq"), "in a format without a reader"),
    "quantize nothing": (("quantize", "{tmp}/none", "{tmp}/out"), "there is no such file or folder"),
    "a hub id without a hub": (("quantize", "some/model", "{tmp}/out"), "not in the cache"),
    "quantized already": (("quantize", str(MODELOPT), "{tmp}/out"), "is quantized already"),
    "pickled weights": (("quantize", "{tmp}/pickled", "{tmp}/out"), "Pickled weights"),
    "a model with missing weights": (("quantize", "{tmp}/partial", "{tmp}/out"), "would be random"),
    "code of a checkpoint": (("quantize", "{tmp}/code", "{tmp}/out", *FAST), "needs code that comes with it"),
    "out is not empty": (("quantize", DENSE, "{tmp}/full", *FAST), "--overwrite"),
    "out is a file": (("quantize", DENSE, NOVEL), "a file of this name"),
    "out is below a file": (("quantize", DENSE, NOVEL + "/out"), "nothing can be written there"),
    "out is the model": (("quantize", "{tmp}/dense", "{tmp}/dense", "--overwrite"), "over itself"),
    "no such device": (("quantize", DENSE, "{tmp}/out", "--device", "cuda"), "cannot be used here"),
    "not a device": (("run", DENSE, "--prompt", "x", "--device", "gpu"), "not a device"),
    "not 2:4": (("quantize", DENSE, "{tmp}/out", "--sparse", "existing", "-q"), "are not 2:4"),
    "sparse without text": (("quantize", DENSE, "{tmp}/out", "--sparse", "admm"), "--calibration FILE"),
    "sparse by magnitude": (("quantize", DENSE, "{tmp}/out", "--sparse", "magnitude"), "--accept-loss"),
    "sparse for another library": (("quantize", DENSE, "{tmp}/out", "--sparse", "existing", "--format", "modelopt"), "no other library reads"),
    "sparse with a head": (("quantize", DENSE, "{tmp}/out", "--sparse", "existing", "--lm-head", "fp8"), "is for dense NVFP4"),
    "a budget without sparsity": (("quantize", DENSE, "{tmp}/out", "--bits", "4"), "without --sparse"),
    "no calibration text": (("quantize", DENSE, "{tmp}/out", "--calibration", "{tmp}/none"), "No such file or directory"),
    "calibration that is no text": (("quantize", DENSE, "{tmp}/out", "--calibration", DENSE + "/model.safetensors"), "no text"),
    "calibration that is not used": (("quantize", DENSE, "{tmp}/out", "--calibration", NOVEL, "--scale-search", "mse"), "would not be used"),
    "a folder of layers that is not used": (("quantize", DENSE, "{tmp}/out", "--checkpoint-dir", "{tmp}/kept", *FAST), "would not be used"),
    "a folder of layers in out": (("quantize", DENSE, "{tmp}/out", "--checkpoint-dir", "{tmp}/out/kept"), "is OUT or lies in it"),
    "a folder of other things": (
        ("quantize", DENSE, "{tmp}/out", "--scale-search", "gptq", "--checkpoint-dir", "{tmp}/full"),
        "holds something else; nothing was changed",
    ),
    "an ignored layer too many": (("quantize", DENSE, "{tmp}/out", "--ignore", "re:.*", *FAST), "no layer to quantize"),
    "an unknown format": (("quantize", DENSE, "{tmp}/out", "--format", "gptq"), "invalid choice"),
    "no bytes of a size": (("quantize", DENSE, "{tmp}/out", "--max-shard-size", "big", *FAST), "max_shard_size is no size"),
    "verify what is dense": (("verify", DENSE), "is not quantized"),
    "export what is dense": (("export", DENSE, "{tmp}/out", "--format", "modelopt"), "is not quantized"),
    "a limit without a model": (("verify", str(MODELOPT), "--max-kl", "1"), "--against MODEL"),
    "no tokenizer": (("run", str(MODELOPT), "--prompt", "x"), "has no tokenizer"),
    "an empty prompt": (("run", DENSE, "--prompt", ""), "the prompt is empty"),
    "no tokens": (("explain", DENSE, "--tokens", "0"), "is no number above 0"),
    "no number": (("explain", DENSE, "--tokens", "1,many"), "'many' is no number above 0"),
    "no command": (("quantise", DENSE, "{tmp}/out"), "invalid choice"),
    "an unknown option": (("inspect", DENSE, "--head"), "unrecognized arguments"),
    "an argument too many": (("verify", str(MODELOPT), DENSE), "usage: fp4-inductor verify FOLDER [--against MODEL] [options] fp4-inductor verify: error:"),
}


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory) -> Path:
    """The folders that MISTAKES name."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("mistaken")
    (folder / "empty").mkdir()
    (folder / "text.gguf").write_text("this is no GGUF file")
    for name in ("gptq", "pickled", "partial", "code", "dense", "full"):
        shutil.copytree(DENSE, folder / name)
    config = json.loads((Path(DENSE) / "config.json").read_text())
    (folder / "gptq" / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    (folder / "pickled" / "model.safetensors").rename(folder / "pickled" / "pytorch_model.bin")
    tensors = load_file(folder / "partial" / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, folder / "partial" / "model.safetensors", metadata={"format": "pt"})
    auto = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    (folder / "code" / "config.json").write_text(json.dumps(config | {"auto_map": auto, "model_type": "mine", "architectures": ["Mine"]}))
    (folder / "code" / "mine.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    return folder


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_a_message_and_changes_nothing(fp4, mistaken, mistake):
    args, said = MISTAKES[mistake]
    before = inside(mistaken)
    done = fp4(*(a.format(tmp=mistaken) for a in args), stdin="y\n").must(2)
    assert done.out == ""
    assert said in " ".join(done.err.split())
    assert max(len(line) for line in done.err.splitlines() if "/" not in line) <= 80
    assert inside(mistaken) == before


def test_json_says_the_mistake_too(fp4):
    found = fp4("inspect", "/none", "--json").must(2).json
    assert found["status"] == 2
    assert found["error"].keys() == {"type", "message", "what", "value", "limit", "remedy"}
    assert found["error"]["type"] == "CheckpointError"


def test_remedies_name_options(fp4, mistaken):
    """The library's remedies name arguments of functions; those that a command has are shown as its options."""
    done = fp4("quantize", DENSE, mistaken / "out", "--ignore", "re:.*", *FAST).must(2)
    assert "ignore=[" not in done.err


def test_a_traceback_is_shown_on_request(fp4):
    done = fp4("inspect", "/none", "--traceback")
    assert done.status == 2
    assert "Traceback (most recent call last)" in done.err and "identify.py" in done.err


def test_an_error_of_the_program_has_a_status_of_its_own(fp4):
    broken = "import fp4_inductor\ndef f(*a, **k): raise KeyError('oops')\nfp4_inductor.inspect_checkpoint = f"
    done = fp4("inspect", DENSE, before=broken).must(3)
    assert "KeyError: 'oops'" in done.err and "--traceback" in done.err


@pytest.mark.parametrize("raised", ["MemoryError()", "RuntimeError('DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes')"])
def test_no_memory_is_a_message(fp4, raised):
    broken = f"import fp4_inductor\ndef f(*a, **k): raise {raised}\nfp4_inductor.inspect_checkpoint = f"
    assert "out of memory" in fp4("inspect", DENSE, before=broken).must(2).err


def test_a_reader_that_stops_reading_is_no_error(fp4):
    done = fp4("inspect", MODELOPT, unread=True)
    assert (done.status, done.err) == (141, "")


# --- nothing half-written --------------------------------------------------------------------------------------------

_WHILE_SAVING = """
import fp4_inductor.checkpoint.save, sys
module = sys.modules["fp4_inductor.checkpoint.save"]
real = module.save_file
def save_file(*args, **kwargs):
    real(*args, **kwargs)
    {do}
module.save_file = save_file
"""
_NO_SPACE = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))"
_STOPS = {
    "no space": (_NO_SPACE, 2, "cannot be written"),
    "Ctrl-C": (_WHILE_SAVING.format(do="import os, signal; os.kill(os.getpid(), signal.SIGINT)"), 130, "interrupted; nothing half-written is left"),
    "SIGTERM": (_WHILE_SAVING.format(do="import os, signal; os.kill(os.getpid(), signal.SIGTERM)"), 143, "interrupted; nothing half-written is left"),
    "read-only": (_WHILE_SAVING.format(do="raise PermissionError(13, 'Permission denied')"), 2, "Permission denied"),
}


@pytest.mark.parametrize("stop", _STOPS)
@pytest.mark.parametrize("old", [False, True], ids=["new folder", "over an old one"])
def test_nothing_half_written_is_left(fp4, written, tmp_path, stop, old):
    before, status, said = _STOPS[stop]
    out = tmp_path / "a" / "out"
    if old:
        shutil.copytree(written("modelopt"), out)
    there = inside(tmp_path)
    done = fp4("quantize", DENSE, out, "--overwrite", *FAST, before=before).must(status)
    assert said in " ".join(done.err.split())
    assert inside(tmp_path) == there


def test_ctrl_c_in_a_process_of_its_own(tmp_path):
    """As a shell sends it, while the model is being read or quantized."""
    command = [sys.executable, "-m", "fp4_inductor", "quantize", str(ASSETS / "austen_moe"), str(tmp_path / "out")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())
    lines = []
    while not lines or not lines[-1].startswith("quantizing"):
        lines.append(process.stderr.readline())
        assert lines[-1], lines
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, ""), err
    assert "interrupted" in err and "Traceback" not in err
    assert inside(tmp_path) == {}


def test_a_machine_without_transformers(tmp_path):
    """``inspect`` works; the others say what to install."""
    code = "import runpy, sys; sys.modules['transformers'] = None; sys.argv[0] = 'fp4-inductor'; runpy.run_module('fp4_inductor', run_name='__main__')"

    def run(*args: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, env=environment(), timeout=120, check=False)

    found = run("inspect", str(MODELOPT))
    assert found.returncode == 0 and "no damage found" in found.stdout, found.stderr
    refused = run("run", DENSE, "--prompt", "x")
    assert refused.returncode == 2, refused.stderr
    assert "pip install 'fp4_inductor[models]'" in refused.stderr and "Traceback" not in refused.stderr


def test_the_fork_server_itself(fp4):
    """A command that crashes is not taken for one that ends well."""
    assert isinstance(fp4, Commands)
    assert fp4("inspect", DENSE, before="import os; os.kill(os.getpid(), 9)").status == -9
    assert fp4("inspect", DENSE, before="1 / 0").status == 99
