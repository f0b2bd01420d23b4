"""``fp4.cached_attention``: new tokens are appended to a layer's cache, and attend to what it then holds. It writes ``keys`` and ``values``.

    query     [B, H, Q, D]           bfloat16, float16 or float32; the queries of the new tokens, at the positions position .. position + Q - 1
    key       [B, Hkv, Q, D]         of the new tokens; H is a multiple of Hkv
    value     [B, Hkv, Q, Dv]
    keys      [B, Hkv, S, D]         the cache, written: the token at position p lies in slot p mod S. Any strides
    values    [B, Hkv, S, Dv]        the cache, written
    position  int64, one number      how many tokens came before. It is read, not advanced: all layers share it
    mask      bool (True: attend) or floating (added), [B or 1, H or 1, Q or 1, P]; the last dimension is over positions, not slots
    scale     None: D ** -0.5
    window    None: every token is kept, and position + Q may not exceed S. W: a query attends to itself and W - 1 positions before it; S >= W
    causal    False: mask alone says what a query attends to; window holds all the same
    softcap   scores become softcap * tanh(scores / softcap) before the mask
    sinks     [H]                    a score for each head that has a share of the softmax and no value
    empty     the caller knows that position is 0: only the new tokens are attended to
    out       [B, Q, H, Dv]          contiguous

What lies in slots beyond position + Q, or at masked positions, changes nothing, NaN and Inf included. A row that attends to nothing is zero.

A ring (``window``) of more than W slots still has what a query needs after S - W tokens were taken back from ``position`` (speculation).
Source: Ainslie et al., "GQA" (2023); Xiao et al., "Attention sinks" (2023), in the form of gpt-oss; the soft-cap is Gemma 2's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError, DeviceError, DTypeError, FP4Error, ShapeError
from ..formats import nvfp4
from .contract import OpContract
from .decode_attention import scale_of

NAME = "fp4.cached_attention"


class CachedCall(NamedTuple):
    """The arguments of one call."""

    query: Tensor
    key: Tensor
    value: Tensor
    keys: Tensor
    values: Tensor
    position: Tensor
    mask: Tensor | None = None
    scale: float | None = None
    window: int | None = None
    causal: bool = True
    softcap: float | None = None
    sinks: Tensor | None = None
    empty: bool = False

    @classmethod
    def of(cls, *args: Any, **kwargs: Any) -> CachedCall:
        return cls(*args, **kwargs)

    @property
    def slots(self) -> int:
        return self.keys.shape[2]


def reference(c: CachedCall) -> Tensor:
    """float64 arithmetic, rounded once to ``query.dtype``. It writes ``keys`` and ``values``, as the op does."""
    check(c)
    at, queries = int(c.position), c.query.shape[2]
    check_room(c, at)
    held = torch.arange(max(0, at - c.slots), at, device=c.query.device)  # the positions whose tokens the cache has, oldest first
    new = torch.arange(at, at + queries, device=c.query.device)
    k, v = (torch.cat([cache[:, :, held % max(c.slots, 1)], token], 2).double() for cache, token in ((c.keys, c.key), (c.values, c.value)))
    where = torch.cat([held, new])
    group = c.query.shape[1] // max(c.key.shape[1], 1)
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = c.query.double() @ k.mT * scale_of(c.query, c.scale)
    if c.softcap is not None:
        scores = c.softcap * (scores / c.softcap).tanh()
    seen = torch.ones(queries, len(where), dtype=torch.bool, device=c.query.device)
    if c.causal:
        seen = where <= new[:, None]
    if c.window is not None:
        seen = seen & (where > new[:, None] - c.window)
    if c.mask is not None:
        mask = c.mask[..., where]
        seen = seen & (mask if mask.dtype == torch.bool else mask != float("-inf"))
        scores = scores if mask.dtype == torch.bool else torch.where(seen, scores + mask.double(), scores)
    seen = seen.expand(scores.shape)
    scores = torch.where(seen, scores, float("-inf"))
    unseen = ~seen.unflatten(1, (-1, group)).any(2).any(2) if seen.numel() else seen.new_zeros(v.shape[0], c.key.shape[1], len(where))
    v = v.masked_fill(unseen.repeat_interleave(group, 1)[..., None], 0.0)
    if c.sinks is not None:
        sink = c.sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1).masked_fill(~seen.any(-1, keepdim=True), 0.0)
    out = (weights @ v).transpose(1, 2).to(c.query.dtype).contiguous()
    last = new[-c.slots :] if c.slots else new[:0]
    for cache, token in ((c.keys, c.key), (c.values, c.value)):
        cache[:, :, last % max(c.slots, 1)] = token[:, :, queries - len(last) :]
    return out


def check(c: CachedCall) -> None:
    """Raise the typed error of any call that has no meaning. Reads shapes, dtypes and devices only."""
    dtypes = {name: getattr(c, name).dtype for name in ("query", "key", "value", "keys", "values")}
    if c.query.dtype not in nvfp4.HIGH_PRECISION or len(set(dtypes.values())) > 1:
        raise DTypeError(f"{NAME}: dtypes of tokens and cache", value=dtypes, limit=f"one of {list(nvfp4.HIGH_PRECISION)}", remedy="Cast them with .to(dtype).")
    shapes = {name: tuple(getattr(c, name).shape) for name in dtypes}
    if not _belong_together(**shapes):
        raise ShapeError(
            f"{NAME}: the new tokens and the cache do not belong together",
            value=shapes,
            limit="query [B, H, Q, D], key [B, Hkv, Q, D], value [B, Hkv, Q, Dv], keys [B, Hkv, S, D], values [B, Hkv, S, Dv], H a multiple of Hkv",
            remedy="Make the cache for this model and this batch.",
        )
    if c.position.dtype != torch.int64 or c.position.numel() != 1:
        got = f"{tuple(c.position.shape)} {c.position.dtype}"
        raise ShapeError(f"{NAME}: position", value=got, limit="one number, int64", remedy="Pass torch.zeros((), dtype=torch.int64, device=...).")
    _check_options(c)
    tensors = {name: t for name, t in c._asdict().items() if isinstance(t, Tensor)}
    devices = {name: str(t.device) for name, t in tensors.items()}
    if len(set(devices.values())) > 1:
        raise DeviceError(f"{NAME}: tensors on different devices", value=devices, limit="one device", remedy="Move them with .to(device).")


def _belong_together(query: tuple, key: tuple, value: tuple, keys: tuple, values: tuple) -> bool:
    if {len(shape) for shape in (query, key, value, keys, values)} != {4}:
        return False
    batch, heads, queries, width = query
    kv_heads = key[1]
    fits = key == (batch, kv_heads, queries, width) and value[:3] == key[:3]
    fits = fits and keys == (batch, kv_heads, keys[2], width) and values == (*keys[:3], value[3])
    return fits and not (heads % kv_heads if kv_heads else heads)


def _check_options(c: CachedCall) -> None:
    batch, heads, queries, _ = c.query.shape
    if c.window is not None and not 1 <= c.window <= c.slots:
        raise ShapeError(f"{NAME}: window", value=c.window, limit=f"1 to {c.slots}, the slots of the cache", remedy="Give the ring at least as many slots.")
    if c.softcap is not None and not c.softcap > 0:
        raise ConfigError(f"{NAME}: softcap", value=c.softcap, limit="above 0, or None", remedy="Pass None if scores are not capped.")
    if c.sinks is not None and (c.sinks.shape != (heads,) or not c.sinks.is_floating_point()):
        got = f"{tuple(c.sinks.shape)} {c.sinks.dtype}"
        raise ShapeError(f"{NAME}: sinks", value=got, limit=f"({heads},), floating: one for each head", remedy="Pass the module's own sinks.")
    if c.mask is None:
        if not c.causal:
            raise ConfigError(
                f"{NAME}: neither causal nor masked", value="causal=False, mask=None", limit="a mask if causal is False", remedy="Pass a mask, or causal=True."
            )
        return
    if c.mask.dtype != torch.bool and not c.mask.is_floating_point():
        raise DTypeError(f"{NAME}: dtype of mask", value=c.mask.dtype, limit="bool or floating", remedy="Compare it with zero, or cast it.")
    full = (batch, heads, queries)
    if c.mask.dim() != 4 or any(have not in (want, 1) for have, want in zip(c.mask.shape, full, strict=False)) or c.mask.shape[3] < queries:
        raise ShapeError(
            f"{NAME}: mask does not fit",
            value=tuple(c.mask.shape),
            limit=f"4 dimensions, the first three 1 or those of {full}, the last for every position so far and the new ones",
            remedy="Broadcast the other dimensions, never the last.",
        )


def check_room(c: CachedCall, at: int) -> None:
    """What only the number in ``position`` says. Where it cannot be read (CUDA), whoever advances it answers for it."""
    end = at + c.query.shape[2]
    error: FP4Error | None = None
    if at < 0 or (c.empty and at):
        limit = "0 where the caller says that the cache is empty" if c.empty else "0 or more"
        error = ShapeError(f"{NAME}: position", value=at, limit=limit, remedy="Reset the cache.")
    elif c.window is None and end > c.slots:
        error = ShapeError(f"{NAME}: the cache is full", value=f"{at} + {end - at} tokens", limit=c.slots, remedy="Make the cache longer, or reset it.")
    elif c.mask is not None and c.mask.shape[3] < end:
        error = ShapeError(f"{NAME}: mask is too short", value=c.mask.shape[3], limit=f"{end} positions or more", remedy="Pass one for every position.")
    if error is not None:
        raise error


def fake(c: CachedCall) -> Tensor:
    check(c)
    batch, heads, queries, _ = c.query.shape
    return c.query.new_empty((batch, queries, heads, c.value.shape[3]))


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    # (B, H, Hkv, Q, S, D, Dv, position, window, extra): empty, full to the last slot, rings before, at and after their first turn, nothing at all
    cases: tuple[tuple[int, int, int, int, int, int, int, int, int | None, str], ...] = (
        (2, 8, 2, 1, 70, 64, 64, 33, None, ""),
        (1, 4, 4, 5, 33, 80, 80, 0, None, "empty"),
        (3, 7, 1, 3, 37, 96, 96, 34, None, "padded"),
        (2, 4, 2, 4, 21, 32, 32, 9, None, "bidirectional"),
        (1, 6, 3, 1, 9, 24, 24, 30, 7, ""),
        (2, 2, 1, 3, 9, 24, 24, 20, 6, "bidirectional"),
        (2, 4, 2, 3, 19, 40, 40, 17, 16, "padded"),
        (1, 4, 1, 11, 8, 48, 48, 13, 5, "float"),
        (1, 2, 2, 20, 8, 16, 16, 0, 8, ""),
        (1, 4, 2, 1, 17, 72, 72, 0, 8, "sinks"),
        (2, 4, 2, 6, 23, 24, 24, 11, 9, "sinks softcap"),
        (1, 4, 4, 2, 18, 48, 32, 7, None, ""),
        (1, 3, 3, 1, 30, 56, 56, 5, None, "nothing"),
        (1, 2, 1, 0, 16, 64, 64, 3, None, ""),
        (0, 4, 2, 1, 16, 64, 64, 3, None, ""),
    )
    for b, h, kv, q, s, d, dv, at, window, extra in cases:
        for dtype in (torch.float32, torch.bfloat16):
            shapes = ((b, h, q, d), (b, kv, q, d), (b, kv, q, dv), (b, kv, s, d), (b, kv, s, dv))
            tensors = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
            end = at + q
            mask: Tensor | None = None
            if extra == "padded":
                mask = (torch.arange(end + 3, device=device) >= torch.arange(b, device=device)[:, None] * 4)[:, None, None]
            if extra == "bidirectional":
                mask = torch.rand(b, 1, q, end, device=device) < 0.7
            if extra == "float":
                mask = torch.randn(b, h, q, end, device=device).masked_fill(torch.rand(b, h, q, end, device=device) < 0.3, float("-inf")).to(dtype)
            if extra == "nothing":
                mask = torch.zeros(1, 1, 1, end, dtype=torch.bool, device=device)
            sinks = torch.randn(h, device=device).to(dtype) if "sinks" in extra else None
            position = torch.full((), at, dtype=torch.int64, device=device)
            options = (mask, 0.3 if extra == "float" else None, window, extra != "bidirectional", 2.0 if "softcap" in extra else None, sinks, extra == "empty")
            yield f"B{b} H{h} Hkv{kv} Q{q} S{s} D{d} Dv{dv} at {at} window {window} {extra} {dtype}", (*tensors, position, *options)


CONTRACT = OpContract(
    name="cached_attention",
    schema="(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor position, Tensor? mask=None, float? scale=None, "
    "int? window=None, bool causal=True, float? softcap=None, Tensor? sinks=None, bool empty=False) -> Tensor",
    reference=reference,
    fake=fake,
    inputs=inputs,
    # As fp4.decode_attention: in half precision the weights of the softmax are rounded once before they meet the values.
    tolerance={torch.float32: 4e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3},
    any_strides=True,
    struct=CachedCall,
)
CONTRACT.refuse_gradients()
