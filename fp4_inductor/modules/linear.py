"""FP4Linear: what ``quantize_model`` puts in place of ``nn.Linear``.

Plain buffers instead of a tensor-subclass Parameter: a subclass costs 5-12 us of host time per weight per call,
outside the compiled graph (design/ARCHITECTURE.md); buffers cost a quarter of a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..errors import ConfigError, DeviceError, DTypeError, ShapeError
from ..formats import nvfp4
from ..ops import cast_for_autocast
from ..ops.linear import LARGE_M
from ..tensors.nvfp4 import NVFP4Tensor

# Each packed buffer, and the integer dtype of the same width that stands for its bits.
_BITS = {"qdata": torch.uint8, "scale": torch.uint8, "global_scale": torch.int32, "input_scale": torch.int32}
_DTYPES = {"qdata": torch.uint8, "scale": nvfp4.SCALE_DTYPE, "global_scale": torch.float32, "input_scale": torch.float32}

_DENSE = "Use dequantize() for a dense weight."


class FP4Linear(nn.Module):
    """``y = x @ W.T + bias`` with W in NVFP4.

    Buffers (names as in the native checkpoint): ``qdata`` uint8 ``[N, K/2]``, ``scale`` float8_e4m3fn ``[N, K/16]``,
    ``global_scale`` float32 ``[]`` (multiplying), ``bias`` ``[N]`` or None, ``input_scale`` float32 ``[]`` or None. K is
    ``in_features`` padded with zero weights to a multiple of 16. ``input_scale`` (multiplying) is what a W4A4 checkpoint
    recorded for its activations: kept for export, not used by a forward pass whose activations stay in high precision.

    ``.to(dtype)``, ``.half()``, ``.bfloat16()`` cast the bias and set :attr:`dtype`; the codes and scales keep their
    bits. ``.to(device)``, ``deepcopy``, ``pin_memory``, ``state_dict`` work as for any module.
    """

    qdata: Tensor
    scale: Tensor
    global_scale: Tensor
    input_scale: Tensor | None
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, bias: bool = False, *, dtype: torch.dtype = torch.bfloat16, device=None, large_m: str = "auto"):
        super().__init__()
        if large_m not in LARGE_M:
            raise ConfigError("FP4Linear: unknown large_m", value=repr(large_m), limit=list(LARGE_M), remedy="NVFP4Config describes them.")
        if dtype not in nvfp4.HIGH_PRECISION:
            raise DTypeError("FP4Linear computes in a high-precision dtype", value=dtype, limit=list(nvfp4.HIGH_PRECISION), remedy=_DENSE)
        self.in_features, self.out_features, self.dtype, self.large_m = in_features, out_features, dtype, large_m
        self.padding = -in_features % nvfp4.GROUP
        k = in_features + self.padding
        self.register_buffer("qdata", torch.zeros(out_features, k // 2, dtype=torch.uint8, device=device))
        self.register_buffer("scale", torch.zeros(out_features, k // nvfp4.GROUP, dtype=torch.uint8, device=device).view(nvfp4.SCALE_DTYPE))
        self.register_buffer("global_scale", torch.ones((), dtype=torch.float32, device=device))
        self.register_buffer("input_scale", None)
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
        bias = self.bias
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        return torch.ops.fp4.linear(x, self.qdata, self.scale, self.global_scale, bias, self.large_m)

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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FP4Linear:
        # nn.Module.to(dtype) casts every floating tensor. Codes and scales are bits, not numbers to be cast:
        # show fn integers of the same width, so that device moves happen and casts do not.
        dtype = self._probe(fn, self.dtype)
        if dtype not in nvfp4.HIGH_PRECISION:
            raise DTypeError("FP4Linear computes in a high-precision dtype", value=dtype, limit=list(nvfp4.HIGH_PRECISION), remedy=_DENSE)
        for bits in set(_BITS.values()):
            if self._probe(fn, bits) != bits:
                raise DTypeError("the codes and scales of FP4Linear cannot be cast", value=self._probe(fn, bits), limit=bits, remedy=_DENSE)
        held = [name for name in _BITS if self._buffers[name] is not None]
        for name in held:
            self._buffers[name] = getattr(self, name).view(_BITS[name])
        try:
            super()._apply(fn, recurse)
        finally:
            for name in held:
                self._buffers[name] = getattr(self, name).view(_DTYPES[name])
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
