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
    arrivals  int32, B * Hkv or more: zeros, which a kernel of one launch counts in and leaves zero; None, or not contiguous: no such kernel is used.
              Calls that share it follow each other on one stream
    early     the caller knows that the kernel before this one on its stream writes neither keys, values nor position: they may be read while it runs
    out       [B, Q, H, Dv]          contiguous

Query and key may come as they left their projections; what is to be done to them first is the *prologue*, all of it None if it is nothing:

    q_norm, k_norm  [D], floating    x becomes x / sqrt(mean(x^2) + eps) * (norm_offset + norm), over the width of each head (RMSNorm)
    cos, sin        [B or 1, Q, C]   then its first R elements turn: x[d] cos[d mod C] + turned[d] sin[d mod C], where turned is the second half of
                                     them, negated, and then the first ("rotate_half")
    rotary          None: R = C. R, even: C is R or R / 2

It is computed in float32 (float64 in the reference) and rounded once, to the dtype of query. Keys are cached as they are after it.

The cache may be in 8 or 4 bits: :mod:`fp4_inductor.formats.kv` has the formats. Its format is told by the dtypes of ``keys`` and ``values``; D = Dv, a
multiple of 16, and the *rest of the cache* belongs to it. All of that is written but what the format lacks, which is None:

    keys, values              codes [B, Hkv, S, D], or [B, Hkv, S, D/2] where two lie in a byte: float8_e4m3fn twice is "fp8", int8 and uint8 is "k8v4",
                              uint8 twice is "nvfp4"
    key_scale, value_scale    float16 [B, Hkv, S]
    key_blocks, value_blocks  float8_e4m3fn [B, Hkv, S, D/16], where the kind is "nvfp4"
    key_mean                  float32 [B, Hkv, D], subtracted from keys before they are rounded. It is written where position is 0: the mean of the first 128
                              new tokens at most, and stays until position is 0 again
    exact_keys, exact_values  [B, Hkv, 4 + R, D] in the dtype of query, where the format is "nvfp4": the first 4 tokens, and a ring of R tokens in which the
                              token at position p >= 4 lies in slot 4 + (p - 4) mod R. R is 64 or more, or no less than window (without one: than S)

A query then attends to what is *stored*, codes times scales plus mean, of the new tokens and of itself too, so that the result does not depend on how many
tokens come in one call. Where the format is "nvfp4" a query at position q attends to the exact tokens at positions below 4 and above q - 64. A token with
NaN or Inf is NaN in its head.

What lies in slots beyond position + Q, or at masked positions, changes nothing, NaN and Inf included. A row that attends to nothing is zero.

A ring (``window``) of more than W slots still has what a query needs after S - W tokens were taken back from ``position`` (speculation).
Source: Ainslie et al., "GQA" (2023); Xiao et al., "Attention sinks" (2023), in the form of gpt-oss; the soft-cap is Gemma 2's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..formats import kv
from .cached_call import CachedCall, Prologue, Stored, check, check_room
from .contract import OpContract
from .decode_attention import scale_of


def reference(c: CachedCall) -> Tensor:
    """float64 arithmetic, rounded once to ``query.dtype``. It writes ``keys`` and ``values``, as the op does."""
    check(c)
    at, queries = int(c.position), c.query.shape[2]
    check_room(c, at)
    c = c.prepared(torch.float64)
    held = torch.arange(max(0, at - c.slots), at, device=c.query.device)  # the positions whose tokens the cache has, oldest first
    new = torch.arange(at, at + queries, device=c.query.device)
    slot = held % max(c.slots, 1)
    exact = None
    if c.stored is None:
        k, v = (torch.cat([cache[:, :, slot], token], 2).double() for cache, token in ((c.keys, c.key), (c.values, c.value)))
        where = torch.cat([held, new])
    else:
        k, v, where, exact, last = _stored(c, c.stored, slot, held, new)
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
    if exact is not None:
        seen = seen & (kv.is_exact(new[:, None], where) == exact)
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
    kept = new[-c.slots :] if c.slots else new[:0]
    if c.stored is None:
        last = [(c.keys, c.key), (c.values, c.value)]
    for cache, token in last:
        kv.indexable(cache)[:, :, kept % max(c.slots, 1)] = kv.indexable(token)[:, :, queries - len(kept) :]
    if c.stored is not None and c.stored.exact_keys is not None and c.stored.exact_values is not None:
        for cache, token in ((c.stored.exact_keys, c.key), (c.stored.exact_values, c.value)):
            for i, position in enumerate(new):  # one after the other, the later over the earlier
                cache[:, :, kv.exact_slot(position, cache.shape[2])] = token[:, :, i]
    return out


