"""The launches of :mod:`.triton_append`: of ``fp4.append_kv`` and ``fp4.dequantize_kv`` on CUDA, and of what a prompt's attention reads.

No Python of a call waits for the device: how many tokens a cache holds is read by the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...formats import kv
from ...ops import dequantize_kv as dequantize_contract
from ...ops.cached_call import CachedCall, Stored
from ...ops.dequantize_kv import DequantizeCall
from ..decode_attention.split import power
from .quantized import KINDS
from .step import along

_WIDEST = 256
_UNFUSED = {"enable_fp_fusion": False}  # a product and a sum are rounded one after the other, as formats.kv does


@dataclass(frozen=True)
class RowsConfig:
    """``block_n`` tokens a program."""

    block_n: int
    num_warps: int = 8


def rows_config(d: int) -> RowsConfig:
    """A thread has 16 numbers of a tile: rounding to NVFP4 holds several copies of each."""
    return RowsConfig(max(16, 4096 // max(32, power(d))))


class Numbers(NamedTuple):
    """Keys and values of a cache as a prompt attends to them, ``[B, Hkv, rows, D]``, in the dtype of the tokens.

    back: None: the token at the position p lies in row p. Else in row ``back + p - position``.
    near_keys, near_values: exact copies, None of a format without them. ``near_back``: as ``back``.
    """

    keys: Tensor
    values: Tensor
    back: int | None = None
    near_keys: Tensor | None = None
    near_values: Tensor | None = None
    near_back: int = 0


def serves(c: CachedCall) -> bool:
    """Can one launch append to this cache? It reads shapes and devices only."""
    return c.query.is_cuda and c.stored is not None and c.key.shape[3] <= _WIDEST


def append_kv(c: CachedCall) -> tuple[Tensor, Tensor]:
    """The new tokens as they are stored, ``[B, Hkv, Q, D]`` twice. :func:`serves`, and nothing of ``c`` is empty."""
    new = Numbers(*_rows_like(c, c.key.shape[2]), back=0)
    append(c, new)
    return new.keys, new.values


def dequantize_kv(c: DequantizeCall) -> tuple[Tensor, Tensor]:
    """``fp4.dequantize_kv`` on CUDA."""
    dequantize_contract.check(c)
    if c.width > _WIDEST or not c.keys.numel():
        return dequantize_contract.reference(c)  # torch's operators
    with torch.cuda.device(c.keys.device):
        return slots_of(c)


def slots_of(c: DequantizeCall) -> tuple[Tensor, Tensor]:
    """By one launch."""
    keys, values = (torch.empty(*c.keys.shape[:2], c.taken, c.width, dtype=c.dtype, device=c.keys.device) for _ in range(2))
    if c.taken:
        changed: dict[str, Any] = {name: t.contiguous() for name, t in c._asdict().items() if isinstance(t, Tensor)}
        _dequantize(c.format, c._replace(**changed), (None, None), None, Numbers(keys, values), c.keys.shape[2], 0, ring=False, exact=False)
    return keys, values


def _rows_like(c: CachedCall, rows: int) -> tuple[Tensor, Tensor]:
    batch, heads, _, d = c.key.shape
    keys, values = (torch.empty(batch, heads, rows, d, dtype=c.key.dtype, device=c.key.device) for _ in range(2))
    return keys, values


def memory(c: CachedCall, empty: bool, exact: bool) -> Numbers:
    """For a call over a cache in 8 or 4 bits: where :func:`append` and :func:`dequantize` write. ``empty``: no token came before.

    ``exact``: of a format with exact tokens, with copies of those that are attended to.
    """
    queries = c.key.shape[2]
    window = c.window
    if empty:
        back: int | None = 0
        rows = queries
    elif window is not None:
        back = window - 1
        rows = back + queries
    else:
        back, rows = None, c.slots
    if not exact:
        return Numbers(*_rows_like(c, rows), back=back)
    if empty:  # all that is attended to is new
        return Numbers(*_rows_like(c, rows), back, along(c.key), along(c.value))
    return Numbers(*_rows_like(c, rows), back, *_rows_like(c, kv.LAST - 1 + queries), kv.LAST - 1)


def append(c: CachedCall, to: Numbers, tile: RowsConfig | None = None) -> None:
    """Write the new tokens, and as numbers to ``to``. :func:`serves`, and nothing of ``c`` is empty.

    A cache that is not contiguous is copied, and copied back.
    """
    from .triton_append import append_rows

    given = c
    c = _contiguous(c)
    s: Any = c.stored
    f: Any = c.format
    batch, heads, queries, d = c.key.shape
    t = tile or rows_config(d)
    key, value = along(c.key), along(c.value)
    copied = to.near_keys is not None and to.near_back > 0
    near = (to.near_keys, to.near_values) if copied else (None, None)
    grid = (batch * heads * -(-queries // t.block_n), 2)
    append_rows[grid](
        key, value, *_bytes(c.keys, c.values), s.key_scale, s.value_scale, *_bytes(s.key_blocks, s.value_blocks), s.key_mean, s.exact_keys, s.exact_values,
        c.position, to.keys, to.values, *near, c.slots, 0 if s.exact_keys is None else s.exact_keys.shape[2], heads, queries, to.keys.shape[2], to.back or 0,
        to.near_back, *key.stride()[:3], *value.stride()[:3], K_KIND=KINDS[f.key], V_KIND=KINDS[f.value], K_TOP=f.key.top, V_TOP=f.value.top, FIRST=kv.FIRST,
        MEAN_TOKENS=kv.MEAN_TOKENS, EXACT=f.exact, FIRST_EXACT=to.near_keys is not None, NEAR=copied, RING=c.window is not None, ABSOLUTE=to.back is None,
        D=d, BLOCK_N=t.block_n, BLOCK_M=t.block_n, BLOCK_D=max(32, power(d)), num_warps=t.num_warps, **_UNFUSED,
    )  # fmt: skip
    for old, new in zip(_parts(given), _parts(c), strict=True):
        if old is not new:
            old.copy_(new)


def _parts(c: CachedCall) -> list[Tensor]:
    s: Any = c.stored
    return [t for t in (c.keys, c.values, *s) if t is not None]


def _contiguous(c: CachedCall) -> CachedCall:
    """With contiguous parts of the cache: themselves, or copies."""
    if all(t.is_contiguous() for t in _parts(c)):
        return c
    s: Any = c.stored
    parts: list[Any] = [None if t is None else t.contiguous() for t in s]
    return c._replace(keys=c.keys.contiguous(), values=c.values.contiguous(), stored=Stored(*parts))


def dequantize(c: CachedCall, to: Numbers, tile: RowsConfig | None = None) -> None:
    """Write the tokens that came before to ``to``, as numbers. It runs before :func:`append`, which may overwrite some of them."""
    c = _contiguous(c)
    s: Any = c.stored
    exact = (s.exact_keys, s.exact_values)
    _dequantize(c.format, _as_stored(c), exact, c.position, to, c.slots, c.key.shape[2], c.window is not None, to.near_keys is not None, tile)


def _as_stored(c: CachedCall) -> DequantizeCall:
    s: Any = c.stored
    return DequantizeCall(c.keys, c.values, s.key_scale, s.value_scale, s.key_mean, c.key.dtype, None, s.value_blocks, s.key_blocks)


def _dequantize(
    f: kv.Format | None, c: DequantizeCall, exact_tokens: tuple[Tensor | None, Tensor | None], position: Tensor | None, to: Numbers, slots: int, queries: int,
    ring: bool, exact: bool, tile: RowsConfig | None = None
) -> None:  # fmt: skip
    from .triton_append import dequantize_rows

    if f is None:
        return
    batch, heads, rows, d = to.keys.shape
    t = tile or rows_config(d)
    tiles = -(-(rows if to.back is None else to.back) // t.block_n)
    near = exact and to.near_back > 0
    grid = (batch * heads * (tiles + near), 2)
    if not grid[0]:
        return
    held = exact_tokens[0]
    dequantize_rows[grid](
        *_bytes(c.keys, c.values), c.key_scale, c.value_scale, *_bytes(c.key_blocks, c.value_blocks), c.key_mean, *exact_tokens, position, to.keys, to.values,
        to.near_keys if near else None, to.near_values if near else None, slots, 0 if held is None else held.shape[2], tiles, queries, rows, to.back or 0,
        to.near_back, K_KIND=KINDS[f.key], V_KIND=KINDS[f.value], FIRST=kv.FIRST, FIRST_EXACT=exact, NEAR=near, COUNTED=position is not None, RING=ring,
        ABSOLUTE=to.back is None, D=d, BLOCK_N=t.block_n, BLOCK_D=max(32, power(d)), num_warps=t.num_warps, **_UNFUSED,
    )  # fmt: skip


def _bytes(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.view(torch.uint8) for t in tensors]
