"""What the loop does with a cache of Transformers: make one, ask how much it holds, take tokens back, say that it is in use.

Source: transformers.cache_utils (5.17 to 5.24).
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ..errors import CacheInUseError, ConfigError, DeviceError, FP4Error, ShapeError
from .options import Lookup

_LEAST = 256
# A cache that no caller made is longer than its call needs, so that later calls find it, and graphs for it: up to this share of a GPU's memory, and up to
# so many tokens: over a longer one attention takes 16 blocks a KV head (kLong in csrc/attention/step.cuh), however few tokens there are.
_UNASKED, _MOST_UNASKED = 1 / 128, 4096
_ROLLBACK = 128  # tokens that a window of a KVCache made here can take back: fewer drafts than that need no other cache
HOLDER = "_fp4_loop"


class Holder:
    """What the loop keeps on a model or on a cache. A copy of the model or of the cache begins without."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # of a cache: held while a generate() uses it
        self.session: Any = None  # of a cache: its buffers and graphs
        self.cache: Any = None  # of a model: the cache of the last call that brought none
        self.made_for: Any = None  # the batch, device, dtype and attention of that cache
        self.not_served = ""  # of a model: why a KVCache that was tried cannot serve it
        self.why_static = ""  # of a model: why that cache is a StaticCache
        self.record: Any = None  # of a model: of its last generate()
        self.said: set[str] = set()  # of a model: reasons that were logged

    def __deepcopy__(self, memo: dict) -> Holder:
        return Holder()

    def __reduce__(self) -> tuple:
        return (Holder, ())


def holder_of(thing: Any) -> Holder:
    """The holder of a model or of a cache."""
    held = vars(thing).get(HOLDER)
    if held is None:
        held = Holder()
        setattr(thing, HOLDER, held)
    return held


def rounded(length: int, most: int | None, least: int = _LEAST) -> int:
    """A power of two for ``length`` tokens, at least ``least``, but not above ``most`` if that is enough: few lengths are few graphs."""
    size = max(least, 1 << (length - 1).bit_length())
    return max(length, min(size, most)) if most is not None else size


def least_length(model: Any, batch: int) -> int:
    """The least length of a KVCache for ``model``, a power of two: what little memory of a GPU holds, and a step reads as fast. Of this rank's heads.

    Raises:
        FP4Error: a KVCache does not know the sizes of this model, or its ranks cannot share the heads.
    """
    from ..decoding.cache import sizes_of
    from ..decoding.ranks import heads_here

    if model.device.type != "cuda":
        return _LEAST
    config = model.config.get_text_config(decoder=True)
    heads, width = sizes_of(config)
    token = 2 * config.num_hidden_layers * batch * heads_here(model, heads) * width * model.dtype.itemsize
    affordable = int(torch.cuda.get_device_properties(model.device).total_memory * _UNASKED) // token
    return max(_LEAST, min(_MOST_UNASKED, 1 << affordable.bit_length() >> 1))


def claim_own_cache(model: Any, length: int, batch: int, lookup: Lookup | None = None) -> Any:
    """An empty cache for a call that brought none, claimed: the one of the call before, if it fits, with its graphs.

    Raises:
        FP4Error: of prompt lookup: there is no KVCache for this model.
    """
    held = holder_of(model)
    cache = held.cache
    if cache is not None and not _claim(cache):  # by a second call at a time, whose cache is not kept
        cache = make_cache(model, length, batch, lookup)
        _claim(cache)
        return cache
    if cache is not None:
        most = holds(cache)
        least = least_length(model, batch) if is_ours(cache) else _LEAST
        fits = most is None or length <= most <= 4 * rounded(length, None, least)  # a cache that is far too long takes memory, a StaticCache time
        if lookup is not None:
            fits = fits and is_ours(cache) and takes_back(cache) >= lookup.tokens
        elif is_ours(cache):  # it may be that of a prompt lookup, which takes no other
            fits = fits and not why_no_kv_cache(model)
        if fits and held.made_for == _made_for(model, batch):
            cache.reset()
            return cache
        holder_of(cache).session = None  # the session and the cache hold each other
    held.cache = cache = None  # its memory is free before the next one's is taken
    held.cache = cache = make_cache(model, length, batch, lookup)
    held.made_for = _made_for(model, batch)
    _claim(cache)
    return cache


