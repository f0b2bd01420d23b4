"""What a compiled artifact depends on beyond its graph: every byte of this package and the dispatch config in force.

Lowerings and appended patterns are in no cache key of torch: a changed threshold would silently reuse the old artifact
(shown on torch 2.11 to 2.15). ``torch.compiler.config.cache_key_tag`` is in the keys of the FX-graph cache, the
AOTAutograd cache and the autotune cache; our element of it changes whenever one of ours does.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from pathlib import Path

import torch

from .. import config
from .._sources import csrc_dir
from .._torch import cache
from .._torch.fx_tables import before_autograd
from ..errors import KernelError

_PREFIX = "fp4:"
_NO_SOURCES = {".pyc", ".so", ".o", ".pyd", ".md"}
_PACKAGE = Path(__file__).resolve().parent.parent


def register() -> None:
    """Salt the cache key now, whenever the dispatch config changes, and in each compilation before a key is computed.

    The last covers a user who assigns ``cache_key_tag`` after this package was loaded. It hangs on two hooks: Dynamo's
    start callback, which ``torch._dynamo.reset()`` forgets, and the passes before AOTAutograd, which a user may move
    behind the cache look-up (``pre_grad_pass_timing = "late"``).
    """
    for op in (torch.ops.fp4.dequantize, torch.ops.fp4.sparse_dequantize, torch.ops.fp4.sparse_decompress):
        cache.keep_dequantized(op.default)
    if refresh not in config.dispatch_observers:
        config.dispatch_observers.append(refresh)
    cache.on_compile_start(refresh)
    before_autograd(lambda graph: refresh())
    refresh()


def salt() -> str:
    """``"fp4:<sha256 of the package's sources and of the dispatch config>"``."""
    digest = hashlib.sha256(f"{sources_digest()}|{config.dispatch_config()!r}".encode()).hexdigest()
    return _PREFIX + digest


def refresh() -> None:
    """Put the present salt into torch's cache key tag, in place of an older one, leaving the user's own elements."""
    others = [part for part in cache.key_tag().split(";") if part and not part.startswith(_PREFIX)]
    cache.set_key_tag(";".join([*others, salt()]))


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
