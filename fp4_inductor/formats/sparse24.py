"""2:4-sparse NVFP4: of every 4 consecutive k of a row exactly two E2M1 codes are kept; scales as in dense NVFP4.

    values uint8 [..., N, K/4]   one byte per group of four: first kept code | second kept code << 4
    meta   uint8 [..., N, K/8]   one nibble per group, even group low: pos0 | pos1 << 2, pos0 < pos1
    scale  e4m3  [..., N, K/16]  global_scale float32 [...]

3.5 bits a weight against 4.5 dense. Six nibbles are legal; the word of eight of them is what ``mma.sp.m16n8k32`` eats
(PTX ISA, "Sparse matrix storage"). A group of fewer than two non-zeros keeps zeros at its lowest free positions. Pruning
comes first and the scales are fitted to what is kept: a dropped weight takes part in no maximum and in no error.

Everything about codes and scales is :mod:`.nvfp4`'s; this module knows which two codes of four there are, and where.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import DeviceError, DTypeError, ShapeError, SparsityError
from . import e2m1, nvfp4
from .storage import Part, Storage

NAME = "sparse24_nvfp4"
K_MULTIPLE = 32
BITS_PER_WEIGHT = 2 + 1 + 8 / nvfp4.GROUP
STORAGE = Storage(NAME, (Part("values", torch.uint8, 4), Part("meta", torch.uint8, 8), *nvfp4.SCALES), K_MULTIPLE, BITS_PER_WEIGHT)
# (pos0, pos1) of the two kept k in a group of four. A kernel's table has this order too.
PATTERNS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
NIBBLES = tuple(p0 | p1 << 2 for p0, p1 in PATTERNS)
_REMEDY_PARTS = "Take all parts from one quantize_sparse24() or one checkpoint entry."
_REMEDY_MASK = "mask_of_scores(score) gives such a mask; complete_mask(keep) fills up groups that keep fewer."


class Sparse24Parts(NamedTuple):
    """The component tensors of one 2:4-sparse NVFP4 weight ``[..., N, K]``; shapes and dtypes as in the module's text."""

    values: Tensor
    meta: Tensor
    scale: Tensor
    global_scale: Tensor


def quantize_sparse24(
    w: Tensor,
    mask: Tensor | None = None,
    scale_search: str = "amax",
    global_scale: Tensor | None = None,
    channel_weight: Tensor | None = None,
) -> Sparse24Parts:
    """Quantize the kept weights of ``w`` to 2:4-sparse NVFP4.

    Args:
        w: ``[..., N, K]`` bfloat16, float16 or float32, finite; K a multiple of 32.
        mask: bool, shape of ``w``, exactly two True in every group of four; None: ``w`` is 2:4 already (:func:`existing_mask`).
        scale_search, global_scale, channel_weight: as in :func:`.nvfp4.quantize`, over the kept weights.

    Raises:
        SparsityError: the mask, or ``w`` without one, is not 2:4. Otherwise as :func:`.nvfp4.quantize`.
    """
    check_weight(w)
    nvfp4.check_search(scale_search)
    if mask is None:
        mask = existing_mask(w)
    else:
        check_mask(mask, w)
        nvfp4.check_finite(w)  # of the dropped weights too: a NaN never disappears silently
    qdata, scale, g = nvfp4.quantize(w.masked_fill(~mask, 0.0), scale_search, global_scale, channel_weight)
    return Sparse24Parts(*compress(qdata, mask), scale, g)


