"""Why a call of ``generate()`` cannot run on the device alone: each of these runs Transformers' loop, and is recorded."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..decoding.naming import NAMES, cache_name, named_otherwise
from ..errors import ConfigError
from . import caches
from .options import Lookup, lookup_of

_TAKEN = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "return_dict", *NAMES}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_CACHES = (None, "dynamic", "static", "hybrid", "sliding_window", "hybrid_chunked")
_EXAMINED = ((5, 17), (5, 24))  # versions of Transformers whose caches, masks and loop this folder was written after


def of_version(version: str) -> list[str]:
    """A version of Transformers that nobody has examined. Its caches may count, or be cropped, in another way."""
    first, last = _EXAMINED
    if first <= tuple(map(int, version.split(".")[:2])) <= last:
        return []
    return [f"Transformers {version}: the loop knows {'.'.join(map(str, first))} to {'.'.join(map(str, last))}"]


def of_mode(config: Any, assistant: Any = None) -> list[str]:
    """Ways to decode other than sampling, greedy tokens, and both with prompt lookup. ``config``: a GenerationConfig."""
    mode = str(config.get_generation_mode(assistant).value)
    looks_up = mode == "assisted_generation" and lookup_of(config, assistant) is not None
    return [] if looks_up or mode in ("sample", "greedy_search") else [f"{mode.replace('_', ' ')} is another way to decode"]


def of_config(config: Any) -> list[str]:
    """Options of a prepared GenerationConfig."""
    found = of_mode(config)
    found += [f"{name}=True keeps a tensor of every step" for name in _OUTPUTS if getattr(config, name, None)]
    if config.use_cache is False:
        found.append("use_cache=False")
    if config.cache_implementation not in _CACHES:
        found.append(f'cache_implementation="{config.cache_implementation}" is no cache that stays where it is')
    if config.prefill_chunk_size is not None:
        found.append("prefill_chunk_size cuts the prompt into pieces")
    if config.is_assistant:
        found.append("the model assists another one")
    return found


def of_model(model: Any, arguments: dict[str, Any]) -> list[str]:
    """The model, and what its forward is given beside tokens."""
    found = []
    if model.config.is_encoder_decoder:
        found.append("the model has an encoder")
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        found.append("the model lies on several devices")
    if name := named_otherwise(model):
        found.append(f"the model's code calls its cache {name}, which Transformers calls {cache_name()}")
    found += [
        f"the model is given {name}" for name, value in arguments.items() if name not in (*_TAKEN, *_OUTPUTS) and value is not None and value is not False
    ]
    position = arguments.get("position_ids")
    if position is not None and position.dim() != 2:
        found.append("positions have several coordinates")
    for module in model.modules():
        kinds = _rope_kinds(module)
        changing = [kind for kind in kinds if "dynamic" in kind or kind == "longrope"]
        if changing:
            found.append(f'rotary embeddings of the kind "{changing[0]}" are chosen on the host, by length')
            break
    return found


def of_cache(cache: Any) -> list[str]:
    """A cache that the caller gave."""
    from transformers.cache_utils import LinearAttentionCacheLayerMixin

    if not getattr(cache, "is_compileable", False):
        return [f"a {type(cache).__name__} grows: its tensors do not stay where they are"]
    if getattr(cache, "offloading", False):
        return ["the cache is offloaded"]
    if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in getattr(cache, "layers", ())):
        return ["layers of the cache hold a recurrent state"]
    return []


def of_lookup(cache: Any, lookup: Lookup | None, columns: int, new: int) -> list[str]:
    """A cache over which there is no prompt lookup. ``columns``: the prompt's tokens, from the cache's first; ``new``: tokens to generate.

    Raises:
        ConfigError: a cache that takes no tokens back, or less than the drafts of a step.
    """
    if lookup is None:
        return []
    if not caches.is_ours(cache):  # Transformers' loop takes none of fixed size
        raise ConfigError(
            "prompt lookup takes tokens back from the cache",
            value=type(cache).__name__,
            limit="fp4_inductor.KVCache, or one that grows, for Transformers' loop",
            remedy="Make a KVCache, or leave the cache out.",
        )
    if not cache.is_croppable:
        return [f"prompt lookup takes tokens back, which not all layers of the cache can: {'; '.join(cache.notes)}"]
    caches.check_takes_back(cache, lookup)
    needed = columns + new - 1 + lookup.queries
    if needed > cache.max_length:
        return [f"prompt lookup writes up to {lookup.queries} tokens behind the text: {needed} in a cache for {cache.max_length}"]
    return []


def of_architecture(model: Any) -> list[str]:
    """A model for which this loop can make no cache."""
    if not getattr(model, "_supports_default_dynamic_cache", lambda: True)() or getattr(model, "_is_stateful", False):
        return ["the model keeps its state in another way than a cache of keys and values"]
    if not getattr(model, "_can_compile_fullgraph", False):
        return ["the model does not take a cache of fixed size (_can_compile_fullgraph is False)"]
    return []


def _rope_kinds(module: nn.Module) -> list[str]:
    kind = vars(module).get("rope_type")
    return list(kind.values()) if isinstance(kind, dict) else [kind] if isinstance(kind, str) else []
