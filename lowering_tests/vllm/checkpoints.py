"""Checkpoints that the tests inside vLLM serve: the language models of examples/assets, quantized and written in one of the formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

PLAIN = "four_over_six"


def quantized(name: str, assets: Path, **options: Any) -> Any:
    """``"dense"``, ``"moe"``, ``"sparse"`` (2:4, both) or ``"moe_sparse"`` of the models of examples/assets, in NVFP4."""
    from transformers import AutoModelForCausalLM

    import fp4_inductor
    from fp4_inductor import NVFP4Config, Sparse24Config

    source = {"sparse": "austen_sparse24", "moe_sparse": "austen_moe"}.get(name, f"austen_{name}")
    configs: dict[str, Any] = {"sparse": Sparse24Config(), "moe_sparse": Sparse24Config(pruning="magnitude", accept_loss=True)}
    config = configs.get(name) or NVFP4Config(scale_search=PLAIN, **options)
    model = AutoModelForCausalLM.from_pretrained(assets / source, dtype=torch.bfloat16)
    return fp4_inductor.quantize_model(model, config, progress=False)


def write(name: str, assets: Path, target: Path) -> None:
    """``name``: model, a hyphen, format (``modelopt``, ``compressed``, ``native``, ``transformers``); in between ``-fp8`` or ``-nvfp4`` for the head."""
    import fp4_inductor

    model, *head, form = name.split("-")
    packed = quantized(model, assets, **({"lm_head": head[0]} if head else {}))
    if form == "native":
        fp4_inductor.save(packed, target)
    elif form == "transformers":
        packed.save_pretrained(target)
    else:
        fp4_inductor.export_pretrained(packed, target, {"modelopt": "modelopt", "compressed": "compressed-tensors"}[form])
