"""append + attention: fp4.cached_attention by torch's operators around the kernels of ``fp4.decode_attention``, on every device and for every call.

A decode step on a GPU is one launch where :mod:`.step`, or over a cache in 8 or 4 bits :mod:`.cuda` or :mod:`.quantized`, takes the call.

On a CPU the position is read, and only the filled part of the cache is. On CUDA nothing is read by the host, so that a CUDA graph may hold the call. The
Triton kernel for few queries takes the position itself; where there is a window or a mask, or for many queries, a mask over the slots is made from it.
The first tokens of an empty cache are attended to where they are, on every device.

Of a cache in 8 or 4 bits the filled part, on CUDA all slots, is dequantized into memory of the dtype of query at each call, and then attended to as any
other: such a cache takes less memory between calls, and more time. On CUDA the first tokens of an empty one are rounded and appended by one launch
(:mod:`.append`). Many tokens behind others are :mod:`.prefill`'s. Exact tokens come behind the rounded ones, and a mask says which of the two copies of a
token a query attends to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...formats import kv
from ...ops.cached_call import CachedCall, Stored, check, check_room
from ...ops.decode_attention import scale_of, without_unseen
from .. import host, select
from ..forms import Launches
from ..kernel import ANY, BY_LIBRARY, IN_CI, Kernel, On
from . import append

_SCORES = 1 << 26  # float32 scores that are in memory at once, where they are computed one by one


def cached_attention(c: CachedCall) -> Tensor:
    """Append, and ``[B, Q, H, Dv]``, by the kernel that ``select.plan`` gives on a GPU. Raises before anything is written."""
    check(c)
    if c.query.is_cuda and c.query.numel() and c.value.numel():
        heads, queries, d = c.query.shape[1:]
        kernel = host.row_for("cached_attention", c.query, queries * (heads // c.key.shape[1]), heads, d, form=select.cached_form(c)).implementation
        with torch.cuda.device(c.query.device):
            return kernel.source()(c)
    return apart(c)


def apart(c: CachedCall) -> Tensor:
    """By torch's operators around the kernels of ``fp4.decode_attention``."""
    at = known(c)
    c = raw = c.prepared()
    batch, heads, queries, _ = c.query.shape
    new = _positions(c, at)
    exact = _exact(c, new, at) if c.query.numel() else None
    launched = at == 0 and c.query.numel() > 0 and append.serves(c)
    if launched:  # nothing old is attended to, so the ring of exact tokens may turn, too
        appended: tuple[tuple[Tensor, Tensor], ...] = ()
        key, value = append.append_kv(c)
        c = c._replace(key=key, value=value)
    else:
        appended = _appended(c, at)
        if c.stored is not None:
            c = _rounded(c, appended)
    # Many tokens at once in a ring: appended first, they would overwrite what the first of them attends to.
    last = c.window is not None and queries > c.slots - c.window + 1
    if not last:
        _append(c, appended, new)
    if not c.query.numel() or not c.value.shape[3]:
        out = c.query.new_zeros((batch, queries, heads, c.value.shape[3]))
    elif c.query.is_cuda and at is None and (kernel := _counting(c)):
        with torch.cuda.device(c.query.device):
            out = kernel(c.query, *_dense(c, c.slots), None, scale_of(c.query, c.scale), position=c.position)
    else:
        out = _attend(c, *_held(c, new, at, last), new, at, exact)
    if last:
        _append(c, appended, new)
    if raw.stored is not None and not launched:
        _append_exact(raw.stored, raw.key, raw.value, new)
    return out


def append_kv(c: CachedCall) -> tuple[Tensor, Tensor]:
    """``fp4.append_kv`` on CUDA: one launch, or torch's operators if heads are wider than 256."""
    check(c)
    if c.window is None and c.key.shape[2] > c.slots:
        check_room(c, 0)
    if c.key.numel() and append.serves(c):
        with torch.cuda.device(c.key.device):
            return append.append_kv(c)
    at = known(c)
    new = _positions(c, at)
    appended = _appended(c, at)
    rounded = _rounded(c, appended)
    _append(c, appended, new)
    if c.stored is not None:
        _append_exact(c.stored, c.key, c.value, new)
    return rounded.key.clone(memory_format=torch.contiguous_format), rounded.value.clone(memory_format=torch.contiguous_format)


def _positions(c: CachedCall, at: int | None) -> Tensor:
    """Of the new tokens."""
    count = c.key.shape[2]
    return torch.arange(count, device=c.key.device) + c.position.reshape(()) if at is None else torch.arange(at, at + count, device=c.key.device)


def known(c: CachedCall) -> int | None:
    """The number in ``position``, where the host can tell without waiting for a device."""
    if c.position.device.type == "cpu":
        at = int(c.position)
        check_room(c, at)
        return at
    if not c.empty:
        return None
    check_room(c, 0)
    torch._assert_async(c.position == 0)  # a CUDA graph may have been replayed since the caller looked
    return 0


