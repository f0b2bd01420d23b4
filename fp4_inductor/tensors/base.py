"""What every quantized weight tensor shares: flattening, moves, copies, views, and the dense fallback.

A subclass names its :class:`Storage` and gives ``from_dense`` and three operations (``dequantize``, ``_linear``, ``_bmm``);
all else is derived from the storage.
"""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._torch.pytree import tree_map_only
from ..errors import DTypeError, UnsupportedOpError
from ..formats.nvfp4 import HIGH_PRECISION
from ..formats.storage import Storage
from ..ops import cast_for_autocast
from .pickled import as_bytes, rebuild

aten = torch.ops.aten


_MATMUL = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


class FP4Tensor(torch.Tensor):
    """A weight ``[..., N, K]`` of dtype ``dtype`` stored in fewer bits; behaves as a dense tensor of that dtype.

    ``transposed`` swaps the last two dimensions without moving data, so that ``w.t()`` (what linear layers become)
    is free. Reads of any kind work: operations without a quantized form dequantise first. Writes other than
    ``copy_`` from a tensor of the same kind raise :class:`UnsupportedOpError`. A view without a packed form (``w[3]``,
    ``w.view(-1)``) is a dense copy: writing to that copy does not reach the weight.
    """

    STORAGE: ClassVar[Storage]
    PARTS: ClassVar[tuple[str, ...]]
    ATTRIBUTES: ClassVar[tuple[str, ...]]
    scale: Tensor
    global_scale: Tensor
    logical_dtype: torch.dtype
    transposed: bool

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.PARTS = cls.STORAGE.names
        # torch.export finds a component only under a name that torch.Tensor does not have; a property gives it the other.
        cls.ATTRIBUTES = tuple(f"{name}_" if hasattr(torch.Tensor, name) else name for name in cls.PARTS)
        torch.serialization.add_safe_globals([cls])

    # -- construction --------------------------------------------------------------------------------------------

    @classmethod
    def _wrapper(cls, first: Tensor, dtype: torch.dtype, transposed: bool):
        """The empty tensor that presents the weight whose first component is ``first``."""
        if dtype not in HIGH_PRECISION:
            raise DTypeError(
                f"{cls.__name__} presents a high-precision dtype",
                value=dtype,
                limit=list(HIGH_PRECISION),
                remedy="For a dense tensor of another dtype: .dequantize().to(dtype).",
            )
        shape: list = list(cls.STORAGE.logical(first.shape))
        strides: list = []
        step: Any = 1
        for size in reversed(shape):
            strides.insert(0, step)
            step = step * size
        if transposed:
            shape[-1], shape[-2] = shape[-2], shape[-1]
            strides[-1], strides[-2] = strides[-2], strides[-1]
        return torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype, device=first.device, requires_grad=False)

    def _hold(self, parts: tuple[Tensor, ...], dtype: torch.dtype, transposed: bool) -> None:
        """Keep the components; the body of a subclass' ``__init__``."""
        first = parts[0]
        for name, part in zip(self.ATTRIBUTES, parts, strict=True):
            # Global scale: [E, 1, 1] broadcasts and [E] indexes: one form inside.
            setattr(self, name, part.reshape(first.shape[:-2]) if name == "global_scale" and part.dim() != first.dim() - 2 else part)
        self.logical_dtype, self.transposed = dtype, transposed

    @classmethod
    def _of_parts(cls, parts, dtype: torch.dtype, transposed: bool):
        """A tensor over components that came from one already: nothing is checked (a check of values would synchronise with the GPU)."""
        t = cls._wrapper(parts[0], dtype, transposed)
        t._hold(tuple(parts), dtype, transposed)
        return t

    def parts(self) -> tuple[Tensor, ...]:
        """The component tensors, in the order of ``PARTS``."""
        return tuple(getattr(self, name) for name in self.ATTRIBUTES)

    def with_parts(self, parts, *, dtype: torch.dtype | None = None, transposed: bool | None = None):
        """The same kind of tensor over other components."""
        context = self.logical_dtype if dtype is None else dtype, self.transposed if transposed is None else transposed
        if torch.is_inference_mode_enabled() and not parts[0].is_inference():
            # A view of a normal tensor is a normal tensor: autograd's bookkeeping refuses an inference wrapper there.
            with torch.inference_mode(False):
                return self._of_parts(parts, *context)
        return self._of_parts(parts, *context)

    def map_parts(self, fn: Callable[[Tensor], Tensor], **changes):
        """The same kind of tensor with ``fn`` applied to each component."""
        return self.with_parts([fn(t) for t in self.parts()], **changes)

    # -- torch's protocols ---------------------------------------------------------------------------------------

    def __tensor_flatten__(self):
        # Never self.dtype or self.shape here: each goes through __torch_function__, per call.
        return list(self.ATTRIBUTES), (self.logical_dtype, self.transposed)

    @classmethod
    def __tensor_unflatten__(cls, parts, context, outer_size, outer_stride):
        return cls._of_parts([parts[name] for name in cls.ATTRIBUTES], *context)

    def _stable_hash_for_caching(self) -> str:
        """Key of torch's AOTAutograd cache (read by torch >= 2.12)."""
        # requires_grad too: a graph compiled without the weight's gradient would be reused where one is wanted.
        layout = ";".join(f"{tuple(t.shape)}{tuple(t.stride())}{t.dtype}{t.device}" for t in self.parts())
        return f"{type(self).__qualname__}:{self.logical_dtype}:{self.transposed}:{self.requires_grad}:{layout}"

    def __reduce_ex__(self, protocol):
        own = {*self.ATTRIBUTES, "logical_dtype", "transposed"}
        rest = {name: value for name, value in vars(self).items() if name not in own}
        parts = tuple(as_bytes(part) for part in self.parts())
        return rebuild, (type(self), parts, self.logical_dtype, self.transposed, self.requires_grad, rest)

    def __repr__(self, *, tensor_contents=None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, transposed={self.transposed})"

    def share_memory_(self):
        """Move every component to shared memory. (torch's own would follow this wrapper's null storage and crash.)"""
        for t in self.parts():
            t.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether every component lies in shared memory."""
        return all(t.is_shared() for t in self.parts())

    def __setitem__(self, index, value) -> None:
        # Tensor's own would write into the dense copy that an index without a packed form returns.
        part = self[index]
        if not isinstance(part, FP4Tensor):
            raise _write_error(self, f"assignment to [{index}] of a {type(self).__name__}")
        part.copy_(value)

    @property
    def data(self):
        """As for any tensor; assignment takes a weight of the same kind and shape, whose components it shares."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value) -> None:
        if type(value) is not type(self) or value.shape != self.shape or value.dtype != self.dtype or value.device != self.device:
            raise _write_error(self, f".data = {type(value).__name__} of shape {tuple(value.shape)}, {value.dtype} on a {type(self).__name__}")
        for name in self.ATTRIBUTES:
            setattr(self, name, getattr(value, name))
        self.transposed = value.transposed

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        # F.linear reaches __torch_dispatch__ only under inference_mode; elsewhere it is decomposed before.
        # torch.matmul of a strided 3-D activation would expand the weight into a bmm, and so dequantise it.
        result = NotImplemented
        if func is torch.nn.functional.linear:
            result = cls.linear_function(*args, **(kwargs or {}))
        elif func in _MATMUL and len(args) == 2 and not kwargs:
            result = cls.matmul_function(*args)
        if result is not NotImplemented:
            return result
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @abc.abstractmethod
    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dense weight in ``dtype`` (default: this tensor's dtype), as an ordinary tensor."""

    @abc.abstractmethod
    def _linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ W.T + bias`` by the packed op; W is one matrix, as stored (whatever ``transposed`` says)."""

    @abc.abstractmethod
    def _bmm(self, x: Tensor) -> Tensor:
        """``x [E, M, K] @ W.mT`` by packed ops, W as stored."""

    @classmethod
    def matmul_function(cls, input, other):
        """``input @ other`` with a quantized ``other``, or NotImplemented."""
        if not isinstance(other, FP4Tensor) or not other.transposed or isinstance(input, FP4Tensor) or not isinstance(input, Tensor) or input.dim() < 2:
            return NotImplemented
        return cls.linear_function(input, other.mT)

    @classmethod
    def linear_function(cls, input, weight, bias=None):
        """``F.linear`` on a quantized weight, or NotImplemented."""
        if not isinstance(weight, FP4Tensor) or isinstance(input, FP4Tensor) or weight.transposed or weight.dim() != 2:
            return NotImplemented
        if weight.requires_grad and torch.is_grad_enabled():
            # The op's weight is frozen; autograd's own formula reaches the rules below and gives w.grad, dense.
            return NotImplemented
        x, bias = cast_for_autocast(input, bias)
        return weight._linear(x, bias)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        kwargs = kwargs or {}
        form = RULES.get(func)
        if form is not None:
            result = form(*args, **kwargs)
            if result is not NotImplemented:
                return result
        # Under inference_mode composite operations arrive whole: their pieces may have rules.
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        _refuse_writes(cls, func, args, kwargs)
        # The faithful fallback: right for every read, visible in a graph as fp4.dequantize.
        with _mode_of_result(func, args):
            dense_args, dense_kwargs = tree_map_only(FP4Tensor, lambda t: t.dequantize(), (args, kwargs))
            return func(*dense_args, **dense_kwargs)


def _write_error(t, what: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        what,
        value=f"shape {tuple(t.shape)}",
        limit=f"copy_ from another {type(t).__name__} of the same shape",
        remedy="Quantize the new weight with from_dense() and assign it.",
    )


def _mode_of_result(func, args):
    """Leave inference_mode for a view of a normal tensor: autograd's bookkeeping refuses an inference tensor there."""
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    normal = is_view and torch.is_inference_mode_enabled() and isinstance(args[0], FP4Tensor) and not args[0].is_inference()
    return torch.inference_mode(False) if normal else contextlib.nullcontext()


def _refuse_writes(cls, func, args, kwargs) -> None:
    for i, spec in enumerate(func._schema.arguments):
        if spec.alias_info is not None and spec.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(spec.name)
            for t in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(t, FP4Tensor):
                    raise _write_error(t, f"{func} would write into a {type(t).__name__}")


# --- operations whose meaning is the same for every format ------------------------------------------------------

RULES: dict[Any, Callable] = {}


def rule(*ops):
    """Decorator: give ``ops`` a quantized form. A form that returns NotImplemented falls back to dense."""

    def register(form):
        for op in ops:
            RULES[op] = form
        return form

    return register


def wrapped(dim: int, n: int) -> int:
    """``dim`` counted from the front, as in any torch operation."""
    if not -n <= dim < n:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-n}, {n - 1}], but got {dim})")
    return dim % n


