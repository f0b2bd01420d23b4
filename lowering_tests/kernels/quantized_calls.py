"""Calls of fp4.cached_attention, for the tests of its kernels."""

from __future__ import annotations

import torch

from fp4_inductor.formats import kv
from fp4_inductor.ops.cached_call import CachedCall, Prologue, Stored

NAN = float("nan")
F16 = torch.float16


def distance(y, r) -> float:
    return ((y.double() - r.double()).norm() / r.double().norm().clamp_min(1e-300)).item()


def call(name, b, h, heads, q, s, d, at, window=None, dtype=F16, prologue=None, sinks=False, rollback=8, **options):
    """Random tokens over a cache that holds what was appended to it one after the other, and NaN everywhere else."""
    f = kv.FORMATS[name]
    held = torch.arange(max(0, at - s), at)
    old = [torch.randn(b, heads, len(held), d).to(dtype) for _ in range(2)]
    mean = torch.randn(b, heads, d)
    rows = [kv.empty(kind, (b, heads, s), d, torch.device("cpu")) for kind in (f.key, f.value)]
    for row, tokens, kind, shift in zip(rows, old, (f.key, f.value), (mean, None), strict=True):
        row.codes.view(torch.uint8).fill_(0x5B)
        row.scale.fill_(NAN)
        for cache, new in zip(row, kv.quantize(tokens, kind, shift), strict=True):
            if cache is not None:
                (cache.view(torch.uint8) if cache.itemsize == 1 else cache)[:, :, held % s] = new.view(torch.uint8) if new.itemsize == 1 else new
    exact = [None, None]
    if f.exact:
        slots = kv.exact_slots(s if window is None else s + 60, rollback)
        exact = [torch.full((b, heads, slots, d), NAN).to(dtype) for _ in range(2)]
        for position in range(at):
            for cache, tokens in zip(exact, old, strict=True):
                if position >= held[0]:
                    cache[:, :, kv.exact_slot(torch.tensor(position), slots)] = tokens[:, :, position - held[0]]
                elif position < kv.FIRST:
                    cache[:, :, position] = 0.5
    new = [torch.randn(b, n, q, d).to(dtype) for n in (h, heads, heads)]
    stored = Stored(rows[0].scale, rows[1].scale, mean, rows[1].blocks, rows[0].blocks, *exact)
    arrivals = torch.zeros(b * heads + 3, dtype=torch.int32)
    sink = torch.randn(h).to(dtype) if sinks else None
    return CachedCall(
        *new, rows[0].codes, rows[1].codes, torch.tensor(at), window=window, sinks=sink, arrivals=arrivals, prologue=prologue, stored=stored, **options
    )


def plain_call(b, h, kv, q, s, d, at, window=None, dtype=F16, prologue=None, sinks=None, **options):
    """Random tokens over a cache that holds NaN wherever no token was written."""
    query, key, value = (torch.randn(b, n, q, d).to(dtype) for n in (h, kv, kv))
    keys, values = torch.full((2, b, kv, s, d), NAN).to(dtype)
    held = torch.arange(max(0, at - s), at) % s
    for cache in (keys, values):
        cache[:, :, held] = torch.randn(b, kv, len(held), d).to(dtype)
    arrivals = torch.zeros(b * kv + 3, dtype=torch.int32)
    sinks = torch.randn(h).to(dtype) if sinks else None
    return CachedCall(query, key, value, keys, values, torch.tensor(at), window=window, sinks=sinks, arrivals=arrivals, prologue=prologue, **options)


def fresh(c):
    return c._replace(keys=c.keys.clone(), values=c.values.clone(), stored=Stored(*(None if t is None else t.clone() for t in c.stored)))


def numbers(c):
    """What the cache holds: keys, values and exact tokens, 9 where there is none."""
    f = c.format
    dense = [kv.dequantize(rows, kind, mean) for rows, kind, mean in zip(c.rows(), (f.key, f.value), (c.stored.key_mean, None), strict=True)]
    return [t.float().nan_to_num(9.0) for t in (*dense, c.stored.exact_keys, c.stored.exact_values) if t is not None]


def turning(b, q, d, dtype=F16, norm=True, rotary=None, half=False, offset=0.0):
    rotary = d if rotary is None else rotary
    norms = [torch.randn(d).to(dtype) if norm else None for _ in range(2)]
    angles = torch.rand(b, q, rotary // 2 if half else rotary) * 6
    return Prologue(*norms, 1e-6, offset, angles.cos().to(dtype), angles.sin().to(dtype), rotary)
