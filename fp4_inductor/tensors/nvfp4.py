"""NVFP4Tensor: an NVFP4 weight ``[..., N, K]`` as a torch.Tensor."""

from __future__ import annotations

import itertools
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import DTypeError
from ..formats import nvfp4
from ..ops import cast_for_autocast
from .base import FP4Tensor, aten, wrapped

fp4 = torch.ops.fp4
_K_PER_BYTE = 2


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

    PARTS: ClassVar[tuple[str, ...]] = ("qdata", "scale", "global_scale")
    qdata: Tensor
    scale: Tensor
    global_scale: Tensor

    @staticmethod
    def __new__(cls, qdata: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype = torch.bfloat16, transposed: bool = False):
        nvfp4.check_parts(qdata, scale, global_scale)
        if dtype not in nvfp4.HIGH_PRECISION:
            raise DTypeError(
                "NVFP4Tensor presents a high-precision dtype",
                value=dtype,
                limit=list(nvfp4.HIGH_PRECISION),
                remedy="For a dense tensor of another dtype: .dequantize().to(dtype).",
            )
        shape = [*qdata.shape[:-1], qdata.shape[-1] * _K_PER_BYTE]
        return FP4Tensor._wrapper(cls, shape, dtype, qdata.device, transposed)

    def __init__(self, qdata: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype = torch.bfloat16, transposed: bool = False):
        # [E, 1, 1] broadcasts and [E] indexes: one form inside.
        self.qdata, self.scale = qdata, scale
        self.global_scale = global_scale if global_scale.dim() == qdata.dim() - 2 else global_scale.reshape(qdata.shape[:-2])
        self.logical_dtype, self.transposed = dtype, transposed

    @classmethod
    def from_dense(cls, w: Tensor, scale_search: str = "amax", global_scale: Tensor | None = None, *, channel_weight: Tensor | None = None) -> NVFP4Tensor:
        """Quantize a dense ``[..., N, K]`` weight (bf16, fp16 or fp32; K a multiple of 16).

        Args:
            w: the weight; not modified.
            scale_search: see :class:`fp4_inductor.NVFP4Config`.
            global_scale: float32, multiplying; derived from the maximum if None.
            channel_weight: ``[K]`` float32 E[x^2] per input channel, for ``scale_search="activation"``.

        Raises:
            DTypeError, ShapeError, NonFiniteError, ConfigError.
        """
        qdata, scale, g = fp4.quantize(w.detach(), scale_search, global_scale, channel_weight)
        return cls(qdata, scale, g, w.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dense weight in ``dtype`` (default: this tensor's dtype), as an ordinary tensor."""
        w = fp4.dequantize(self.qdata, self.scale, self.global_scale, dtype or self.logical_dtype)
        return w.mT if self.transposed else w

    @classmethod
    def matmul_function(cls, input, other):
        if not isinstance(other, NVFP4Tensor) or not other.transposed or isinstance(input, FP4Tensor) or not isinstance(input, Tensor) or input.dim() < 2:
            return NotImplemented
        return cls.linear_function(input, other.mT)

    @classmethod
    def linear_function(cls, input, weight, bias=None):
        if not isinstance(weight, NVFP4Tensor) or isinstance(input, FP4Tensor) or weight.transposed or weight.dim() != 2:
            return NotImplemented
        if weight.requires_grad and torch.is_grad_enabled():
            # The op's weight is frozen; autograd's own formula reaches the rules below and gives w.grad, dense.
            return NotImplemented
        x, bias = cast_for_autocast(input, bias)
        return fp4.linear(x, weight.qdata, weight.scale, weight.global_scale, bias)


@NVFP4Tensor.implements(aten.linear.default)
def _aten_linear(x, w, bias=None):
    if not isinstance(w, NVFP4Tensor) or w.transposed or isinstance(x, FP4Tensor) or w.dim() != 2:
        return NotImplemented
    return fp4.linear(x, *w.parts(), bias)


def _is_packed_rhs(x, w) -> bool:
    """Can ``x @ w`` run packed? Else the dense product, or torch's own error: ``@`` would turn our DTypeError (a
    TypeError) into "unsupported operand"."""
    return isinstance(w, NVFP4Tensor) and w.transposed and not isinstance(x, FP4Tensor) and x.dtype in nvfp4.HIGH_PRECISION


@NVFP4Tensor.implements(aten.mm.default, aten.matmul.default)
def _mm(x, w):
    if not _is_packed_rhs(x, w) or w.dim() != 2:
        return NotImplemented
    return fp4.linear(x, *w.parts())


@NVFP4Tensor.implements(aten.addmm.default)
def _addmm(bias, x, w, *, beta=1, alpha=1):
    if not _is_packed_rhs(x, w) or bias.shape != w.shape[1:] or beta != 1 or alpha != 1:
        return NotImplemented
    return fp4.linear(x, *w.parts(), bias)


@NVFP4Tensor.implements(aten.bmm.default)
def _bmm(x, w):
    if not _is_packed_rhs(x, w):
        return NotImplemented
    return fp4.bmm(x, *w.parts())


# --- taking a part of a weight: N freely, K on block boundaries, leading dimensions freely -----------------------


def _storage_axis(t: NVFP4Tensor, dim: int) -> int:
    """The axis of qdata that the presented dimension ``dim`` lies on (-1 is K)."""
    dim = wrapped(dim, t.dim()) - t.dim()
    if t.transposed and dim >= -2:
        dim = -3 - dim
    return dim


@NVFP4Tensor.implements(aten.slice.Tensor)
def _slice(t, dim=0, start=None, end=None, step=1):
    axis = _storage_axis(t, dim)
    size = t.shape[dim]
    if step != 1:
        return NotImplemented
    start = 0 if start is None else max(0, start + size if start < 0 else start)
    end = size if end is None else min(size, end + size if end < 0 else end)
    start, end = min(start, size), max(min(start, size), end)
    if axis == -1:
        if start % nvfp4.GROUP or end % nvfp4.GROUP:
            return NotImplemented
        return t.with_parts(
            (
                t.qdata.narrow(-1, start // _K_PER_BYTE, (end - start) // _K_PER_BYTE),
                t.scale.narrow(-1, start // nvfp4.GROUP, (end - start) // nvfp4.GROUP),
                t.global_scale,
            )
        )
    g = t.global_scale if axis == -2 else t.global_scale.narrow(axis + 2, start, end - start)
    return t.with_parts((t.qdata.narrow(axis, start, end - start), t.scale.narrow(axis, start, end - start), g))


@NVFP4Tensor.implements(aten.split.Tensor)
def _split(t, split_size, dim=0):
    size = t.shape[dim]
    if split_size <= 0:
        return NotImplemented
    starts = range(0, max(size, 1), split_size)
    return _slices(t, dim, [(i, min(i + split_size, size)) for i in starts])


@NVFP4Tensor.implements(aten.split_with_sizes.default)
def _split_with_sizes(t, sizes, dim=0):
    ends = list(itertools.accumulate(sizes))
    if min(sizes, default=-1) < 0 or ends[-1] != t.shape[dim]:
        return NotImplemented
    return _slices(t, dim, [(end - size, end) for size, end in zip(sizes, ends, strict=True)])


def _slices(t, dim, bounds):
    """All parts packed, or NotImplemented: then all are dense."""
    parts = [_slice(t, dim, start, end) for start, end in bounds]
    return NotImplemented if any(p is NotImplemented for p in parts) else parts


@NVFP4Tensor.implements(aten.select.int)
def _select(t, dim, index):
    axis = _storage_axis(t, dim)
    if axis >= -2:
        return NotImplemented
    return t.with_parts((t.qdata.select(axis, index), t.scale.select(axis, index), t.global_scale.select(axis + 2, index)))


@NVFP4Tensor.implements(aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(t, dim):
    axes = sorted({wrapped(d, t.dim()) for d in ([dim] if isinstance(dim, int) else dim) if t.shape[d] == 1}, reverse=True)
    if any(axis >= t.dim() - 2 for axis in axes):
        return NotImplemented
    for axis in axes:
        t = _select(t, axis, 0)
    return t if axes else t.map_parts(lambda p: p.detach())


@NVFP4Tensor.implements(aten.squeeze.default)
def _squeeze_all(t):
    return _squeeze(t, list(range(t.dim())))


@NVFP4Tensor.implements(aten.unbind.int)
def _unbind(t, dim=0):
    if _storage_axis(t, dim) >= -2:
        return NotImplemented
    return [_select(t, dim, i) for i in range(t.shape[dim])]


@NVFP4Tensor.implements(aten.index_select.default)
def _index_select(t, dim, index):
    axis = _storage_axis(t, dim)
    if axis == -1:
        return NotImplemented
    g = t.global_scale if axis == -2 else t.global_scale.index_select(axis + 2, index)
    return t.with_parts((t.qdata.index_select(axis, index), t.scale.index_select(axis, index), g))


@NVFP4Tensor.implements(aten.index.Tensor)
def _index(t, indices):
    if len(indices) != 1 or indices[0] is None or t.dim() < 3 or (indices[0].dtype in (torch.bool, torch.uint8) and indices[0].dim() > t.dim() - 2):
        return NotImplemented
    return t.map_parts(lambda p: aten.index.Tensor(p, indices))


# --- putting weights together: leading dimensions freely, N and K where one global scale holds for all ------------


def _alike(tensors) -> bool:
    first = tensors[0]
    return all(isinstance(t, NVFP4Tensor) and (t.transposed, t.logical_dtype, t.dim()) == (first.transposed, first.logical_dtype, first.dim()) for t in tensors)


@NVFP4Tensor.implements(aten.stack.default)
def _stack(tensors, dim=0):
    if not _alike(tensors) or wrapped(dim, tensors[0].dim() + 1) > tensors[0].dim() - 2 or len({tuple(t.shape) for t in tensors}) > 1:
        return NotImplemented
    return tensors[0].with_parts([torch.stack(parts, dim) for parts in zip(*(t.parts() for t in tensors), strict=True)])


@NVFP4Tensor.implements(aten.cat.default)
def _cat(tensors, dim=0):
    if not _alike(tensors):
        return NotImplemented
    axis = _storage_axis(tensors[0], dim)
    parts = [list(p) for p in zip(*(t.parts() for t in tensors), strict=True)]
    if axis < -2:
        return tensors[0].with_parts([torch.cat(parts[0], axis), torch.cat(parts[1], axis), torch.cat(parts[2], axis + 2)])
    g = parts[2][0]
    if not g.is_meta and not all(torch.equal(g, other) for other in parts[2][1:]):
        return NotImplemented
    return tensors[0].with_parts([torch.cat(parts[0], axis), torch.cat(parts[1], axis), g])
