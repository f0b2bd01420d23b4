"""FP4Linear: what ``quantize_model`` puts in place of ``nn.Linear``.

Plain buffers instead of a tensor-subclass Parameter: a subclass costs 5-12 us of host time per weight per call,
outside the compiled graph (design/ARCHITECTURE.md); buffers cost a quarter of a microsecond.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import ConfigError, DeviceError, ShapeError
from ..formats import nvfp4
from ..ops import cast_for_autocast
from ..ops.linear import LARGE_M
from ..tensors.nvfp4 import NVFP4Tensor
from .bits import QuantizedLinear, check_dtype


class FP4Linear(QuantizedLinear):
    """``y = x @ W.T + bias`` with W in NVFP4.

    Buffers (names as in the native checkpoint): ``qdata`` uint8 ``[N, K/2]``, ``scale`` float8_e4m3fn ``[N, K/16]``,
    ``global_scale`` float32 ``[]`` (multiplying), ``bias`` ``[N]`` or None. K is ``in_features`` padded with zero
    weights to a multiple of 16.

    ``.to(dtype)``, ``.half()``, ``.bfloat16()`` cast the bias and set :attr:`dtype`; the codes and scales keep their
    bits. ``.to(device)``, ``deepcopy``, ``pin_memory``, ``state_dict`` work as for any module.
    """

    qdata: Tensor
    scale: Tensor
    global_scale: Tensor
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, bias: bool = False, *, dtype: torch.dtype = torch.bfloat16, device=None, large_m: str = "auto"):
        super().__init__()
        if large_m not in LARGE_M:
            raise ConfigError("FP4Linear: unknown large_m", value=repr(large_m), limit=list(LARGE_M), remedy="NVFP4Config describes them.")
        check_dtype(self, dtype)
        self.in_features, self.out_features, self.dtype, self.large_m = in_features, out_features, dtype, large_m
        self.padding = -in_features % nvfp4.GROUP
        k = in_features + self.padding
        self.register_buffer("qdata", torch.zeros(out_features, k // 2, dtype=torch.uint8, device=device))
        self.register_buffer("scale", torch.zeros(out_features, k // nvfp4.GROUP, dtype=torch.uint8, device=device).view(nvfp4.SCALE_DTYPE))
        self.register_buffer("global_scale", torch.ones((), dtype=torch.float32, device=device))
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype, device=device) if bias else None)

    @classmethod
    def from_weight(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        scale_search: str = "amax",
        channel_weight: Tensor | None = None,
        global_scale: Tensor | None = None,
        large_m: str = "auto",
    ) -> FP4Linear:
        """Quantize ``weight`` ``[N, K]`` (bf16, fp16 or fp32; any K: padded to a multiple of 16). The inputs are not modified."""
        if weight.dim() != 2:
            raise ShapeError("FP4Linear takes a matrix", value=tuple(weight.shape), limit="[N, K]", remedy="Experts [E, N, K] are an NVFP4Tensor.")
        n, k = weight.shape
        if bias is not None and tuple(bias.shape) != (n,):
            raise ShapeError("FP4Linear: bias does not fit N", value=tuple(bias.shape), limit=f"({n},)", remedy="The bias has one entry per output.")
        if bias is not None and bias.device != weight.device:
            raise DeviceError("FP4Linear: weight and bias on different devices", value=bias.device, limit=weight.device, remedy="Move both with .to(device).")
        layer = cls(k, n, dtype=weight.dtype, device="meta", large_m=large_m)
        if layer.padding:
            weight = nn.functional.pad(weight, (0, layer.padding))
            channel_weight = None if channel_weight is None else nn.functional.pad(channel_weight, (0, layer.padding))
        layer.qdata, layer.scale, layer.global_scale = torch.ops.fp4.quantize(weight.detach(), scale_search, global_scale, channel_weight)
        layer.bias = None if bias is None else bias.detach().to(weight.dtype).clone()
        return layer

    def forward(self, x: Tensor) -> Tensor:
        x, _ = cast_for_autocast(x)
        if self.padding:
            x = nn.functional.pad(x, (0, self.padding))
        qdata, scale, global_scale, bias = self.operands()
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        return torch.ops.fp4.linear(x, qdata, scale, global_scale, bias, self.large_m)

    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """``(qdata, scale, global_scale, bias)`` as :meth:`forward` passes them to ``fp4.linear``."""
        bias = self.bias  # read first: the order of a compiled graph's inputs
        return self.qdata, self.scale, self.global_scale, bias

    @property
    def weight(self) -> NVFP4Tensor:
        """The weight as an :class:`NVFP4Tensor` ``[N, K]`` that shares this layer's memory."""
        if self.padding:
            raise ShapeError(
                "this layer's K is padded, so its weight is not an NVFP4Tensor [N, K]",
                value=self.in_features,
                limit="in_features % 16 == 0",
                remedy="Use layer.dequantize(), or qdata and scale directly.",
            )
        return NVFP4Tensor(self.qdata, self.scale, self.global_scale, self.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight ``[N, in_features]`` in ``dtype`` (default: :attr:`dtype`)."""
        w = torch.ops.fp4.dequantize(self.qdata, self.scale, self.global_scale, dtype or self.dtype)
        return w[:, : self.in_features] if self.padding else w

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, nvfp4, dtype={self.dtype}, large_m={self.large_m}"
