"""A save that fails or is interrupted leaves what was there: the old checkpoint, or nothing."""

from __future__ import annotations

import os
import signal
import sys

import pytest

import fp4_inductor
from fp4_inductor import errors
from fp4_inductor.checkpoint import aside
from lowering_tests.checkpoint.test_native_round_trip import Net, bits
from lowering_tests.foreign import PLAIN

SAVE = sys.modules["fp4_inductor.checkpoint.save"]  # the package has a function of this name
CASES = [OSError(28, "No space left on device"), PermissionError(13, "Permission denied"), KeyboardInterrupt()]


def quantized():
    return fp4_inductor.quantize_model(Net().bfloat16().eval(), PLAIN, progress=False)


@pytest.mark.parametrize("error", CASES, ids=["no space", "read-only", "Ctrl-C"])
@pytest.mark.parametrize("old", [False, True], ids=["new folders", "over an old checkpoint"])
def test_an_interrupted_save_leaves_what_was_there(tmp_path, monkeypatch, error, old):
    model = quantized()
    directory = tmp_path / "a" / "b"
    if old:
        fp4_inductor.save(model, directory)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    def fails(*args, **kwargs):
        raise error

    if isinstance(error, PermissionError):
        monkeypatch.setattr(aside.tempfile, "mkdtemp", fails)
    else:
        real, calls = SAVE.save_file, []
        monkeypatch.setattr(SAVE, "save_file", lambda *args, **kwargs: calls.append(0) or (fails() if len(calls) == 2 else real(*args, **kwargs)))
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else errors.CheckpointError, match=getattr(error, "strerror", None)):
        fp4_inductor.save(model, directory, max_shard_size=2000)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert (tmp_path / "a").exists() == old
    if old:
        assert [p.name for p in directory.iterdir() if p.is_dir()] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_an_interrupt_waits_until_the_files_are_in_place(tmp_path, monkeypatch, request, number):
    """Between the removal of the old checkpoint and the last rename, an interrupt would leave neither."""
    fp4_inductor.save(quantized(), tmp_path)
    before = signal.signal(number, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(number, before))
    real = aside.os.replace

    def interrupted(source, target):
        os.kill(os.getpid(), number)
        real(source, target)

    monkeypatch.setattr(aside.os, "replace", interrupted)
    model = quantized()
    with pytest.raises(KeyboardInterrupt):
        fp4_inductor.save(model, tmp_path)
    monkeypatch.undo()
    assert bits(fp4_inductor.load(Net, tmp_path)) == bits(model)


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(errors.CheckpointError, match="cannot be written"):
            fp4_inductor.save(quantized(), directory)
