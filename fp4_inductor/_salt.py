"""What a compiled artifact depends on beyond its graph, as a string: every byte of this package, the dispatch config, the compile range in force."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from pathlib import Path

from . import _engines, _exchange
from ._sources import csrc_dir
from .config import dispatch_config
from .errors import KernelError
from .ranges import range_in_force

PREFIX = "fp4:"
_NO_SOURCES = {".pyc", ".so", ".o", ".pyd", ".md"}
foreign_kernels: list[str] = []  # "op:name" of those that kernels/registry.py was given
_PACKAGE = Path(__file__).resolve().parent


def cache_salt() -> str:
    """What a compiled graph of this package depends on beyond its own code and inputs, for the key of a cache that stores such graphs.

    It is another string if a byte of this package's sources changes, the :class:`fp4_inductor.DispatchConfig` in force (that of
    :func:`fp4_inductor.set_dispatch` and of the :class:`fp4_inductor.dispatch` blocks around the caller), the range of
    :func:`fp4_inductor.compile_range` or of a provider, or which groups of ranks share memory. It is the same in each process that has these
    alike. Torch's own caches need no help: their keys have it. A cache above them does, if it stores graphs that are not lowered again when it hits (vLLM's
    is one).

    Returns:
        ASCII without spaces, at most 120 characters.
    """
    given = range_in_force()
    ranges = "" if given is None else f":{given.low}-{'' if given.high is None else given.high}"
    return f"{salt()}{ranges}{':engine' if _engines.compiles() else ''}{_groups()}"


def _groups() -> str:
    """Groups of ranks over which a launch may sum: a graph that does is none for a process that lacks their memory."""
    numbers = _exchange.numbers()
    return f":{hashlib.sha256(repr(numbers).encode()).hexdigest()[:12]}" if numbers else ""


def salt() -> str:
    """``"fp4:<sha256 of the package's sources and of the dispatch config in force>"``."""
    return PREFIX + hashlib.sha256(f"{sources_digest()}|{dispatch_config()!r}|{foreign_kernels}".encode()).hexdigest()


@functools.cache
def sources_digest() -> str:
    """sha256 over the names and bytes of all source files of the package and of its ``csrc``."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(f"{path.relative_to(_PACKAGE.parent).as_posix()}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def sources() -> list[Path]:
    """The files whose bytes decide what a compiled artifact does, sorted."""
    roots = [_PACKAGE]
    with contextlib.suppress(KernelError):  # a copy without the C and CUDA sources has none that could change
        roots.append(csrc_dir())
    return sorted({p for root in roots for p in root.rglob("*") if p.is_file() and p.suffix not in _NO_SOURCES and "__pycache__" not in p.parts})
