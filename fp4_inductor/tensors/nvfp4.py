"""NVFP4Tensor: an NVFP4 weight ``[..., N, K]`` as a torch.Tensor."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..formats import nvfp4
from ..formats.storage import Storage
from . import rules  # noqa: F401
from .base import FP4Tensor

fp4 = torch.ops.fp4


class NVFP4Tensor(FP4Tensor):
    """An NVFP4 weight: ``value = e2m1(qdata) * scale * global_scale``.

    Args:
        qdata: uint8 ``[..., N, K/2]``, two E2M1 codes a byte, the even k in the low nibble.
        scale: float8_e4m3fn ``[..., N, K/16]``.
        global_scale: float32 of the leading shape (``[]`` for a matrix, ``[E]`` for experts; ``[E, 1, 1]`` becomes ``[E]``);
            it multiplies.
        dtype: bfloat16, float16 or float32: the dtype this weight presents and dequantises to.
        transposed: present ``[..., K, N]``.

    Raises:
        DTypeError, ShapeError, DeviceError: if the parts do not belong together.
    """

    STORAGE: ClassVar[Storage] = nvfp4.STORAGE
    qdata: Tensor

    @staticmethod
    def __new__(cls, qdata: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype = torch.bfloat16, transposed: bool = False):
        nvfp4.check_parts(qdata, scale, global_scale)
        return cls._wrapper(qdata, dtype, transposed)

    def __init__(self, qdata: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype = torch.bfloat16, transposed: bool = False):
        self._hold((qdata, scale, global_scale), dtype, transposed)

    @classmethod
    def from_dense(cls, w: Tensor, scale_search: str = "amax", global_scale: Tensor | None = None, *, channel_weight: Tensor | None = None) -> NVFP4Tensor:
        """Quantize a dense ``[..., N, K]`` weight (bf16, fp16 or fp32; K a multiple of 16).

        Args:
            w: the weight; not modified.
            scale_search: see :class:`fp4_inductor.NVFP4Config`.
            global_scale: float32, multiplying; derived from the maximum if None.
            channel_weight: ``[K]`` float32 E[x^2] per input channel, for ``scale_search="activation"``.

        Raises:
            DTypeError, ShapeError, NonFiniteError, ConfigError
        """
        qdata, scale, g = fp4.quantize(w.detach(), scale_search, global_scale, channel_weight)
        return cls(qdata, scale, g, w.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dense weight in ``dtype`` (default: this tensor's dtype), as an ordinary tensor."""
        w = fp4.dequantize(self.qdata, self.scale, self.global_scale, dtype or self.logical_dtype)
        return w.mT if self.transposed else w

    def _linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return fp4.linear(x, self.qdata, self.scale, self.global_scale, bias)

    def _bmm(self, x: Tensor) -> Tensor:
        return fp4.bmm(x, self.qdata, self.scale, self.global_scale)
