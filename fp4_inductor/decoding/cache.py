"""``fp4_inductor.KVCache``: a cache of fixed length for Transformers models, passed as ``past_key_values``.

One counter serves all layers. A layer's ``update()`` writes nothing: it returns handles, and the attention ``"fp4_inductor"`` appends and attends in one
op (:mod:`.handles`, ``fp4.cached_attention``). Nothing depends on what lies beyond the counter, so ``crop`` and ``reset`` change the counter alone.
Source: transformers.cache_utils (5.17 to 5.24).
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, Cache, CacheLayerMixin, get_layer_types_and_kwargs

from .._torch.capture import original
from .._torch.static import keep_address
from ..errors import ConfigError, DeviceError, DTypeError, ShapeError, UnsupportedOpError
from ..formats import kv as formats
from ..formats import nvfp4
from ..ops.cached_call import Stored
from . import cache_state
from .attention import NAME, use_attention_backend
from .handles import Counter, Handle, Offset
from .ranks import heads_here

_STATIC = "Use transformers.StaticCache, or DynamicCache."


class KVLayer(CacheLayerMixin):
    """K ``[batch, heads, slots, width]`` and V of one layer: every token (``window`` None), or a ring of the last ones.

    ``format`` and ``stored``: of a cache in 8 or 4 bits, whose codes are ``keys`` and ``values``; else None.
    """

    is_compileable = True
    is_croppable = True
    keys: Tensor
    values: Tensor
    stored: Stored | None = None

    def __init__(
        self,
        counter: Counter,
        shape: tuple[int, int, int],
        window: int | None,
        rollback: int,
        dtype: torch.dtype,
        sliding: bool,
        format: formats.Format | None = None,
    ):
        super().__init__()
        batch, heads, width = shape
        slots = counter.max_length if window is None else min(counter.max_length, window + rollback)
        if format is not None:
            slots = -(-slots // formats.SLOTS) * formats.SLOTS
        self.window = None if window is None or window >= counter.max_length else window
        self.counter, self.batch_size, self.rollback, self.is_sliding = counter, batch, rollback, sliding
        self.first = self.last = False
        self.width, self.dtype, self.format = width, dtype, format
        device = counter.position.device
        if format is None:
            self.keys = torch.zeros((batch, heads, slots, width), dtype=dtype, device=device)
            self.values = torch.zeros((batch, heads, slots, width), dtype=dtype, device=device)
        else:
            key, value = (formats.empty(kind, (batch, heads, slots), width, device) for kind in (format.key, format.value))
            mean = torch.zeros((batch, heads, width), dtype=torch.float32, device=device)
            exact = (batch, heads, formats.exact_slots(counter.max_length, rollback), width)
            copies = [torch.zeros(exact, dtype=dtype, device=device) if format.exact else None for _ in range(2)]
            self.keys, self.values = key.codes, value.codes
            self.stored = Stored(key.scale, value.scale, mean, value.blocks, key.blocks, *copies)
        self.is_initialized = True

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that a layer holds; the batch is the first dimension."""
        return self.keys, self.values, *(t for t in self.stored or () if t is not None)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the buffers are made with the cache."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Handles of ``key_states`` and ``value_states`` ``[B, Hkv, Q, D]``, for the attention ``"fp4_inductor"``. Writes nothing.

        Raises:
            ShapeError, DTypeError, DeviceError: they are those of another model or batch, or do not fit.
        """
        for new, held in ((key_states, self.keys), (value_states, self.values)):
            if new.dim() != 4 or new.shape[:2] != held.shape[:2] or new.shape[3] != self.width:
                raise ShapeError(
                    "KVCache: K and V of another model, or of another batch",
                    value=tuple(new.shape),
                    limit=f"[{held.shape[0]}, {held.shape[1]}, tokens, {self.width}]: batch, heads, tokens, width",
                    remedy="Make a cache for this model: fp4_inductor.KVCache(model, max_length, batch).",
                )
            if new.dtype != self.dtype:
                raise DTypeError("KVCache: dtype of K and V", value=new.dtype, limit=self.dtype, remedy="Make it after model.to(dtype), without autocast.")
            if new.device != held.device:
                raise DeviceError("KVCache: device of K and V", value=new.device, limit=held.device, remedy="Make the cache after model.to(device).")
        queries = key_states.shape[2]
        if self.first:
            self.counter.look(queries)
            self.counter.check_room(queries)
        empty = self.counter.starts if torch.compiler.is_compiling() else self.counter.at == 0
        return Handle(self, key_states, empty), Handle(self, value_states, empty)

    def get_seq_length(self) -> Tensor:  # type: ignore[override]
        return self.counter.position

    def get_max_length(self) -> int:
        return self.counter.max_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.counter.max_length, 0

    def why_not_back_to(self, at: int) -> str:
        """Why the tokens that a query at position ``at`` attends to are not all here; empty: they are."""
        slots, furthest = self.keys.shape[2], self.counter.furthest
        if self.stored is not None and self.stored.exact_keys is not None and at:
            ring = self.stored.exact_keys.shape[2] - formats.FIRST
            if furthest - formats.FIRST > ring and max(formats.FIRST, at - formats.LAST + 1) < furthest - ring:
                return f"the last {formats.LAST} tokens exact, of which it holds {ring}, of {furthest}"
        if self.window is None or at == 0 or furthest <= slots or max(0, at - self.window + 1) >= furthest - slots:
            return ""
        return f"a window of {self.window} that holds {slots} tokens, of {furthest}"

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for held in self.tensors:
            cache = formats.indexable(held)
            cache.copy_(cache.index_select(0, beam_idx.to(cache.device)))


_SERVED = {"full_attention", "sliding_attention"}


def _layers(config: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """The type of each layer, and the arguments of a cache's layer for it: from Transformers 5.24 on it has them for each layer, before for all."""
    types, kwargs = get_layer_types_and_kwargs(config)
    return types, kwargs if isinstance(kwargs, list) else [kwargs] * len(types)


