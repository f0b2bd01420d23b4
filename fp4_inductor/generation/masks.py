"""The attention mask of a decode step.

A model of Transformers makes its masks from what the cache says about itself. That is left to it, except where the cache answers with Python numbers
(a ``StaticSlidingWindowLayer`` counts in Python): those would be constants of a captured step. For such a cache the masks are made here, from the
position that the device holds, as ``transformers.masking_utils.create_masks_for_generate`` makes them.

Source: transformers.masking_utils, transformers.cache_utils (5.17 to 5.24).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .caches import host_counted

_OURS = ("sdpa", "eager", "fp4_inductor")  # implementations of attention whose masks are bool, or added, [B, 1, Q, S]
_PATTERNS = {"full_attention", "sliding_attention"}


def why_no_masks(model: Any, cache: Any) -> str | None:
    """Why this module cannot make the masks that ``cache`` needs; None: it can, or need not."""
    if not host_counted(cache):
        return None
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation not in _OURS:
        return f'attention "{config._attn_implementation}" over a cache with sliding layers'
    other = set(getattr(config, "layer_types", None) or ()) - _PATTERNS
    if other or getattr(config, "attention_chunk_size", None) is not None:
        return f"the layers' masks are of other kinds ({', '.join(sorted(other)) or 'chunked_attention'})"
    return None


class Masks:
    """Makes the masks of decode steps over one cache, of one phase of it (:func:`fp4_inductor.generation.caches.phase`).

    Args:
        full: is the window of the sliding layers full?
    """

    def __init__(self, model: Any, cache: Any, full: bool):
        config = model.config.get_text_config(decoder=True)
        self.ours = bool(host_counted(cache))
        self.full = full
        self.kinds = tuple(sorted(set(config.layer_types))) if hasattr(config, "layer_types") else ()
        self.slides = getattr(config, "sliding_window", None) is not None
        self.added = config._attn_implementation == "eager"
        self.dtype = model.dtype
        sizes = [(bool(getattr(layer, "is_sliding", False)), layer.get_max_length()) for layer in getattr(cache, "layers", ())] if self.ours else []
        self.window = next((size for slides, size in sizes if slides), 0)
        self.length = next((size for slides, size in sizes if not slides), 0)

    def __call__(self, padding: Tensor | None, column: Tensor) -> Any:
        """What the model takes as ``attention_mask``.

        Args:
            padding: bool ``[B, S]``, False for padding, True for all that is to come; None: no row is padded.
            column: int64 ``[]``, tokens in the cache before this step.
        """
        if not self.ours:
            return padding
        if self.kinds:
            return {kind: self._mask(padding, column, kind == "sliding_attention") for kind in self.kinds}
        return self._mask(padding, column, self.slides)

    def _mask(self, padding: Tensor | None, column: Tensor, slides: bool) -> Tensor:
        places = torch.arange(self.window if slides else self.length, device=column.device)
        if slides and self.full:
            # The cache holds the last tokens, oldest first, and this step's token comes last. All of them are in the window.
            places = places + (column - (self.window - 1))
            mask = torch.ones_like(places, dtype=torch.bool)[None]
        else:
            mask = (places <= column)[None]
        if padding is not None:
            mask = mask & padding.index_select(1, places)
        mask = mask[:, None, None, :]
        if not self.added:
            return mask
        return torch.where(mask, torch.zeros((), dtype=self.dtype, device=mask.device), torch.finfo(self.dtype).min)
