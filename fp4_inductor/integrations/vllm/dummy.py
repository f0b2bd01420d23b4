"""Random weights for ``load_format="dummy"``: vLLM fills parameters with numbers around zero, which as block scales are negative or zero.

The numbers have no meaning; the time of a forward pass has. Codes are random bytes, so that a GPU switches as many bits as with a
real model, and magnitudes are those of an initialised model, so that nothing overflows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats import sparse24

_SEED = 1234
_SCALE_CODES = (0x30, 0x38)  # E4M3 0.5 to 1.0
_GLOBAL = 2.0**-6


def fill_dummy(codes: Tensor, scale: Tensor, global_scale: Tensor, meta: Tensor | None, divides: bool) -> None:
    """Fill the parts of a weight in place, the same on every run. ``divides``: as in :class:`.linear.Names`."""
    generator = torch.Generator(device=codes.device).manual_seed(_SEED)
    codes.view(torch.uint8).random_(0, 256, generator=generator)
    scale.view(torch.uint8).random_(*_SCALE_CODES, generator=generator)
    global_scale.fill_(1 / _GLOBAL if divides else _GLOBAL)
    if meta is not None:
        legal = torch.tensor(sparse24.NIBBLES, dtype=torch.uint8, device=meta.device)
        which = torch.empty((*meta.shape[:-1], 2 * meta.shape[-1]), dtype=torch.uint8, device=meta.device).random_(0, len(legal), generator=generator)
        meta.copy_(sparse24.pack_meta(legal[which.int()]))