def _stored(c: CachedCall, s: Stored, slot: Tensor, held: Tensor, new: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, list[tuple[Tensor, Tensor]]]:
    """K, V and positions of what a cache in 8 or 4 bits holds and of the new tokens as it will hold them, which of them are exact copies, and what is to
    be written where. Writes the mean."""
    f: Any = c.format
    if len(new) and not int(c.position):
        s.key_mean.copy_(kv.mean_of(c.key))
    dense, last = [], []
    for kind, rows, token, mean in zip((f.key, f.value), c.rows(), (c.key, c.value), (s.key_mean, None), strict=True):
        old = rows.each(lambda t: kv.indexable(t)[:, :, slot].view(t.dtype))
        added = kv.quantize(token, kind, mean)
        dense.append(torch.cat([kv.dequantize(r, kind, mean) for r in (old, added)], 2).double())
        last += [(a, b) for a, b in zip(rows, added, strict=True) if a is not None and b is not None]
    k, v = dense
    where = torch.cat([held, new])
    if s.exact_keys is None or s.exact_values is None:
        return k, v, where, None, last
    ring = s.exact_keys.shape[2] - kv.FIRST
    there = held[(held < kv.FIRST) | (held >= int(c.position) - ring)]
    copies = [cache[:, :, kv.exact_slot(there, cache.shape[2])] for cache in (s.exact_keys, s.exact_values)]
    k, v = (torch.cat([t, copy.double(), token.double()], 2) for t, copy, token in zip((k, v), copies, (c.key, c.value), strict=True))
    exact = torch.arange(k.shape[2], device=k.device) >= len(where)
    return k, v, torch.cat([where, there, new]), exact, last


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
        (2, 8, 2, 1, 40, 64, 64, 25, None, "prologue norm"),
        (2, 6, 3, 3, 21, 48, 48, 16, 18, "prologue"),
        (1, 4, 1, 2, 33, 40, 40, 12, None, "prologue norm half padded"),
        (1, 2, 1, 0, 16, 64, 64, 3, None, ""),
        (0, 4, 2, 1, 16, 64, 64, 3, None, ""),
    )
    for b, h, heads, q, s, d, dv, at, window, extra in cases:
        for dtype in (torch.float32, torch.bfloat16):
            shapes = ((b, h, q, d), (b, heads, q, d), (b, heads, q, dv), (b, heads, s, d), (b, heads, s, dv))
            tensors = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
            end = at + q
            mask: Tensor | None = None
            if "padded" in extra:
                mask = (torch.arange(end + 3, device=device) >= torch.arange(b, device=device)[:, None] * 4)[:, None, None]
            if extra == "bidirectional":
                mask = torch.rand(b, 1, q, end, device=device) < 0.7
            if extra == "float":
                mask = torch.randn(b, h, q, end, device=device).masked_fill(torch.rand(b, h, q, end, device=device) < 0.3, float("-inf")).to(dtype)
            if extra == "nothing":
                mask = torch.zeros(1, 1, 1, end, dtype=torch.bool, device=device)
            sinks = torch.randn(h, device=device).to(dtype) if "sinks" in extra else None
            position = torch.full((), at, dtype=torch.int64, device=device)
            last: tuple[Any, ...] = ()
            if "prologue" in extra:
                norms = [torch.randn(d, device=device).to(dtype) if "norm" in extra else None for _ in range(2)]
                r = d - 8 if "half" in extra else d
                angle = torch.rand(b if at % 2 else 1, q, r // 2 if "half" in extra else r, device=device) * 6
                arrivals = torch.zeros(b * heads, dtype=torch.int32, device=device)
                last = (arrivals, False, *norms, 1e-6, 1.0 if "half" in extra else 0.0, angle.cos().to(dtype), angle.sin().to(dtype), r)
            options = (mask, 0.3 if extra == "float" else None, window, extra != "bidirectional", 2.0 if "softcap" in extra else None, sinks, extra == "empty")
            yield f"B{b} H{h} Hkv{heads} Q{q} S{s} D{d} Dv{dv} at {at} window {window} {extra} {dtype}", (*tensors, position, *options, *last)
    yield from _stored_inputs(device)


def _stored_inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    """Caches in 8 and 4 bits, which hold what they were given, or anything."""
    # (B, H, Hkv, Q, S, D, position, window, softcap): empty, a step, tokens that overwrite a ring, one that is full to the last slot, no tokens
    cases: tuple[tuple[int, int, int, int, int, int, int, int | None, float | None], ...] = (
        (2, 4, 2, 9, 24, 32, 0, None, None),
        (1, 4, 1, 1, 90, 64, 80, None, None),
        (2, 2, 2, 3, 83, 16, 80, None, 2.0),
        (1, 6, 3, 12, 11, 48, 90, 9, None),
        (1, 2, 1, 0, 8, 32, 3, None, None),
    )
    for f in kv.FORMATS.values():
        for b, h, heads, q, s, d, at, window, softcap in cases:
            for dtype in (torch.float32, torch.bfloat16):
                new = [torch.randn(b, n, q, d, device=device).to(dtype) for n in (h, heads, heads)]
                mean = torch.randn(b, heads, d, device=device)
                held = [torch.randn(b, heads, s, d, device=device) for _ in range(2)]
                key, value = kv.quantize(held[0], f.key, mean), kv.quantize(held[1], f.value)
                exact = [torch.randn(b, heads, kv.exact_slots(s, 2), d, device=device).to(dtype) if f.exact else None for _ in range(2)]
                position = torch.full((), at, dtype=torch.int64, device=device)
                arrivals = torch.zeros(b * heads, dtype=torch.int32, device=device)
                options = (None, None, window, True, softcap, None, at == 0, arrivals, False, *Prologue())
                rest = [part for part in (key.scale, value.scale, mean, value.blocks, key.blocks, *exact) if part is not None]
                name = f"{f.name} B{b} H{h} Hkv{heads} Q{q} S{s} D{d} at {at} window {window} {dtype}"
                yield name, (*new, key.codes, value.codes, position, *options, *rest)


CONTRACT = OpContract(
    name="cached_attention",
    schema="(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor position, Tensor? mask=None, float? scale=None, "
    "int? window=None, bool causal=True, float? softcap=None, Tensor? sinks=None, bool empty=False, "
    "Tensor(c!)? arrivals=None, bool early=False, Tensor? q_norm=None, Tensor? k_norm=None, float eps=0.0, float norm_offset=0.0, Tensor? cos=None, "
    "Tensor? sin=None, int? rotary=None, Tensor(d!)? key_scale=None, Tensor(e!)? value_scale=None, Tensor(f!)? key_mean=None, "
    "Tensor(g!)? value_blocks=None, Tensor(h!)? key_blocks=None, Tensor(i!)? exact_keys=None, Tensor(j!)? exact_values=None) -> Tensor",
    reference=reference,
    fake=fake,
    inputs=inputs,
    # As fp4.decode_attention: in half precision the weights of the softmax are rounded once before they meet the values.
    tolerance={torch.float32: 4e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3},
    any_strides=True,
    struct=CachedCall,
)
CONTRACT.refuse_gradients()
CONTRACT.serve_regions()