def not_served(config: Any) -> list[str]:
    """The types of layers of a decoder's ``config`` that keep Transformers' own layer in a KVCache."""
    return sorted(set(_layers(config)[0]) - _SERVED)


class KVCache(Cache):
    """Keys and values of ``batch`` sequences of up to ``max_length`` tokens, for ``model.generate(ids, past_key_values=cache)`` or ``model(...)``.

    In place of a StaticCache it has one counter for all layers, one op (``fp4.cached_attention``) that appends and attends, and no mask where attention
    is causal; rings for sliding windows; and it can be cropped, so that prompt lookup and assisted generation work on it. It is kept between calls:
    ``reset()`` empties it, also after a ``generate()`` that was interrupted. Memory is taken when it is made (``nbytes``), and does not move.

    Layers with full or sliding attention are served. Others (linear attention, chunks) keep Transformers' own layer, with the reason in ``notes``.
    Attention sinks (gpt-oss) and soft-caps (Gemma 2, which ``"sdpa"`` leaves out or refuses) are computed.

    The 2-D attention mask of a one-token step on a GPU is taken to continue that of its prompt, as it does in ``generate()``: its length is checked, it is
    not looked at. A one-token call on a GPU without such a mask is not checked: past ``max_length`` its result is NaN, or ``index_copy_`` stops the device.

    Args:
        model: a Transformers model that generates. Its attention becomes ``"fp4_inductor"`` where it is ``"sdpa"``, as ``quantize_model`` does.
        max_length: the most tokens of a sequence, its prompt included.
        batch: the number of sequences; with beam search or several answers to a prompt, times those.
        kv: the format of K and V (``docs/kv_cache_formats.md`` has the loss that was measured). ``"bf16"``: the dtype of the model. ``"fp8"``: E4M3, a scale
            for each token and head. ``"k8v4"``: K in INT8, V in NVFP4. ``"nvfp4"``: both in NVFP4, but the first 4 and the last 64 tokens, which are exact.
            Of all three the mean of K is kept apart. A decode step on a GPU reads them as they are, in less time than ``"bf16"`` if there are many tokens.
            Prompts take more time: torch's operators round them.
        rollback: how many tokens ``crop`` may take back from a full sliding window, or from the exact tokens of ``"nvfp4"``: that many slots more for each.

    Attributes:
        notes: what was changed in the model, and which layers are not served, and why.

    Raises:
        ConfigError: a number that is not positive, an unknown format, no model of Transformers, one with an encoder, with latent attention or with layers
            that share K and V, or with another attention implementation; none of its layers is served.
        ShapeError: heads whose width is no multiple of 16, in ``"fp8"``, ``"k8v4"`` or ``"nvfp4"``.
        DTypeError, DeviceError: a model that is not bfloat16, float16 or float32, or lies on several devices.
    """

    def __init__(self, model: Any, max_length: int, batch: int = 1, *, kv: str = formats.DENSE, rollback: int = 128):
        self.format = formats.named(kv)
        for name, number, least in (("max_length", max_length, 1), ("batch", batch, 1), ("rollback", rollback, 0)):
            if not isinstance(number, int) or isinstance(number, bool) or number < least:
                raise ConfigError(f"KVCache: {name}", value=number, limit=f"a whole number, {least} or more", remedy="See help(fp4_inductor.KVCache).")
        model = original(model)[0]
        model = model.get_base_model() if callable(getattr(model, "get_base_model", None)) else model  # PEFT's wrapper around it
        if not isinstance(model, PreTrainedModel):
            raise ConfigError("KVCache: not a model of Transformers", value=type(model).__name__, limit="PreTrainedModel", remedy="Pass the model itself.")
        config = model.config.get_text_config(decoder=True)
        _check_model(model, config)
        types, kwargs = _layers(config)
        if not _SERVED & set(types):
            raise ConfigError("KVCache: it serves no layer of this model", value=sorted(set(types)), limit=sorted(_SERVED), remedy=_STATIC)
        device, dtype = _place(model)
        heads, width = sizes_of(config)
        heads = heads_here(model, heads)
        if self.format is not None:
            formats.check_width(width)
        self.notes: list[str] = _select_attention(model, config)
        self.batch, self.rollback = batch, rollback
        layers: list[Any] = []
        with torch.inference_mode(False):
            self.counter = Counter(device, max_length, len(types), batch * heads)
            for kind, own in zip(types, kwargs, strict=True):
                if kind in _SERVED:
                    sliding = kind == "sliding_attention"
                    window = own.get("sliding_window") if sliding else None
                    layers.append(KVLayer(self.counter, (batch, heads, width), window, rollback, dtype, sliding, self.format))
                else:
                    layers.append(STATIC_LAYER_TYPE_MAPPING[kind](max_cache_len=max_length, **own))
        super().__init__(layers=layers)
        self._static = super().is_compileable
        ours = self._ours
        ours[0].first = ours[-1].last = True
        for tensor in (self.counter.position, self.counter.arrivals, *(t for layer in ours for t in layer.tensors)):
            keep_address(tensor)
        for kind, count in Tally(kind for kind in types if kind not in _SERVED).items():
            self.notes.append(f"{count} layers of {kind}: Transformers' own {STATIC_LAYER_TYPE_MAPPING[kind].__name__}; KVCache serves {sorted(_SERVED)}")

    @property
    def _ours(self) -> list[KVLayer]:
        return [layer for layer in self.layers if isinstance(layer, KVLayer)]

    @property
    def others(self) -> list[str]:
        """The names of the layers' types that are Transformers' own."""
        return sorted({type(layer).__name__ for layer in self.layers if not isinstance(layer, KVLayer)})

    @property
    def is_compileable(self) -> bool:
        """Are all layers of fixed size? Asked for each layer of a model that is traced, so not by looking at all of them each time."""
        return self._static

    @property
    def max_length(self) -> int:
        """The most tokens of a sequence."""
        return self.counter.max_length

    @property
    def nbytes(self) -> int:
        """The memory of all K and V in bytes, scales, means and exact tokens included, that of Transformers' own layers as far as they have any yet."""
        others = [t for layer in self.layers if not isinstance(layer, KVLayer) for t in vars(layer).values() if isinstance(t, Tensor)]
        return sum(layer.nbytes for layer in self._ours) + sum(t.nbytes for t in others)

    def __repr__(self) -> str:
        ours = self._ours
        kinds = Tally("full" if layer.window is None else f"ring of {layer.keys.shape[2]} (window {layer.window})" for layer in ours)
        kinds.update(type(layer).__name__ for layer in self.layers if not isinstance(layer, KVLayer))
        layers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        size = f"{self.nbytes / 2**20:,.1f} MiB"
        held = str(ours[0].dtype).removeprefix("torch.") if self.format is None else f"{self.format.name} of {str(ours[0].dtype).removeprefix('torch.')}"
        return f"KVCache({held}, batch {self.batch}, max_length {self.max_length}, layers: {layers}; {size})"

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """The number of tokens in the cache: the counter itself, a tensor on the device."""
        return self.counter.position

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """The position of the next query, for functions that make masks."""
        layers: list[Any] = self.layers
        layer = layers[layer_idx]
        if not isinstance(layer, CacheLayerMixin):  # linear attention: Transformers asks it for the masks of the others
            layer = next(other for other in layers if isinstance(other, CacheLayerMixin))
        return Offset(self.counter) if isinstance(layer, KVLayer) else layer.get_seq_length()

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """What the layer's ``update`` returns: handles, where it is served."""
        if layer_idx >= len(self.layers):
            self.counter.check_layers(layer_idx + 1)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens back. ``tokens_to_remove``: their number, negative, as Transformers counts; 0: none. Reads the counter.

        Raises:
            ConfigError: a positive number, or more tokens than there are.
            UnsupportedOpError: a layer cannot go back so far: a full sliding window or the exact tokens of ``"nvfp4"`` (``rollback``), or a layer of
                Transformers' own.
        """
        if tokens_to_remove > 0:
            raise ConfigError("KVCache.crop", value=tokens_to_remove, limit="the number of tokens to remove, negative", remedy="cache.crop(-3) removes three.")
        stuck = [type(layer).__name__ for layer in self.layers if not getattr(layer, "is_croppable", False)]
        if stuck and tokens_to_remove:
            raise UnsupportedOpError("KVCache.crop: layers that cannot", value=sorted(set(stuck)), limit="KVLayer", remedy="reset() it and begin anew.")
        if tokens_to_remove:
            at = int(self.counter.position)
            kept = at + tokens_to_remove
            if kept < 0:
                raise ConfigError("KVCache.crop: beyond its start", value=tokens_to_remove, limit=f"-{at} to 0", remedy="reset() empties it.")
            before, self.counter.furthest = self.counter.furthest, max(self.counter.furthest, at)
            why = next(filter(None, (layer.why_not_back_to(kept) for layer in self._ours)), "")
            if why:
                self.counter.furthest = before
                raise UnsupportedOpError(
                    f"KVCache.crop: back to {kept} tokens", value=why, limit=f"rollback={self.rollback}", remedy="Make it with a larger rollback, or reset it."
                )
            self.counter.position.add_(tokens_to_remove)
        for layer in self.layers:
            if not isinstance(layer, KVLayer) and hasattr(layer, "crop"):
                layer.crop(tokens_to_remove)

    def reset(self) -> None:
        """Empty it; for another prompt, or after a call that was interrupted."""
        self.counter.reset()
        for layer in self.layers:
            if not isinstance(layer, KVLayer):
                layer.reset()

    def state_dict(self) -> dict[str, Tensor]:
        """What it holds, as tensors of their own, for ``torch.save`` or ``safetensors``: the tokens so far, not the empty rest. Reads the counter.

        ``fp4_inductor.decoding.cache_state`` has the keys.

        Raises:
            UnsupportedOpError: a layer is one of Transformers' own.
        """
        return cache_state.state_of(self)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Hold what :meth:`state_dict` gave, from any device; what was here is lost. Compiled graphs over this cache stay as they are.

        ``max_length`` may be another one, if the tokens fit. Sliding windows that had turned, and the exact tokens of ``"nvfp4"``, need the ``rollback``
        of the cache that was saved. A state of one sequence becomes that of every sequence of the batch.

        Raises:
            ConfigError, ShapeError, DTypeError: of another model, format, dtype or batch; tokens that do not fit, or that the saved cache had lost.
                Nothing is changed.
            UnsupportedOpError: a layer is one of Transformers' own.
        """
        cache_state.load(self, state)

    @contextmanager
    def from_empty(self) -> Iterator[None]:
        """Inside, the cache is empty when the model is called: a compiled model then attends to the prompt where it is, and reads no cache.

        Raises:
            ConfigError: it holds tokens. Reads the counter.
        """
        at = int(self.counter.position)
        if at:
            raise ConfigError("KVCache.from_empty", value=f"{at} tokens", limit="an empty cache", remedy="reset() it, or call the model without.")
        self.counter.starts = True
        try:
            yield
        finally:
            self.counter.starts = False

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise _fixed_batch("batch_repeat_interleave", self.batch)

    def batch_select_indices(self, indices: Tensor) -> None:
        raise _fixed_batch("batch_select_indices", self.batch)


