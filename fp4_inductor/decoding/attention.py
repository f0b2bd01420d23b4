"""The attention implementation ``"fp4_inductor"`` of Transformers: ``"sdpa"``, but over a mask on CUDA.

``"sdpa"`` over a StaticCache gets a mask, and with a mask it copies K and V of the whole cache once for each query head of a
group (``repeat_kv``) before it calls ``F.scaled_dot_product_attention``, which computes what the mask leaves out, too.
``fp4.decode_attention`` reads the cache where it lies, and no more than the mask leaves in: in a decode step, and over a bool
mask for all heads in a prompt. Everything else, a prompt without a mask, a CPU, training, options that the op does not compute, runs
``"sdpa"`` itself. Masks are ``"sdpa"``'s in either case.

``quantize_model`` selects it where ``"sdpa"`` was selected (``NVFP4Config(attention="keep")`` does not). The name is in no
config.json: Transformers does not save the attention implementation.

Transformers compares names in some places, and knows none of other libraries. There the model is given ``"sdpa"`` again: for
continuous batching (``continuous_batching.py``), for context parallelism (``trainer.py``), and if its own code compares names.
Source: transformers.integrations.sdpa_attention, transformers.masking_utils (5.17 to 5.24).
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.symbols import statically_known_true
from ..errors import UnsupportedOpError
from ..kernels import registry
from ..kernels.choose.common import FEW_QUERIES
from ..kernels.select import attention_form, is_shared
from .handles import Handle, Offset, attend, mask_for
from .naming import NAMES

NAME = "fp4_inductor"
_KERNEL = registry.named("decode_attention")["triton_decode_attention"]
# Keyword arguments that "sdpa" leaves to the mask or to others. A call with any other goes to "sdpa", unless that is None or False.
_WITHOUT_MEANING = {
    "sliding_window", "position_ids", "cache_position", "use_cache", *NAMES,
    "num_items_in_batch", "output_hidden_states", "output_router_logits",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "return_dict", "logits_to_keep",
}  # fmt: skip
_whole: set[int] = set()  # where masks lie that hide nothing
_ASKS_BY_NAME = re.compile(r"_attn_implementation\s*(==|!=|in\b|not in\b)[^\n]*[\"']sdpa[\"']")


def register() -> None:
    """Make ``"fp4_inductor"`` an attention implementation of Transformers, with the masks of ``"sdpa"``. May be called again."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, attention_mask)


def attention_mask(**arguments: Any) -> Tensor | None:
    """Transformers' mask interface: ``"sdpa"``'s masks, but for a :class:`fp4_inductor.KVCache`, which says itself how far it is filled."""
    from transformers.masking_utils import sdpa_mask

    offset = arguments.get("q_offset")
    if isinstance(offset, Offset):
        return mask_for(offset, arguments, sdpa_mask)
    padding = arguments.get("attention_mask")
    if padding is not None and _whole and padding.untyped_storage().data_ptr() in _whole:
        arguments["attention_mask"] = None
        if _only_causal(**arguments):
            return None
    return sdpa_mask(**arguments)


@contextmanager
def whole(ids: Tensor) -> Iterator[Tensor]:
    """A padding mask ``[B, T]`` for ``ids`` that hides nothing, which the attention ``"fp4_inductor"`` knows in here without looking into it.

    Without a mask Transformers looks for several texts in one row, and in one for padding. In the capture of a CUDA graph it cannot look: there it makes
    other masks than outside.
    """
    mask = torch.ones_like(ids, dtype=torch.bool)
    place = mask.untyped_storage().data_ptr()  # some models make a view of it
    _whole.add(place)
    try:
        yield mask
    finally:
        _whole.remove(place)


def _only_causal(
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **kwargs: Any,
) -> bool:
    """Is the mask that Transformers asks for the one that attention over a whole prompt computes without?"""
    from_the_first = q_length == kv_length and isinstance(q_offset, int) and q_offset == 0
    windowed = local_size is not None and kv_length >= local_size
    return allow_is_causal_skip and from_the_first and attention_mask is None and not windowed and not use_vmap


@contextmanager
def kept(*models: Any) -> Iterator[None]:
    """Afterwards Transformers models have the attention implementations that they have now."""
    before = [implementations(model) for model in models]
    try:
        yield
    finally:
        for model, names in zip(models, before, strict=True):
            if implementations(model) != names:
                model.set_attn_implementation(names)


def implementations(model: Any) -> dict[str, str]:
    """The attention implementations of a Transformers model and of the direct parts of its config, as ``set_attn_implementation`` takes them.

    Empty for another module.
    """
    if not hasattr(getattr(model, "config", None), "sub_configs"):
        return {}
    places = {"": model.config, **{key: getattr(model.config, key, None) for key in model.config.sub_configs}}
    return {key: place._attn_implementation for key, place in places.items() if place is not None}


