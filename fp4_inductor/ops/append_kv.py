"""``fp4.append_kv``: new tokens are rounded and written to a layer's cache in 8 or 4 bits. Nothing is attended to.

    key, value  [B, Hkv, Q, D]   bfloat16, float16 or float32; the tokens at the positions position .. position + Q - 1
    returns     two tensors [B, Hkv, Q, D] in the dtype of key, contiguous: the new tokens as the cache stores them, codes times scales plus mean

All other arguments are those of :mod:`fp4_inductor.ops.cached_attention`, and mean what they mean there. Of more tokens than a ring has slots the last ones
are written; all of them are returned. The mean of keys is written if position is 0 and Q is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..formats import kv
from .cached_call import CachedCall, Stored, check, check_room
from .contract import OpContract

_ALL = ("key", "value", "keys", "values", "position", "key_scale", "value_scale", "key_mean", "window", "empty", "value_blocks", "key_blocks", "exact_keys",
        "exact_values")  # fmt: skip


class AppendCall:
    """The op's arguments as a :class:`CachedCall`, whose query is its key: nothing is attended to."""

    @staticmethod
    def of(*args: Any, **kwargs: Any) -> CachedCall:
        given = dict(zip(_ALL, args, strict=False)) | kwargs
        stored = Stored(**{name: given.pop(name, None) for name in Stored._fields})
        return CachedCall(given["key"], **given, stored=stored)

    @staticmethod
    def flat_of(c: CachedCall) -> tuple[Any, ...]:
        """The op's arguments of a call of ``fp4.cached_attention``, without what the format lacks."""
        given = c._asdict() | (c.stored._asdict() if c.stored is not None else {})
        values = [given[name] for name in _ALL]
        while values[-1] is None:
            values.pop()
        return tuple(values)


def reference(c: CachedCall) -> tuple[Tensor, Tensor]:
    """Rounds all tokens by ``formats.kv`` and writes them, the exact ones one after the other."""
    check(c)
    at, count = int(c.position), c.key.shape[2]
    check_room(c, at)
    s: Any = c.stored
    f: Any = c.format
    new = torch.arange(at, at + count, device=c.key.device)
    kept = new[-c.slots :] if c.slots else new[:0]
    if count and not at:
        s.key_mean.copy_(kv.mean_of(c.key))
    dense = []
    for kind, cache, token, mean in zip((f.key, f.value), c.rows(), (c.key, c.value), (s.key_mean, None), strict=True):
        rounded = kv.quantize(token, kind, mean)
        for held, part in zip(cache, rounded, strict=True):
            if held is not None and part is not None:
                kv.indexable(held)[:, :, kept % max(c.slots, 1)] = kv.indexable(part)[:, :, count - len(kept) :]
        dense.append(kv.dequantize(rounded, kind, mean, c.key.dtype).clone(memory_format=torch.contiguous_format))
    for exact, token in ((s.exact_keys, c.key), (s.exact_values, c.value)):
        for i, position in enumerate(new if exact is not None else ()):
            exact[:, :, kv.exact_slot(position, exact.shape[2])] = token[:, :, i]
    return dense[0], dense[1]


def fake(c: CachedCall) -> tuple[Tensor, Tensor]:
    check(c)
    return c.key.new_empty(c.key.shape), c.value.new_empty(c.value.shape)


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    # (B, Hkv, Q, S, D, position, window): empty, full to the last slot, a ring that the tokens turn in once or more often, one token, none
    cases: tuple[tuple[int, int, int, int, int, int, int | None], ...] = (
        (2, 2, 9, 24, 32, 0, None),
        (1, 1, 10, 90, 64, 80, None),
        (1, 3, 20, 11, 48, 90, 9),
        (2, 1, 150, 160, 16, 3, None),
        (1, 2, 1, 7, 32, 5, None),
        (1, 2, 0, 8, 32, 3, None),
    )
    for f in kv.FORMATS.values():
        for b, heads, q, s, d, at, window in cases:
            for dtype in (torch.float32, torch.bfloat16):
                new = [torch.randn(b, heads, q, d, device=device).to(dtype) for _ in range(2)]
                mean = torch.randn(b, heads, d, device=device)
                key, value = (kv.quantize(torch.randn(b, heads, s, d, device=device), kind) for kind in (f.key, f.value))
                exact = [torch.randn(b, heads, kv.exact_slots(s, 2), d, device=device).to(dtype) if f.exact else None for _ in range(2)]
                position = torch.full((), at, dtype=torch.int64, device=device)
                rest = [part for part in (value.blocks, key.blocks, *exact) if part is not None]
                name = f"{f.name} B{b} Hkv{heads} Q{q} S{s} D{d} at {at} window {window} {dtype}"
                yield name, (*new, key.codes, value.codes, position, key.scale, value.scale, mean, window, at == 0, *rest)


CONTRACT = OpContract(
    name="append_kv",
    schema="(Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor position, Tensor(c!) key_scale, Tensor(d!) value_scale, "
    "Tensor(e!) key_mean, int? window=None, bool empty=False, Tensor(f!)? value_blocks=None, Tensor(g!)? key_blocks=None, Tensor(h!)? exact_keys=None, "
    "Tensor(i!)? exact_values=None) -> (Tensor, Tensor)",
    reference=reference,
    fake=fake,
    inputs=inputs,
    tolerance=dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), 0.0),  # but for the mean, which is summed in another order
    any_strides=True,
    struct=AppendCall,
)
CONTRACT.refuse_gradients()