@rule(aten.detach.default, aten.alias.default)
def _view_of_self(t):
    return t.map_parts(lambda p: p.detach())


@rule(aten.clone.default, aten.contiguous.default)
def _clone(t, *, memory_format=torch.preserve_format):
    if t.transposed and memory_format == torch.contiguous_format:
        return NotImplemented  # [..., K, N] row-major has no packed form
    return t.map_parts(lambda p: p.clone())


@rule(aten._to_copy.default)
def _to_copy(t, *, dtype=None, layout=None, device=None, pin_memory=None, non_blocking=False, memory_format=None):
    if dtype is not None and not dtype.is_floating_point:
        return NotImplemented
    moved = t.map_parts(lambda p: p.to(device=device, non_blocking=non_blocking, copy=True), dtype=dtype)
    return moved.map_parts(lambda p: p.pin_memory()) if pin_memory else moved


@rule(aten.copy_.default)
def _copy_(dst, src, non_blocking=False):
    # Falling back to dense here would copy into a temporary: load_state_dict would silently do nothing.
    if not isinstance(dst, FP4Tensor):
        return NotImplemented
    if type(dst) is not type(src) or dst.shape != src.shape or dst.transposed != src.transposed:
        raise UnsupportedOpError(
            f"copy_ into a {type(dst).__name__} of shape {tuple(dst.shape)}",
            value=f"{type(src).__name__} of shape {tuple(getattr(src, 'shape', ()))}",
            limit=f"a {type(dst).__name__} of the same shape",
            remedy="Use load_state_dict(..., assign=True), or quantize the source with from_dense().",
        )
    if _covers_part_of_its_matrix(dst) and not torch.equal(dst.global_scale.to(src.device), src.global_scale):
        raise UnsupportedOpError(
            f"copy_ into a part of a {type(dst).__name__} would change the global scale of the rest",
            value=f"global_scale {src.global_scale.flatten()[:4].tolist()}",
            limit=f"global_scale {dst.global_scale.flatten()[:4].tolist()}",
            remedy="Quantize the source with from_dense(..., global_scale=whole.global_scale).",
        )
    for d, s in zip(dst.parts(), src.parts(), strict=True):
        d.copy_(s, non_blocking)
    return dst


