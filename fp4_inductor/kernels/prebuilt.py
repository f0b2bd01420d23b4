"""The compiled libraries that a wheel brings in ``fp4_inductor/_lib``, and the manifest that says what each is.

A library is used if its sources and flags are those of this package and its bytes are those that were written: the loader never
sees a damaged file, and a changed source never meets an old library.
"""

from __future__ import annotations

import functools
import hashlib
import json
import warnings
from pathlib import Path

from .._sources import prebuilt_dir

MANIFEST = "manifest.json"


Entry = dict[str, str | int]


def entry(library: Path, identity: str) -> Entry:
    """What the manifest says of a library; ``identity``: the hash of its sources and flags."""
    content = library.read_bytes()
    return {"identity": identity, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def write_manifest(folder: Path, entries: dict[str, Entry]) -> None:
    """Write ``{file name: entry(...)}`` beside the libraries."""
    (folder / MANIFEST).write_text(json.dumps(dict(sorted(entries.items())), indent=1) + "\n")


@functools.cache
def _read(folder: Path) -> dict[str, Entry]:
    try:
        return json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        warnings.warn(f"fp4_inductor: the libraries of {folder} are not used, their manifest cannot be read: {error}", RuntimeWarning, stacklevel=2)
        return {}


def manifest() -> dict[str, Entry]:
    """``{file name: entry}`` of this installation; empty if it brought no libraries."""
    folder = prebuilt_dir()
    return _read(folder) if folder else {}


def find(identity: str) -> Path | None:
    """The library that was made from these sources with these flags; None if this installation has none, or if it is damaged."""
    folder = prebuilt_dir()
    for name, known in manifest().items():
        if folder is not None and known["identity"] == identity:
            return folder / name if _intact(folder / name, known) else None
    return None


def _intact(path: Path, known: Entry) -> bool:
    try:
        if entry(path, str(known["identity"])) == known:
            return True
        why = "its bytes are not those that were written"
    except OSError as error:
        why = str(error)
    warnings.warn(f"fp4_inductor: {path} cannot be used: {why}. Reinstall fp4_inductor", RuntimeWarning, stacklevel=3)
    return False


def architectures() -> list[int]:
    """The compute capabilities (times ten) for which this installation brought CUDA kernels."""
    return sorted({int(name.rpartition(".sm_")[2].removesuffix(".so")) for name in manifest() if ".sm_" in name})
