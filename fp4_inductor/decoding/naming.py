"""What Transformers calls the cache of a model: the argument of a model and of ``model.generate``, and the field of what they return.

It is ``cache`` from Transformers 5.24 on, and ``past_key_values`` before. Which of them is asked for is decided here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

NAMES = ("past_key_values", "cache")


@functools.cache
def cache_name() -> str:
    """The name in this Transformers. A later one takes the earlier name too, but warns of it at each call."""
    from transformers.generation.utils import ALL_CACHE_NAMES

    return next(name for name in reversed(NAMES) if name in ALL_CACHE_NAMES)


def named_otherwise(model: Any) -> str:
    """The name that the forward of ``model`` has for its cache, if it is not :func:`cache_name`; empty: it is, or there is none."""
    accepts = inspect.signature(model.forward).parameters
    return next((name for name in NAMES if name in accepts), "") if cache_name() not in accepts else ""


def name_in(arguments: Mapping[str, Any]) -> str:
    """The name that the caller of a layer uses: code outside of Transformers may use another one than Transformers does."""
    return next((name for name in NAMES if name in arguments), NAMES[-1])