def _fixed_batch(what: str, batch: int) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"KVCache.{what}: its batch does not change",
        value=what,
        limit=f"batch {batch}",
        remedy="Make it for the batch that the model gets, or use DynamicCache.",
    )


def _check_model(model: PreTrainedModel, config: Any) -> None:
    """Refuse what the layers of ``config`` do not say."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError("KVCache: a model with an encoder", value=type(model).__name__, limit="decoders", remedy=_STATIC)
    shared = getattr(config, "num_kv_shared_layers", None)
    if getattr(config, "kv_lora_rank", None) is not None:
        raise ConfigError("KVCache: latent attention, which expands what it cached", value="kv_lora_rank", limit="attention over K and V", remedy=_STATIC)
    if shared:
        raise ConfigError("KVCache: layers that share K and V", value=f"{shared} layers", limit="each layer its own", remedy="Use transformers.DynamicCache.")


def _place(model: PreTrainedModel) -> tuple[torch.device, torch.dtype]:
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1 or "meta" in {d.type for d in devices}:
        names = sorted(map(str, devices))
        raise DeviceError("KVCache: where the model is", value=names, limit="one device", remedy="Load it on one device, or use transformers.DynamicCache.")
    if model.dtype not in nvfp4.HIGH_PRECISION:
        raise DTypeError("KVCache: dtype of the model", value=model.dtype, limit=list(nvfp4.HIGH_PRECISION), remedy="Convert it with model.to(torch.bfloat16).")
    return model.device, model.dtype


def _select_attention(model: PreTrainedModel, config: Any) -> list[str]:
    """Make the attention ours where it is ``"sdpa"``; notes."""
    before = config._attn_implementation
    told = use_attention_backend(model)
    if config._attn_implementation != NAME:
        raise ConfigError(
            "KVCache: the model's attention does not read it",
            value=f'"{config._attn_implementation}"' + "".join(f" ({note})" for note in told),
            limit=f'"{NAME}"',
            remedy=f'Select it with model.set_attn_implementation("{NAME}"), or use transformers.StaticCache.',
        )
    return [] if before == NAME else [f'attention: "{NAME}" in the place of "{before}"']


def sizes_of(config: Any) -> tuple[int, int]:
    """Heads of K and V, and their width."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    sizes = getattr(config, "num_key_value_heads", None) or heads, width
    if not all(isinstance(size, int) for size in sizes):
        raise ConfigError("KVCache: heads of K and V that differ between layers", value=sizes, limit="numbers", remedy=_STATIC)
    return sizes
