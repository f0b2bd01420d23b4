"""The progress bar of everything that walks a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def bar(items: Iterable[Any], desc: str, unit: str, progress: bool, total: int | None = None) -> Iterable[Any]:
    """``items`` behind a tqdm bar; ``progress=False`` shows none. ``total``: how many, if ``items`` cannot tell."""
    from tqdm.auto import tqdm

    return tqdm(items, desc=desc, unit=unit, disable=not progress, total=total)
