"""What :class:`fp4_inductor.KVCache` and the attention ``"fp4_inductor"`` say to each other through a Transformers model.

A layer's ``update()`` returns two :class:`Handle` objects in the place of K and V. The model passes them on, unseen, to its attention function, which
calls ``fp4.cached_attention`` on what they hold. ``get_query_offset()`` returns an :class:`Offset`, by which the function that makes masks knows that
the cache is ours: then causality and windows come from the counter, and only padding needs a mask.
Source: transformers.masking_utils, transformers.cache_utils (5.17 to 5.24).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import ConfigError, ShapeError, UnsupportedOpError
from ..kernels.cached_attention.composed import prompt
from ..ops.cached_call import CachedCall, Stored
from ..ops.linear_chain import ARRIVALS

REMEDY = 'Select it with model.set_attn_implementation("fp4_inductor"); for a model that computes with K and V itself use transformers.StaticCache.'


class Counter:
    """How many tokens a cache holds: one number on the device for all its layers. ``at``: that number, where the host knows it.

    ``arrivals``: zeros for the sequences times KV heads of a layer, ``rows`` of them, in which the programs of an attention count themselves, and which are
    zero again when it has ended; behind them those in which the blocks of ``fp4.linear_chain`` meet between two attentions. All launches share them, because
    they follow each other.
    """

    def __init__(self, device: torch.device, max_length: int, layers: int, rows: int):
        self.layers = layers
        self.position = torch.zeros((), dtype=torch.int64, device=device)
        self.arrivals = torch.zeros(rows + ARRIVALS, dtype=torch.int32, device=device)
        self.max_length = max_length
        self.at: int | None = None
        self.starts = False  # a compiled call, which cannot read the position, is given an empty cache (``KVCache.from_empty``)
        self.padded: bool | None = None  # is a token of the batch masked? None: nobody has looked
        self.furthest = 0  # the highest position that was ever written, plus one, as of the last crop

    def reset(self) -> None:
        self.position.zero_()
        self.arrivals.zero_()  # an aborted launch may have left it otherwise
        self.at = self.padded = None
        self.furthest = 0

    def look(self, queries: int) -> None:
        """Read the position at the begin of an eager call, where that is free, or one read among many tokens' work; else the host does not know it."""
        if torch.compiler.is_compiling():
            return
        cpu = self.position.device.type == "cpu"
        self.at = int(self.position) if cpu or (queries > 1 and not torch.cuda.is_current_stream_capturing()) else None

    def check_room(self, queries: int) -> None:
        """Raise if the host knows that ``queries`` tokens more do not fit."""
        before = 0 if self.at is None or torch.compiler.is_compiling() else self.at
        if before + queries > self.max_length:
            raise too_long(before + queries, self.max_length)

    def check_layers(self, layers: int) -> None:
        if layers != self.layers:
            raise ConfigError("KVCache: a cache of another model", value=f"{layers} layers", limit=f"{self.layers} layers", remedy="Make one for this model.")

    def advance(self, queries: int) -> None:
        self.position.add_(queries)
        if not torch.compiler.is_compiling():
            self.at = None


def too_long(tokens: int, max_length: int) -> ShapeError:
    return ShapeError("KVCache: the tokens do not fit", value=f"{tokens} tokens", limit=max_length, remedy="Make it with a larger max_length, or reset() it.")


class CacheLayer(Protocol):
    """What the attention function needs of a layer."""

    keys: Tensor
    values: Tensor
    window: int | None
    last: bool
    counter: Counter
    stored: Stored | None


class Handle:
    """New keys or values ``[B, Hkv, Q, D]`` of one layer, before they are in the cache. It is no tensor: whoever takes it for one gets a typed error."""

    def __init__(self, layer: CacheLayer, new: Tensor, empty: bool):
        self.layer, self.new, self.empty, self.used = layer, new, empty, False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _touched(f".{name}")

    def __getitem__(self, index: Any) -> Any:
        raise _touched(f"[{index}]")

    def __iter__(self) -> Any:
        raise _touched("iter()")

    def __len__(self) -> int:
        raise _touched("len()")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _touched(getattr(function, "__name__", str(function)))


def _arithmetic(name: str) -> Any:
    def refuse(self: Handle, *others: Any) -> Any:
        raise _touched(name)

    return refuse


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul", "neg"):
    setattr(Handle, f"__{_name}__", _arithmetic(f"__{_name}__"))


def _touched(what: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        "KVCache: K or V was touched after update(), which returns handles", value=what, limit='the attention "fp4_inductor", which unpacks them', remedy=REMEDY
    )


