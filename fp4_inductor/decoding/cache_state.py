"""What a :class:`fp4_inductor.KVCache` holds as a dictionary of tensors, for ``torch.save`` or ``safetensors``, and back.

A prompt that many texts begin with is computed once::

    model(ids, past_key_values=cache)
    safetensors.torch.save_file(cache.state_dict(), "prompt.safetensors")
    ...
    cache.load_state_dict(safetensors.torch.load_file("prompt.safetensors"))

=============================  ============================================================================================================
key                            tensor
=============================  ============================================================================================================
``position``                   int64, how many tokens the cache holds
``furthest``                   int64, the most it ever held since it was emptied: what ``crop`` may not go back to depends on it
``padded``                     int64: 1 if a token of the batch is masked, 0 if none is, -1 if nobody has looked
``layers.<i>.<name>``          of each layer ``keys``, ``values`` ``[B, Hkv, tokens, ...]`` in the order of their positions, the last ``tokens`` of
                               them; in 8 or 4 bits likewise ``key_scale``, ``value_scale``, ``key_blocks``, ``value_blocks``; and as they lie
                               ``key_mean``, ``exact_keys``, ``exact_values``
=============================  ============================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError, DTypeError, ShapeError, UnsupportedOpError
from ..formats import kv as formats

_COUNTS = ("position", "furthest", "padded")
_WHOLE = ("key_mean", "exact_keys", "exact_values")
_SAME = "Load it into a KVCache of the same model, format and dtype."


class Part(NamedTuple):
    """One tensor of a layer. ``rows``: a token at position p lies in its row p mod the number of its rows."""

    key: str
    tensor: Tensor
    rows: bool
    layer: Any


def parts(cache: Any) -> Iterator[Part]:
    """All tensors of a cache whose layers are all ours."""
    for i, layer in enumerate(cache.layers):
        named = {"keys": layer.keys, "values": layer.values} | (layer.stored._asdict() if layer.stored is not None else {})
        for name, tensor in named.items():
            if tensor is not None:
                yield Part(f"layers.{i}.{name}", tensor, name not in _WHOLE, layer)


def state_of(cache: Any) -> dict[str, Tensor]:
    """See :meth:`fp4_inductor.KVCache.state_dict`."""
    _check_layers(cache, "state_dict")
    counter = cache.counter
    at = int(counter.position)
    padded = -1 if counter.padded is None else int(counter.padded)
    state = dict(zip(_COUNTS, map(torch.tensor, (at, max(counter.furthest, at), padded)), strict=True))
    for key, tensor, rows, _ in parts(cache):
        if not rows:
            state[key] = tensor.clone()
            continue
        held = torch.arange(max(0, at - tensor.shape[2]), at, device=tensor.device) % tensor.shape[2]
        state[key] = formats.indexable(tensor).index_select(2, held).view(tensor.dtype)
    return state


def load(cache: Any, state: Mapping[str, Tensor]) -> None:
    """See :meth:`fp4_inductor.KVCache.load_state_dict`. Everything is checked before anything is written."""
    _check_layers(cache, "load_state_dict")
    ours = list(parts(cache))
    expected = {*_COUNTS, *(part.key for part in ours)}
    if set(state) != expected:
        missing, others = sorted(expected - set(state)), sorted(set(state) - expected)
        got = f"missing {missing}, unknown {others}"
        raise ConfigError("KVCache.load_state_dict: of another cache", value=got, limit=f"{len(expected)} keys", remedy=_SAME)
    at, furthest, padded = (int(state[name]) for name in _COUNTS)
    if at > cache.max_length or not 0 <= at <= furthest or padded not in (-1, 0, 1):
        raise ShapeError(
            "KVCache.load_state_dict: the counts",
            value=f"position {at}, furthest {furthest}, padded {padded}",
            limit=f"0 <= position <= furthest, position <= {cache.max_length}, -1 <= padded <= 1",
            remedy="Load it into a longer KVCache; if the numbers make no sense, the file is not one of state_dict().",
        )
    for part in ours:
        _check(part, state[part.key], at)
    with torch.no_grad():
        for key, tensor, rows, _ in ours:
            saved = formats.indexable(state[key].to(tensor.device))
            if rows:
                kept = min(saved.shape[2], tensor.shape[2])
                positions = torch.arange(at - kept, at, device=tensor.device)
                saved = saved[:, :, saved.shape[2] - kept :]
                formats.indexable(tensor).index_copy_(2, positions % tensor.shape[2], saved.expand(tensor.shape[0], *saved.shape[1:]))
            else:
                same = slice(min(saved.shape[2], tensor.shape[2]) if saved.dim() > 3 else None)
                formats.indexable(tensor)[:, :, same].copy_(saved[:, :, same])
        cache.counter.reset()
        cache.counter.position.fill_(at)
        cache.counter.furthest = furthest
        cache.counter.padded = None if padded < 0 else bool(padded)


def _check(part: Part, saved: Tensor, at: int) -> None:
    """Raise unless ``saved`` can become ``part`` of a cache of ``at`` tokens."""
    key, tensor, rows, layer = part
    if saved.dtype != tensor.dtype:
        raise DTypeError(f"KVCache.load_state_dict: {key}", value=saved.dtype, limit=tensor.dtype, remedy=_SAME)
    slots = 2 if rows or tensor.dim() > 3 else None  # the dimension whose size may differ
    alike = saved.dim() == tensor.dim() and saved.shape[0] in (1, tensor.shape[0])
    if not alike or any(saved.shape[i] != tensor.shape[i] for i in range(1, tensor.dim()) if i != slots):
        limit = f"{tuple(tensor.shape)}, but for {'the first dimension, which may be 1' if slots is None else 'the tokens, and the first, which may be 1'}"
        raise ShapeError(f"KVCache.load_state_dict: {key}", value=tuple(saved.shape), limit=limit, remedy=_SAME)
    if rows:
        needed = at if layer.window is None else min(at, tensor.shape[2])
        if not needed <= saved.shape[2] <= at:
            raise ShapeError(
                f"KVCache.load_state_dict: {key} has not the tokens that this cache holds of {at}",
                value=f"{saved.shape[2]} tokens",
                limit=f"{needed} to {at}",
                remedy="Make this cache with the max_length and the rollback of the one that was saved.",
            )
    elif slots and saved.shape[2] != tensor.shape[2] and at > min(saved.shape[2], tensor.shape[2]):
        raise ShapeError(
            f"KVCache.load_state_dict: {key} is a ring of another length",
            value=f"{saved.shape[2] - formats.FIRST} tokens",
            limit=f"{tensor.shape[2] - formats.FIRST} tokens",
            remedy="Make this cache with the rollback of the one that was saved.",
        )


def _check_layers(cache: Any, what: str) -> None:
    if cache.others:
        raise UnsupportedOpError(f"KVCache.{what}: layers of Transformers' own", value=cache.others, limit="KVLayer", remedy="Run the prompt again.")
