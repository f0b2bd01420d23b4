"""A module whose buffers are bits, not numbers: device moves happen to them, casts do not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..errors import DTypeError
from ..formats import nvfp4

DENSE = "Use dequantize() for a dense weight."
PARTS = {"qdata": torch.uint8, "scale": nvfp4.SCALE_DTYPE, "global_scale": torch.float32}
# The integer dtype of the same width that stands for each part's bits.
_BITS = {"qdata": torch.uint8, "scale": torch.uint8, "global_scale": torch.int32}


class BitBuffers(nn.Module):
    """``_apply`` of a module that holds some of the :data:`PARTS` as buffers.

    ``nn.Module.to(dtype)`` casts every floating tensor: codes and scales are shown to it as integers of the same width.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BitBuffers:
        held = [name for name in PARTS if self._buffers.get(name) is not None]
        for bits in {_BITS[name] for name in held}:
            if probe(self, fn, bits) != bits:
                raise DTypeError("the codes and scales of FP4Linear cannot be cast", value=probe(self, fn, bits), limit=bits, remedy=DENSE)
        for name in held:
            self._buffers[name] = self._buffers[name].view(_BITS[name])  # type: ignore[union-attr]
        try:
            super()._apply(fn, recurse)
        finally:
            for name in held:
                self._buffers[name] = self._buffers[name].view(PARTS[name])  # type: ignore[union-attr]
        return self


def probe(module: nn.Module, fn: Callable[[Tensor], Tensor], dtype: torch.dtype) -> torch.dtype:
    """The dtype that ``fn`` turns ``dtype`` into, on the device of ``module``'s codes."""
    device = module.qdata.device
    return fn(torch.empty(0, dtype=dtype, device="cpu" if device.type == "meta" else device)).dtype