def _made_for(model: Any, batch: int) -> tuple:
    """What a cache of ``model`` depends on beside its length. A KVCache has selected its attention by now; another one may read another cache."""
    return batch, model.device, model.dtype, model.config.get_text_config(decoder=True)._attn_implementation


def make_cache(model: Any, length: int, batch: int, lookup: Lookup | None = None) -> Any:
    """An empty cache for ``length`` tokens of ``batch`` rows: a KVCache, or a StaticCache for a model that it does not serve (``Holder.why_static``).

    The only place where the loop makes one.

    Raises:
        FP4Error: of prompt lookup: there is no KVCache for this model.
    """
    from transformers import StaticCache

    from ..decoding.cache import KVCache

    config, held = model.config.get_text_config(decoder=True), holder_of(model)
    most = getattr(config, "max_position_embeddings", None)

    def ours(rollback: int) -> KVCache:
        return KVCache(model, rounded(length, most, least_length(model, batch)), batch, rollback=rollback)

    if lookup is not None:
        return ours(max(_ROLLBACK, lookup.tokens))
    held.why_static = why_no_kv_cache(model)
    if not held.why_static:
        try:
            return ours(_ROLLBACK)
        except FP4Error as error:
            held.why_static = str(error)
    cache = StaticCache(config=config, max_cache_len=rounded(length, most))
    shape = model._get_static_cache_init_shape()
    if shape is not None and getattr(config, "global_head_dim", None) is None:  # else its first update does it, with the shapes that come
        cache.early_initialization(batch_size=batch, num_heads=shape[0], head_dim=shape[1], dtype=model.dtype, device=model.device)
    return cache


def why_no_kv_cache(model: Any) -> str:
    """Why a call that brings no cache is not given a KVCache, though one could be made; empty: nothing is known."""
    from ..decoding.cache import not_served

    config = model.config.get_text_config(decoder=True)
    if others := not_served(config):
        return f"KVCache does not serve layers of {', '.join(others)}"
    if getattr(config, "attn_logit_softcapping", None) is not None and config._attn_implementation != "eager" and sdpa_leaves_softcaps_out():
        return f'a KVCache computes soft-caps, which the attention "{config._attn_implementation}" leaves out'
    return holder_of(model).not_served


@functools.cache
def sdpa_leaves_softcaps_out() -> bool:
    """Does Transformers' attention ``"sdpa"`` compute without the soft-caps that a model asks for? From 5.21 on it refuses them."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    tiny = torch.zeros(1, 1, 1, 1)
    try:
        sdpa_attention_forward(nn.Module(), tiny, tiny, tiny, None, is_causal=False, softcap=1.0)
    except ValueError:
        return False
    return True


def give_up(model: Any, cache: Any, why: str) -> None:
    """``cache``, a KVCache that was made here, does not serve ``model``: later calls get a StaticCache."""
    held = holder_of(model)
    held.not_served = why
    holder_of(cache).session = None
    if held.cache is cache:
        held.cache = None


def is_ours(cache: Any) -> bool:
    """Is it a :class:`fp4_inductor.KVCache`?"""
    from ..decoding.cache import KVCache

    return isinstance(cache, KVCache)


def takes_back(cache: Any) -> int:
    """How many tokens a step may write into a KVCache and take back: what a ring holds beyond its window, where it can come round."""
    rings = [layer.keys.shape[2] - layer.window for layer in cache.layers if getattr(layer, "window", None) is not None]
    return min((spare for spare in rings if spare < cache.max_length), default=cache.max_length)


def wrote_beyond(cache: Any, tokens: int) -> None:
    """Up to ``tokens`` were written behind a KVCache's counter: a later ``crop`` can go back less far. Waits for the device, if a window slides."""
    if takes_back(cache) < cache.max_length:
        cache.counter.furthest = max(cache.counter.furthest, seq_length(cache) + tokens)


