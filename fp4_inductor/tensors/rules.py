"""Matmuls by a quantized weight, and parts of one: the same for every format."""

from __future__ import annotations

import itertools

import torch

from ..formats.nvfp4 import HIGH_PRECISION
from .base import FP4Tensor, aten, rule, wrapped


@rule(aten.linear.default)
def _aten_linear(x, w, bias=None):
    if not isinstance(w, FP4Tensor) or w.transposed or isinstance(x, FP4Tensor) or w.dim() != 2:
        return NotImplemented
    return w._linear(x, bias)


def _is_packed_rhs(x, w) -> bool:
    """Can ``x @ w`` run packed? Else the dense product, or torch's own error: ``@`` would turn our DTypeError (a
    TypeError) into "unsupported operand"."""
    return isinstance(w, FP4Tensor) and w.transposed and not isinstance(x, FP4Tensor) and x.dtype in HIGH_PRECISION


@rule(aten.mm.default, aten.matmul.default)
def _mm(x, w):
    if not _is_packed_rhs(x, w) or w.dim() != 2:
        return NotImplemented
    return w._linear(x)


@rule(aten.addmm.default)
def _addmm(bias, x, w, *, beta=1, alpha=1):
    if not _is_packed_rhs(x, w) or bias.shape != w.shape[1:] or beta != 1 or alpha != 1:
        return NotImplemented
    return w._linear(x, bias)


@rule(aten.bmm.default)
def _bmm(x, w):
    if not _is_packed_rhs(x, w):
        return NotImplemented
    return w._bmm(x)


# --- taking a part of a weight: N freely, K on block boundaries, leading dimensions freely -----------------------


def _storage_axis(t: FP4Tensor, dim: int) -> int:
    """The axis of the stored matrices that the presented dimension ``dim`` lies on (-1 is K)."""
    dim = wrapped(dim, t.dim()) - t.dim()
    if t.transposed and dim >= -2:
        dim = -3 - dim
    return dim


@rule(aten.slice.Tensor)
def _slice(t, dim=0, start=None, end=None, step=1):
    axis = _storage_axis(t, dim)
    size = t.shape[dim]
    if step != 1:
        return NotImplemented
    start = 0 if start is None else max(0, start + size if start < 0 else start)
    end = size if end is None else min(size, end + size if end < 0 else end)
    start, end = min(start, size), max(min(start, size), end)
    if axis == -1:
        block = t.STORAGE.k_multiple
        if start % block or end % block:
            return NotImplemented
        return _each(t, lambda p, k: p.narrow(-1, start // k, (end - start) // k), lambda g: g)
    return _each(t, lambda p, k: p.narrow(axis, start, end - start), lambda g: g if axis == -2 else g.narrow(axis + 2, start, end - start))


def _each(t: FP4Tensor, matrix, scalar) -> FP4Tensor:
    """The same kind of tensor with ``matrix(component, weights per element)`` of the matrices and ``scalar(component)`` of the global scale."""
    return t.with_parts([matrix(p, spec.k) if spec.k else scalar(p) for p, spec in zip(t.parts(), t.STORAGE.parts, strict=True)])


@rule(aten.split.Tensor)
def _split(t, split_size, dim=0):
    size = t.shape[dim]
    if split_size <= 0:
        return NotImplemented
    starts = range(0, max(size, 1), split_size)
    return _slices(t, dim, [(i, min(i + split_size, size)) for i in starts])


@rule(aten.split_with_sizes.default)
def _split_with_sizes(t, sizes, dim=0):
    ends = list(itertools.accumulate(sizes))
    if min(sizes, default=-1) < 0 or ends[-1] != t.shape[dim]:
        return NotImplemented
    return _slices(t, dim, [(end - size, end) for size, end in zip(sizes, ends, strict=True)])


def _slices(t, dim, bounds):
    """All parts packed, or NotImplemented: then all are dense."""
    parts = [_slice(t, dim, start, end) for start, end in bounds]
    return NotImplemented if any(p is NotImplemented for p in parts) else parts


@rule(aten.select.int)
def _select(t, dim, index):
    axis = _storage_axis(t, dim)
    if axis >= -2:
        return NotImplemented
    return _each(t, lambda p, k: p.select(axis, index), lambda g: g.select(axis + 2, index))


@rule(aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(t, dim):
    axes = sorted({wrapped(d, t.dim()) for d in ([dim] if isinstance(dim, int) else dim) if t.shape[d] == 1}, reverse=True)
    if any(axis >= t.dim() - 2 for axis in axes):
        return NotImplemented
    for axis in axes:
        t = _select(t, axis, 0)
    return t if axes else t.map_parts(lambda p: p.detach())


@rule(aten.squeeze.default)
def _squeeze_all(t):
    return _squeeze(t, list(range(t.dim())))


@rule(aten.unbind.int)
def _unbind(t, dim=0):
    if _storage_axis(t, dim) >= -2:
        return NotImplemented
    return [_select(t, dim, i) for i in range(t.shape[dim])]


@rule(aten.index_select.default)
def _index_select(t, dim, index):
    axis = _storage_axis(t, dim)
    if axis == -1:
        return NotImplemented
    return _each(t, lambda p, k: p.index_select(axis, index), lambda g: g if axis == -2 else g.index_select(axis + 2, index))


@rule(aten.index.Tensor)
def _index(t, indices):
    if len(indices) != 1 or indices[0] is None or t.dim() < 3 or (indices[0].dtype in (torch.bool, torch.uint8) and indices[0].dim() > t.dim() - 2):
        return NotImplemented
    return t.map_parts(lambda p: aten.index.Tensor(p, indices))


# --- putting weights together: leading dimensions freely, N and K where one global scale holds for all ------------


def _alike(tensors) -> bool:
    first = tensors[0]
    return all(type(t) is type(first) and (t.transposed, t.logical_dtype, t.dim()) == (first.transposed, first.logical_dtype, first.dim()) for t in tensors)


@rule(aten.stack.default)
def _stack(tensors, dim=0):
    if not _alike(tensors) or wrapped(dim, tensors[0].dim() + 1) > tensors[0].dim() - 2 or len({tuple(t.shape) for t in tensors}) > 1:
        return NotImplemented
    return tensors[0].with_parts([torch.stack(parts, dim) for parts in zip(*(t.parts() for t in tensors), strict=True)])


@rule(aten.cat.default)
def _cat(tensors, dim=0):
    if not _alike(tensors):
        return NotImplemented
    first = tensors[0]
    axis = _storage_axis(first, dim)
    g = first.global_scale
    if axis >= -2 and not g.is_meta and not all(torch.equal(g, other.global_scale) for other in tensors[1:]):
        return NotImplemented
    pieces = zip(*(t.parts() for t in tensors), strict=True)
    joined = [torch.cat(p, axis) if spec.k else g if axis >= -2 else torch.cat(p, axis + 2) for p, spec in zip(pieces, first.STORAGE.parts, strict=True)]
    return first.with_parts(joined)
