"""One global scale for the layers that a server fuses into one product.

vLLM, SGLang and TensorRT-LLM load q, k and v (gate and up, ...) into one weight with one global scale. From a file with
several they take the largest for all, or the first, and compute wrong products with the others. So every layout is
written with one scale a family.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ...formats import nvfp4
from ...models import families
from ...tensors import NVFP4Tensor

# Last parts of the names of layers of one module that are fused. Source: packed_modules_mapping and stacked_params_mapping
# of the models of vLLM 0.32. A family that one server does not fuse costs a rounding of block scales, so all are listed.
FUSED: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj"),  # g: OLMo hybrid; b: Bailing
    ("wq", "wk", "wv"),  # Mistral's own names, Molmo
    ("q", "k", "v"),
    ("query", "key", "value"),
    ("query_net", "key_net", "value_net"),
    ("gate_proj", "up_proj"),  # of MLPs, shared experts and each routed expert
    ("gate_proj", "dense_h_to_4h"),  # GLM-4V
    ("w1", "w3"),  # of Mixtral's experts, LFM2, InternLM2; w2 is the down projection
    ("fc1", "fc3"),
    ("c_fc_0", "c_fc_1"),
    ("q_a_proj", "kv_a_proj_with_mqa"),  # latent attention
    ("wk", "weights_proj"),  # the indexer of DeepSeek-V3.2
    ("in_proj_qkv", "in_proj_z"),  # the gated delta net of Qwen3.5
    ("in_proj_b", "in_proj_a"),
)


def fused_families(weights: Mapping[str, tuple[int, ...]]) -> Iterator[list[str]]:
    """Names of ``weights`` that a server may fuse, a family at a time.

    Args:
        weights: name on disk, ``X.weight`` -> shape ``[N, K]``. Layers that read one input have one K.
    """
    parents: dict[tuple, dict[str, str]] = defaultdict(dict)
    for name, shape in weights.items():
        if len(shape) == 2 and name.endswith(".weight"):
            parent, _, last = name.removesuffix(".weight").rpartition(".")
            parents[parent, shape[1]][last] = name
    for children in parents.values():
        for listed in (*FUSED, *(s for family in families() for s in family.siblings)):
            together = [last for last in listed if last in children]
            if len(together) > 1:
                yield [children.pop(last) for last in together]


def share_scales(weights: dict[str, NVFP4Tensor], inputs: dict[str, Tensor]) -> dict[str, float]:
    """Give every fused family one global scale and one input scale, in place of the entries of both dictionaries.

    The largest scale of a family becomes that of all: its own weight keeps every bit. The others are quantized again
    from their decoded values under that scale, as ``siblings="shared"`` does from the dense ones. Input scales: the
    largest too, which covers the range that was measured for each.

    Args:
        weights: by name on disk. inputs: float32 ``[]`` by the same names, or empty.

    Returns:
        The relative change ``|W' - W| / |W|`` of each weight that was quantized again.
    """
    changed: dict[str, float] = {}
    for names in fused_families({name: tuple(t.shape) for name, t in weights.items()}):
        # A weight of zeros has the global scale 1, which says nothing about its values.
        used = [name for name in names if bool(weights[name].scale.view(torch.uint8).any())] or names
        largest = torch.stack([weights[name].global_scale.reshape(()).cpu() for name in used]).amax()
        for name in names:
            if not torch.equal(weights[name].global_scale.reshape(()).cpu(), largest):
                weights[name], changed[name] = _under(weights[name], largest)
        measured = [inputs[name].reshape(()).cpu() for name in names if name in inputs]
        if measured:
            inputs |= dict.fromkeys(names, torch.stack(measured).amax())
    return changed


def _under(weight: NVFP4Tensor, global_scale: Tensor) -> tuple[NVFP4Tensor, float]:
    """``weight`` under another global scale, and its relative change."""
    old = weight.dequantize(torch.float32)
    qdata, scale, g = nvfp4.quantize(old, "mse", global_scale=global_scale.to(old.device))
    new = weight.with_parts((qdata, scale, g))
    norm = torch.linalg.vector_norm(old)
    return new, float(torch.linalg.vector_norm(new.dequantize(torch.float32) - old) / norm) if norm else 0.0
