"""Other projects' layouts of 2:4-sparse FP4 weights, to and from the canonical one. Codes and metadata convert bit for bit.

``dgx-vllm v7`` (Avarok's sparse MoE kernel): N is the contiguous dimension. values uint8 ``[.., K/4, N]`` and meta uint8
``[.., K/8, N]`` with the canonical bytes; scale E4M3 ``[.., K/16, N]`` or one per 8 k, ``[.., K/8, N]``; a float32 global
scale per expert that multiplies.

``Metal Marlin`` (its "2:4 Structured Sparse Weight Format" document): values uint32 ``[K/16, N]`` of 8 kept codes, metadata
uint32 ``[K/32, N]`` of 8 nibbles, both lowest bits first; scales float16 ``[K/G, N]``, no global scale. Its text lets ties
keep the lower index and its sample code the higher one; what was kept is in the metadata, so either converts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ConfigError, DTypeError, ShapeError
from . import nvfp4, sparse24
from .sparse24 import Sparse24Parts

_REMEDY = "Dequantise it with its own library and quantize the result: quantize_sparse24(w) keeps the pattern."


def from_dgx_v7(values: Tensor, meta: Tensor, scale: Tensor, global_scale: Tensor) -> Sparse24Parts:
    """The canonical parts of a dgx-vllm v7 weight.

    Raises:
        SparsityError: illegal metadata. ShapeError, DTypeError: the parts do not belong together, or the two scales of a
            block of 16 differ (one scale per 8 k).
    """
    if min(values.dim(), meta.dim(), scale.dim()) < 2:
        raise ShapeError(
            "dgx-vllm v7 parts are matrices",
            value=[tuple(t.shape) for t in (values, meta, scale)],
            limit="[.., K/4, N], [.., K/8, N], [.., K/16, N]",
            remedy="Take all from one weight.",
        )
    if scale.shape[-2] * 4 == values.shape[-2] * 2:
        first, second = scale.view(torch.uint8)[..., 0::2, :], scale.view(torch.uint8)[..., 1::2, :]
        if not torch.equal(first, second):
            raise ShapeError(
                "dgx-vllm v7: a block of 16 k has two scales",
                value=f"{int((first != second).sum())} of {first.numel()} blocks",
                limit="one scale per 16 k, or equal pairs",
                remedy=_REMEDY,
            )
        scale = first.view(scale.dtype)
    parts = Sparse24Parts(_turned(values), _turned(meta), _turned(scale), global_scale.clone())
    sparse24.check_parts(*parts)
    sparse24.validate_meta(parts.meta)
    return parts


def to_dgx_v7(parts: Sparse24Parts, k_per_scale: int = 8) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(values, meta, scale, global_scale)`` as the v7 kernel reads them, with one scale per ``k_per_scale`` (8 or 16) k."""
    sparse24.check_parts(*parts)
    if k_per_scale not in (8, nvfp4.GROUP):
        raise ConfigError("dgx-vllm v7: k_per_scale", value=k_per_scale, limit=[8, nvfp4.GROUP], remedy="Its published kernel reads one scale per 8 k.")
    scale = parts.scale.view(torch.uint8).repeat_interleave(nvfp4.GROUP // k_per_scale, -1).view(parts.scale.dtype)
    return _turned(parts.values), _turned(parts.meta), _turned(scale), parts.global_scale.clone()


def from_metal_marlin(values: Tensor, metadata: Tensor, scales: Tensor) -> Sparse24Parts:
    """The canonical parts of a Metal Marlin FP4 weight.

    Args:
        values: uint32 or int32 ``[K/16, N]``. metadata: ``[K/32, N]``.
        scales: float16 ``[K/G, N]``, G a multiple of 16, >= 0.

    Raises:
        SparsityError: illegal metadata. ShapeError: the parts do not belong together. DTypeError: wrong dtypes, or scales that
            are not E4M3 numbers times one power of two: float16 has eight times their precision.
    """
    kept, meta = _bytes(values, "values"), _bytes(metadata, "metadata")
    sparse24.check_packed(kept, meta)
    sparse24.validate_meta(meta)
    k = kept.shape[1] * 4
    if scales.dtype != torch.float16:
        raise DTypeError("Metal Marlin scales are float16", value=scales.dtype, limit=torch.float16, remedy=_REMEDY)
    if scales.dim() != 2 or scales.shape[1] != kept.shape[0] or not scales.shape[0] or k % scales.shape[0] or k // scales.shape[0] % nvfp4.GROUP:
        raise ShapeError(
            "Metal Marlin scales do not fit the values",
            value=tuple(scales.shape),
            limit=f"[K/G, N] with K = {k}, N = {kept.shape[0]}, G a multiple of {nvfp4.GROUP}",
            remedy="Take all from one weight.",
        )
    wide = scales.float().mT.repeat_interleave(k // scales.shape[0] // nvfp4.GROUP, -1)
    largest = float(wide.max()) if wide.numel() else 0.0
    g = 2.0 ** torch.tensor(largest / nvfp4.SCALE_MAX).log2().ceil() if largest > 0 and largest < float("inf") else torch.tensor(1.0)
    g = g.to(wide.device)
    scale = (wide / g).to(nvfp4.SCALE_DTYPE)
    exact = (scale.float() * g == wide) & (wide >= 0)
    if not bool(exact.all()):
        raise DTypeError(
            "Metal Marlin scales are no E4M3 numbers",
            value=f"{int((~exact).sum())} of {exact.numel()} blocks",
            limit="E4M3 >= 0, times one power of two",
            remedy=_REMEDY,
        )
    return Sparse24Parts(kept, meta, scale, g)


def to_metal_marlin(parts: Sparse24Parts) -> tuple[Tensor, Tensor, Tensor]:
    """``(values int32 [K/16, N], metadata int32 [K/32, N], scales float16 [K/16, N])`` of one matrix; the scale product is rounded to float16.

    Raises:
        ShapeError: more than one matrix. DTypeError: a scale product is beyond float16.
    """
    sparse24.check_parts(*parts)
    if parts.values.dim() != 2:
        raise ShapeError("Metal Marlin's layout holds one matrix", value=tuple(parts.values.shape), limit="[N, K/4]", remedy="Convert expert by expert.")
    product = parts.scale.float() * parts.global_scale
    scales = product.to(torch.float16)
    lost = (scales.isinf() | ((scales == 0) & (product > 0))).sum()
    if int(lost):
        raise DTypeError(
            "a scale is beyond float16",
            value=f"{int(lost)} of {scales.numel()} blocks",
            limit="6e-8 to 65504",
            remedy="Scale the weight by a power of two, and the output by its inverse.",
        )
    return _words(parts.values), _words(parts.meta), scales.mT.contiguous()


def _turned(t: Tensor) -> Tensor:
    """The transposed matrix in memory of its own; ``contiguous()`` would share that of a matrix with one row."""
    return t.mT.clone(memory_format=torch.contiguous_format)


def _bytes(words: Tensor, name: str) -> Tensor:
    """uint32 ``[R, N]`` to bytes ``[N, 4 R]``, lowest first."""
    if words.dtype not in (torch.uint32, torch.int32):
        raise DTypeError(f"Metal Marlin {name} are 32-bit words", value=words.dtype, limit="uint32 or int32", remedy="Reinterpret with .view(torch.int32).")
    if words.dim() != 2:
        raise ShapeError(f"Metal Marlin {name} are one matrix", value=tuple(words.shape), limit="[.., N]", remedy="Convert expert by expert.")
    word = words.view(torch.int32).mT
    return torch.stack([(word >> shift & 255).to(torch.uint8) for shift in (0, 8, 16, 24)], dim=-1).flatten(-2)


def _words(stored: Tensor) -> Tensor:
    """Bytes ``[N, 4 R]`` to int32 ``[R, N]``, lowest first."""
    b = stored.to(torch.int32).unflatten(-1, (-1, 4))
    return (b[..., 0] | b[..., 1] << 8 | b[..., 2] << 16 | b[..., 3] << 24).mT.contiguous()