def dequantize_sparse24(values: Tensor, meta: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``[..., N, K]`` in ``dtype``; the kept weights as :func:`.nvfp4.dequantize` gives them, zeros elsewhere. Metadata is not checked."""
    return nvfp4.dequantize(decompress(values, meta), scale, global_scale, dtype)


# --- which two of four ------------------------------------------------------------------------------------------------


def mask_of_scores(score: Tensor) -> Tensor:
    """bool mask ``[..., K]`` keeping the two largest ``score`` of every group of four; ties keep the lower index. K % 4 == 0.

    Args:
        score: any real dtype, without NaN; larger is kept.
    """
    _check_groups(score, "a score")
    g = score.unflatten(-1, (-1, 4))
    a = [g[..., i] for i in range(4)]
    # A tournament: of four totally ordered players exactly two win two games or more.
    wins: list = [0, 0, 0, 0]
    for i, j in PATTERNS:
        lower = a[i] >= a[j]
        wins[i] = wins[i] + lower.to(torch.uint8)
        wins[j] = wins[j] + (~lower).to(torch.uint8)
    return torch.stack([w >= 2 for w in wins], dim=-1).flatten(-2)


def magnitude_mask(w: Tensor) -> Tensor:
    """bool mask keeping the two largest magnitudes of every group of four of ``w [..., K]``; ties keep the lower index.

    Raises:
        NonFiniteError: ``w`` holds NaN or Inf. ShapeError: K % 4 != 0.
    """
    nvfp4.check_finite(w)
    return mask_of_scores(w.abs())


def complete_mask(keep: Tensor) -> Tensor:
    """``keep`` (bool, at most two True per group of four) with every group filled up to two at its lowest free positions.

    Raises:
        SparsityError: a group keeps more than two.
    """
    _check_counts(keep, "a mask keeps more than two of a group of four", 0, _REMEDY_MASK)
    return mask_of_scores(keep.to(torch.uint8))


def is_24(w: Tensor) -> bool:
    """Whether every group of four consecutive k of ``w [..., K]`` has at most two non-zeros. -0 is a zero; K % 4 == 0."""
    _check_groups(w, "a weight")
    return bool((_group_counts(w != 0) <= 2).all())


def existing_mask(w: Tensor) -> Tensor:
    """The mask of a weight ``[..., K]`` that is 2:4 already; groups with fewer than two non-zeros keep zeros at their lowest positions.

    Raises:
        SparsityError: it is not 2:4; the message names the first row and group. NonFiniteError, ShapeError.
    """
    _check_groups(w, "a weight")
    nvfp4.check_finite(w)
    keep = w != 0
    _check_counts(keep, "the weight is not 2:4 sparse", 0, 'Prune it: pruning="magnitude" (or "wanda", "sparsegpt" with calibration data).')
    return mask_of_scores(keep.to(torch.uint8))


# --- packing ------------------------------------------------------------------------------------------------------


def compress(qdata: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Dense codes to ``(values, meta)``.

    Args:
        qdata: uint8 ``[..., N, K/2]`` packed E2M1 codes, K % 8 == 0.
        mask: bool ``[..., N, K]`` as :func:`check_mask` wants it; what it drops is lost. None: the codes that are not
            zero, of which no group may have more than two; a -0 is kept where there is room.
    """
    codes = e2m1.unpack(qdata)
    _check_groups(codes, "a weight", 8)
    if mask is None:
        _check_counts(codes & 7 != 0, "the codes are not 2:4 sparse", 0, "Prune the weight before it is quantized.")
        mask = mask_of_scores((codes & 7).clamp(max=1) * 2 + (codes >> 3))
    else:
        check_mask(mask, codes)
    nibble = _nibble_of(mask)
    groups = codes.unflatten(-1, (-1, 4))
    kept = torch.stack((nibble & 3, nibble >> 2), dim=-1)
    values = e2m1.pack(groups.gather(-1, kept.long()).flatten(-2))
    return values.contiguous(), pack_meta(nibble).contiguous()


def decompress(values: Tensor, meta: Tensor) -> Tensor:
    """``(values [..., N, K/4], meta [..., N, K/8])`` to the dense codes uint8 ``[..., N, K/2]``, code 0 where nothing was kept.

    Bit-exact inverse of :func:`compress`. Metadata is not checked: an illegal nibble gives codes without meaning.
    """
    nibble = unpack_meta(meta)
    first, second = (nibble & 3) * 4, (nibble >> 2) * 4
    value = values.to(torch.int32)
    word = (value & 15) << first | (value >> 4) << second
    return torch.stack((word & 255, word >> 8), dim=-1).flatten(-2).to(torch.uint8)


def mask_of(meta: Tensor) -> Tensor:
    """bool ``[..., N, K]``: where the metadata ``[..., N, K/8]`` keeps a weight."""
    nibble = unpack_meta(meta).unsqueeze(-1)
    at = torch.arange(4, dtype=torch.uint8, device=meta.device)
    return ((nibble & 3 == at) | (nibble >> 2 == at)).flatten(-2)


def pack_meta(nibble: Tensor) -> Tensor:
    """One nibble per group (uint8 ``[..., K/4]``) to bytes ``[..., K/8]``, even group low."""
    return nibble[..., 0::2] | (nibble[..., 1::2] << 4)


def unpack_meta(meta: Tensor) -> Tensor:
    """Bytes ``[..., K/8]`` to one nibble per group, uint8 ``[..., K/4]``."""
    return torch.stack((meta & 15, meta >> 4), dim=-1).flatten(-2)


# --- checks -----------------------------------------------------------------------------------------------------


def illegal_meta(meta: Tensor) -> Tensor:
    """bool ``[meta.numel()]``: the bytes of which a nibble is illegal. Nothing is read back to the host."""
    return ~_legal_bytes(meta.device).index_select(0, meta.reshape(-1).int())


def validate_meta(meta: Tensor) -> None:
    """Raise SparsityError unless both nibbles of every metadata byte are legal (36 of the 256 bytes are). Reads the values."""
    if meta.dtype != torch.uint8:
        raise DTypeError("2:4 metadata is uint8", value=meta.dtype, limit=torch.uint8, remedy="Reinterpret bytes with .view(torch.uint8).")
    if meta.device.type == "meta":
        raise DeviceError(
            "metadata on the meta device has no values to validate", value=tuple(meta.shape), limit="a device with memory", remedy="Load it first."
        )
    bad = illegal_meta(meta)
    count = int(bad.sum())
    if count:
        flat = int(bad.to(torch.uint8).argmax())
        byte = int(meta.reshape(-1)[flat])
        at = torch.unravel_index(torch.tensor(flat), meta.shape)
        raise SparsityError(
            "2:4 metadata is corrupt",
            value=f"{count} of {meta.numel()} bytes, the first 0x{byte:02X} at {tuple(int(i) for i in at)}",
            limit=f"nibbles {sorted(NIBBLES)} (pos0 | pos1 << 2 with pos0 < pos1)",
            remedy="The data is damaged or in another layout: quantize the weight again, or convert it with fp4_inductor.read_sparse24().",
        )


def check_weight(w: Tensor) -> None:
    """Raise unless ``w`` is a high-precision ``[..., N, K]`` with K a multiple of 32. Reads no values."""
    nvfp4.check_weight(w)
    if w.shape[-1] % K_MULTIPLE:
        raise ShapeError(
            "2:4-sparse NVFP4 needs a weight [..., N, K] with K a multiple of 32",
            value=tuple(w.shape),
            limit="K % 32 == 0",
            remedy="Pad K with zeros, as FP4Linear does.",
        )


def check_mask(mask: Tensor, w: Tensor) -> None:
    """Raise unless ``mask`` is bool, of ``w``'s shape and device, with exactly two True in every group of four."""
    check_mask_shape(mask, w)
    _check_counts(mask, "the mask is not 2:4", 2, _REMEDY_MASK)


def check_mask_shape(mask: Tensor, w: Tensor) -> None:
    """The part of :func:`check_mask` that reads no values."""
    if mask.dtype != torch.bool:
        raise DTypeError("a 2:4 mask is bool", value=mask.dtype, limit=torch.bool, remedy="Compare: mask = w != 0.")
    if mask.shape != w.shape:
        raise ShapeError("the mask has another shape than the weight", value=tuple(mask.shape), limit=tuple(w.shape), remedy="One bool per weight.")
    if mask.device != w.device:
        raise DeviceError("the mask lies on another device than the weight", value=mask.device, limit=w.device, remedy="Move it with .to(weight.device).")
    _check_groups(mask, "a mask")


def check_parts(values: Tensor, meta: Tensor, scale: Tensor, global_scale: Tensor) -> None:
    """Raise unless the four tensors can be one weight: dtypes, shapes, one device. Reads no values (:func:`validate_meta` does)."""
    check_packed(values, meta)
    nvfp4.check_dtypes(scale=(scale, nvfp4.SCALE_DTYPE), global_scale=(global_scale, torch.float32))
    if tuple(scale.shape) != (want := STORAGE.shapes(STORAGE.logical(values.shape))["scale"]):
        raise ShapeError("2:4 values and scale do not belong together", value=f"scale {tuple(scale.shape)}", limit=want, remedy=_REMEDY_PARTS)
    nvfp4.check_global_scale(global_scale, tuple(values.shape[:-2]))
    nvfp4.check_one_device(values=values, meta=meta, scale=scale, global_scale=global_scale)


def check_packed(values: Tensor, meta: Tensor) -> None:
    """:func:`check_parts` for the codes and the metadata alone."""
    nvfp4.check_dtypes(values=(values, torch.uint8), meta=(meta, torch.uint8))
    if values.dim() < 2 or values.shape[-1] % 8 or tuple(meta.shape) != (*values.shape[:-1], values.shape[-1] // 2):
        raise ShapeError(
            "2:4 values and meta do not belong together",
            value=f"values {tuple(values.shape)}, meta {tuple(meta.shape)}",
            limit="values [..., N, K/4], meta [..., N, K/8], K % 32 == 0",
            remedy=_REMEDY_PARTS,
        )
    nvfp4.check_one_device(values=values, meta=meta)


# --- inside -------------------------------------------------------------------------------------------------------


def _group_counts(keep: Tensor) -> Tensor:
    return keep.unflatten(-1, (-1, 4)).sum(-1, dtype=torch.uint8)


def _check_groups(t: Tensor, what: str, multiple: int = 4) -> None:
    if t.dim() < 1 or t.shape[-1] % multiple:
        raise ShapeError(f"{what} has no whole groups of four", value=tuple(t.shape), limit=f"[..., K] with K % {multiple} == 0", remedy="Pad K with zeros.")


def _check_counts(keep: Tensor, what: str, least: int, remedy: str) -> None:
    """SparsityError unless every group of four has between ``least`` and 2 True; names the first that has not."""
    _check_groups(keep, "a mask")
    count = _group_counts(keep)
    bad = (count > 2) | (count < least)
    total = int(bad.sum())
    if total:
        flat = int(bad.reshape(-1).to(torch.uint8).argmax())
        *row, group = (int(i) for i in torch.unravel_index(torch.tensor(flat), count.shape))
        where = f"row {row[0] if len(row) == 1 else tuple(row)}, k {group * 4}..{group * 4 + 3}"
        raise SparsityError(
            what,
            value=f"{total} of {count.numel()} groups of four; the first: {where} with {int(count.reshape(-1)[flat])} non-zeros",
            limit="exactly 2" if least == 2 else "at most 2",
            remedy=remedy,
        )


def _nibble_of(mask: Tensor) -> Tensor:
    """One nibble per group, uint8 ``[..., K/4]``, of a mask with exactly two True per group."""
    m = mask.unflatten(-1, (-1, 4)).to(torch.uint8)
    # pos0 is the number of leading False, pos1 is 3 minus the number of trailing ones.
    first = torch.where(m[..., 0] == 1, 0, torch.where(m[..., 1] == 1, 1, 2))
    last = torch.where(m[..., 3] == 1, 3, torch.where(m[..., 2] == 1, 2, 1))
    return (first | last << 2).to(torch.uint8)


@e2m1.constant
def _legal_bytes(device: torch.device) -> Tensor:
    """bool ``[256]``."""
    byte = torch.arange(256, dtype=torch.int32, device=device)
    legal = torch.tensor(NIBBLES, dtype=torch.int32, device=device)
    return torch.isin(byte & 15, legal) & torch.isin(byte >> 4, legal)