class Offset:
    """The position of the first query, as ``get_query_offset()`` gives it to functions that make masks. Other functions may add it."""

    def __init__(self, counter: Counter):
        self.counter = counter

    def __add__(self, other: Any) -> Any:
        return self.counter.position + other

    __radd__ = __add__


def mask_for(offset: Offset, arguments: dict[str, Any], sdpa_mask: Any) -> Tensor | None:
    """What a Transformers model gives its attention over our cache: None, a mask of padding ``[B, 1, 1, max_length]``, or, where the model asks for more
    than causality and windows, all of it as ``"sdpa"`` gets it, ``[B, 1, Q, max_length]``. All are over positions.

    Raises:
        ShapeError: the 2-D mask counts more tokens than the cache holds.
        ConfigError: the cache has not as many layers as the model that asks.
    """
    counter, padding, queries = offset.counter, arguments.get("attention_mask"), arguments["q_length"]
    counter.check_layers(getattr(arguments.get("config"), "num_hidden_layers", counter.layers))
    if padding is not None and padding.shape[-1] > counter.max_length:
        raise too_long(padding.shape[-1], counter.max_length)
    # For a single query, Transformers forbids to leave out the mask of a compileable cache; whatever else it may add to causality lies ahead.
    skip = arguments.get("allow_is_causal_skip", True) or queries == 1
    if not skip or arguments.get("use_vmap") or arguments.get("allow_is_bidirectional_skip"):
        whole = dict(q_offset=counter.position, kv_length=counter.max_length, kv_offset=0, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        return sdpa_mask(**arguments | whole)
    if padding is None or not _padded(counter, padding, queries):
        return None
    filled = torch.nn.functional.pad(padding, (0, counter.max_length - padding.shape[-1]))
    return filled[:, None, None, :]


def _padded(counter: Counter, padding: Tensor, queries: int) -> bool:
    """Is a token masked? The host looks where that is free, or at the begin; one-token steps on a GPU go on with the mask of their prompt."""
    if torch.compiler.is_compiling():
        return True  # nobody can look
    if padding.device.type == "cpu" or queries > 1:
        counter.padded = not bool(padding.all())
    return counter.padded is not False


def _alone(layer: CacheLayer, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Do a prompt's tokens attend to nothing but each other, in a way that torch's attention takes? What asks for gradients goes to the op, which refuses."""
    gradients = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    return query.shape[2] <= (layer.window or query.shape[2]) and key.shape[3] == value.shape[3] and not gradients


def attend(query: Tensor, key: Any, value: Any, mask: Tensor | None, scaling: float | None, causal: bool, options: dict[str, Any]) -> Tensor:
    """``[B, Q, H, Dv]``: append what the handles hold, and attend.

    ``causal``: what the model means where it passes no mask. ``options``: those that change the result, as the model passed them.

    Raises:
        UnsupportedOpError: an option that ``fp4.cached_attention`` does not compute, handles that do not belong together, or that were used before.
        ConfigError: attention that is not causal, and has no mask.
    """
    together = isinstance(key, Handle) and isinstance(value, Handle) and value.layer is key.layer
    if not together or key.used:
        what = "handles that were used before" if together else "K and V of different layers"
        raise UnsupportedOpError("KVCache: an attention layer does not use its own K and V", value=what, limit="each layer its own, once", remedy=REMEDY)
    softcap, sinks = options.pop("softcap", None), options.pop("s_aux", None)
    if options:
        raise UnsupportedOpError(
            "KVCache: attention with an option that fp4.cached_attention does not compute",
            value=sorted(options),
            limit=["mask", "scaling", "softcap", "s_aux"],
            remedy="Call model.eval(), or use transformers.StaticCache.",
        )
    if mask is None and not causal:
        raise ConfigError("KVCache: attention that is not causal", value="is_causal=False", limit="causal, or a 4-D mask", remedy="Use StaticCache.")
    key.used = True
    layer, queries = key.layer, query.shape[2]
    sinks = None if sinks is None else sinks.to(query.dtype)
    counter = layer.counter
    if layer.stored is None and key.empty and mask is None and softcap is None and sinks is None and _alone(layer, query, key.new, value.new):
        # torch's operators: they take less time of the host than one of ours, and Inductor writes the cache where it makes keys and values.
        for held, new in ((layer.keys, key.new), (layer.values, value.new)):
            held[:, :, :queries].copy_(new)
        out = prompt(query, key.new, value.new, scaling)
    else:
        call = CachedCall(
            query, key.new, value.new, layer.keys, layer.values, counter.position, mask, scaling, layer.window, mask is None or mask.shape[2] == 1, softcap,
            sinks, key.empty, counter.arrivals, stored=layer.stored,
        )  # fmt: skip
        out = torch.ops.fp4.cached_attention(*call.flat())
    if layer.last:
        layer.counter.advance(queries)
    return out
