"""A folder of finished layers, from which an interrupted run goes on: one safetensors file for each, and ``run.json``, which says of which run.

Each file is written under another name and renamed, so that a process that is killed leaves whole files only. The folder is locked while a run
uses it; the lock ends with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..config import NVFP4Config, Sparse24Config
from ..errors import CheckpointError, ConfigError
from .aside import as_path, said_by
from .safetensors_file import Reader, crc32, parse_json, read_header

FILE = "run.json"
KIND = "fp4_inductor: finished layers of quantize_model"
_USES = ("auto", "gptq")  # the scale searches that take long enough
_OURS = re.compile(r"run\.json|(text|layer-\d+)\.safetensors|\..*\.tmp")
# In the metadata of a file: the digest of the fingerprint, the key, and the CRC-32 of each tensor.
_RUN, _KEY, _CRC = "run", "key", "crc32."
_AGAIN = "Remove this file to have its layer made again."


class LayerFolder:
    """A :class:`fp4_inductor.models.finished.LayerStore` in a folder, which is another run's to use once the ``with`` block ends."""

    def __init__(self, directory: Path):
        self.directory, self.place = directory, str(directory)
        self._run = ""
        self._lock: int | None = None

    def open(self, fingerprint: dict[str, str]) -> None:
        """Make the folder, or go on with it.

        Raises:
            CheckpointError: it holds another run's layers or other files, another run is using it, or it cannot be written to.
        """
        self._run = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()
        path = self.directory / FILE
        with self._writing():
            self.directory.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            present = sorted(p.name for p in self.directory.iterdir())
        foreign = [n for n in present if not _OURS.fullmatch(n)]
        if foreign or (present and FILE not in present and any(n.endswith(".safetensors") for n in present)):
            raise CheckpointError(
                "checkpoint_dir holds something else; nothing was changed",
                value=f"{self.place}: {', '.join(foreign[:5] or present[:5])}",
                limit="a new or empty folder, or that of an interrupted run",
                remedy="Name another folder.",
            )
        for name in present:
            if name.endswith(".tmp"):  # of a process that was killed: nobody else has the lock
                (self.directory / name).unlink(missing_ok=True)
        if FILE not in present:
            with self._writing():
                self._replace(path, json.dumps({"kind": KIND, "fingerprint": fingerprint}, indent=1).encode())
            return
        found = self._fingerprint(path)
        if found != fingerprint:
            other = sorted(k for k in {*found, *fingerprint} if found.get(k) != fingerprint.get(k))
            options = f" (there {found.get('options')}; now {fingerprint.get('options')})" if "options" in other else ""
            raise CheckpointError(
                "checkpoint_dir holds the layers of another run; nothing was changed",
                value=f"{self.place} of other {', '.join(other)}{options}",
                limit="the same weights, calibration and options, bit for bit",
                remedy="Name another folder, or remove this one to begin again.",
            )

    def read(self, key: str, expected: Mapping[str, tuple[torch.dtype, tuple[int, ...]]] | None = None) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """``(tensors, words)`` of one file; None if it is not there.

        Raises:
            CheckpointError: it is damaged, of another run, or not of the ``expected`` dtypes and shapes.
        """
        path = self.directory / f"{key}.safetensors"
        if not path.exists():
            return None
        header = read_header(path)
        is_expected = expected is None or {n: (e.dtype, e.shape) for n, e in header.entries.items()} == expected
        sums = {n: header.metadata.get(f"{_CRC}{n}") for n in header.entries}
        if (header.metadata.get(_RUN), header.metadata.get(_KEY)) != (self._run, key) or not is_expected or None in sums.values():
            raise CheckpointError(
                f"{path.name} does not belong to this run; nothing was changed",
                value=f"{path}: {', '.join(header.entries)}"[:200],
                limit=f"{key} of this run",
                remedy=_AGAIN,
            )
        with Reader() as reader:
            tensors = {n: reader.read(e, int(sums[n] or "0", 16)) for n, e in header.entries.items()}
        return tensors, {k: v for k, v in header.metadata.items() if k not in (_RUN, _KEY) and not k.startswith(_CRC)}

    def write(self, key: str, tensors: dict[str, Tensor], words: dict[str, str]) -> None:
        """Write one file; it is there as a whole, or not at all.

        Raises:
            CheckpointError: no space, or no permission; the files before it stay.
        """
        held = {n: t.detach().contiguous().cpu() for n, t in tensors.items()}
        metadata = {**words, _RUN: self._run, _KEY: key, **{f"{_CRC}{n}": f"{crc32(t):08x}" for n, t in held.items()}}
        with self._writing():
            self._replace(self.directory / f"{key}.safetensors", held, metadata)

    def __enter__(self) -> LayerFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take_lock(self) -> None:
        if self._lock is not None:
            return
        self._lock = os.open(self.directory, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._unlock()
            raise CheckpointError(
                "checkpoint_dir is used by another run; nothing was changed",
                value=self.place,
                limit="one run at a time",
                remedy="Wait until that run has ended, or name another folder.",
            ) from error
        except OSError:  # a file system without locks
            pass

    def _fingerprint(self, path: Path) -> dict[str, str]:
        content = parse_json(path.read_bytes(), path.name)
        found = content.get("fingerprint")
        if content.get("kind") != KIND or not isinstance(found, dict):
            raise CheckpointError("checkpoint_dir: run.json is of another program", value=self.place, limit=KIND, remedy="Name another folder.")
        return found

    def _replace(self, path: Path, content: bytes | dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
        file, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=self.directory)
        os.close(file)
        try:
            if isinstance(content, bytes):
                Path(name).write_bytes(content)
            else:
                save_file(content, name, metadata=metadata)
            with open(name, "rb") as written:
                os.fsync(written.fileno())
            os.replace(name, path)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(name)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                "checkpoint_dir cannot be written to; the model is as it was, and so are the layers that are in the folder",
                value=f"{said_by(error)}: {self.place}",
                limit="a folder you may write to, with space for the quantized weights",
                remedy="Make space or correct its permissions, and run it again with the same folder.",
            ) from error


def layer_folder(directory: str | os.PathLike | None, config: NVFP4Config | Sparse24Config) -> LayerFolder | None:
    """The folder that ``checkpoint_dir=directory`` names; None for None. Nothing is read or written before :meth:`LayerFolder.open`.

    Raises:
        ConfigError: ``directory`` is no path, or ``config`` asks for nothing that could be gone on with.
    """
    if directory is None:
        return None
    path = as_path(directory, "checkpoint_dir")
    search = config.scale_search if isinstance(config, NVFP4Config) else "Sparse24Config"
    if search not in _USES:
        raise ConfigError(
            "checkpoint_dir would not be used",
            value=search,
            limit=f"NVFP4Config with scale_search={' or '.join(map(repr, _USES))}",
            remedy="Leave checkpoint_dir out: nothing else keeps finished layers.",
        )
    return LayerFolder(path)