def _covered(p: Tensor) -> float:
    """The share of its storage that ``p`` covers."""
    return p.numel() * p.element_size() / max(p.untyped_storage().nbytes(), 1)


def _covers_part_of_its_matrix(t) -> bool:
    """Is ``t`` a slice of rows or columns whose global scale belongs to the whole matrix?"""
    return not t.is_meta and _covered(t.parts()[0]) < _covered(t.global_scale)


@rule(aten.mul_.Tensor, aten.mul_.Scalar)
def _mul_(t, other):
    """By a positive number: the global scale takes it. RWKV rescales its layers so before it generates."""
    factor = _factor(t, other)
    return NotImplemented if factor is None else _scaled(t, t.global_scale * factor)


@rule(aten.div_.Tensor, aten.div_.Scalar)
def _div_(t, other):
    factor = _factor(t, other)
    return NotImplemented if factor is None else _scaled(t, t.global_scale / factor)


def _factor(t, other) -> float | None:
    """``other`` as a positive finite number; None if it is none, or if others share the global scale of ``t``."""
    if not isinstance(t, FP4Tensor) or "global_scale" not in t.PARTS or t.is_meta or isinstance(other, FP4Tensor):
        return None
    if isinstance(other, Tensor) and (other.dim() or other.is_meta):
        return None
    if any(_covered(p) < 1 for p in (t.parts()[0], t.global_scale)):
        return None
    factor = float(other)
    return factor if math.isfinite(factor) and factor > 0 else None


