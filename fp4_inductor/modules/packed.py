"""What every module with packed buffers shares: device moves happen, casts leave codes and scales alone, loading never converts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DTypeError
from ..formats import nvfp4

# Each packed buffer, its dtype, and the integer dtype of the same width that stands for its bits.
_BITS = {"qdata": torch.uint8, "scale": torch.uint8, "global_scale": torch.int32, "input_scale": torch.int32}
_DTYPES = {"qdata": torch.uint8, "scale": nvfp4.SCALE_DTYPE, "global_scale": torch.float32, "input_scale": torch.float32}
_DENSE = "Use dequantize() for a dense weight."


class PackedWeight(nn.Module):
    """Buffers ``qdata``, ``scale``, ``global_scale`` (multiplying) of one NVFP4 weight ``[..., N, K]`` and its ``bias`` ``[..., N]`` or None.

    ``input_scale`` (float32, multiplying, the leading shape, or None) is what a W4A4 checkpoint recorded for its activations:
    kept for export, not used by a forward pass whose activations stay in high precision.

    ``.to(dtype)``, ``.half()``, ``.bfloat16()`` cast the bias and set :attr:`dtype`, the dtype this module computes in;
    the codes and scales keep their bits.
    """

    qdata: Tensor
    scale: Tensor
    global_scale: Tensor
    input_scale: Tensor | None
    bias: Tensor | None

    def __init__(self, lead: tuple[int, ...], n: int, k: int, bias: bool, dtype: torch.dtype, device: Any):
        super().__init__()
        if dtype not in nvfp4.HIGH_PRECISION:
            raise DTypeError(f"{type(self).__name__} computes in a high-precision dtype", value=dtype, limit=list(nvfp4.HIGH_PRECISION), remedy=_DENSE)
        self.dtype = dtype
        self.register_buffer("qdata", torch.zeros(*lead, n, k // 2, dtype=torch.uint8, device=device))
        self.register_buffer("scale", torch.zeros(*lead, n, k // nvfp4.GROUP, dtype=torch.uint8, device=device).view(nvfp4.SCALE_DTYPE))
        self.register_buffer("global_scale", torch.ones(lead, dtype=torch.float32, device=device))
        self.register_buffer("input_scale", None)
        self.register_buffer("bias", torch.zeros(*lead, n, dtype=dtype, device=device) if bias else None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True):
        # nn.Module.to(dtype) casts every floating tensor. Codes and scales are bits, not numbers to be cast:
        # show fn integers of the same width, so that device moves happen and casts do not.
        name = type(self).__name__
        dtype = self._probe(fn, self.dtype)
        if dtype not in nvfp4.HIGH_PRECISION:
            raise DTypeError(f"{name} computes in a high-precision dtype", value=dtype, limit=list(nvfp4.HIGH_PRECISION), remedy=_DENSE)
        for bits in set(_BITS.values()):
            if self._probe(fn, bits) != bits:
                raise DTypeError(f"the codes and scales of {name} cannot be cast", value=self._probe(fn, bits), limit=bits, remedy=_DENSE)
        held = [part for part in _BITS if self._buffers[part] is not None]
        for part in held:
            self._buffers[part] = getattr(self, part).view(_BITS[part])
        try:
            super()._apply(fn, recurse)
        finally:
            for part in held:
                self._buffers[part] = getattr(self, part).view(_DTYPES[part])
        self.dtype = dtype
        return self

    def _probe(self, fn: Callable[[Tensor], Tensor], dtype: torch.dtype) -> torch.dtype:
        """The dtype that ``fn`` turns ``dtype`` into."""
        device = self.qdata.device
        return fn(torch.empty(0, dtype=dtype, device="cpu" if device.type == "meta" else device)).dtype

    def _load_from_state_dict(self, state_dict, prefix, *args):
        # copy_ would convert: scale bytes stored as uint8 would become the numbers 0 to 255, silently.
        for name, dtype in _DTYPES.items():
            value = state_dict.get(prefix + name)
            if value is not None and value.dtype != dtype:
                raise DTypeError(
                    f"{prefix}{name} in the state_dict has the wrong dtype", value=value.dtype, limit=dtype, remedy="Reinterpret bits with .view(dtype)."
                )
        super()._load_from_state_dict(state_dict, prefix, *args)
