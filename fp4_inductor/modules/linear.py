"""FP4Linear: what ``quantize_model`` puts in place of ``nn.Linear``.

Plain buffers instead of a tensor-subclass Parameter: a subclass costs 5-12 us of host time per weight per call,
outside the compiled graph; buffers cost a quarter of a microsecond.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from .._renamed import has_old_names, takes_old_names
from ..errors import ConfigError, DeviceError, ShapeError
from ..ops import cast_for_autocast
from ..ops.linear import PREFILL
from .packed import PackedWeight


@has_old_names
class FP4Linear(PackedWeight):
    """``y = x @ W.T + bias`` with W in NVFP4.

    Buffers (names as in the native checkpoint): ``qdata`` uint8 ``[N, K/2]``, ``scale`` float8_e4m3fn ``[N, K/16]``,
    ``global_scale`` float32 ``[]`` (multiplying), ``bias`` ``[N]`` or None. K is ``in_features`` padded with zero
    weights to a multiple of 16.

    The bias is a Parameter if it is trained (``train_bias()``).

    ``.to(dtype)``, ``.half()``, ``.bfloat16()`` cast the bias and set :attr:`dtype`; the codes and scales keep their
    bits. ``.to(device)``, ``deepcopy``, ``pin_memory``, ``state_dict`` work as for any module.

    A subclass stores the weight in another format: it names the tensor class, whose components become the buffers.
    """

    ACCEPTED: ClassVar[tuple[str, ...]] = PREFILL

    def __init__(self, in_features: int, out_features: int, bias: bool = False, *, dtype: torch.dtype = torch.bfloat16, device=None, prefill: str = "auto"):
        if prefill not in self.ACCEPTED:
            raise ConfigError(f"{type(self).__name__}: unknown prefill", value=repr(prefill), limit=list(self.ACCEPTED), remedy="NVFP4Config describes them.")
        padding = -in_features % self.storage().k_multiple
        super().__init__((), out_features, in_features + padding, bias, dtype, device)
        self.in_features, self.out_features, self.prefill, self.padding = in_features, out_features, prefill, padding

    @classmethod
    @takes_old_names
    def from_weight(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        scale_search: str = "amax",
        channel_weight: Tensor | None = None,
        global_scale: Tensor | None = None,
        prefill: str = "auto",
    ) -> FP4Linear:
        """Quantize ``weight`` ``[N, K]`` (bf16, fp16 or fp32; any K: padded to a multiple of 16). The inputs are not modified."""
        layer, weight, channel_weight = cls._prepare(weight, bias, channel_weight, prefill)
        return layer._fill(torch.ops.fp4.quantize(weight, scale_search, global_scale, channel_weight), bias)

    @classmethod
    def _prepare(cls, weight: Tensor, bias: Tensor | None, channel_weight: Tensor | None, prefill: str):
        """``(a layer without values, the weight and channel_weight padded)``; raises for shapes that are no linear layer."""
        if weight.dim() != 2:
            raise ShapeError(
                f"{cls.__name__} takes a matrix", value=tuple(weight.shape), limit="[N, K]", remedy=f"Experts [E, N, K] are a {cls.TENSOR.__name__}."
            )
        n, k = weight.shape
        if bias is not None and tuple(bias.shape) != (n,):
            raise ShapeError(f"{cls.__name__}: bias does not fit N", value=tuple(bias.shape), limit=f"({n},)", remedy="The bias has one entry per output.")
        if bias is not None and bias.device != weight.device:
            raise DeviceError(
                f"{cls.__name__}: weight and bias on different devices", value=bias.device, limit=weight.device, remedy="Move both with .to(device)."
            )
        layer = cls(k, n, dtype=weight.dtype, device="meta", prefill=prefill)
        weight = weight.detach()
        if layer.padding:
            weight = nn.functional.pad(weight, (0, layer.padding))
            channel_weight = None if channel_weight is None else nn.functional.pad(channel_weight, (0, layer.padding))
        return layer, weight, channel_weight

    def _fill(self, parts: tuple[Tensor, ...], bias: Tensor | None):
        self.take(parts)
        self.bias = None if bias is None else bias.detach().to(self.dtype).clone()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x, _ = cast_for_autocast(x)
        if self.padding:
            x = nn.functional.pad(x, (0, self.padding))
        bias = self.bias
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        return self._product(x, bias)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.fp4.linear.default(x, self.qdata, self.scale, self.global_scale, bias, self.prefill)

    def train_bias(self) -> FP4Linear:
        """Make the bias a Parameter that requires a gradient, in place; nothing happens to a layer without one. Returns the layer.

        A layer among siblings gets buffers of its own: one call of all siblings would need one bias for all of them.
        """
        if self.bias is not None and not isinstance(self.bias, nn.Parameter):
            self.bias = nn.Parameter(self.bias.detach().clone())
        return self

    @property
    def weight(self) -> Tensor:
        """The weight ``[N, K]``: a tensor of class :attr:`TENSOR` that shares this layer's memory, or, if K is padded, decoded anew at each access."""
        if self.padding:
            return self.dequantize()
        return self.TENSOR._of_parts(self.parts(), self.dtype, False)

    def dequantize(self, dtype: torch.dtype | None = None, rows: slice = slice(None)) -> Tensor:
        """``rows`` of the weight, ``[.., in_features]``, in ``dtype`` (default: :attr:`dtype`)."""
        w = self._dense(rows, dtype or self.dtype)
        return w[:, : self.in_features] if self.padding else w

    def _dense(self, rows: slice, dtype: torch.dtype) -> Tensor:
        return torch.ops.fp4.dequantize(self.qdata[rows], self.scale[rows], self.global_scale, dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.storage().name}, dtype={self.dtype}, prefill={self.prefill}"
