"""Modules whose weight is 2:4-sparse: Sparse24Linear, and Sparse24ExpertWeight for the experts of a layer."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from .._renamed import takes_old_names
from ..formats import sparse24
from ..ops.linear import WEIGHT_ONLY
from ..tensors import Sparse24NVFP4Tensor
from ..tensors.base import FP4Tensor
from .experts import FP4ExpertWeight
from .linear import FP4Linear
from .packed import PackedWeight

_EMPTY = sparse24.NIBBLES[0] * 0x11  # every group keeps its first two, which are zeros


class Sparse24Weight(PackedWeight):
    """The buffers of a 2:4-sparse weight: ``values`` and ``meta`` in place of ``qdata``. Metadata from a state_dict is validated."""

    TENSOR: ClassVar[type[FP4Tensor]] = Sparse24NVFP4Tensor
    ACCEPTED: ClassVar[tuple[str, ...]] = WEIGHT_ONLY
    values: Tensor
    meta: Tensor

    def _empty_weight(self) -> None:
        super()._empty_weight()
        self.meta.fill_(_EMPTY)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        meta = state_dict.get(prefix + "meta")
        if meta is not None and meta.device.type != "meta":
            sparse24.validate_meta(meta)
        super()._load_from_state_dict(state_dict, prefix, *args)


class Sparse24ExpertWeight(Sparse24Weight, FP4ExpertWeight):
    """One 2:4-sparse NVFP4 matrix per expert, ``[E, N, K]``: as :class:`FP4ExpertWeight`, K as stored a multiple of 32.

    Buffers: ``values`` uint8 ``[E, N, K/4]``, ``meta`` uint8 ``[E, N, K/8]``, ``scale`` float8_e4m3fn ``[E, N, K/16]``, ``global_scale``
    float32 ``[E]``, ``bias`` ``[E, N]`` or None.
    """


class Sparse24Linear(Sparse24Weight, FP4Linear):
    """``y = x @ W.T + bias`` with W in 2:4-sparse NVFP4.

    Buffers (names as in the native checkpoint): ``values`` uint8 ``[N, K/4]``, ``meta`` uint8 ``[N, K/8]``, ``scale``
    float8_e4m3fn ``[N, K/16]``, ``global_scale`` float32 ``[]``, ``bias`` ``[N]`` or None; K is ``in_features`` padded
    with zero weights to a multiple of 32. All else is as in :class:`FP4Linear`.
    """

    @classmethod
    @takes_old_names
    def from_weight(  # type: ignore[override]
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        scale_search: str = "amax",
        channel_weight: Tensor | None = None,
        global_scale: Tensor | None = None,
        prefill: str = "auto",
    ) -> Sparse24Linear:
        """Quantize ``weight`` ``[N, K]`` (bf16, fp16 or fp32; any K: padded to a multiple of 32). The inputs are not modified.

        Args:
            mask: bool ``[N, K]``, what to keep: two of every four k (of a last, short group at most two). None: ``weight`` is 2:4 already.

        Raises:
            SparsityError: the mask, or the weight without one, is not 2:4. Otherwise as :meth:`FP4Linear.from_weight`.
        """
        layer, weight, channel_weight = cls._prepare(weight, bias, channel_weight, prefill)
        if mask is not None and layer.padding:
            mask = sparse24.complete_mask(nn.functional.pad(mask, (0, layer.padding)))
        return layer._fill(torch.ops.fp4.sparse_quantize(weight, mask, scale_search, global_scale, channel_weight), bias)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.fp4.sparse_linear.default(x, self.values, self.meta, self.scale, self.global_scale, bias, self.prefill)

    def _dense(self, rows: slice, dtype: torch.dtype) -> Tensor:
        return torch.ops.fp4.sparse_dequantize(self.values[rows], self.meta[rows], self.scale[rows], self.global_scale, dtype)
