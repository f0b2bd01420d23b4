"""FP8Linear: a linear layer with an E4M3 weight, for layers that NVFP4 would cost too much (the output head)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..errors import ConfigError
from ..ops import cast_for_autocast
from ..ops.linear import LARGE_M
from ..ops.linear_fp8 import quantize_weight
from .bits import QuantizedLinear, check_dtype


class FP8Linear(QuantizedLinear):
    """``y = x @ (weight * weight_scale[:, None]).T + bias``.

    Buffers: ``weight`` float8_e4m3fn ``[N, K]``, ``weight_scale`` float32 ``[N]``, ``bias`` ``[N]`` or None. Moves and casts as
    for :class:`FP4Linear`.
    """

    parts: ClassVar[dict[str, torch.dtype]] = {"weight": torch.float8_e4m3fn, "weight_scale": torch.float32}
    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, bias: bool = False, *, dtype: torch.dtype = torch.bfloat16, device=None, large_m: str = "auto"):
        super().__init__()
        if large_m not in LARGE_M:
            raise ConfigError("FP8Linear: unknown large_m", value=repr(large_m), limit=list(LARGE_M), remedy="NVFP4Config describes them.")
        check_dtype(self, dtype)
        self.in_features, self.out_features, self.dtype, self.large_m = in_features, out_features, dtype, large_m
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn))
        self.register_buffer("weight_scale", torch.ones(out_features, dtype=torch.float32, device=device))
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype, device=device) if bias else None)

    @classmethod
    def from_weight(cls, weight: Tensor, bias: Tensor | None = None, *, large_m: str = "auto") -> FP8Linear:
        """Round ``weight`` ``[N, K]`` (bf16, fp16 or fp32) to E4M3, one scale per output. The inputs are not modified."""
        layer = cls(weight.shape[1], weight.shape[0], dtype=weight.dtype, device="meta", large_m=large_m)
        layer.weight, layer.weight_scale = quantize_weight(weight.detach())
        layer.bias = None if bias is None else bias.detach().to(weight.dtype).clone()
        return layer

    def forward(self, x: Tensor) -> Tensor:
        x, _ = cast_for_autocast(x)
        bias = self.bias
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        return torch.ops.fp4.linear_fp8(x, self.weight, self.weight_scale, bias, self.large_m)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight ``[N, K]`` in ``dtype`` (default: :attr:`dtype`)."""
        return (self.weight.float() * self.weight_scale[:, None]).to(dtype or self.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, fp8, dtype={self.dtype}, large_m={self.large_m}"