def without_ours(names: dict[str, str]) -> dict[str, str]:
    """``names`` with ``"sdpa"`` instead of ``"fp4_inductor"``."""
    return {key: "sdpa" if name == NAME else name for key, name in names.items()}


def use_attention_backend(model: Any, choice: str = "auto") -> list[str]:
    """Select it for the decoder of a Transformers model that runs ``"sdpa"``; what was done, or why nothing, for the report.

    Empty for a module that is no Transformers model, or has no decoder.
    """
    if "transformers.modeling_utils" not in sys.modules or not isinstance(model, sys.modules["transformers.modeling_utils"].PreTrainedModel):
        return []
    configs = {id(m.config): m.config for m in model.modules() if _decodes(m)}
    if not configs:
        return []
    if choice == "keep":
        return ['attention: as it was (attention="keep")']
    wanted: dict[str, str] = {}
    notes = []
    for config in configs.values():
        name = next((key for key in ("", *model.config.sub_configs) if (getattr(model.config, key, None) if key else model.config) is config), None)
        why = _why_not(model, config, name)
        if why:
            notes.append(f"attention: as it was, {why}")
        elif name is not None and config._attn_implementation != NAME:
            wanted[name] = NAME
    register()
    if wanted:
        model.set_attn_implementation(implementations(model) | wanted)
    if any(config._attn_implementation == NAME for config in configs.values()):
        notes.insert(0, 'attention: fp4.decode_attention for decode steps and over masks on CUDA, "sdpa" for all else')
    return notes


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor | Handle,
    value: Tensor | Handle,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface: query ``[B, H, Q, D]``, key and value ``[B, Hkv, S, D]`` or handles of a KVCache -> ``[B, Q, H, D]``."""
    if isinstance(key, Handle) or isinstance(value, Handle):
        options = _with_meaning(kwargs) | ({"dropout": dropout} if dropout else {})
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        return attend(query, key, value, attention_mask, scaling, causal, options), None
    if kwargs.get("s_aux") is not None:  # "sdpa" would leave them out, silently
        raise UnsupportedOpError(
            'the attention "fp4_inductor" of a model with sinks',
            value="s_aux",
            limit="a KVCache",
            remedy='Pass a KVCache, or call model.set_attn_implementation("eager").',
        )
    if _is_ours(query, key, value, attention_mask, dropout, kwargs):
        return torch.ops.fp4.decode_attention(query, key, value, attention_mask, scaling), None
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs)


def _is_ours(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, kwargs: dict[str, Any]) -> bool:
    """Decided by what is known while a graph is traced; no guard is added."""
    if not query.is_cuda or query.dtype not in _KERNEL.dtypes or key.dtype != query.dtype or value.dtype != query.dtype:
        return False
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return False
    if dropout or _with_meaning(kwargs):
        return False
    heads, queries, d = query.shape[1], query.shape[2], query.shape[3]
    kv_heads = key.shape[1]
    if key.shape[3] != d or value.shape[3] != d or d % _KERNEL.k_multiple or attention_form(d) or heads % kv_heads:
        return False
    if mask is None:
        return statically_known_true(queries == 1) and heads // kv_heads <= FEW_QUERIES  # more without a mask: causal
    return is_shared(mask) or (mask.dim() == 4 and statically_known_true(queries * (heads // kv_heads) <= FEW_QUERIES))


def _with_meaning(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Those of a call's options that change its result."""
    return {name: x for name, x in kwargs.items() if x is not None and x is not False and name not in _WITHOUT_MEANING}


def _decodes(module: nn.Module) -> bool:
    """Is this the self-attention of a decoder, which has a cache?"""
    return getattr(module, "is_causal", None) is True and hasattr(getattr(module, "config", None), "_attn_implementation")


def _why_not(model: Any, config: Any, name: str | None) -> str:
    """Why the implementation of ``config`` stays; empty: it need not."""
    if config._attn_implementation not in ("sdpa", NAME):
        return f'it is "{config._attn_implementation}"; fp4.decode_attention takes the place of "sdpa"'
    if name is None:
        return "its config is not a direct part of the model's"
    modules = [m for m in model.modules() if getattr(m, "config", None) is config]
    if not all(m._can_set_attn_implementation() for m in [model, *modules] if hasattr(m, "_can_set_attn_implementation")):
        return "the model does not use Transformers' attention interface"
    if any(_ASKS_BY_NAME.search(_source(name)) for name in {type(m).__module__ for m in modules}):
        return 'the model\'s code asks for "sdpa" by name'
    return ""


def _source(module: str) -> str:
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return ""