def _counting(c: CachedCall) -> Callable[..., Tensor] | None:
    """The kernel that takes the position in the place of a mask, if it serves this call: it attends to slots 0 to position + Q - 1, causally."""
    heads, queries, d = c.query.shape[1:]
    if not c.causal or c.mask is not None or c.window is not None or c.softcap is not None or c.sinks is not None or c.value.shape[3] != d:
        return None
    if c.format is not None and c.format.exact:
        return None
    kernel = host.row_for("decode_attention", c.query, queries * (heads // c.key.shape[1]), heads, d, form=select.attention_form(d)).implementation
    return kernel.form.source() if kernel.name == "triton_decode_attention" and isinstance(kernel.form, Launches) else None


def _appended(c: CachedCall, at: int | None) -> tuple[tuple[Tensor, Tensor], ...]:
    """``(a part of the cache, what of the new tokens goes there)`` for each part. Writes the mean of keys, where the cache is empty."""
    if c.stored is None or c.format is None:
        return (c.keys, c.key), (c.values, c.value)
    mean = c.stored.key_mean
    if at == 0 and c.key.shape[2]:
        mean.copy_(kv.mean_of(c.key))
    elif at is None and c.key.shape[2]:
        mean.copy_(torch.where(c.position.reshape(()) == 0, kv.mean_of(c.key), mean))
    parts: list[tuple[Tensor, Tensor]] = []
    for kind, cache, token, shift in zip((c.format.key, c.format.value), c.rows(), (c.key, c.value), (mean, None), strict=True):
        parts += [(old, new) for old, new in zip(cache, kv.quantize(token, kind, shift), strict=True) if old is not None and new is not None]
    return tuple(parts)


def _rounded(c: CachedCall, appended: tuple[tuple[Tensor, Tensor], ...]) -> CachedCall:
    """With the new tokens as the cache will hold them."""
    stored: Any = c.stored
    f: Any = c.format
    of_key = 3 if f.key.blocks else 2
    key, value = (kv.Rows(*(new for _, new in part)) for part in (appended[:of_key], appended[of_key:]))
    dtype = c.query.dtype
    return c._replace(key=kv.dequantize(key, f.key, stored.key_mean, dtype), value=kv.dequantize(value, f.value, None, dtype))


def _dense(c: CachedCall, filled: int) -> tuple[Tensor, Tensor]:
    """The first slots of the cache in the dtype of query."""
    if c.stored is None or c.format is None:
        return c.keys[:, :, :filled], c.values[:, :, :filled]
    key, value = c.rows(slice(filled))
    return kv.dequantize(key, c.format.key, c.stored.key_mean, c.query.dtype), kv.dequantize(value, c.format.value, None, c.query.dtype)


def _append(c: CachedCall, appended: tuple[tuple[Tensor, Tensor], ...], new: Tensor) -> None:
    kept = min(c.query.shape[2], c.slots)
    if not kept:
        return
    slots = new[-kept:] if c.window is None else new[-kept:] % c.slots
    for cache, token in appended:
        kv.indexable(cache).index_copy_(2, slots, kv.indexable(token)[:, :, -kept:])


def _exact(c: CachedCall, new: Tensor, at: int | None) -> tuple[Tensor, Tensor, Tensor] | None:
    """K, V and positions of the exact tokens before the new ones are appended, and of these; None: the format has none."""
    if c.stored is None or c.stored.exact_keys is None or c.stored.exact_values is None:
        return None
    if at == 0:
        return c.key, c.value, new
    where = kv.exact_position(new[0] - 1, c.stored.exact_keys.shape[2])
    return torch.cat([c.stored.exact_keys, c.key], 2), torch.cat([c.stored.exact_values, c.value], 2), torch.cat([where, new])


def _append_exact(stored: Stored, key: Tensor, value: Tensor, new: Tensor) -> None:
    queries = key.shape[2]
    for cache, token in ((stored.exact_keys, key), (stored.exact_values, value)):
        if cache is None or not queries:
            continue
        kept = min(queries, cache.shape[2] - kv.FIRST)  # no two of them in one slot
        cache.index_copy_(2, kv.exact_slot(new[-kept:], cache.shape[2]), token[:, :, -kept:])
        index = torch.arange(kv.FIRST, device=new.device) - new[0]  # of the first tokens among the new ones, if they are there
        first = token.index_select(2, index.clamp(0, queries - 1))
        there = ((index >= 0) & (index < queries))[:, None]
        cache[:, :, : kv.FIRST] = torch.where(there, first, cache[:, :, : kv.FIRST])


def _held(c: CachedCall, new: Tensor, at: int | None, last: bool) -> tuple[Tensor, Tensor, Tensor]:
    """K, V and the positions of their tokens; negative: there is none."""
    if at == 0:
        return c.key, c.value, new
    queries = c.query.shape[2]
    filled = c.slots if at is None else min(c.slots, at if last else at + queries)
    slot = torch.arange(filled, device=c.query.device)
    where = slot
    if c.window is not None:
        newest = new[0] - 1 if last else new[-1]
        where = newest - (newest - slot) % c.slots
    keys, values = _dense(c, filled)
    if last:
        return torch.cat([keys, c.key], 2), torch.cat([values, c.value], 2), torch.cat([where, new])
    return keys, values, where


def _attend(c: CachedCall, k: Tensor, v: Tensor, where: Tensor, new: Tensor, at: int | None, exact: tuple[Tensor, Tensor, Tensor] | None) -> Tensor:
    queries = c.query.shape[2]
    copies = 0
    if exact is not None:
        k, v, where = (torch.cat([t, more], 2 if t.dim() > 1 else 0) for t, more in zip((k, v, where), exact, strict=True))
        copies = exact[2].shape[0]
    plain = c.softcap is None and c.sinks is None and k.shape[3] == v.shape[3]
    whole = exact is None and c.causal and c.mask is None and (c.window is None or (at == 0 and queries <= c.window))
    if whole and plain and at == 0 and queries > 1:
        return prompt(c.query, k, v, c.scale)
    mask = None if whole and at is not None and queries == 1 else _mask(c, where, new, copies)
    if plain:
        return torch.ops.fp4.decode_attention(c.query, k, v, mask, c.scale)
    return _by_scores(c, k, v, mask)


def prompt(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Causal attention of tokens to themselves alone, ``[B, Q, H, Dv]``."""
    as_it_is = q.is_cuda and all(t.stride(3) == 1 for t in (q, k, v))  # on a CPU the order of sums would follow the strides
    q, k, v = (t if as_it_is else t.contiguous() for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).contiguous()


def _mask(c: CachedCall, where: Tensor, new: Tensor, copies: int = 0) -> Tensor:
    """What is attended to, over the tokens at the positions ``where``, the last ``copies`` of which are exact ones of tokens that are there rounded, too."""
    query = new[:, None]
    seen = (where <= (query if c.causal else new[-1])) & (where >= 0)
    if c.window is not None:
        seen = seen & (where > query - c.window)
    if copies:
        behind = torch.arange(len(where), device=where.device) >= len(where) - copies
        seen = seen & (kv.is_exact(query, where) == behind)
    seen = seen[None, None]  # one row, where all queries see the same
    if c.mask is None:
        return seen
    length = c.mask.shape[3]
    seen = seen & (where < length)
    mask = c.mask[..., : len(where)] if c.window is None and not copies and length >= len(where) else c.mask[..., where.clamp(0, length - 1)]
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))


def _by_scores(c: CachedCall, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax in float32, with what no library takes: a soft-cap, sinks, values of another width. A part of the queries at a time."""
    batch, heads, queries, _ = c.query.shape
    kv_heads = k.shape[1]
    group = (kv_heads, heads // kv_heads)
    if mask is not None:
        seen = (mask if mask.dtype == torch.bool else mask != float("-inf")).expand(batch, heads, queries, -1)
        k, v = without_unseen(k, v, seen)
    k, v = k.float().contiguous()[:, :, None], v.float().contiguous()[:, :, None]
    out = c.query.new_empty((batch, queries, heads, v.shape[4]))
    step = max(1, _SCORES // max(1, batch * heads * k.shape[3]))
    for begin in range(0, queries, step):
        part = slice(begin, begin + step)
        scores = c.query[:, :, part].float().contiguous().unflatten(1, group) @ k.mT * scale_of(c.query, c.scale)
        if c.softcap is not None:
            scores = c.softcap * (scores / c.softcap).tanh()
        if mask is not None:
            rows = mask.expand(batch, heads, queries, -1)[:, :, part].unflatten(1, group)
            scores = scores.masked_fill(~rows, float("-inf")) if rows.dtype == torch.bool else scores + rows.float()
        peak = scores.amax(-1, keepdim=True)
        sink = None if c.sinks is None else c.sinks.float().view(*group, 1, 1)
        peak = peak if sink is None else torch.maximum(peak, sink)
        peak = peak.masked_fill(peak == float("-inf"), 0.0)
        weights = (scores - peak).exp()
        total = weights.sum(-1, keepdim=True) + (0.0 if sink is None else (sink - peak).exp())
        weights = torch.where(total > 0, weights / total, 0.0)
        out[:, part] = (weights @ v).flatten(1, 2).transpose(1, 2).to(out.dtype)
    return out


_WHY = "many queries, and what the one launch does not take: torch's operators append, and make a mask of the slots where the counter does not do"
KERNELS = (
    Kernel(
        "cached_attention", "append + attention", "library", (On(0, 129, IN_CI, _WHY),), ANY, k_multiple=1, batch=BY_LIBRARY,
        form=Launches("cached_attention.composed:apart"),
    ),
)  # fmt: skip