def seq_length(cache: Any) -> int:
    """Tokens that the cache holds. Waits for the device."""
    return int(cache.get_seq_length())


def starting(cache: Any, held: int) -> AbstractContextManager:
    """What a prompt behind ``held`` tokens runs in: a cache that can make use of it is told that it is empty."""
    from_empty = getattr(cache, "from_empty", None)
    return from_empty() if from_empty is not None and held == 0 else nullcontext()


def holds(cache: Any) -> int | None:
    """The most tokens that the cache can take; None: no limit, because all its layers slide."""
    layers = getattr(cache, "layers", None)
    if layers is None:
        return int(cache.get_max_length())
    if is_ours(cache):
        return int(cache.max_length)
    limits = [layer.get_max_length() for layer in layers if not getattr(layer, "is_sliding", False)]
    return min((int(limit) for limit in limits if limit >= 0), default=None)


def host_counted(cache: Any) -> list[Any]:
    """Layers that count their tokens in Python, too: a step has to be told apart by it, and a replay has to advance it."""
    return [layer for layer in getattr(cache, "layers", ()) if isinstance(getattr(layer, "cumulative_length_int", None), int)]


def phase(cache: Any) -> tuple[bool, ...]:
    """Which of those layers are full: a full one shifts its window at every step, which is another graph."""
    return tuple(layer.cumulative_length_int >= layer.max_cache_len for layer in host_counted(cache))


def advance(cache: Any, tokens: int = 1) -> None:
    """Count ``tokens`` in Python where Transformers does, after a replay that ran no Python."""
    for layer in host_counted(cache):
        layer.cumulative_length_int += tokens


def keep_counts(cache: Any) -> Callable[[], None]:
    """A function that sets the Python counts back to what they are now."""
    counts = [(layer, layer.cumulative_length_int) for layer in host_counted(cache)]

    def restore() -> None:
        for layer, count in counts:
            layer.cumulative_length_int = count

    return restore


def can_crop(cache: Any, length: int, tokens: int) -> bool:
    """Can up to ``tokens`` tokens be taken back from a cache that will have held ``length`` of them?"""
    from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

    if getattr(cache, "is_croppable", False):
        return not is_ours(cache) or tokens <= cache.rollback or not any(_loses(layer, length) for layer in cache.layers)
    layers = getattr(cache, "layers", ())
    if not layers or any(type(layer) not in (StaticLayer, StaticSlidingWindowLayer) for layer in layers):
        return False
    return all(length <= layer.max_cache_len for layer in layers if type(layer) is StaticSlidingWindowLayer)


def _loses(layer: Any, length: int) -> bool:
    """Does a layer of a KVCache overwrite tokens before it has held ``length`` of them?"""
    ring = layer.window is not None and layer.keys.shape[2] < length
    return ring or (layer.stored is not None and layer.stored.exact_keys is not None)


def crop(cache: Any, tokens: int) -> None:
    """Take the last ``tokens`` tokens back. What is written there stays, unread, until it is written again."""
    if not tokens:
        return
    if getattr(cache, "is_croppable", False):
        cache.crop(-tokens)
        return
    for layer in cache.layers:  # of a StaticCache, which has no crop of its own
        layer.cumulative_length.sub_(tokens)
    advance(cache, -tokens)


