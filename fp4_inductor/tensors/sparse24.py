"""Sparse24NVFP4Tensor: a 2:4-sparse NVFP4 weight ``[..., N, K]`` as a torch.Tensor."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..errors import ConfigError
from ..formats import sparse24
from ..formats.storage import Storage
from . import rules  # noqa: F401
from .base import FP4Tensor

fp4 = torch.ops.fp4
_PRUNING = ("magnitude", "existing")


class Sparse24NVFP4Tensor(FP4Tensor):
    """A weight of which every 4 consecutive k of a row keep 2, in NVFP4: 3.5 bits a weight.

    Args:
        values: uint8 ``[..., N, K/4]``, the two kept codes of a group of four, the first in the low nibble; K % 32 == 0.
        meta: uint8 ``[..., N, K/8]``, one nibble ``pos0 | pos1 << 2`` per group, even group low. All bytes are validated.
        scale: float8_e4m3fn ``[..., N, K/16]``.
        global_scale: float32 of the leading shape (``[]`` for a matrix, ``[E]`` for experts; ``[E, 1, 1]`` becomes ``[E]``);
            it multiplies.
        dtype: bfloat16, float16 or float32: the dtype this weight presents and dequantises to.
        transposed: present ``[..., K, N]``.

    Raises:
        DTypeError, ShapeError, DeviceError: if the parts do not belong together. SparsityError: illegal metadata.
    """

    STORAGE: ClassVar[Storage] = sparse24.STORAGE
    values_: Tensor
    meta: Tensor

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        """uint8 ``[..., N, K/4]``. (``torch.Tensor.values()`` is for sparse COO tensors, which this is not.)"""
        return self.values_

    @staticmethod
    def __new__(
        cls,
        values: Tensor,
        meta: Tensor,
        scale: Tensor,
        global_scale: Tensor,
        dtype: torch.dtype = torch.bfloat16,
        transposed: bool = False,
    ):
        sparse24.check_parts(values, meta, scale, global_scale)
        if type(meta) in (Tensor, torch.nn.Parameter) and meta.device.type != "meta" and not torch.compiler.is_compiling():
            sparse24.validate_meta(meta)
        return cls._wrapper(values, dtype, transposed)

    def __init__(
        self,
        values: Tensor,
        meta: Tensor,
        scale: Tensor,
        global_scale: Tensor,
        dtype: torch.dtype = torch.bfloat16,
        transposed: bool = False,
    ):
        self._hold((values, meta, scale, global_scale), dtype, transposed)

    @classmethod
    def from_dense(
        cls,
        w: Tensor,
        pruning: str = "existing",
        scale_search: str = "amax",
        global_scale: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        channel_weight: Tensor | None = None,
    ) -> Sparse24NVFP4Tensor:
        """Prune and quantize a dense ``[..., N, K]`` weight (bf16, fp16 or fp32; K a multiple of 32); scales are fitted to what is kept.

        Args:
            w: the weight; not modified.
            pruning: ``"existing"``: it is 2:4 already, else an error; ``"magnitude"``: keep the larger two of four (cheap, and
                harmful: see the README on sparsity).
            mask: bool, exactly two of every four True: what to keep, instead of ``pruning``.
            scale_search, global_scale, channel_weight: as in :meth:`NVFP4Tensor.from_dense`.

        Raises:
            SparsityError, DTypeError, ShapeError, NonFiniteError, ConfigError
        """
        if pruning not in _PRUNING:
            raise ConfigError(
                "from_dense: unknown pruning", value=repr(pruning), limit=list(_PRUNING), remedy="Pruning that needs data: quantize_model(Sparse24Config(...))."
            )
        w = w.detach()
        if mask is None and pruning == "magnitude":
            sparse24.check_weight(w)
            mask = sparse24.mask_of_scores(w.abs())
        values, meta, scale, g = fp4.sparse_quantize(w, mask, scale_search, global_scale, channel_weight)
        return cls(values, meta, scale, g, w.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dense weight in ``dtype`` (default: this tensor's dtype), as an ordinary tensor."""
        w = fp4.sparse_dequantize(self.values_, self.meta, self.scale, self.global_scale, dtype or self.logical_dtype)
        return w.mT if self.transposed else w

    def _linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return fp4.sparse_linear(x, self.values_, self.meta, self.scale, self.global_scale, bias)

    def _bmm(self, x: Tensor) -> Tensor:
        return fp4.bmm(x, fp4.sparse_decompress(self.values_, self.meta), self.scale, self.global_scale)
