"""``generate()`` for what needs texts of a model and no more of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..decoding.attention import kept
from .caches import HOLDER, holder_of


@contextmanager
def aside(model: Any) -> Iterator[None]:
    """What :func:`fp4_inductor.generate` puts on ``model`` is gone afterwards, and what was there before is there again.

    That is the attention that a KVCache selects, the cache and the graphs that a next call would go on with, and the record of the last call.
    """
    before = vars(model).pop(HOLDER, None)
    with kept(model):
        try:
            yield
        finally:
            own = holder_of(model)
            if own.cache is not None:
                holder_of(own.cache).session = None  # the session and the cache hold each other
            delattr(model, HOLDER)
            if before is not None:
                setattr(model, HOLDER, before)
