"""gpt-oss: vLLM's model loads the experts of a layer as one tensor, by code of its own that knows its published checkpoint only.

That code picks tensors by ``.w13_weight`` and ``.w2_weight`` in their names and takes a rank's share of K as if a number were an
element, which two codes in a byte and a scale for 16 are not. A scale whose name it does not know it leaves out. So the parts of an NVFP4
weight get names of their own (:data:`NAMES`), which go to the parameter's own loader (:func:`share_of`). Biases stay vLLM's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedOpError
from .linear import Names

MODEL_TYPE = "gpt_oss"
NAMES = Names("qweight", "qweight_scale", "qweight_scale_2", "qweight_input_scale", divides=False, meta="qweight_meta")
_OF_CACHE = re.compile(r"(.*)\.[kv]_proj\.([kv]_scale)")
_WEIGHTS = {"gate_up_proj": "w13", "down_proj": "w2"}
_WRITE = "Write one first: fp4-inductor quantize MODEL OUT --format modelopt."


def is_gpt_oss(hf_config: Any) -> bool:
    return str(getattr(hf_config, "model_type", "")) == MODEL_TYPE


def refuse_format(value: str) -> None:
    """Raise UnsupportedOpError: NVFP4 is read from our own checkpoints and from ModelOpt's alone."""
    raise UnsupportedOpError("gpt-oss is not served from this checkpoint", value=value, limit="ModelOpt NVFP4, or save_pretrained of ours", remedy=_WRITE)


def check_head(formats: Mapping[str, str]) -> None:
    """Raise UnsupportedOpError for a quantized output head: vLLM's model makes it without asking for a quantization method."""
    if kind := formats.get("lm_head"):
        raise UnsupportedOpError(
            "vLLM's gpt-oss has no quantized output head", value=kind, limit="a head in bfloat16", remedy="Quantize the model again without lm_head=."
        )


def tensors(name: str, codes: list[Tensor], scale: Tensor, global_scale: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The parts of the weight ``name`` as :func:`share_of` takes them.

    Args:
        codes: ``[E, N, K/2]``, or values and metadata of 2:4-sparse weights. scale: ``[E, N, K/16]``. global_scale: ``[E]``.
    """
    owner, _, last = name.rpartition(".")
    stem = f"{owner}.{_WEIGHTS[last]}"
    for part, t in zip((NAMES.codes, NAMES.meta), codes, strict=False):
        yield f"{stem}_{part}", t
    yield f"{stem}_{NAMES.scale}", scale
    yield f"{stem}_{NAMES.global_scale}", global_scale


def scales_of_cache(names: Iterable[str]) -> dict[str, str]:
    """The scales of an FP8 KV cache among ``names``, as ModelOpt calls them -> by the name of the parameter in vLLM's model."""
    return {m[0]: f"{m[1]}.attn.{m[2]}" for name in names if (m := _OF_CACHE.fullmatch(name))}


def share_of(layer: Any, rank: int) -> Callable:
    """A loader that is given all experts of a layer and keeps this rank's: some of them (expert parallelism), or a share of each.

    Gates and ups take turns, so a share of them is consecutive rows, as a share of the down projection is consecutive columns.
    """

    def load(param: Tensor, loaded: Tensor) -> None:
        where = layer.expert_map
        if where is not None:
            here = torch.nonzero(where >= 0).flatten()
            loaded = loaded[here[where[here].argsort()].to(loaded.device)]
        if loaded.dim() < param.dim():  # one global scale for gate and up
            loaded = loaded[:, None].expand(param.shape)
        for dim in range(1, param.dim()):
            if param.shape[dim] != loaded.shape[dim]:
                loaded = loaded.narrow(dim, rank * param.shape[dim], param.shape[dim])
        param.data.copy_(loaded)

    return load
