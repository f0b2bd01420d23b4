"""Continuous batching of Transformers (``generate_batch``, ``transformers serve``) for a model that runs ``"fp4_inductor"`` attention.

Continuous batching accepts an attention implementation by its name, and decides by the name whether it makes masks: ``"sdpa"`` in
Transformers 5.23, ``"paged|sdpa"`` in 5.17. ``fp4.decode_attention`` does not read a paged cache. So the model runs ``"sdpa"``, or
what continuous batching prefers to it, while a manager serves the model, and its own implementations again afterwards.
Importing this imports what it extends.
Source: transformers.generation.continuous_batching.continuous_api (5.17 to 5.24).
"""

from __future__ import annotations

import functools
from typing import Any

from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from ..decoding.attention import NAME, implementations, without_ours

_SWITCH = "switch_to_cb_friendly_attn"


def register() -> None:
    """Extend the choice of an attention by Transformers' ``ContinuousBatchingManager``. May be called again."""
    switch = getattr(ContinuousBatchingManager, _SWITCH)
    if hasattr(switch, "_fp4_inductor"):
        return

    @functools.wraps(switch)
    def switch_from_ours(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        before = implementations(model)
        if NAME not in before.values():
            return switch(self, model, *args, **kwargs)
        model.set_attn_implementation(without_ours(before))
        try:
            switch(self, model, *args, **kwargs)
        except BaseException:
            model.set_attn_implementation(before)
            raise
        # The manager gives this to set_attn_implementation when it stops; a dictionary restores every part of the model.
        self._original_attn_impl = before

    switch_from_ours._fp4_inductor = True  # type: ignore[attr-defined]
    setattr(ContinuousBatchingManager, _SWITCH, switch_from_ours)


register()
