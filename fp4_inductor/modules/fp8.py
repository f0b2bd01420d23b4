"""FP8Linear: a linear layer with an E4M3 weight, for layers that NVFP4 would cost too much (the output head)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from .._renamed import takes_old_names
from ..formats import fp8
from ..formats.storage import Storage
from ..ops.linear import WEIGHT_ONLY
from ..ops.linear_fp8 import quantize_weight
from .linear import FP4Linear


class FP8Linear(FP4Linear):
    """``y = x @ (qdata * scale[:, None]).T + bias``.

    Buffers: ``qdata`` float8_e4m3fn ``[N, K]``, ``scale`` float32 ``[N]``, ``bias`` ``[N]`` or None. All else is as in
    :class:`FP4Linear`; no K is padded.
    """

    ACCEPTED: ClassVar[tuple[str, ...]] = WEIGHT_ONLY

    @classmethod
    def storage(cls) -> Storage:
        """How the weight lies in the buffers."""
        return fp8.STORAGE

    def _empty_weight(self) -> None:
        self.scale.fill_(1.0)

    def parts(self) -> tuple[Tensor, ...]:
        """The weight's buffers, in the order in which the op takes them."""
        return self.qdata, self.scale

    def take(self, parts: tuple[Tensor, ...]) -> None:
        """Make ``parts`` the weight's buffers."""
        self.qdata, self.scale = parts

    @classmethod
    @takes_old_names
    def from_weight(cls, weight: Tensor, bias: Tensor | None = None, *, prefill: str = "auto") -> FP8Linear:  # type: ignore[override]
        """Round ``weight`` ``[N, K]`` (bf16, fp16 or fp32) to E4M3, one scale per output. The inputs are not modified."""
        layer, weight, _ = cls._prepare(weight, bias, None, prefill)
        return layer._fill(quantize_weight(weight), bias)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.fp4.linear_fp8.default(x, self.qdata, self.scale, bias, self.prefill)

    @property
    def weight(self) -> Tensor:
        """The weight in :attr:`dtype`, decoded anew at each access."""
        return self.dequantize()

    def _dense(self, rows: slice, dtype: torch.dtype) -> Tensor:
        return (self.qdata[rows].float() * self.scale[rows, None]).to(dtype)