def _scaled(t, global_scale: Tensor):
    if not bool((torch.isfinite(global_scale) & (global_scale > 0)).all()):
        return NotImplemented
    t.global_scale.copy_(global_scale)
    return t


@rule(aten.empty_like.default)
def _empty_like(t, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return t.map_parts(lambda p: torch.empty_like(p, device=device), dtype=dtype)


@rule(aten._pin_memory.default)
def _pin_memory(t, device=None):
    return t.map_parts(lambda p: p.pin_memory())


@rule(aten.is_pinned.default)
def _is_pinned(t, device=None):
    return all(p.is_pinned() for p in t.parts())


@rule(aten.t.default)
def _t(t):
    return t.map_parts(lambda p: p.detach(), transposed=not t.transposed)


@rule(aten.transpose.int)
def _transpose(t, dim0, dim1):
    dims = {wrapped(dim0, t.dim()), wrapped(dim1, t.dim())}
    if len(dims) == 1:
        return _view_of_self(t)
    return _t(t) if dims == {t.dim() - 1, t.dim() - 2} else NotImplemented


@rule(aten.permute.default)
def _permute(t, dims):
    n = t.dim()
    wanted = [wrapped(d, n) for d in dims]
    if wanted == [*range(n - 2), n - 1, n - 2]:
        return _t(t)
    return _view_of_self(t) if wanted == list(range(n)) else NotImplemented


@rule(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default)
def _same_shape_view(t, size, **kwargs):
    return _view_of_self(t) if list(size) == list(t.shape) else NotImplemented
