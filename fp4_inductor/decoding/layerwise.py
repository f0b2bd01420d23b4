"""A prompt through a model whose decoder layers are compiled by themselves: all layers of a kind are one compiled function.

``torch.compile`` of the whole model traces every layer, though it generates code for one of a kind (:mod:`.regions`). Here one of a kind is traced. What the
host does more for each layer at each call, its guards and its call, nobody waits for where the prompt is replayed from a CUDA graph, or is a long one.

A layer is given a cache of its own, so that neither its number nor the address of its keys is part of what is compiled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .._torch.compiling import Compiled
from .._torch.static import tokens_may_vary
from . import regions
from .cache import KVCache, KVLayer
from .naming import name_in
from .ranks import ranks_of


class OneLayer(Cache):
    """The part of a KVCache that one layer of a model sees. It neither looks at the counter nor advances it."""

    def __init__(self, layer: KVLayer):
        own = copy.copy(layer)
        own.first = own.last = False
        # Other tensors of the same memory: those of the cache are known to stay where they are, and a graph for them would be for them alone.
        own.keys, own.values = _alias(layer.keys), _alias(layer.values)
        if layer.stored is not None:
            own.stored = layer.stored._replace(**{name: _alias(t) for name, t in layer.stored._asdict().items() if t is not None})
        super().__init__(layers=[own])
        self.layer = own

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return self.layer.update(key_states, value_states)


def _alias(tensor: Tensor) -> Tensor:
    return tensor.view(tensor.shape)


def why_not(model: Any, cache: Any) -> str:
    """Why prompts of ``model`` over ``cache`` are compiled as a whole; empty: they need not be."""
    if ranks_of(model) is not None:
        return "the model is distributed"
    layers = regions.decoder_layers(model)
    if not isinstance(cache, KVCache) or cache.others:
        return "not all layers of the cache are a KVCache's"
    if len(layers) != len(cache.layers) or not all(map(regions.is_marked, layers)):
        return "not all decoder layers are regions"
    return ""


class Layerwise:
    """Calls of ``model`` over ``cache``, for which :func:`why_not` has nothing to say. ``notes``: what was not compiled, and why."""

    def __init__(self, model: Any, cache: KVCache):
        self.cache = cache
        self.kinds: dict[tuple, Compiled] = {}
        self._of: dict[int, tuple[tuple, OneLayer]] = {}
        with torch.inference_mode(False):
            for layer, held in zip(regions.decoder_layers(model), cache._ours, strict=True):
                kind = (type(layer), tuple(type(m) for m in layer.modules()), held.window)
                self._of[id(layer)] = kind, OneLayer(held)

    @property
    def notes(self) -> list[str]:
        return sorted({compiled.note for compiled in self.kinds.values() if compiled.note})

    def run(self, forward: Callable[..., Tensor], inputs: dict[str, Any]) -> Tensor:
        """``forward(**inputs)``, which calls the model; the cache holds its tokens then."""
        with regions.called_by(self.cache, self._call):
            result = forward(**inputs)
        self.cache.counter.advance(inputs["input_ids"].shape[1])
        return result

    def _call(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        kind, cache = self._of[id(layer)]
        tokens = args[0].shape[1] if args else kwargs["hidden_states"].shape[1]
        tokens_may_vary((args, kwargs), tokens)
        key = (*kind, self.cache.counter.starts)
        if key not in self.kinds:  # each has torch.compile's number of graphs to itself
            self.kinds[key] = Compiled(regions.call_layer, True, f"a layer of a prompt ({type(layer).__name__})")
        return self.kinds[key](layer, *args, **kwargs | {name_in(kwargs): cache})