def check_cache(cache: Any, model: nn.Module, batch: int, prompt: int, new: int) -> None:
    """Is this a cache in which ``batch`` rows of ``prompt`` and ``new`` tokens fit? ``prompt`` counts from the cache's first token.

    Raises:
        ShapeError, DeviceError: what does not fit.
    """
    layers = getattr(cache, "layers", ())
    wanted = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)  # type: ignore[union-attr, operator]
    if layers and isinstance(wanted, int) and len(layers) < wanted:
        raise ShapeError(
            "the given cache is a cache of another model",
            value=f"{len(layers)} layers",
            limit=f"{wanted} layers",
            remedy="Make a cache from this model's config.",
        )
    rows = getattr(cache, "batch_size", -1)
    if isinstance(rows, int) and rows > 0 and rows != batch:
        raise ShapeError(
            "the batch does not fit the cache",
            value=f"{batch} rows",
            limit=f"{rows} rows",
            remedy="Make a cache for this batch, or leave the cache out.",
        )
    keys = getattr(layers[0], "keys", None) if layers else None
    if isinstance(keys, torch.Tensor) and keys.device != model.device:
        raise DeviceError(
            "the cache lies on another device than the model",
            value=str(keys.device),
            limit=str(model.device),
            remedy="Make a new cache; it goes where the model is.",
        )
    most = holds(cache)
    if most is not None and prompt + new - 1 > most:  # the last token is not put into it
        long = prompt >= most
        raise ShapeError(
            "the prompt is longer than the cache" if long else "prompt and max_new_tokens do not fit the cache",
            value=f"{prompt} tokens" if long else f"{prompt} + {new} tokens",
            limit=f"{most} tokens in the cache, and one behind it",
            remedy="Make a longer cache, leave the cache out, or generate fewer tokens.",
        )


def check_takes_back(cache: Any, lookup: Lookup) -> None:
    """Can a step's drafts be taken back from a KVCache?

    Raises:
        ConfigError: they overwrite what its sliding windows need.
    """
    if takes_back(cache) < lookup.tokens:
        raise ConfigError(
            "prompt_lookup_num_tokens is above what the cache can take back",
            value=lookup.tokens,
            limit=f"{takes_back(cache)} tokens (rollback={cache.rollback})",
            remedy="Make it with a larger rollback, KVCache(model, max_length, rollback=...), or give a smaller number.",
        )


def _claim(cache: Any) -> bool:
    return holder_of(cache).lock.acquire(blocking=False)


def is_in_use(cache: Any) -> bool:
    return holder_of(cache).lock.locked()


def claim(cache: Any) -> None:
    """From here to :func:`release` a second ``generate()`` on ``cache`` is refused.

    Raises:
        CacheInUseError: it is in use already.
    """
    if not _claim(cache):
        raise CacheInUseError(
            "the cache is in use by another generate()",
            value=type(cache).__name__,
            limit="one generate() on a cache at a time",
            remedy="Wait until it has returned, or give each its own cache.",
        )


def release(cache: Any) -> None:
    holder_of(cache).lock.release()


def release_memory(model_or_cache: Any) -> None:
    """Give back what ``generate()`` keeps between calls: of a model its cache, of that or a given cache the captured CUDA graphs and their memory.

    The next call makes them anew. Call it before ``torch.distributed.destroy_process_group()``: NCCL waits for every CUDA graph that holds one of its
    sums, and so would the program, forever (pytorch #115388).

    Args:
        model_or_cache: a model that :func:`fp4_inductor.generate` was called with, or a cache that it was given. One that was never used is left alone.

    Raises:
        CacheInUseError: a ``generate()`` is using it.
    """
    held = vars(model_or_cache).get(HOLDER)
    if held is None:
        return
    cache = model_or_cache if held.cache is None else held.cache
    claim(cache)
    holder_of(cache).session = held.cache = held.made_for = None
    release(cache)
    gc.collect()  # a graph may be part of a cycle, and has to be gone when this returns


@contextmanager
def allocating() -> Iterator[None]:
    """Tensors that are made inside can be written in ``torch.inference_mode`` and outside of it, whichever comes first."""
    with torch.inference_mode(False), torch.no_grad():
        yield
