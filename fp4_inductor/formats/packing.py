"""Raw tensors of a checkpoint to the arguments of ``fp4.linear``, ``fp4.sparse_linear`` and ``fp4.moe``.

For whoever has such tensors and no module: a server's loader, the readers of this package. Values are proved here, once, so that no
kernel has to; codes and block scales are taken as they lie in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import DeviceError, DTypeError, FP4Error, NonFiniteError, ShapeError, SparsityError
from . import nvfp4, sparse24
from .reciprocal import reciprocal_scale

MAX_SCALES = 3  # that one call of a CUDA kernel takes
_AGAIN = "Load the whole checkpoint: a tensor that was not loaded is NaN. If it holds such values, download it or quantize the model again."


class PackedLinear(NamedTuple):
    """The weight of one linear layer, or of several of the same input, as the ops take it: see :func:`pack_linear`.

    Args:
        codes: uint8 ``[N, K/2]``, or values ``[N, K/4]`` of a 2:4-sparse weight.
        scale: float8_e4m3fn ``[N, K/16]``.
        global_scale: float32 ``[]``, or ``[S]``, one for each member. It multiplies.
        rows: the row at which each of the S members begins, the first at 0; None where ``global_scale`` is ``[]``.
        meta: uint8 ``[N, K/8]`` of a 2:4-sparse weight, else None.
    """

    codes: Tensor
    scale: Tensor
    global_scale: Tensor
    rows: list[int] | None = None
    meta: Tensor | None = None

    @property
    def weight(self) -> tuple[Tensor, ...]:
        """``(codes, scale, global_scale)`` as ``fp4.linear`` takes them, ``(codes, meta, scale, global_scale)`` as ``fp4.sparse_linear`` does."""
        return _in_order(self.codes, self.meta, self.scale, self.global_scale)


class PackedExperts(NamedTuple):
    """The experts' weights of one product as ``fp4.moe`` takes them: see :func:`pack_experts`.

    Args:
        codes: uint8 ``[E, N, K/2]``, or values ``[E, N, K/4]`` of 2:4-sparse weights.
        scale: float8_e4m3fn ``[E, N, K/16]``.
        global_scale: float32 ``[E]``, or ``[E, 2]``, of gate and of up. It multiplies.
        meta: uint8 ``[E, N, K/8]`` of 2:4-sparse weights, else None.
    """

    codes: Tensor
    scale: Tensor
    global_scale: Tensor
    meta: Tensor | None = None

    @property
    def weight(self) -> tuple[Tensor, ...]:
        """``(codes, scale, global_scale)``, or ``(codes, meta, scale, global_scale)`` of 2:4-sparse weights."""
        return _in_order(self.codes, self.meta, self.scale, self.global_scale)


def pack_linear(
    codes: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    *,
    output_sizes: Sequence[int] | None = None,
    meta: Tensor | None = None,
    divides: bool = False,
    name: str = "weight",
) -> PackedLinear:
    """The arguments of ``fp4.linear`` from the tensors of a checkpoint.

    ``torch.ops.fp4.linear(x, *packed.weight, bias, "auto", packed.rows)`` is then the product with all rows. Codes, scale and metadata are not
    copied where they are contiguous. Equal global scales become one; of more than three, which one kernel does not take, equal neighbours do.
    The host reads a few numbers back, once.

    Args:
        codes: ``[N, K/2]`` uint8 or float4_e2m1fn_x2, the even k in the low nibble, K a multiple of 16. With ``meta``: the kept values ``[N, K/4]``.
        scale: ``[N, K/16]`` float8_e4m3fn, or its bytes as uint8, row by row (not swizzled).
        global_scale: float32 ``[]``, ``[1]`` or ``[S]``, one for each of S layers whose weights are rows of ``codes``, in their order.
        output_sizes: rows of each of the S layers, whose sum is N. Needed if S > 1.
        meta: ``[N, K/8]`` uint8, metadata of a 2:4-sparse weight, K a multiple of 32.
        divides: the global scales divide (compressed-tensors); they are inverted by :func:`reciprocal_scale`.
        name: what errors call the layer.

    Raises:
        DTypeError, ShapeError, DeviceError: the tensors do not belong together. A global scale of another dtype has been rounded.
        NonFiniteError: a block scale that is NaN or negative, a global scale that is not finite and positive.
        SparsityError: illegal metadata.
    """
    codes, scale = _bytes_of(codes), _scales_of(scale)
    _check_shapes(name, 2, codes, scale, meta, global_scale)
    _check_dtype(name, global_scale)
    n, g = codes.shape[0], global_scale.detach()
    count = 1 if g.dim() == 0 else g.shape[0] if g.dim() == 1 else -1
    sizes = (n,) if output_sizes is None else tuple(output_sizes)
    if count < 1 or len(sizes) != count or sum(sizes) != n or (count > 1 and min(sizes) < 1):
        raise ShapeError(
            f"{name}: global scales and rows do not belong together",
            value=f"global_scale {tuple(g.shape)}, output_sizes {None if output_sizes is None else list(sizes)}, {n} rows",
            limit="global_scale [], [1] or [S], and S output_sizes whose sum is the number of rows",
            remedy="Pass one global scale for each of the layers that the rows belong to, and their numbers of rows.",
        )
    g = reciprocal_scale(g.reshape(-1)) if divides else g.reshape(-1)
    alike = g[1:] == g[:-1]
    repeated = _check_values(name, scale, g, meta, alike)
    kept = codes.contiguous(), scale.contiguous()
    metas = None if meta is None else meta.contiguous()
    if all(repeated):
        return PackedLinear(*kept, g[0].clone(), None, metas)
    begins = [0, *accumulate(sizes[:-1])]
    if count > MAX_SCALES:
        first = [i for i in range(count) if i == 0 or not repeated[i - 1]]
        g, begins = torch.stack([g[i] for i in first]), [begins[i] for i in first]
    return PackedLinear(*kept, g.clone(), begins, metas)


def pack_experts(
    codes: Tensor, scale: Tensor, global_scale: Tensor, *, meta: Tensor | None = None, divides: bool = False, name: str = "experts"
) -> PackedExperts:
    """The arguments of ``fp4.moe`` for one of its two products from the tensors of a checkpoint.

    Codes, scale and metadata are not copied where they are contiguous. All experts are worked on at once. The host reads a few numbers back, once.

    Args:
        codes: ``[E, N, K/2]`` uint8 or float4_e2m1fn_x2, K a multiple of 16. With ``meta``: the kept values ``[E, N, K/4]``.
        scale: ``[E, N, K/16]`` float8_e4m3fn, or its bytes as uint8, row by row (not swizzled).
        global_scale: float32 ``[E]``, ``[E, 1]``, ``[E, 1, 1]``, or ``[E, 2]``: of the gate's and of up's rows. Two that are equal for every
            expert become one.
        meta, divides, name: as of :func:`pack_linear`.

    Raises:
        As :func:`pack_linear`.
    """
    codes, scale = _bytes_of(codes), _scales_of(scale)
    _check_shapes(name, 3, codes, scale, meta, global_scale)
    _check_dtype(name, global_scale)
    experts, n = codes.shape[:2]
    apart = tuple(global_scale.shape) == (experts, 2)
    if tuple(global_scale.shape) not in ((experts,), (experts, 1), (experts, 1, 1), (experts, 2)) or (apart and n % 2):
        raise ShapeError(
            f"{name}: global scales do not fit",
            value=f"global_scale {tuple(global_scale.shape)}, {experts} experts of {n} rows",
            limit=f"({experts},), or ({experts}, 2) of an even number of rows",
            remedy="One for each expert, or one for its gate and one for its up.",
        )
    g = global_scale.detach().reshape(experts, -1)
    g = reciprocal_scale(g) if divides else g
    repeated = _check_values(name, scale, g, meta, (g[:, :1] == g).all(0)[1:])
    g = g[:, 0] if all(repeated) else g
    return PackedExperts(codes.contiguous(), scale.contiguous(), g.clone(memory_format=torch.contiguous_format), None if meta is None else meta.contiguous())


def _in_order(codes: Tensor, meta: Tensor | None, scale: Tensor, global_scale: Tensor) -> tuple[Tensor, ...]:
    return (codes, scale, global_scale) if meta is None else (codes, meta, scale, global_scale)


def _bytes_of(codes: Tensor) -> Tensor:
    """uint8, a view."""
    return codes.detach().view(torch.uint8) if codes.dtype == torch.float4_e2m1fn_x2 else codes.detach()


def _scales_of(scale: Tensor) -> Tensor:
    """float8_e4m3fn, a view."""
    return scale.detach().view(nvfp4.SCALE_DTYPE) if scale.dtype == torch.uint8 else scale.detach()


def _check_dtype(name: str, global_scale: Tensor) -> None:
    if global_scale.dtype != torch.float32:
        raise DTypeError(
            f"{name}: dtype of the global scale",
            value=global_scale.dtype,
            limit=torch.float32,
            remedy="Load it into a float32 tensor: another dtype has rounded it, and a default dtype makes one unasked.",
        )


def _check_shapes(name: str, dims: int, codes: Tensor, scale: Tensor, meta: Tensor | None, global_scale: Tensor) -> None:
    placeholder = global_scale.new_empty(codes.shape[:-2], dtype=torch.float32)
    if codes.dim() != dims:
        what = "[N, K/2]" if dims == 2 else "[E, N, K/2]"
        raise ShapeError(
            f"{name}: codes have {codes.dim()} dimensions", value=tuple(codes.shape), limit=what, remedy="pack_linear takes matrices, pack_experts stacks."
        )
    try:
        if meta is None:
            nvfp4.check_parts(codes, scale, placeholder)
        else:
            sparse24.check_parts(codes, meta, scale, placeholder)
    except FP4Error as error:
        raise type(error)(f"{name}: {error.what}", value=error.value, limit=error.limit, remedy=error.remedy) from None


def _check_values(name: str, scale: Tensor, g: Tensor, meta: Tensor | None, alike: Tensor) -> list[bool]:
    """Raise for a scale that no weight has. Returns ``alike`` (bool ``[S]``), read back together with what is judged."""
    if scale.device.type == "meta":
        raise DeviceError(f"{name} is on the meta device", value="no values", limit="a device with memory", remedy="Load the weights first.")
    largest = scale.view(torch.uint8).max() if scale.numel() else torch.zeros((), dtype=torch.uint8, device=scale.device)
    sound = (torch.isfinite(g) & (g > 0)).all()
    illegal = torch.zeros_like(sound) if meta is None else sparse24.illegal_meta(meta).any()
    byte, good, corrupt, *rest = torch.cat((*(t.reshape(1).int() for t in (largest, sound, illegal)), alike.int())).tolist()
    if byte > nvfp4.SCALE_MAX_BYTE:
        raise NonFiniteError(f"{name} has a NaN or negative block scale", value=hex(byte), limit="0x00 .. 0x7e", remedy=_AGAIN)
    if not good:
        bad = g[~(torch.isfinite(g) & (g > 0))]
        raise NonFiniteError(
            f"{name} has a global scale that is not finite and positive",
            value=f"{bad.numel()} of {g.numel()}: {bad[:4].tolist()}",
            limit="finite and > 0",
            remedy=_AGAIN,
        )
    if meta is not None and corrupt:
        try:
            sparse24.validate_meta(meta)
        except SparsityError as error:
            raise SparsityError(f"{name}: {error.what}", value=error.value, limit=error.limit, remedy=error.remedy) from None
    return [bool(v) for v in rest]
